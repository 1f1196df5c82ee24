"""torch's fused flash attention for CPUs (aten::_scaled_dot_product_flash_attention_for_cpu).

Seen on torch 2.13: causal is top-left for any Sq and Sk; a float mask is taken in float32 with 16-bit inputs; with
float64 inputs a float32 mask is read as float64 (silently wrong), hence `bias_dtype="accumulate"`. No GQA and no bool
mask. Causal writes -inf before it scales (0 * -inf is NaN, -0.3 * -inf is +inf), hence `_positive`. The backward of
16-bit inputs adds up dq over blocks of keys, dk and dv over blocks of queries, in 16 bits: errors grow with the root of
the length, twice what is allowed at 65536 tokens, hence `_long`. Where all scores of a query are NaN and its keys are
fewer than a vector (16 in float32), out is 0 and lse 0 instead of NaN; the gradients are NaN as they should.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Reason, Wanted

# Private schemas are pinned: torch 2.11 to 2.13.
SCHEMAS = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
        "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor output, Tensor logsumexp)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, "
        "Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, "
        "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options) -> ForwardOut:
    """One call of the kernel; it wants (B, H, S, D), which is the same memory with two strides swapped."""
    q, scale, _ = _positive(q, options.scale)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, mask.causal is not None, attn_mask=mask.dense, scale=scale
    )
    return ForwardOut(out.transpose(1, 2), lse)


def backward(
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
    """One call of the kernel; all of dq, dk, dv come together."""
    q, scale, sign = _positive(q, options.scale)
    dtype = torch.float32 if _long(q, k) else q.dtype
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2).to(dtype) for x in (grad_out, q, k, v, out)),
        lse,
        0.0,
        mask.causal is not None,
        attn_mask=mask.dense,
        scale=scale,
    )
    dq, dk, dv = (x.to(q.dtype).transpose(1, 2) if w else None for x, w in zip(grads, wanted[:3], strict=True))
    return Grads(dq if dq is None or sign == 1 else sign * dq, dk, dv)


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """q and scale with the scale's sign moved into q, so that the scale is positive; and that sign (-1, 0 or 1)."""
    sign = (scale > 0) - (scale < 0)
    return (q, scale, 1) if sign == 1 else (sign * q, abs(scale) or 1.0, sign)


def _long(q: Tensor, k: Tensor) -> bool:
    """Whether sums over 16-bit blocks would lose more than the inputs' own rounding does."""
    return q.dtype in (torch.bfloat16, torch.float16) and (q.shape[1] > 1024 or k.shape[1] > 4096)


def unavailable(device: str) -> Reason | None:
    """`schema-moved` when torch's private op is not the one that was tried."""
    for name, pinned in SCHEMAS.items():
        op = getattr(torch.ops.aten, name, None)
        seen = "absent" if op is None else str(op.default._schema)
        if seen != pinned:
            return Reason(
                "schema-moved",
                f"torch {torch.__version__} changed the private op {name}",
                pinned,
                seen,
                "use native_math",
            )
    return None


CLAIMS = Claims(
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
    masks=frozenset({"dense_float"}),
    causal="top_left",
    arithmetic="16-bit",
)
BACKEND = Backend(
    "native_flash",
    "torch's fused flash kernel",
    {"cpu": OpPair("native_flash", forward, backward, CLAIMS)},
    unavailable,
)
