"""What stand-ins of quantised kernels compute with: int8 products of query and key, as SageAttention puts them.

One scale for a block of tokens of one head: the largest magnitude of the block is 127. Layout (B, S, H, D).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

LOG2_E = 1.44269504


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, blocks: tuple[int, int] = (128, 64),
    floats8: bool = False, counted: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out in q's dtype and lse (B, H, Sq) in float32, to base 2 and without any correction.

    `floats8`: weights and values as 8-bit floats. `counted`: so many keys more with a score of 0 and no value.
    """
    groups = q.shape[2] // k.shape[2]
    whole_q, step_q = quantised(q.float() * scale * LOG2_E, blocks[0])
    whole_k, step_k = (x.repeat_interleave(groups, 2) for x in quantised(k.float(), blocks[1]))
    products = torch.einsum("bqhd,bkhd->bhqk", whole_q, whole_k)
    scores = products * step_q.permute(0, 2, 1, 3) * step_k.permute(0, 2, 3, 1)
    if causal:
        later = torch.arange(k.shape[1]) > torch.arange(q.shape[1])[:, None]
        scores = scores.masked_fill(later, -1.0e6)
    else:
        scores = torch.nn.functional.pad(scores, (0, counted))
    most = scores.amax(-1, keepdim=True)
    weights = torch.exp2(scores - most)
    total = weights.sum(-1, keepdim=True)
    weights, values = weights[..., : k.shape[1]], v.repeat_interleave(groups, 2)
    if floats8:
        step = (values.float().abs().amax(1, keepdim=True) / 448).clamp_min(1e-9)
        values = (values.float() / step).to(torch.float8_e4m3fn).float() * step
        weights = (weights * 448).to(torch.float8_e4m3fn).float() / 448
    else:
        values, weights = values.half().float(), weights.half().float()
    out = torch.einsum("bhqk,bkhd->bqhd", weights / total, values)
    return out.to(q.dtype), (most + total.log2()).squeeze(-1)


def packed(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, q_most: int, k_most: int, scale: float
) -> Tensor:
    """Sequences one after another, (tokens, H, D): keys that are missing in the last block of each count as 0.

    A sequence without keys gives 0, tokens behind the last one whatever is there."""
    assert q_ends.dtype in (torch.int32, torch.int64)
    assert q_ends.is_contiguous()
    assert k_ends.is_contiguous()
    assert q_ends.shape == k_ends.shape
    assert int(q_ends.diff().max()) <= q_most
    assert int(k_ends.diff().max()) <= k_most
    out = torch.full_like(q, torch.nan)
    for (start, end), (first, last) in zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True):
        rows, cols = slice(start, end), slice(first, last)
        if end > start and last > first:
            one = [x.unsqueeze(0) for x in (q[rows], k[cols], v[cols])]
            out[rows] = attention(*one, scale, False, counted=(first - last) % 64)[0][0]
        else:
            out[rows] = 0.0
    return out


def quantised(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Whole numbers, rounded half away from 0, and the scale of each token (B, S, H, 1)."""
    scales = torch.cat(
        [part.abs().amax((1, 3), keepdim=True).expand(-1, part.shape[1], -1, -1) for part in x.split(block, 1)], 1
    )
    steps = scales / 127
    exact = (x / steps).nan_to_num(0.0)  # a block of zeros: whatever its numbers are, its scale is 0
    return torch.trunc(exact + 0.5 * torch.where(exact >= 0, 1, -1)), steps
