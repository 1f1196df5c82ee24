"""Two attentions, one of them deliberately wrong: what sample.html is the audit of.

transposed_twice keeps query, key and value as (B, H, S, D) for its backward, which transposes key and value once more.
Where heads and tokens are equally many every shape fits, and dq, dk and dv are those of another call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def right(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """(B, S, H, D) in and out."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return (_weights(q, k, is_causal) @ v).transpose(1, 2)


def transposed_twice(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """The same, with gradients of its own."""
    return TransposedTwice.apply(query, key, value, is_causal)


class TransposedTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        ctx.save_for_backward(q, k, v)
        ctx.is_causal = is_causal
        return (_weights(q, k, is_causal) @ v).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # the fault: they are (B, H, S, D) already
        grad_out = grads[0].transpose(1, 2)
        weights = _weights(q, k, ctx.is_causal)
        grad_weights = grad_out @ v.mT
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        found = (grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad_out)
        dq, dk, dv = (x.transpose(1, 2) for x in found)
        return dq, dk, dv, None


def _weights(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1)
