"""The flash attention of Pallas on TPUs, through torch_xla's two operators: xla::fa_custom_forward and _backward.

Read in torch_xla 2.9.0 (torch_xla/experimental/custom_kernel.py, whose public `flash_attention` is an autograd
function around these two) and in jax 0.7.1, whose kernels they run
(jax/experimental/pallas/ops/tpu/flash_attention.py). 2.9.0 is the last release; it is built for torch 2.9, and its
import fails beside torch 2.13 (an undefined symbol), as the reason then says.

(B, H, S, D); D is below 128 or a multiple of it, of which 64 and 128 are claimed. In place of lse come the sum l above
the maximum m of each row, (B, H, Sq) float32: lse = m + log(l); backward takes lse for m and 1 for l. Causal is
top-left. Only equal segment ids attend, (B, S) int32, which is how keys are hidden. The bias is multiplied by the
scale and is wanted in full size: not claimed. Backward gives dk and dv only where dq is asked for too.

Lengths. Its blocks are of up to 512 keys and 1024 queries and must divide the lengths, of which backward also asks
multiples of 128. Forward pads keys itself, with zeros that nothing hides from the softmax: beyond 512 keys, of a
number that is no multiple of 512, its result is silently wrong. So both come here padded, with the added keys hidden.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..contract import STAND_IN, Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package, Reason, Wanted
from ..optional import loaded, why_not

PACKAGE = Package(
    "torch_xla.experimental.custom_kernel", 'pip install "torch_xla[tpu,pallas]" (a build for the torch that is here)',
    distribution="torch_xla", at_least="2.9", below="3",
    attributes=("fa_custom_forward", "fa_custom_backward", "requires_jax"),
)  # fmt: skip
KEYS, QUERIES = (
    ((128, 256), 512),
    ((128, 256, 384, 512), 1024),
)  # lengths that are taken, and then multiples of the last
EVERY = [True] * 3 + [False] * 7  # which of forward's arguments require a gradient; without one l and m are not kept
NONE = "None"  # of the partition and the mesh, which travel as text

CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16}),
    masks=frozenset({"key_keep"}),
    causal="top_left",
    max_head_dim=128,
    head_dims=frozenset({64, 128}),
    any_scale=False,
    deterministic=False,
    arithmetic="16-bit",
)


def make_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair around torch_xla's `custom_kernel`, or a module with its operators, which `load` gives when called."""
    return OpPair(name, partial(_forward, load), partial(_backward, load), CLAIMS)


def _forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options
) -> ForwardOut:
    """One call of the kernel, cut to the queries there are."""
    module, q_len = load(), q.shape[1]
    ids = _ids(mask, q, k)
    out, _, _, _, l_sum, top, _ = module.requires_jax(module.fa_custom_forward)(
        *_longer(q, k, v), mask.causal is not None, *ids, options.scale, None, NONE, NONE, EVERY
    )
    return ForwardOut(out.transpose(1, 2)[:, :q_len], (top + l_sum.log())[:, :, :q_len])


def _backward(
    load: Callable[[], Any],
    grad_out: Tensor,
    grad_lse: None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    rng: None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """One call of the kernel; queries that were added have no weights (lse +inf)."""
    module = load()
    longer = _longer(q, k, v)
    grad_out, out = (_pad(x, longer[0].shape[2]) for x in (grad_out, out))
    top = functional.pad(lse, (0, longer[0].shape[2] - q.shape[1]), value=torch.inf).contiguous()
    grads = module.requires_jax(module.fa_custom_backward)(
        grad_out, *longer, out, torch.ones_like(top), top, *_ids(mask, q, k), None, mask.causal is not None,
        options.scale, NONE, NONE, list(longer[0].shape), list(longer[1].shape), None, EVERY,
    )  # fmt: skip
    like = zip(grads[:3], (q, k, v), wanted[:3], strict=True)
    return Grads(*(grad.transpose(1, 2)[:, : x.shape[1]] if w else None for grad, x, w in like))


def _longer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as (B, H, S, D), of lengths that the kernel's blocks divide."""
    k_len = _up(k.shape[1], *KEYS)
    return _pad(q, _up(q.shape[1], *QUERIES)), _pad(k, k_len), _pad(v, k_len)


def _up(length: int, first: tuple[int, ...], step: int) -> int:
    return next((size for size in first if length <= size), -(-length // step) * step)


def _pad(x: Tensor, length: int) -> Tensor:
    return functional.pad(x.transpose(1, 2), (0, 0, 0, length - x.shape[1])).contiguous()


def _ids(mask: Mask, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Segment ids of queries, 0, and of keys, 1 where nobody attends to them; none where all keys are there."""
    batch, k_len = k.shape[0], k.shape[1]
    added = _up(k_len, *KEYS) - k_len
    if mask.key_keep is None and not added:
        return None, None
    hidden = torch.zeros(batch, k_len, dtype=torch.int32, device=k.device)
    hidden = hidden if mask.key_keep is None else mask.key_keep.logical_not().to(torch.int32)
    return hidden.new_zeros(batch, _up(q.shape[1], *QUERIES)), functional.pad(hidden, (0, added), value=1)


def unavailable(device: str) -> Reason | None:
    """Why torch_xla cannot be used: itself, jax (which is not imported: it would take the TPU), or another device."""
    reason = why_not(PACKAGE)
    if reason is not None:
        return reason
    try:
        importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        return Reason("package-missing", "jax is not installed", "jax", "absent", PACKAGE.install)
    kind = importlib.import_module("torch_xla.runtime").device_type()
    if kind != "TPU":
        return Reason("not-tpu", "the kernel runs on TPUs alone", "PJRT_DEVICE=TPU", str(kind), "use native_math")
    return None


BACKEND = Backend(
    "native_xla",
    "Pallas' flash attention on TPUs, through torch_xla",
    {"xla": make_pair("native_xla", partial(loaded, PACKAGE))},
    unavailable,
    packages=(PACKAGE,),
    verified={"xla": STAND_IN},
)
