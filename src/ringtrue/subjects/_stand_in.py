"""Attention written out, for the place of a kernel that is not here: so that the code around the kernel can be judged.

In float64, by the formulas alone, and rounded once. backward takes an out and lse of more keys than it is
given, as every kernel under a ring must. A row that sees nothing: out 0, lse -inf, gradients 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Asked:
    """query i sees keys i + since to i + until (None: no limit); bias broadcasts to (B, H, Sq, Sk)."""

    scale: float
    bias: Tensor | None = None
    since: int | None = None
    until: int | None = None
    dropout_p: float = 0.0
    seed: int = 0
    softcap: float = 0.0


def forward(query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, Dv) and lse (B, H, Sq), of query (B, H, Sq, D), key (B, Hk, Sk, D) and value (B, Hk, Sk, Dv)."""
    scores, _ = _scores(query, key, asked)
    lse = scores.logsumexp(-1) if key.shape[2] else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = _weights(scores, lse) * _kept(scores, asked)
    return (weights @ _wide(value, query)).to(query.dtype), lse.to(torch.promote_types(query.dtype, torch.float32))


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, asked: Asked
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in their inputs' dtypes; those of shared key heads are sums."""
    scores, slope = _scores(query, key, asked)
    weights, kept = _weights(scores, lse.double()), _kept(scores, asked)
    wide = grad_out.double()
    delta = (wide * out.double()).sum(-1, keepdim=True)
    d_scores = weights * ((wide @ _wide(value, query).mT) * kept - delta) * slope * asked.scale
    grads = d_scores @ _wide(key, query), d_scores.mT @ query.double(), (weights * kept).mT @ wide
    group = query.shape[1] // key.shape[1]
    dq, dk, dv = grads[0], *(x.unflatten(1, (-1, group)).sum(2) for x in grads[1:])
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _wide(x: Tensor, query: Tensor) -> Tensor:
    """In float64, every key head as often as query heads share it."""
    return x.double().repeat_interleave(query.shape[1] // x.shape[1], 1)


def _scores(query: Tensor, key: Tensor, asked: Asked) -> tuple[Tensor, Tensor | float]:
    """Scaled and masked scores, and the slope of their cap."""
    scores = _wide(query, query) @ _wide(key, query).mT * asked.scale
    slope: Tensor | float = 1.0
    if asked.softcap:
        bent = torch.tanh(scores / asked.softcap)
        scores, slope = asked.softcap * bent, 1 - bent.square()
    if asked.bias is not None:
        scores = scores + asked.bias
    row = torch.arange(scores.shape[2], device=scores.device).unsqueeze(1)
    col = torch.arange(scores.shape[3], device=scores.device)
    if asked.until is not None:
        scores = scores.masked_fill(col > row + asked.until, -torch.inf)
    if asked.since is not None:
        scores = scores.masked_fill(col < row + asked.since, -torch.inf)
    return scores, slope


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))


def _kept(scores: Tensor, asked: Asked) -> Tensor | float:
    """Dropout's mask, scaled: the same for the same seed."""
    if not asked.dropout_p:
        return 1.0
    draw = torch.rand(scores.shape, generator=torch.Generator().manual_seed(asked.seed)).to(scores.device)
    return (draw >= asked.dropout_p).double() / (1.0 - asked.dropout_p)
