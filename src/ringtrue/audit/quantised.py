"""The yardstick of pairs that quantise query and key: eager attention that does so as SageAttention's paper describes.

Written out from arXiv:2410.02367 (int8 for query and key, one scale for a block of 128 queries or 64 keys, keys without
their mean over the sequence, weights and value in float16) and arXiv:2411.10958 ("8-bit values": value in 8-bit floats
with a scale for each channel, weights in 8-bit floats relative to the largest of their row). It knows no backend.

It stands for out and lse alone. Gradients of such a pair are another pair's, exact ones, with the ordinary yardstick.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import accumulate_dtype
from .inputs import Inputs
from .truth import by_head, visible

QUERIES, KEYS, LEVELS = 128, 64, 127
FLOAT8_MOST = 448.0  # the largest number of float8_e4m3fn
FLOAT8_UNIT = 2.0**-5  # near the rms of one rounding to its 4 bits, as the units of rule.py


def eager(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, Dv) in the inputs' dtype and lse (B, H, Sq), by int8 products."""
    x, group = inputs, inputs.q.shape[2] // inputs.k.shape[2]
    q, k, v = (t.float() for t in (by_head(x.q), by_head(x.k), by_head(x.v)))
    mean = k.mean(-2, keepdim=True)
    (q8, q_step), (k8, k_step) = _int8(q, QUERIES), _int8(k - mean, KEYS)
    k8, k_step, mean, v = (t.repeat_interleave(group, 1) for t in (k8, k_step, mean, v))
    scores = (q8 @ k8.mT) * q_step * k_step.mT * x.options.scale
    seen = visible(x.mask, scores.shape, scores.device)
    dead = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(dead, 0.0)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(dead, 0.0)
    total = weights.sum(-1, keepdim=True).masked_fill(dead, 1.0)
    if x.arithmetic == "8-bit values":
        step = (v.abs().amax(-2, keepdim=True) / FLOAT8_MOST).clamp_min(1e-12)
        weights = _float8(weights * FLOAT8_MOST) / FLOAT8_MOST
        v = _float8(v / step) * step
    else:
        weights, v = weights.half().float(), v.half().float()
    out = (weights @ v / total).transpose(1, 2).to(x.q.dtype)
    lse = lse + x.options.scale * (q * mean).sum(-1, keepdim=True)
    return out, lse.masked_fill(dead, -torch.inf).squeeze(-1).to(accumulate_dtype(x.q.dtype))


def score_noise(inputs: Inputs) -> Tensor:
    """The square of what int8 does to a score, (B, H, Sq, Sk) float64: a rounding is uniform, of rms step / sqrt(12).

    (E_int8)^2 = scale^2 (step_q^2 |k - mean|^2 + step_k^2 |q|^2) / 12
    """
    group = inputs.q.shape[2] // inputs.k.shape[2]
    q, k = by_head(inputs.q), by_head(inputs.k)
    k = k - k.mean(-2, keepdim=True)
    of_q = _steps(q, QUERIES) ** 2
    of_k, size = (t.repeat_interleave(group, 1).mT for t in (_steps(k, KEYS) ** 2, (k**2).sum(-1, keepdim=True)))
    return inputs.options.scale**2 * (of_q * size + (q**2).sum(-1, keepdim=True) * of_k) / 12


def _int8(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Whole numbers up to 127 (as floats) and what one of them is worth, for blocks of tokens; x (B, H, S, D)."""
    step = _steps(x, block)
    return (x / step).round(), step


def _steps(x: Tensor, block: int) -> Tensor:
    """(B, H, S, 1)"""
    largest = [part.abs().amax((-2, -1), keepdim=True).expand(-1, -1, part.shape[-2], 1) for part in x.split(block, -2)]
    return (torch.cat(largest, -2) / LEVELS).clamp_min(1e-12)


def _float8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)
