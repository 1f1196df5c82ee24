"""Faults of the kernels we call, as data, and the two that need code around a pair: an OpPair -> OpPair each.

`mended(pair, device, other)` is what selection puts under the edge. Nothing here changes what a pair claims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import local
from typing import Literal

import torch
from torch import Tensor

from .contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted
from .errors import GradientError, message


@dataclass(frozen=True)
class Fault:
    """One fault: whose it is, where it was seen, what happens, what is done about it here, and where.

    avoid   the call is put so that the fault cannot show, by the module named in `where`
    pad     the call is made larger, and the rest is cut off
    guard   the result is checked once per signature, against another pair, or with dropout by laws
    refuse  a claim leaves it out
    """

    backend: str
    device: str
    seen: str
    what: str
    action: Literal["avoid", "pad", "guard", "refuse"]
    where: str
    link: str


FAULTS: tuple[Fault, ...] = (
    Fault(
        "native_cudnn", "cuda", "torch 2.11, cuDNN 9.19",
        "backward's graphs are cached by sizes and strides of q, k, v and bias, not by those of out and grad_out: "
        "after a call with another layout of grad_out, anybody's, the gradients are wrong by their own size",
        "guard", "faults.py", "https://github.com/pytorch/pytorch/issues/191576",
    ),
    Fault(
        "native_cudnn", "cuda", "torch 2.11, cuDNN 9.19",
        "a single query: NaN in dk and dv when its scores are very negative; one query and one key are not taken",
        "pad", "faults.py", "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    Fault(
        "native_cudnn", "cuda", "torch 2.11, cuDNN 9.19",
        "storage that does not start at a multiple of 16 bytes: a misaligned address, after which the process has lost "
        "its device; torch's own attention does the same",
        "avoid", "edge/fit.py (Claims.stride_multiple)", "https://github.com/pytorch/pytorch/issues/112577",
    ),
    Fault(
        "native_cudnn", "cuda", "torch 2.11, cuDNN 9.19",
        "an odd multiple of 64 keys: NaN in dq when all scores of a query are below about -88 (no report known)",
        "avoid", "edge/blocks.py (Claims.key_tile)", "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    Fault(
        "cudnn_frontend", "cuda", "1.32, cuDNN 9.19",
        "one query and one key are not taken by backward",
        "pad", "faults.py", "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    Fault(
        "cudnn_frontend", "cuda", "1.32, cuDNN 9.19",
        "an odd multiple of 64 keys: NaN in dq when all scores of a query are below about -88 (no report known)",
        "avoid", "edge/blocks.py (Claims.key_tile)", "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    Fault(
        "cudnn_frontend", "cuda", "1.32, cuDNN 9.19",
        "no plan for the gradient of a bias at some lengths (seen: 18, 77 keys)",
        "avoid", "backends/cudnn_frontend.py", "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    Fault(
        "cudnn_frontend", "cuda", "1.32, cuDNN 9.19",
        "a bias with one row for all queries: backward is wrong by the gradients' own size (no report known)",
        "avoid", "backends/cudnn_frontend.py", "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    Fault(
        "native_efficient", "cuda", "torch 2.11",
        "lse of 0 for a query that sees nothing; NaN when it comes back as -inf",
        "avoid", "edge/__init__.py (dead rows)", "https://github.com/pytorch/pytorch/issues/103963",
    ),
    Fault(
        "native_efficient", "cuda", "torch 2.11",
        "backward takes an out whose heads are outermost for one whose tokens are: garbage in dq and dk",
        "avoid", "backends/native_efficient.py", "https://github.com/Dao-AILab/flash-attention/issues/355",
    ),
    Fault(
        "native_efficient", "cuda", "torch 2.11",
        "a bias near the lowest float becomes -inf when it is scaled for base 2: queries of nothing else get 0 or NaN",
        "avoid", "level.py", "https://github.com/huggingface/transformers/issues/38690",
    ),
    Fault(
        "native_efficient", "cuda", "torch 2.11",
        "dropout counts weights (B H Sq Sk) in 32 bits: from 2**32 on heads drop the same ones, and by the report "
        "backward drops others than forward",
        "avoid", "edge/blocks.py (Claims.dropout_tile)", "https://github.com/pytorch/pytorch/pull/188015",
    ),
    Fault(
        "flash", "cuda", "the source of flash-attn 2.8.3",
        "dropout with head dims above 192 on a GPU with less than 144 KB of shared memory a block: backward launches "
        "nothing, and the gradients are what the memory held",
        "refuse", "select.py (Claims.max_dropout_head_dim)", "https://github.com/Dao-AILab/flash-attention/issues/138",
    ),
    Fault(
        "flash_4", "cuda", "flash-attn-4 4.0.0b36 on an H200",
        "head dims up to 128 that are no multiple of 32 when rounded up to one of 16 (16, 40, 72 ...): with more than "
        "one block of queries dq is wrong by its own size: its sums are laid out for one width and read for another",
        "avoid", "edge/fit.py (Claims.head_dim_multiple)", "https://github.com/Dao-AILab/flash-attention/pull/2896",
    ),
    Fault(
        "native_flash", "cpu", "torch 2.11 to 2.13",
        "causal with a scale of 0 or less is NaN or sees what is hidden",
        "avoid", "edge/fit.py (Claims.any_scale)", "https://github.com/pytorch/pytorch/issues/103082",
    ),
    Fault(
        "native_flash", "cpu", "torch 2.13",
        "a float32 mask beside float64 inputs is read as float64",
        "avoid", "edge/fit.py (Claims.bias_dtype)", "https://github.com/pytorch/pytorch/issues/112577",
    ),
    Fault(
        "native_flash", "cpu", "torch 2.11 to 2.13",
        "16-bit gradients are summed in 16 bits: the error grows with the length",
        "avoid", "backends/native_flash.py", "https://arxiv.org/abs/2205.14135",
    ),
    Fault(
        "native_flash", "cpu", "torch 2.11 to 2.13",
        "an empty call ends the process with SIGFPE; a last stride other than 1 is read as 1",
        "avoid", "edge/__init__.py", "https://github.com/pytorch/pytorch/issues/133780",
    ),
    Fault(
        "native_xla", "xla", "torch_xla 2.9.0, read in its source",
        "beyond 512 keys, of a number that is no multiple of 512, forward pads them with zeros that the softmax sees",
        "avoid", "backends/native_xla.py", "https://github.com/pytorch/xla/pull/8671",
    ),
    Fault(
        "native_xla", "xla", "torch_xla 2.9.0, read in its source",
        "a backward that is asked for dk or dv without dq raises UnboundLocalError",
        "avoid", "backends/native_xla.py", "https://github.com/pytorch/xla/pull/8671",
    ),
    Fault(
        "sage", "cuda", "SageAttention 1.0.6, and the Triton kernels of 2.2.0",
        "keys that are missing in the last block of 64, of every packed sequence too, count as keys with a score of 0",
        "avoid", "backends/sage.py", "https://github.com/thu-ml/SageAttention/issues/26",
    ),
    Fault(
        "sage", "cuda", "SageAttention 1.0.6",
        "the mean of the keys is subtracted in the caller's own key tensor (no report known)",
        "avoid", "backends/sage.py", "https://github.com/thu-ml/SageAttention/issues/26",
    ),
    Fault(
        "sage", "cuda", "SageAttention 2.2.0",
        "what smoothing took from lse is given back rounded to 16 bits: a ring is off by more than int8 costs",
        "avoid", "backends/sage.py", "https://github.com/feifeibear/long-context-attention/pull/127",
    ),
    Fault(
        "sage", "cuda", "SageAttention 1.0.6 to 2.2.0",
        "elements are counted in 32 bits: tensors that reach over 2**31 of them are read at wrong places",
        "avoid", "backends/sage.py", "https://github.com/thu-ml/SageAttention/issues/386",
    ),
)  # fmt: skip


def has(backend: str, device: str, action: str) -> bool:
    """Whether the table has such an entry."""
    return any((f.backend, f.device, f.action) == (backend, device, action) for f in FAULTS)


def mended(pair: OpPair, device: str, other: OpPair | None) -> OpPair:
    """The pair with what its faults on that device need; `other` is an exact pair that takes the same calls."""
    if has(pair.name, device, "pad"):
        pair = padded(pair)
    if has(pair.name, device, "guard") and other is not None:
        pair = guarded(pair, other)
    return pair


def padded(pair: OpPair) -> OpPair:
    """The pair, a single query asked twice: the second has no part in backward."""
    return replace(pair, forward=partial(_padded_forward, pair), backward=partial(_padded_backward, pair))


def _padded_forward(
    pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options
) -> ForwardOut:
    if q.shape[1] != 1:
        return pair.forward(q, k, v, mask, rng, options)
    result = pair.forward(_twice(q), k, v, mask, rng, options)
    return result._replace(out=result.out[:, :1], lse=result.lse[:, :, :1])


def _padded_backward(
    pair: OpPair,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    *rest: object,
) -> Grads:
    if q.shape[1] != 1:
        return pair.backward(grad_out, grad_lse, q, k, v, mask, out, lse, *rest)
    grad_out = torch.cat([grad_out, torch.zeros_like(grad_out)], 1).contiguous()
    lse = torch.cat([lse, torch.full_like(lse, torch.inf)], 2)  # all weights of the second query are 0
    grads = pair.backward(grad_out, grad_lse, _twice(q), k, v, mask, _twice(out), lse, *rest)
    return grads if grads.dq is None else grads._replace(dq=grads.dq[:, :1])


def _twice(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1).contiguous()  # cat may choose another order of dims


AGREE = 0.05  # two kernels in 16 bits differ by less than 1 %, the fault is of the size of the gradients
NOISE = 2.0**-8  # the same, against what a gradient of almost 0 was summed from
LIMIT = 4096  # then all is forgotten: sizes that never come back must not hold memory

Layout = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class _Checked(local):
    """Signatures whose backward was checked in this thread (torch's cache is per thread too), and how each is put."""

    def __init__(self) -> None:
        self.layouts: dict[tuple[object, ...], Layout] = {}


_checked = _Checked()


def guarded(pair: OpPair, other: OpPair) -> OpPair:
    """The pair with a backward that does not depend on what ran before it, in this thread or anybody's call.

    Before the first backward of a signature (device, dtype, sizes, strides, causal, bias, dropout_p) both pairs are
    asked for the gradients of random tensors stored like the call's: the call's own may hide the fault (a grad_out of
    ones has no wrong order). That costs a forward, two backwards, their memory and one synchronisation. With dropout no
    other pair draws the same mask: there the gradients are held against laws that they keep whatever the mask
    (`_lawful`), for one more forward in place of the other's backward. GradientError when no layout is right, or when a
    stream is being captured.
    """
    return replace(pair, backward=partial(_guarded_backward, pair, other))


def _guarded_backward(
    pair: OpPair,
    other: OpPair,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    rng: Tensor | None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    p = options.dropout_p
    key = (q.device, q.dtype, mask.causal is not None, p, *(_form(x) for x in (q, k, v, mask.dense)))
    layout = _checked.layouts.get(key)
    if layout is None:
        layout = _right_layout(pair, other, q, k, v, mask, p)
        if len(_checked.layouts) >= LIMIT:
            _checked.layouts.clear()
        _checked.layouts[key] = layout
    q, out, grad_out = layout(q, out, grad_out)
    return pair.backward(grad_out, grad_lse, q, k, v, mask, out, lse, rng, saved, options, wanted)


def _form(x: Tensor | None) -> tuple[object, ...] | None:
    return None if x is None else (*x.shape, *x.stride())


def _right_layout(pair: OpPair, other: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, p: float) -> Layout:
    """The first layout in which the pair's gradients are right, on random tensors of the same form."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise GradientError(
            message(
                f"backend {pair.name!r} meets these sizes and strides for the first time while a stream is captured",
                limit="its backward is checked once before it is trusted, which synchronises",
                value=f"q {tuple(q.shape)} with strides {q.stride()}",
                remedy="run one step before the capture",
            )
        )
    draw = torch.Generator(q.device)  # the user's random numbers stay as they are
    draw.manual_seed(0)
    q, k, v, other_v = (_random_like(x, draw) for x in (q, k, v, v))
    mask = mask if mask.dense is None else replace(mask, dense=_random_like(mask.dense, draw))
    options = Options(q.shape[3] ** -0.5, dropout_p=p, levelled=True)
    (out, lse, *_), rng = _drawn(pair, q, k, v, mask, options)
    grad_out = torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=draw)
    rest = (lse, rng, (), options, Wanted(True, True, True))  # dv shows a misread grad_out, dq and dk a misread out
    if p:
        moved = pair.forward(q, k, other_v, mask, rng, options).out
        right = partial(_lawful, q=q, k=k, v=other_v, out=out, moved=moved, grad_out=grad_out, scale=options.scale)
    else:
        grads = other.backward(grad_out, None, q, k, v, mask, out, *rest)
        right = partial(_agree, right=grads, spread=_spread(grad_out, q, k, out))
    for layout in (_as_q, _apart):
        own_q, own_out, own_grad = layout(q, out, grad_out)
        if right(pair.backward(own_grad, None, own_q, k, v, mask, own_out, *rest)):
            return layout
    raise _wrong(pair, other, q, p)


def _wrong(pair: OpPair, other: OpPair, q: Tensor, p: float) -> GradientError:
    problem = f"gave gradients unlike those of {other.name!r}"
    if p:
        problem = "gave gradients that no dropout mask can give"
    return GradientError(
        message(
            f"backend {pair.name!r} {problem} in every layout that was tried",
            limit=f"a difference below {AGREE:.0%}",
            value=f"q {tuple(q.shape)} with strides {q.stride()}",
            remedy="use another backend" if p else f"use backend={other.name!r}",
        )
    )


def _drawn(
    pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options
) -> tuple[ForwardOut, Tensor | None]:
    """A forward and its random state: the first that does not drop everything, which would show nothing."""
    if not options.dropout_p:
        return pair.forward(q, k, v, mask, None, options), None
    rng = torch.tensor([0, 0], device="cpu")
    result = pair.forward(q, k, v, mask, rng, options)
    while not result.out.any() and rng[1] < 64:
        rng = rng + torch.tensor([0, 1], device="cpu")
        result = pair.forward(q, k, v, mask, rng, options)
    return result, rng


def _random_like(x: Tensor, draw: torch.Generator) -> Tensor:
    """Random numbers in the same form: sizes, strides (also of expanded dims) and dtype."""
    room = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return torch.randn(room, dtype=x.dtype, device=x.device, generator=draw).as_strided(x.shape, x.stride())


def _as_q(q: Tensor, out: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out and grad_out in the order of q's dims, as torch's own forward makes out."""
    if q.stride(2) > q.stride(1):
        return q, _heads_outermost(out), _heads_outermost(grad_out)
    return q, out.contiguous(), grad_out.contiguous()


def _heads_outermost(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _apart(q: Tensor, out: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q in storage with a gap after each head, strides that nobody else has: another key of the cache."""
    own = q.new_empty(*q.shape[:3], q.shape[3] + 8)[..., : q.shape[3]].copy_(q)
    return own, out.contiguous(), grad_out.contiguous()


def _spread(grad_out: Tensor, q: Tensor, k: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What dq, dk and dv are sums of, in size: with one key dq and dk are 0, and rounding is all there is."""
    terms = (grad_out.float() * out.float()).abs().sum(-1).norm() * q.shape[3] ** -0.5
    k_size, q_size = (x.float().norm(dim=-1).square().mean().sqrt() for x in (k, q))
    return terms * k_size, terms * q_size, grad_out.float().norm() / k.shape[1] ** 0.5


def _agree(found: Grads, right: Grads, spread: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether both gave the same gradients; synchronises."""
    close = []
    for a, b, terms in zip(found[:3], right[:3], spread, strict=True):
        if a is None or b is None:
            return False
        close.append((a.float() - b.float()).norm() <= AGREE * b.float().norm() + NOISE * terms)
    return bool(torch.stack(close).all())


def _lawful(
    grads: Grads, q: Tensor, k: Tensor, v: Tensor, out: Tensor, moved: Tensor, grad_out: Tensor, scale: float
) -> bool:
    """Whether gradients keep three laws that hold with any mask; synchronises. `moved` is out with these values `v`.

    out is linear in v, column by column: sum_i moved g = sum_j v dv, which a misread grad_out breaks.
    The same vector added to all keys changes nothing: sum_j dk = 0, which a misread out breaks, through rowsum(g out).
    dq and dk come of one dS: sum_i q dq^T = sum_j dk k^T.
    """
    given = [x for x in grads[:3] if x is not None]
    if len(given) < 3:
        return False
    groups = (k.shape[2], -1)
    q, k, v, g, out, moved, dq, dk, dv = (x.float() for x in (q, k, v, grad_out, out, moved, *given))
    linear = (moved * g).sum(1).unflatten(1, groups).sum(2) - (v * dv).sum(1)
    delta = (g * out).sum(-1, keepdim=True)
    still, size = dk.sum(1), scale * (delta * q).norm()
    of_q = torch.einsum("bshd,bshe->bhde", q, dq).unflatten(1, groups).sum(2)
    common = of_q - torch.einsum("bshd,bshe->bhde", dk, k)
    rounding = NOISE * size * k.norm(dim=-1).square().mean().sqrt()
    laws = (
        linear.norm() <= AGREE * (moved * g).norm(),
        still.norm() <= AGREE * size,
        common.norm() <= AGREE * of_q.norm() + rounding,
    )
    return bool(torch.stack(laws).all())
