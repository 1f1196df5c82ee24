"""Truth: attention and its gradients in float64, written out from the formula; shares no code with any backend.

With X = scale q k^T, S = softcap(X) + bias, P = softmax(S), M the drawn dropout mask (1 without dropout), g = dL/dout:

    out = (P M) v        lse = log sum exp S
    dv = (P M)^T g       dP = M (g v^T)      delta = rowsum(g out) - dL/dlse      dS = P (dP - delta)
    dbias = dS summed over its broadcast dims      dX = dS (1 - tanh^2)      dq = scale dX k      dk = scale dX^T q

(the backward pass of FlashAttention, arXiv:2205.14135, appendix B, before it is cut into blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import Mask


class Quantities(NamedTuple):
    """What is judged: out (B, Sq, H, Dv), lse (B, H, Sq), gradients shaped like q, k, v and Mask.bias; or None."""

    out: Tensor | None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Truth:
    """The float64 quantities, and the steps towards them that say how large rounding may be (noise.py).

    weights P, grad_weights dP, slope 1 - tanh^2 and magnitude |scale| |q||k|^T: (B, H, Sq, Sk). delta: (B, H, Sq, 1).
    """

    values: Quantities
    weights: Tensor
    grad_weights: Tensor
    slope: Tensor
    delta: Tensor
    magnitude: Tensor


def truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    softcap: float = 0.0,
    dropout: Tensor | None = None,
) -> Truth:
    """Everything, in float64, for inputs of any dtype in the layouts of contract.py.

    `dropout` is the mask that was drawn, (B, H, Sq, Sk): 0 where dropped, 1 / (1 - p) where kept.
    """
    group = q.shape[2] // k.shape[2]
    queries, upstream = by_head(q), by_head(grad_out)
    keys, values = by_head(k).repeat_interleave(group, 1), by_head(v).repeat_interleave(group, 1)

    raw = scale * (queries @ keys.mT)
    capped = softcap * torch.tanh(raw / softcap) if softcap else raw
    slope = 1 - (capped / softcap) ** 2 if softcap else torch.ones_like(raw)
    weights, lse = softmax(capped + bias_of(mask, raw), visible(mask, raw.shape, raw.device))
    drawn = torch.ones_like(weights) if dropout is None else dropout.double()

    out = (weights * drawn) @ values
    delta = (upstream * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.double().unsqueeze(-1)
    grad_weights = drawn * (upstream @ values.mT)
    grad_scores = weights * (grad_weights - delta)
    grad_raw = grad_scores * slope
    return Truth(
        Quantities(
            out=out.transpose(1, 2),
            lse=lse,
            dq=(scale * (grad_raw @ keys)).transpose(1, 2),
            dk=sum_groups(scale * (grad_raw.mT @ queries), k.shape[2]).transpose(1, 2),
            dv=sum_groups((weights * drawn).mT @ upstream, k.shape[2]).transpose(1, 2),
            dbias=None if mask.bias is None else sum_to_bias(grad_scores, mask),
        ),
        weights,
        grad_weights,
        slope,
        delta,
        abs(scale) * queries.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).unsqueeze(-2),
    )


def by_head(x: Tensor) -> Tensor:
    """(B, S, H, D) of any dtype -> (B, H, S, D) float64."""
    return x.detach().double().transpose(1, 2)


def visible(mask: Mask, shape: torch.Size, device: torch.device) -> Tensor:
    """Which key each query may attend to: bool of the full `shape` (B, H, Sq, Sk). A bias of -inf forbids."""
    seen = torch.ones(shape, dtype=torch.bool, device=device)
    row, key = torch.arange(shape[2], device=device).unsqueeze(1), torch.arange(shape[3], device=device)
    if mask.causal is not None:
        seen &= key <= row + mask.causal
    if mask.since is not None:
        seen &= key >= row + mask.since
    if mask.q_segments is not None and mask.k_segments is not None:
        seen &= mask.q_segments[:, None, :, None] == mask.k_segments[:, None, None, :]
    for part in (mask.dense, mask.key_keep, mask.key_bias):
        if part is not None:
            part = part if part.dim() == 4 else part[:, None, None, :]
            seen &= part if part.dtype == torch.bool else part.detach() != -torch.inf
    return seen


def bias_of(mask: Mask, like: Tensor) -> Tensor:
    """The sum of the float parts, of `like`'s dtype and shape; 0 where it is -inf (`visible` forbids those)."""
    total = torch.zeros_like(like)
    for part in (mask.dense, mask.key_bias):
        if part is not None and part.dtype != torch.bool:
            part = part if part.dim() == 4 else part[:, None, None, :]
            total = total + part.detach().to(like.dtype).masked_fill(part.detach() == -torch.inf, 0.0)
    return total


def softmax(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (B, H, Sq, Sk) and lse (B, H, Sq) of the scores that are seen; a row that sees nothing: 0 and -inf."""
    if scores.shape[-1] == 0:  # no maximum of nothing
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    live = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True).masked_fill(~live, 0.0)
    powers = torch.exp(scores - top)
    total = powers.sum(-1, keepdim=True)
    lse = (top + total.log()).masked_fill(~live, -torch.inf)
    return powers / total.masked_fill(~live, 1.0), lse.squeeze(-1)


def sum_groups(x: Tensor, kv_heads: int) -> Tensor:
    """(B, H, S, D) summed over the query heads that share a key head: (B, Hk, S, D)."""
    return x.unflatten(1, (kv_heads, -1)).sum(2) if kv_heads else x


def sum_to_bias(scores: Tensor, mask: Mask) -> Tensor:
    """(B, H, Sq, Sk) summed over the dims that Mask.bias leaves out, in Mask.bias's shape."""
    bias = mask.bias
    assert bias is not None
    return scores.sum_to_size(bias.shape) if bias.dim() == 4 else scores.sum((1, 2))
