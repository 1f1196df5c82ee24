"""flash-attn 2, by its package or by its kernel from the hub: the functions under its public calls, varlen ones too.

Read in flash-attn 2.8.3 (flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp) and in version 3 of
kernels-community/flash-attn2, whose functions have the same arguments. Layout (B, S, H, D); lse (B, H, Sq) float32;
causal and windows count from the bottom right. An end of a window beyond Sk, or none beside another, becomes Sk: too
few keys where there are more than Sk + 1 queries, which `edge` cuts. Dropout as in torch's copy of the kernel
(native_flash.py): the state is drawn from the device's default generator, and backward reads (seed, offset) from the
device; not beside softcap, and on a GPU whose blocks have less than 144 KB of shared memory (all but data-center ones)
backward launches nothing for head dims above 192 with dropout.

The varlen functions take tokens (total, H, D) and where each sequence ends (_packed.py); lse is (H, total). Causal and
windows count within each sequence, so a call with padded keys or segments has neither.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contract import (
    STAND_IN,
    Backend,
    Claims,
    ForwardOut,
    Grads,
    Mask,
    OpPair,
    Options,
    Package,
    Reason,
    Wanted,
)
from ..optional import loaded, why_not
from . import _hub
from ._ends import ends_of
from ._packed import PACKED_KINDS, packed_shapes, packing
from ._philox import drawing, replayed

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
ENDS = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
GIVEN = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
ARGUMENTS = {  # in this order, as a pair passes them
    "_flash_attn_forward": ("q", "k", "v", *ENDS, "return_softmax"),
    "_flash_attn_backward": (*GIVEN, *ENDS, "deterministic", "rng_state"),
    "_flash_attn_varlen_forward": ("q", "k", "v", *LENGTHS, *ENDS[:3]),
    "_flash_attn_varlen_backward": (*GIVEN, *LENGTHS, *ENDS, "deterministic", "rng_state"),
}
FUNCTIONS = tuple(ARGUMENTS)
PACKAGE = Package(
    "flash_attn.flash_attn_interface", 'pip install "flash-attn>=2.8,<3" --no-build-isolation',
    distribution="flash-attn", at_least="2.8", below="3", attributes=FUNCTIONS,
)  # fmt: skip
HUB = _hub.Kernel("kernels-community/flash-attn2", version=3, attributes=FUNCTIONS)

CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    masks=frozenset({"window"}),
    causal="bottom_right",
    min_capability=(8, 0),
    max_head_dim=256,
    max_dropout_head_dim=192,
    head_dim_multiple=8,
    gqa=True,
    any_scale=False,
    stride_multiple=8,
    dropout=True,
    softcap=True,
    softcap_dropout=False,
    arithmetic="16-bit",
)
VARLEN_CLAIMS = replace(CLAIMS, masks=CLAIMS.masks | PACKED_KINDS, alone=PACKED_KINDS)


def make_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair around a module with flash-attn 2's functions, which `load` gives when a call needs it."""
    return OpPair(name, partial(_forward, load), partial(_backward, load), CLAIMS)


def make_varlen_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair around a module with flash-attn 2's varlen functions."""
    forward, backward = partial(_varlen_forward, load), partial(_varlen_backward, load)
    return OpPair(name, forward, backward, VARLEN_CLAIMS, shapes=packed_shapes)


def _forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options
) -> ForwardOut:
    """One call of the kernel."""
    kernel, p = load()._flash_attn_forward, options.dropout_p
    causal, left, right = ends_of(mask, q.shape[1], k.shape[1])
    with drawing(rng, p, q.device):
        out, lse, *_ = kernel(q, k, v, p, options.scale, causal, left, right, options.softcap, None, False)
    return ForwardOut(out, lse, rng)


def _backward(
    load: Callable[[], Any],
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
    """One call of the kernel, which writes dq, dk and dv together into buffers of ours."""
    p = options.dropout_p
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    state = replayed(rng, p, q.device, 2) if p else None
    load()._flash_attn_backward(
        grad_out, q, k, v, out, lse.contiguous(), *grads, p, options.scale, *ends_of(mask, q.shape[1], k.shape[1]),
        options.softcap, None, options.deterministic, state,
    )  # fmt: skip
    return Grads(*(grad if w else None for grad, w in zip(grads, wanted[:3], strict=True)))


def _varlen_forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options
) -> ForwardOut:
    """One call of the kernel on all sequences of all samples."""
    kernel, p, batch = load()._flash_attn_varlen_forward, options.dropout_p, q.shape[0]
    packed, kept = packing(mask, q, k)
    causal, left, right = ends_of(mask, q.shape[1], k.shape[1])
    given = (packed.queries(q), packed.keys(k), packed.keys(v), *packed.kernel_arguments)
    with drawing(rng, p, q.device):
        out, lse, *_ = kernel(
            *given, p, options.scale, causal, window_size_left=left, window_size_right=right, softcap=options.softcap
        )
    return ForwardOut(packed.queries_back(out, batch), packed.sums_back(lse, batch), rng, kept)


def _varlen_backward(
    load: Callable[[], Any],
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
    """One call of the kernel, with the packing that forward found."""
    p, batch = options.dropout_p, q.shape[0]
    packed, _ = packing(mask, q, k, saved)
    inputs = (packed.queries(q), packed.keys(k), packed.keys(v))
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    state = replayed(rng, p, q.device, 2) if p else None
    load()._flash_attn_varlen_backward(
        packed.queries(grad_out), *inputs, packed.queries(out), packed.sums(lse), *grads, *packed.kernel_arguments, p,
        options.scale, *ends_of(mask, q.shape[1], k.shape[1]), options.softcap, None, options.deterministic, state,
    )  # fmt: skip
    back = (packed.queries_back, packed.keys_back, packed.keys_back)
    return Grads(*(to(grad, batch) if w else None for to, grad, w in zip(back, grads, wanted[:3], strict=True)))


def unavailable(device: str) -> Reason | None:
    """Why the package cannot be used."""
    return why_not(PACKAGE) or unlike(loaded(PACKAGE))


def fetch(device: str) -> Reason | None:
    """Why the hub's kernel cannot be had, or used."""
    return _hub.fetch(HUB, device) or unlike(_hub.module(HUB))


def unlike(module: Any) -> Reason | None:
    """`schema-moved` where one of the functions takes other arguments; what says nothing of its own is believed."""
    for name, pinned in ARGUMENTS.items():
        function = getattr(module, name)
        try:  # torch's custom ops hide the function that they are made of
            there = inspect.signature(getattr(function, "_init_fn", function)).parameters
        except (TypeError, ValueError):
            there = inspect.signature(lambda: None).parameters
        if any(p.kind is p.VAR_POSITIONAL for p in there.values()):
            continue
        seen = tuple(there)[: len(pinned)]
        if seen != pinned:
            problem = f"this flash-attn 2 has another {name}"
            return Reason("schema-moved", problem, ", ".join(pinned), ", ".join(seen) or "none", PACKAGE.install)
    return None


FLASH = Backend(
    "flash",
    "flash-attn 2",
    {"cuda": make_pair("flash", partial(loaded, PACKAGE))},
    unavailable,
    packages=(PACKAGE,),
    verified={"cuda": STAND_IN},
)
FLASH_HUB = Backend(
    "flash_hub",
    "flash-attn 2 from the hub",
    {"cuda": make_pair("flash_hub", partial(_hub.module, HUB))},
    lambda device: why_not(_hub.PACKAGE),
    packages=(_hub.PACKAGE,),
    verified={"cuda": STAND_IN},
    fetch=fetch,
)
FLASH_VARLEN = Backend(
    "flash_varlen",
    "flash-attn 2, packed",
    {"cuda": make_varlen_pair("flash_varlen", partial(loaded, PACKAGE))},
    unavailable,
    packages=(PACKAGE,),
    verified={"cuda": STAND_IN},
)
FLASH_VARLEN_HUB = Backend(
    "flash_varlen_hub",
    "flash-attn 2 from the hub, packed",
    {"cuda": make_varlen_pair("flash_varlen_hub", partial(_hub.module, HUB))},
    lambda device: why_not(_hub.PACKAGE),
    packages=(_hub.PACKAGE,),
    verified={"cuda": STAND_IN},
    fetch=fetch,
)
