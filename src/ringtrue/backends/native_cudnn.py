"""cuDNN's fused attention through torch (aten::_scaled_dot_product_cudnn_attention).

Seen on torch 2.11, cuDNN 9.19 and an H200: lse is (B, H, S, 1); causal is top-left; a float mask has q's dtype; GQA and
Dv != D are taken directly; no gradient of a float mask. Its backward depends on what ran before it in the process, and
a single query is wrong: faults.py mends both. With an odd multiple of 64 keys dq is NaN where all scores of a query are
very negative: hence `key_tile`. Dropout: the state comes and goes as two int64 scalars on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted
from ._philox import drawing, replayed
from ._pinned import moved, op

SCHEMAS = {
    "_scaled_dot_product_cudnn_attention": (
        "aten::_scaled_dot_product_cudnn_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
        "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
        "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)"
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "aten::_scaled_dot_product_cudnn_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, *, float? scale=None) "
        "-> (Tensor, Tensor, Tensor)"
    ),
}


_forward, _backward = map(op, SCHEMAS)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
    """One call of the kernel."""
    p = options.dropout_p
    with drawing(rng, p, q.device):
        out, lse, *_ = _forward(
            *(x.transpose(1, 2) for x in (q, k, v)), mask.dense, True, p, mask.causal is not None, False,
            scale=options.scale,
        )  # fmt: skip
    return ForwardOut(out.transpose(1, 2), lse.view(q.shape[0], q.shape[2], q.shape[1]), rng)


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
    """One call of the kernel; all of dq, dk, dv come together."""
    p = options.dropout_p
    state = replayed(rng, p, q.device)
    grads = _backward(
        *(x.transpose(1, 2) for x in (grad_out, q, k, v, out)), lse.unsqueeze(-1).contiguous(), state, state,
        mask.dense, None, None, q.shape[1], k.shape[1], p, mask.causal is not None, scale=options.scale,
    )  # fmt: skip
    return Grads(*(x.transpose(1, 2) if w else None for x, w in zip(grads, wanted[:3], strict=True)))


CLAIMS = Claims(
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    masks=frozenset({"dense_float"}),
    bias_dtype="input",
    stride_multiple=8,
    causal="top_left",
    min_capability=(8, 0),
    max_head_dim=128,
    head_dim_multiple=8,
    gqa=True,
    value_dim=True,
    key_tile=64,
    any_scale=False,
    dropout=True,
    deterministic=False,
    arithmetic="16-bit",
)
BACKEND = Backend(
    "native_cudnn",
    "cuDNN's fused kernel, through torch",
    {"cuda": OpPair("native_cudnn", forward, backward, CLAIMS)},
    lambda device: moved(SCHEMAS),
    verified={"cuda": "docs/verified/2026-11-30-1xH200-issue4.md"},
)
