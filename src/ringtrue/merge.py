"""Merge partial attention results over disjoint sets of keys, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from .contract import accumulate_dtype

Out: TypeAlias = Float[Tensor, "B Sq H Dv"]
Lse: TypeAlias = Float[Tensor, "B H Sq"]


def merge(total: tuple[Out, Lse] | None, out: Out, lse: Lse, odds: Lse | float = 0.0) -> tuple[Out, Lse]:
    """Add one part to a running total, or start one.

    Each part is weighted by exp(lse - merged lse), the online softmax of FlashAttention (arXiv:2205.14135), written so
    that both weights sum to 1. A part whose lse is -inf saw nothing and weighs 0; where all are -inf, out stays 0.
    `odds` is added to how much more the part weighs than the total, as a logarithm: what two equal lse cannot say.
    """
    out = out.to(accumulate_dtype(out.dtype))
    if total is None:
        return out, lse
    old_out, old_lse = total
    # the part's share, 1 / (1 + exp(old - new)); NaN is -inf - -inf: neither saw anything
    share = torch.sigmoid(lse - old_lse + odds).nan_to_num(0.0).transpose(1, 2).unsqueeze(-1)
    return torch.lerp(old_out, out, share), torch.logaddexp(old_lse, lse)
