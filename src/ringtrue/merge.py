"""Merge partial attention results over disjoint sets of keys, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from .contract import accumulate_dtype

Out: TypeAlias = Float[Tensor, "B Sq H Dv"]
Lse: TypeAlias = Float[Tensor, "B H Sq"]

SWALLOWED = 2.0**26  # float32 at this level counts in eights: scores of an ordinary size are lost


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


class Merged:
    """out (B, Sq, H, Dv) and lse (B, H, Sq) of queries that see their keys part by part, some rows at a time.

    With `flat`, every part says how many of its keys are at the top of a flat row (level.py), and rows of flat parts
    weigh them by that.
    """

    def __init__(self, q: Tensor, value_dim: int, flat: bool = False) -> None:
        self._q, self._shape = q, (*q.shape[:3], value_dim)
        self._total: tuple[Tensor, Tensor] | None = None
        self._owned = False  # a first part is taken as it is, and must not be written into
        batch, q_len, heads, _ = q.shape
        self._tops = torch.ones(batch, heads, q_len, dtype=self._dtype, device=q.device) if flat else None

    @property
    def _dtype(self) -> torch.dtype:
        return accumulate_dtype(self._q.dtype)

    def add(self, rows: slice, out: Tensor, lse: Tensor, at_top: Tensor | None = None) -> None:
        """One part for some rows; `at_top` broadcasts to its lse."""
        every = rows.start == 0 and rows.stop == self._shape[1]
        if every and self._total is None and self._tops is None:
            self._total = merge(None, out, lse)
            return
        if self._total is None:
            self._total, self._owned = self._nothing(), True
        elif not every and not self._owned:
            self._total, self._owned = (self._total[0].clone(), self._total[1].clone()), True
        total_out, total_lse = self._total
        odds: Tensor | float = 0.0
        if self._tops is not None and at_top is not None:
            odds, self._tops[:, :, rows] = _flat_odds(self._tops[:, :, rows], total_lse[:, :, rows], at_top, lse)
        merged = merge((total_out[:, rows], total_lse[:, :, rows]), out, lse, odds)
        if every:
            self._total, self._owned = merged, True
        else:
            total_out[:, rows], total_lse[:, :, rows] = merged

    def result(self) -> tuple[Tensor, Tensor]:
        """out in q's dtype, and lse; 0 and -inf for rows that no part was for."""
        out, lse = self._total or self._nothing()
        return out.to(self._q.dtype), lse

    def _nothing(self) -> tuple[Tensor, Tensor]:
        batch, q_len, heads, _ = self._shape
        lse = torch.full((batch, heads, q_len), float("-inf"), dtype=self._dtype, device=self._q.device)
        return torch.zeros(self._shape, dtype=self._dtype, device=self._q.device), lse


def _flat_odds(before: Tensor, old: Tensor, here: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """How much more a part weighs than those before it in rows at a flat level, and the keys there so far.

    Such a row weighs all its keys alike, but its lse cannot say how many they are.
    """
    same = (old == new) & (new.abs() >= SWALLOWED) & new.isfinite()
    odds = torch.where(same, (here / before).log(), 0.0)
    return odds, torch.where(same, before + here, torch.where(new > old, here.to(before.dtype), before))
