"""Faults of the kernels we call, as data, and the two that need code around a pair: an OpPair -> OpPair each.

`mended(pair, other)` is what selection puts under the edge. Nothing here changes what a pair claims.
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
    guard   the result is checked once per signature, against another pair
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
    result = pair.forward(torch.cat([q, q], 1), k, v, mask, rng, options)
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
    two = [torch.cat([x, x], 1) for x in (q, out)]
    grad_out = torch.cat([grad_out, torch.zeros_like(grad_out)], 1)
    lse = torch.cat([lse, torch.full_like(lse, torch.inf)], 2)  # all weights of the second query are 0
    grads = pair.backward(grad_out, grad_lse, two[0], k, v, mask, two[1], lse, *rest)
    return grads if grads.dq is None else grads._replace(dq=grads.dq[:, :1])


AGREE = 0.05  # two kernels in 16 bits differ by less than 1 %, the fault is of the size of the gradients
NOISE = 2.0**-5  # the same, against what a gradient of almost 0 was summed from


class _Checked(local):
    """Signatures whose backward was checked in this thread (torch's cache is per thread too), and how each is put."""

    def __init__(self) -> None:
        self.layouts: dict[tuple[object, ...], Layout] = {}


_checked = _Checked()
Layout = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def guarded(pair: OpPair, other: OpPair) -> OpPair:
    """The pair with a backward that does not depend on what ran before it, in this thread or anybody's call.

    The first backward of a signature (device, dtype, sizes, strides, causal) is held against `other`, which costs one
    more backward and one synchronisation. GradientError when no layout is right, or when a stream is being captured.
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
    key = (q.device, q.dtype, mask.causal is not None, *(_form(x) for x in (q, k, v, mask.dense)))
    layout = _checked.layouts.get(key)
    rest = (k, v, mask)
    if layout is not None:
        own_q, own_out, own_grad = layout(q, out, grad_out)
        return pair.backward(own_grad, grad_lse, own_q, *rest, own_out, lse, rng, saved, options, wanted)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise GradientError(
            message(
                f"backend {pair.name!r} meets these sizes and strides for the first time while a stream is captured",
                limit="its backward is checked once before it is trusted, which synchronises",
                value=f"q {tuple(q.shape)} with strides {q.stride()}",
                remedy="run one step before the capture",
            )
        )
    every = Wanted(True, True, True)  # dv shows a wrongly read grad_out, dq and dk a wrongly read out
    told = replace(options, levelled=True)  # a mask of bools has become a float one under the edge
    right = other.backward(grad_out, grad_lse, q, *rest, out, lse, rng, (), told, every)
    spread = _spread(grad_out, q, k, out, options.scale)
    for layout in (_as_q, _apart):
        own_q, own_out, own_grad = layout(q, out, grad_out)
        found = pair.backward(own_grad, grad_lse, own_q, *rest, own_out, lse, rng, saved, options, every)
        verdict = _judge(found, right, spread)
        if verdict == "right":
            _checked.layouts[key] = layout
        if verdict != "wrong":
            return Grads(*(g if w else None for g, w in zip(found[:3], wanted[:3], strict=True)))
    raise GradientError(
        message(
            f"backend {pair.name!r} gave gradients unlike those of {other.name!r} in every layout that was tried",
            limit=f"a difference below {AGREE:.0%}",
            value=f"q {tuple(q.shape)} with strides {q.stride()}",
            remedy=f"use backend={other.name!r}",
        )
    )


def _form(x: Tensor | None) -> tuple[object, ...] | None:
    return None if x is None else (*x.shape, *x.stride())


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


def _spread(grad_out: Tensor, q: Tensor, k: Tensor, out: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """What dq, dk and dv are sums of, in size: where they cancel to almost 0, rounding is all that is left."""
    terms = (grad_out.float() * out.float()).abs().sum(-1).norm() * abs(scale)
    k_size, q_size = (x.float().norm(dim=-1).square().mean().sqrt() for x in (k, q))
    return terms * k_size, terms * q_size, grad_out.float().norm() / k.shape[1] ** 0.5


def _judge(found: Grads, right: Grads, spread: tuple[Tensor, Tensor, Tensor]) -> str:
    """ "right", "wrong", or "unclear" where both agree, but on zeros or on no finite numbers; synchronises."""
    sizes, own, close = [], [], []
    for a, b, terms in zip(found[:3], right[:3], spread, strict=True):
        if a is not None and b is not None:
            sizes.append(b.float().norm())
            own.append(a.float().norm())
            close.append((a.float() - b.float()).norm() <= AGREE * sizes[-1] + NOISE * terms)
    right_size, own_size = torch.stack(sizes), torch.stack(own)
    finite, own_finite, nonzero, same = torch.stack(
        [right_size.isfinite().all(), own_size.isfinite().all(), (right_size > 0).any(), torch.stack(close).all()]
    ).tolist()
    if finite and same:
        return "right" if nonzero else "unclear"
    return "wrong" if finite or own_finite else "unclear"
