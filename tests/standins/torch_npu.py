"""torch_npu 2.11.0: the arguments of its fused attention and of the gradient, and what is computed of them here.

As there: BSND; the row maximum and the sum above it, (B, H, Sq, 8) each; True in atten_mask hides; sparse_mode 3 reads
a triangle of 2048 x 2048 for any length, bottom-right, and mode 1 the whole mask. A hidden score is the lowest float32,
not -inf: a query that sees nothing gets the mean of all values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _eager

MOST = 2147483647
LOWEST = torch.finfo(torch.float32).min


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = MOST, next_tockens: int = MOST, inner_precise: int = 0, prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None, actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
    dropout_mask: Tensor | None = None, seed: int = 0, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:  # fmt: skip
    unused = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink, dropout_mask)
    _require(all(x is None for x in unused) and keep_prob == 1.0, "not part of this stand-in")
    _check(query, key, value, head_num, input_layout)
    bias = _bias(query, key, atten_mask, sparse_mode)
    scores = _eager._scores(query, key, scale, False, _eager.NO_WINDOW, 0.0, bias)[0]
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / total, _eager._per_head(value, query)).to(query.dtype)
    kept = [x.expand(*x.shape[:-1], 8).contiguous() for x in (top, total)]
    return out.contiguous(), *kept, query.new_empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0, pre_tockens: int = MOST,
    next_tockens: int = MOST, inner_precise: int = 0, seed: int = 0, offset: int = 0, numels: int = 0,
    prefix: list[int] | None = None, actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:  # fmt: skip
    unused = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink)
    _require(all(x is None for x in unused) and keep_prob == 1.0, "not part of this stand-in")
    _check(query, key, value, head_num, input_layout)
    assert softmax_max is not None
    assert softmax_sum is not None
    assert attention_in is not None
    _require(dy.is_contiguous() and attention_in.is_contiguous() and dy.dtype == query.dtype, "dy or attention_in")
    rows = (query.shape[0], head_num, query.shape[1], 8)
    for kept in (softmax_max, softmax_sum):
        _require(kept.shape == rows and kept.dtype == torch.float32 and kept.is_contiguous(), "softmax_max or _sum")
    lse = softmax_max[..., 0] + softmax_sum[..., 0].log()
    bias = _bias(query, key, atten_mask, sparse_mode)
    grads = _eager.backward(dy, query, key, value, attention_in, lse, scale_value, bias=bias)[:3]
    return *grads, None, query.new_empty(0)


def _bias(query: Tensor, key: Tensor, hidden: Tensor | None, sparse_mode: int) -> Tensor | None:
    """What is hidden, as the lowest number."""
    if hidden is None:
        return None
    _require(hidden.dtype == torch.bool and hidden.is_contiguous(), "atten_mask")
    q_len, k_len = query.shape[1], key.shape[1]
    if sparse_mode == 3:
        _require(torch.equal(hidden, torch.ones(2048, 2048, dtype=torch.bool).triu(1)), "the fixed triangle")
        hidden = torch.ones(q_len, k_len, dtype=torch.bool).triu(1 + k_len - q_len)
    else:
        _require(sparse_mode == 1, "not part of this stand-in")
        batch, heads = query.shape[0], query.shape[2]
        shapes = [(q_len, k_len), *((b, h, q_len, k_len) for b, h in ((batch, heads), (batch, 1), (1, 1)))]
        _require(hidden.shape in shapes, f"atten_mask of {tuple(hidden.shape)}")
    return torch.zeros(hidden.shape).masked_fill(hidden, LOWEST)


def _check(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str) -> None:
    _require(input_layout == "BSND" and head_num == query.shape[2], "layout or heads")
    _require(query.dtype in (torch.bfloat16, torch.float16), "dtype")
    _require(query.dtype == key.dtype == value.dtype and key.shape == value.shape, "dtype or shape")
    _require(query.shape[2] % key.shape[2] == 0 and query.shape[3] == key.shape[3] <= 768, "heads or head dim")
    _require(all(x.is_contiguous() for x in (query, key, value)), "this stand-in reads no strides")


def _require(fits: bool, text: str) -> None:
    if not fits:
        raise RuntimeError(text)
