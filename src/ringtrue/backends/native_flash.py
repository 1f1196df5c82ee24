"""torch's fused flash attention: FlashAttention-2 on CUDA (aten::_scaled_dot_product_flash_attention), and for CPUs.

CUDA, seen on torch 2.11 and an H200: takes (B, H, S, D) as strides, GQA directly, no mask at all; causal is
bottom-right; head dims are multiples of 8 up to 256, equal for keys and values. Dropout: the state comes and goes as
(seed, offset) in uint64 on the device; a weight is kept where a random byte is at most 255 (1 - p) rounded down, so the
share that is kept is off by up to 1/256, while what is kept is divided by 1 - p as it should.

CPU (aten::_scaled_dot_product_flash_attention_for_cpu), seen on torch 2.13: causal is top-left for any Sq and Sk; a
float mask is taken in float32 with 16-bit inputs; with float64 inputs a float32 mask is read as float64 (silently
wrong), hence `bias_dtype="accumulate"`. No GQA and no bool mask. Causal writes -inf before it scales (0 * -inf is NaN,
-0.3 * -inf is +inf), hence `any_scale=False`. The backward of 16-bit inputs adds up dq over blocks of keys, dk and dv
over blocks of queries, in 16 bits: errors grow with the root of the length, twice what is allowed at 65536 tokens,
hence `_long`. Where all scores of a query are NaN and its keys are fewer than a vector (16 in float32), out is 0 and
lse 0 instead of NaN; the gradients are NaN as they should.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted
from ._philox import drawing, replayed
from ._pinned import moved, op

CPU_SCHEMAS = {
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


CUDA_SCHEMAS = {
    "_scaled_dot_product_flash_attention": (
        "aten::_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, "
        "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, "
        "Tensor unused, Tensor debug_attn_mask)"
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "aten::_scaled_dot_product_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}


_cuda_forward, _cuda_backward = map(op, CUDA_SCHEMAS)
_cpu_forward, _cpu_backward = map(op, CPU_SCHEMAS)


def cuda_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
    """One call of the kernel."""
    p = options.dropout_p
    with drawing(rng, p, q.device):
        out, lse, *_ = _cuda_forward(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), p, mask.causal is not None, scale=options.scale
        )
    return ForwardOut(out.transpose(1, 2), lse, rng)


def cuda_backward(
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
    """One call of the kernel; all of dq, dk, dv come together."""
    p = options.dropout_p
    state = replayed(rng, p, q.device, 2).view(torch.uint64)  # seed and offset; the second tensor is not read
    grads = _cuda_backward(
        *(x.transpose(1, 2) for x in (grad_out, q, k, v, out)), lse.contiguous(), None, None, q.shape[1], k.shape[1],
        p, mask.causal is not None, state, state, scale=options.scale,
    )  # fmt: skip
    return Grads(*(x.transpose(1, 2) if w else None for x, w in zip(grads, wanted[:3], strict=True)))


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options) -> ForwardOut:
    """One call of the kernel; it wants (B, H, S, D), which is the same memory with two strides swapped."""
    out, lse = _cpu_forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, mask.causal is not None, attn_mask=mask.dense,
        scale=options.scale,
    )  # fmt: skip
    return ForwardOut(out.transpose(1, 2), lse)


def cpu_backward(
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
    dtype, long = q.dtype, _long(q, k)
    if long:
        grad_out, q, k, v, out = (x.float() for x in (grad_out, q, k, v, out))
    dq, dk, dv = _cpu_backward(
        grad_out.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2), lse,
        0.0, mask.causal is not None, attn_mask=mask.dense, scale=options.scale,
    )  # fmt: skip
    if long:
        dq, dk, dv = (x.to(dtype) for x in (dq, dk, dv))
    return Grads(*(x.transpose(1, 2) if w else None for x, w in zip((dq, dk, dv), wanted[:3], strict=True)))


def _long(q: Tensor, k: Tensor) -> bool:
    """Whether sums over 16-bit blocks would lose more than the inputs' own rounding does."""
    return q.dtype in (torch.bfloat16, torch.float16) and (q.shape[1] > 1024 or k.shape[1] > 4096)


CPU_CLAIMS = Claims(
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
    masks=frozenset({"dense_float"}),
    causal="top_left",
    any_scale=False,
    arithmetic="16-bit",
)
CUDA_CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    causal="bottom_right",
    min_capability=(8, 0),
    max_head_dim=256,
    head_dim_multiple=8,
    gqa=True,
    any_scale=False,
    stride_multiple=8,
    dropout=True,
    deterministic=False,
    deterministic_by_switch=True,
    arithmetic="16-bit",
)
BACKEND = Backend(
    "native_flash",
    "torch's fused flash kernel",
    {
        "cpu": OpPair("native_flash", cpu_forward, cpu_backward, CPU_CLAIMS),
        "cuda": OpPair("native_flash", cuda_forward, cuda_backward, CUDA_CLAIMS),
    },
    lambda device: moved(CUDA_SCHEMAS if device == "cuda" else CPU_SCHEMAS),
    verified={"cuda": "docs/verified/2026-11-30-1xH200-issue4.md"},
)
