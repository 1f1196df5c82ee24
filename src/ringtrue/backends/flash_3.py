"""flash-attn 3 (kernels for Hopper), by its package or by its kernel from the hub; and packed.

Read in hopper/flash_attn_interface.py and hopper/flash_api.cpp of the flash-attention repository and in version 1 of
kernels-community/flash-attn3, which have the same two functions for dense and for packed calls; and in the 3.0.0b1 that
came with flash-attn 2.8.3, which takes a window as one pair and has no defaults. A release whose functions take other
arguments is refused. Layout (B, S, H, D), or tokens
(total, H, D) and where each sequence ends (_packed.py); lse (B, H, Sq), or (H, total), -inf where a query sees nothing;
causal and windows count from the bottom right, within each sequence. Head dims are those that it has kernels for: what
it does with others was not tried. The deterministic backward ends at 192. No dropout, no bias, no gradient of lse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
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

FUNCTIONS = ("_flash_attn_forward", "_flash_attn_backward")
PACKAGE = Package(
    "flash_attn_interface", "pip install --no-build-isolation ./hopper, in a clone of the flash-attention repository",
    distribution="flash_attn_3", at_least="3.0.0b1", below="4", pre=True, attributes=FUNCTIONS,
)  # fmt: skip
HUB = _hub.Kernel("kernels-community/flash-attn3", version=1, attributes=FUNCTIONS)

SHARED = ("softmax_scale", "window_size_left", "window_size_right", "softcap")
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FORWARD_ARGUMENTS = ("q", "k", "v", *PACKED, *SHARED, "causal")
BACKWARD_ARGUMENTS = (
    "dout", "q", "k", "v", "out", "softmax_lse", *PACKED, "dq", "dk", "dv", *SHARED, "is_causal", "deterministic",
)  # fmt: skip
OLDER_NAMES = {"is_causal": "causal", "window_size_left": "window_size", "window_size_right": "window_size"}

CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    masks=frozenset({"window"}),
    causal="bottom_right",
    min_capability=(9, 0),
    max_capability=(9, 0),
    max_head_dim=256,
    head_dims=frozenset({64, 96, 128, 192, 256}),
    max_deterministic_head_dim=192,
    gqa=True,
    any_scale=False,
    stride_multiple=8,
    softcap=True,
    arithmetic="16-bit",
)
VARLEN_CLAIMS = replace(CLAIMS, masks=CLAIMS.masks | PACKED_KINDS, alone=PACKED_KINDS)


def make_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair around a module with flash-attn 3's functions, which `load` gives when a call needs it."""
    return OpPair(name, partial(_forward, load), partial(_backward, load), CLAIMS)


def make_varlen_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair that hands the same functions packed sequences."""
    forward, backward = partial(_varlen_forward, load), partial(_varlen_backward, load)
    return OpPair(name, forward, backward, VARLEN_CLAIMS, shapes=packed_shapes)


def _forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options
) -> ForwardOut:
    """One call of the kernel."""
    causal, shared = _shared(mask, q, k, options)
    out, lse, *_ = load()._flash_attn_forward(q, k, v, causal=causal, **shared)
    return ForwardOut(out, lse)


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
    rng: None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """One call of the kernel, which writes dq, dk and dv together into buffers of ours."""
    causal, shared = _shared(mask, q, k, options)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    load()._flash_attn_backward(
        grad_out, q, k, v, out, lse.contiguous(), dq=dq, dk=dk, dv=dv, is_causal=causal,
        deterministic=options.deterministic, **shared,
    )  # fmt: skip
    return Grads(*(grad if w else None for grad, w in zip((dq, dk, dv), wanted[:3], strict=True)))


def _varlen_forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options
) -> ForwardOut:
    """One call of the kernel on all sequences of all samples."""
    batch = q.shape[0]
    packed, kept = packing(mask, q, k)
    causal, shared = _shared(mask, q, k, options)
    ends = dict(zip(PACKED, packed.kernel_arguments, strict=True))
    given = (packed.queries(q), packed.keys(k), packed.keys(v))
    out, lse, *_ = load()._flash_attn_forward(*given, causal=causal, **ends, **shared)
    return ForwardOut(packed.queries_back(out, batch), packed.sums_back(lse, batch), None, kept)


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
    rng: None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """One call of the kernel, with the packing that forward found."""
    batch = q.shape[0]
    packed, _ = packing(mask, q, k, saved)
    causal, shared = _shared(mask, q, k, options)
    ends = dict(zip(PACKED, packed.kernel_arguments, strict=True))
    inputs = (packed.queries(q), packed.keys(k), packed.keys(v))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    load()._flash_attn_backward(
        packed.queries(grad_out), *inputs, packed.queries(out), packed.sums(lse), dq=dq, dk=dk, dv=dv,
        is_causal=causal, deterministic=options.deterministic, **ends, **shared,
    )  # fmt: skip
    back = ((packed.queries_back, dq), (packed.keys_back, dk), (packed.keys_back, dv))
    return Grads(*(to(grad, batch) if w else None for (to, grad), w in zip(back, wanted[:3], strict=True)))


def _shared(mask: Mask, q: Tensor, k: Tensor, options: Options) -> tuple[bool, dict[str, float]]:
    """Whether the call is causal, which both functions call by another name, and the arguments that both have."""
    causal, left, right = ends_of(mask, q.shape[1], k.shape[1])
    return causal, dict(zip(SHARED, (options.scale, left, right, options.softcap), strict=True))


def unavailable(device: str) -> Reason | None:
    """Why the package cannot be used."""
    return why_not(PACKAGE) or unlike(loaded(PACKAGE))


def fetch(device: str) -> Reason | None:
    """Loads the kernel of the hub, and says why it cannot be had or is another one."""
    return _hub.fetch(HUB, device) or unlike(_hub.module(HUB))


@cache
def module() -> Any:
    """The package's functions, with the arguments of the newer releases."""
    return _renewed(loaded(PACKAGE))


def _renewed(module: Any) -> Any:
    functions = [getattr(module, name) for name in FUNCTIONS]
    if "window_size" not in _parameters(functions[0]):
        return module
    return SimpleNamespace(**{n: partial(_older, f) for n, f in zip(FUNCTIONS, functions, strict=True)})


def _older(
    function: Callable[..., Any], *tensors: Tensor, window_size_left: int, window_size_right: int, **given: Any
) -> Any:
    """A call of a function of 3.0.0b1."""
    given = {OLDER_NAMES.get(name, name): value for name, value in given.items()}
    unset = [n for n, p in _parameters(function).items() if p.default is p.empty][len(tensors) :]
    return function(*tensors, **dict.fromkeys(unset) | given, window_size=(window_size_left, window_size_right))


@cache
def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(function, "_init_fn", function)).parameters  # of a torch.library.custom_op


def unlike(module: Any) -> Reason | None:
    """`schema-moved` where the two functions lack an argument that a pair passes."""
    for name, arguments in zip(FUNCTIONS, (FORWARD_ARGUMENTS, BACKWARD_ARGUMENTS), strict=True):
        there = _parameters(getattr(module, name))
        if "window_size" in there:
            arguments = tuple(OLDER_NAMES.get(a, a) for a in arguments)
        missing = [a for a in dict.fromkeys(arguments) if a not in there]
        if missing:
            return Reason(
                "schema-moved", f"this release of flash-attn 3 has another {name}", ", ".join(arguments),
                f"without {', '.join(missing)}", PACKAGE.install,
            )  # fmt: skip
    return None


FLASH_3 = Backend(
    "flash_3",
    "flash-attn 3",
    {"cuda": make_pair("flash_3", module)},
    unavailable,
    packages=(PACKAGE,),
    verified={"cuda": STAND_IN},
)
FLASH_VARLEN_3 = Backend(
    "flash_varlen_3",
    "flash-attn 3, packed",
    {"cuda": make_varlen_pair("flash_varlen_3", module)},
    unavailable,
    packages=(PACKAGE,),
    verified={"cuda": STAND_IN},
)
FLASH_3_HUB = Backend(
    "flash_3_hub",
    "flash-attn 3 from the hub",
    {"cuda": make_pair("flash_3_hub", partial(_hub.module, HUB))},
    lambda device: why_not(_hub.PACKAGE),
    packages=(_hub.PACKAGE,),
    verified={"cuda": STAND_IN},
    fetch=fetch,
)
FLASH_3_VARLEN_HUB = Backend(
    "flash_3_varlen_hub",
    "flash-attn 3 from the hub, packed",
    {"cuda": make_varlen_pair("flash_3_varlen_hub", partial(_hub.module, HUB))},
    lambda device: why_not(_hub.PACKAGE),
    packages=(_hub.PACKAGE,),
    verified={"cuda": STAND_IN},
    fetch=fetch,
)
