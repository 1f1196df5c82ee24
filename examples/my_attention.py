"""An attention function as one might write it, with its backward by hand: the subject of docs/audit/your-own-kernel.md.

It holds a mistake on purpose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """query (B, Sq, H, D), key and value (B, Sk, Hk, D) -> (B, Sq, H, D); causal at the last token, as in decoding."""
    if key.shape[2] != query.shape[2] and not enable_gqa:
        raise ValueError("fewer key heads than query heads need enable_gqa")
    if is_causal and query.shape[1] > key.shape[1]:
        raise ValueError("causal with more queries than keys: some would see nothing")
    out: Tensor = Attention.apply(query, key, value, is_causal, query.shape[3] ** -0.5 if scale is None else scale)
    return out


class Attention(torch.autograd.Function):
    """Eager attention that keeps its weights for backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> Tensor:
        group = query.shape[2] // key.shape[2]
        q, k, v = query.transpose(1, 2), spread(key, group), spread(value, group)
        scores = (q @ k.mT).float() * scale
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
            scores = scores.masked_fill(~seen, -math.inf)
        weights = scores.softmax(-1)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scale = scale
        return (weights.to(v.dtype) @ v).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        group = query.shape[2] // key.shape[2]
        q, k, v, g = query.transpose(1, 2), spread(key, group), spread(value, group), grad_out.transpose(1, 2)
        d_weights = (g @ v.mT).float()
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * ctx.scale
        d_scores = d_scores.to(q.dtype)
        dq = d_scores @ k
        dk, dv = gather(d_scores.mT @ q, group), gather(weights.to(g.dtype).mT @ g, group)
        return dq.transpose(1, 2), dk, dv, None, None


def spread(x: Tensor, group: int) -> Tensor:
    """(B, S, Hk, D) -> (B, H, S, D): each key head for every query head of its group."""
    return x.transpose(1, 2).repeat_interleave(group, 1)


def gather(x: Tensor, group: int) -> Tensor:
    """(B, H, S, D) -> (B, S, Hk, D): the gradient of `spread`."""
    return x.unflatten(1, (-1, group))[:, :, 0].transpose(1, 2)
