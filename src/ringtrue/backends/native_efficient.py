"""torch's memory-efficient attention on CUDA (aten::_scaled_dot_product_efficient_attention, once xformers' kernels).

Seen on torch 2.11 and an H200: lse comes in rows of ceil(Sq / 32) * 32 with +inf in the padding, and goes back so;
causal is top-left; a float mask has q's dtype, starts each row at a multiple of 8 elements and may be expanded, its
gradient comes in full (B, H, Sq, Sk); backward takes an out whose heads are outermost for one whose tokens are. No GQA.
Dropout: the state comes and goes as two int64 scalars on the CPU; weights are counted in 32 bits, so that from 2**32 on
the same numbers are drawn again (at 16384 tokens head 16 drops what head 0 drops) and backward may count otherwise than
forward: hence `dropout_tile`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..contract import Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted
from ._philox import drawing, replayed
from ._pinned import moved, op

SCHEMAS = {
    "_scaled_dot_product_efficient_attention": (
        "aten::_scaled_dot_product_efficient_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
        "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) "
        "-> (Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)"
    ),
    "_scaled_dot_product_efficient_attention_backward": (
        "aten::_scaled_dot_product_efficient_attention_backward(Tensor grad_out_, Tensor query, Tensor key, "
        "Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, "
        "float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
}
LSE_ROWS = 32


_forward, _backward = map(op, SCHEMAS)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
    """One call of the kernel, lse cut to the queries there are."""
    p = options.dropout_p
    with drawing(rng, p, q.device):
        out, lse, *_ = _forward(
            *(x.transpose(1, 2) for x in (q, k, v)), _bias(q, k, mask), True, p, mask.causal is not None,
            scale=options.scale,
        )  # fmt: skip
    return ForwardOut(out.transpose(1, 2), lse[:, :, : q.shape[1]], rng)


def backward(
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
    """One call of the kernel; lse is padded again as the kernel reads it."""
    p = options.dropout_p
    state = replayed(rng, p, torch.device("cpu") if p else q.device)  # read by the host
    padded = functional.pad(lse, (0, -lse.shape[2] % LSE_ROWS), value=float("inf")).contiguous()
    grads = _backward(
        *(x.transpose(1, 2) for x in (grad_out, q, k, v)), _bias(q, k, mask), out.contiguous().transpose(1, 2),
        padded, state, state, p, [True, True, True, wanted.bias], mask.causal is not None, scale=options.scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) if w else None for x, w in zip(grads[:3], wanted[:3], strict=True))
    return Grads(dq, dk, dv, grads[3] if wanted.bias else None)


def _bias(q: Tensor, k: Tensor, mask: Mask) -> Tensor | None:
    return None if mask.dense is None else mask.dense.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


CLAIMS = Claims(
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    masks=frozenset({"dense_float"}),
    bias_dtype="input",
    stride_multiple=8,
    causal="top_left",
    head_dim_multiple=8,
    value_dim=True,
    dropout=True,
    dropout_tile=2**31,
    dbias=True,
    deterministic=False,
    deterministic_by_switch=True,
    arithmetic="16-bit",
)
BACKEND = Backend(
    "native_efficient",
    "torch's memory-efficient kernel",
    {"cuda": OpPair("native_efficient", forward, backward, CLAIMS)},
    lambda device: moved(SCHEMAS),
    verified={"cuda": "docs/verified/2026-11-30-1xH200-issue4.md"},
)
