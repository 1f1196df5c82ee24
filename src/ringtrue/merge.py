"""Merge partial attention results over disjoint sets of keys, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from .contract import accumulate_dtype

Out: TypeAlias = Float[Tensor, "B Sq H Dv"]
Lse: TypeAlias = Float[Tensor, "B H Sq"]


def merge(total: tuple[Out, Lse] | None, out: Out, lse: Lse) -> tuple[Out, Lse]:
    """Add one part to a running total, or start one.

    Each part is weighted by exp(lse - merged lse), the online softmax of FlashAttention (arXiv:2205.14135). A part
    whose lse is -inf saw nothing and weighs 0; where all parts are -inf, out stays 0 and lse -inf.
    """
    out = out.to(accumulate_dtype(out.dtype))
    if total is None:
        return out, lse
    old_out, old_lse = total
    new_lse = torch.logaddexp(old_lse, lse)
    # -inf - -inf would be NaN: rows that saw nothing so far take 0 as pivot, and both weights become exp(-inf) = 0
    pivot = new_lse.masked_fill(new_lse == float("-inf"), 0.0)
    old_weight = (old_lse - pivot).exp().transpose(1, 2).unsqueeze(-1)
    weight = (lse - pivot).exp().transpose(1, 2).unsqueeze(-1)
    return old_out * old_weight + out * weight, new_lse
