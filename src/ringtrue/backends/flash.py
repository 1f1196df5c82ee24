"""flash-attn 2, by its package or by its kernel from the hub: the two functions under its public `flash_attn_func`.

Read in flash-attn 2.8.3 (flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp) and in version 3 of
kernels-community/flash-attn2, whose functions have the same arguments. Layout (B, S, H, D); lse (B, H, Sq) float32;
causal and windows count from the bottom right. A window's right end of Sk or more is taken for no limit, which `edge`
knows of. Dropout as in torch's copy of the kernel (native_flash.py): the state is drawn from the device's default
generator, and backward reads (seed, offset) from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contract import STAND_IN, Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package, Wanted
from ..optional import loaded, why_not
from . import _hub
from ._ends import ends_of
from ._philox import drawing, replayed

FUNCTIONS = ("_flash_attn_forward", "_flash_attn_backward")
PACKAGE = Package(
    "flash_attn.flash_attn_interface", "pip install flash-attn --no-build-isolation", distribution="flash-attn",
    at_least="2.8", below="3", attributes=FUNCTIONS,
)  # fmt: skip
HUB = _hub.Kernel("kernels-community/flash-attn2", version=3, attributes=FUNCTIONS)

CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    masks=frozenset({"window"}),
    causal="bottom_right",
    min_capability=(8, 0),
    max_head_dim=256,
    head_dim_multiple=8,
    gqa=True,
    any_scale=False,
    stride_multiple=8,
    dropout=True,
    softcap=True,
    arithmetic="16-bit",
)


def make_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair around a module with flash-attn 2's functions, which `load` gives when a call needs it."""
    return OpPair(name, partial(_forward, load), partial(_backward, load), CLAIMS)


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


FLASH = Backend(
    "flash",
    "flash-attn 2",
    {"cuda": make_pair("flash", partial(loaded, PACKAGE))},
    lambda device: why_not(PACKAGE),
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
    fetch=partial(_hub.fetch, HUB),
)
