"""What stand-ins compute with on the CPU: attention written out in float32, as flash-attn counts its arguments.

Layout (B, S, H, D). Causal is bottom-right; `window` is (left, right) around the diagonal that ends in the last query
and the last key, -1 or None = no limit. A query that sees nothing has out 0 and lse +inf, as flash-attn 2 returns it.
"""

from __future__ import annotations

import torch
from torch import Tensor

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (-1, -1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out in q's dtype and lse (B, H, Sq) in float32. `bias` (b, h, q, k) is added; `keep` (drawn mask) multiplies the
    weights after the sum."""
    scores = _scores(q, k, scale, causal, window, softcap, bias)[0]
    lse = scores.logsumexp(-1)
    # by the row's own sum: at a huge level lse has no bits left for it
    weights = scores.softmax(-1).masked_fill(scores == -torch.inf, 0.0)
    weights = weights if keep is None else weights * keep
    out = torch.einsum("bhqk,bkhd->bqhd", weights, _per_head(v, q))
    return out.to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool = False,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    keep: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in their inputs' dtype, and d_scores (B, H, Sq, Sk) in float32, from the lse that is handed in."""
    scores, slope = _scores(q, k, scale, causal, window, softcap, bias)
    weights = _weights(scores, lse)
    grad, result = grad_out.float(), out.float()
    d_weights = torch.einsum("bqhd,bkhd->bhqk", grad, _per_head(v, q))
    dropped = weights if keep is None else weights * keep
    d_weights = d_weights if keep is None else d_weights * keep
    delta = (grad * result).sum(-1).transpose(1, 2)
    delta = delta if grad_lse is None else delta - grad_lse
    d_scores = weights * (d_weights - delta.unsqueeze(-1))
    before = d_scores * slope * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", before, _per_head(k, q))
    dk = _per_group(torch.einsum("bhqk,bqhd->bkhd", before, q.float()), k)
    dv = _per_group(torch.einsum("bhqk,bqhd->bkhd", dropped, grad), v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_scores


def _scores(
    q: Tensor, k: Tensor, scale: float, causal: bool, window: Window, softcap: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scaled and masked scores in float32, and the slope of the softcap."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), _per_head(k, q)) * scale
    slope = torch.ones_like(scores)
    if softcap:
        curved = torch.tanh(scores / softcap)
        scores, slope = softcap * curved, 1 - curved**2
    scores = scores if bias is None else scores + bias.float()
    row = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    col = torch.arange(k.shape[1])
    left, right = (None if end is None or end < 0 else end for end in window)
    right = 0 if causal else right
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    hidden = hidden if left is None else hidden | (col < row - left)
    hidden = hidden if right is None else hidden | (col > row + right)
    return scores.masked_fill(hidden, -torch.inf), slope


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Of what is hidden exactly 0, also where lse is infinite."""
    return (scores - lse.unsqueeze(-1)).exp().masked_fill(scores == -torch.inf, 0.0)


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _per_group(grad: Tensor, like: Tensor) -> Tensor:
    return grad.unflatten(2, (like.shape[2], -1)).sum(3)
