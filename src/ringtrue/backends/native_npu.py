"""Ascend's fused attention through torch_npu (npu_fusion_attention and its gradient, as two ops without autograd).

Read in torch_npu 2.11.0 (its op schemas, meta registrations and the documentation of the op in _op_plugin_docs.py),
and how transformers (integrations/npu_flash_attention.py) and rings of others call it. Layout BSND, our (B, S, H, D).
In place of lse it gives the maximum of each row and the sum above it, (B, H, Sq, 8) float32, eight times the same
number: lse = max + log(sum); backward takes lse for the maximum and 1 for the sum, which is how rings hand it the
numbers of all keys. atten_mask is True where attention is *not* allowed. Causal is sparse_mode 3, bottom-right, with
the fixed triangle of 2048 x 2048 that the kernel reads for every length; any other mask is sparse_mode 1 and written
out, (b, h, Sq, Sk), in bytes. A float mask (pse) is multiplied by the scale there; its rounding was not tried: not
claimed. Nor are dropout, whose state comes as three numbers of the host, float32, and whether strides are honoured:
hence the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contract import STAND_IN, Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Package, Reason, Wanted
from ..masks import allowed
from ..optional import loaded, why_not

FUNCTIONS = ("npu_fusion_attention", "npu_fusion_attention_grad")
PACKAGE = Package(
    "torch_npu", "pip install torch-npu (the release with torch's own number; it needs Ascend's CANN)", "torch-npu",
    at_least="2.11", below="3", attributes=FUNCTIONS,
)  # fmt: skip
LAYOUT = "BSND"
WHOLE, BOTTOM_RIGHT = 1, 3  # of sparse_mode
TRIANGLE = 2048
REPEATS = 8  # how often the kernel keeps each number of the softmax

CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    masks=frozenset({"dense_bool", "key_keep", "segments", "window"}),
    causal="bottom_right",
    max_head_dim=256,
    head_dim_multiple=16,
    gqa=True,
    any_scale=False,
    deterministic=False,
    arithmetic="16-bit",
)


def make_pair(name: str, load: Callable[[], Any]) -> OpPair:
    """The pair around `torch_npu`, or a module with its two functions, which `load` gives when called."""
    return OpPair(name, partial(_forward, load), partial(_backward, load), CLAIMS)


def _forward(
    load: Callable[[], Any], q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options
) -> ForwardOut:
    """One call of the kernel."""
    out, top, total, *_ = load().npu_fusion_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), q.shape[2], LAYOUT, scale=options.scale, **_hidden(mask, q, k)
    )
    return ForwardOut(out, top[..., 0] + total[..., 0].log())


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
    """One call of the kernel; all of dq, dk, dv come together."""
    top = lse.unsqueeze(-1).expand(*lse.shape, REPEATS).contiguous()
    grads = load().npu_fusion_attention_grad(
        q.contiguous(), k.contiguous(), v.contiguous(), grad_out.contiguous(), q.shape[2], LAYOUT, softmax_max=top,
        softmax_sum=torch.ones_like(top), attention_in=out.contiguous(), scale_value=options.scale,
        **_hidden(mask, q, k),
    )  # fmt: skip
    return Grads(*(grad if w else None for grad, w in zip(grads[:3], wanted[:3], strict=True)))


def _hidden(mask: Mask, q: Tensor, k: Tensor) -> dict[str, Any]:
    """The mask as the kernel reads it, and how it is to be read."""
    if mask.hides_nothing:
        return {}
    if not mask.kinds:
        triangle = torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=q.device).triu_(1)
        return {"atten_mask": triangle, "sparse_mode": BOTTOM_RIGHT}
    seen = allowed(mask, q.shape[1], k.shape[1], q.device)
    assert seen is not None
    heads = seen.shape[1]  # a mask with heads has all samples too, one without may be one for all
    batch = seen.shape[0] if heads == 1 else q.shape[0]
    return {
        "atten_mask": seen.logical_not().expand(batch, heads, q.shape[1], k.shape[1]).contiguous(),
        "sparse_mode": WHOLE,
    }


def unavailable(device: str) -> Reason | None:
    """Why torch_npu cannot be used."""
    return why_not(PACKAGE)


BACKEND = Backend(
    "native_npu",
    "Ascend's fused kernel, through torch_npu",
    {"npu": make_pair("native_npu", partial(loaded, PACKAGE))},
    unavailable,
    packages=(PACKAGE,),
    verified={"npu": STAND_IN},
)
