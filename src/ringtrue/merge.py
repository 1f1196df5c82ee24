"""Merge partial attention results over disjoint sets of keys, in float32 (float64 for float64 inputs).

On CUDA one pass of one kernel (merge_triton.py) where Triton can be used, else, as on a CPU, a few operations of torch
with the same formula.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from .contract import accumulate_dtype

Out: TypeAlias = Float[Tensor, "B Sq H Dv"]
Lse: TypeAlias = Float[Tensor, "B H Sq"]

SWALLOWED = 2.0**26  # float32 at this level counts in eights: scores of an ordinary size are lost


def merge(
    total: tuple[Out, Lse] | None,
    out: Out,
    lse: Lse,
    odds: Lse | float = 0.0,
    into: tuple[Out, Lse] | None = None,
) -> tuple[Out, Lse]:
    """Add one part to a running total, or start one.

    Each part is weighted by exp(lse - merged lse), the online softmax of FlashAttention (arXiv:2205.14135), written so
    that both weights sum to 1. A part whose lse is -inf saw nothing and weighs 0; where all are -inf, out stays 0.
    `odds` is added to how much more the part weighs than the total, as a logarithm: what two equal lse cannot say.
    `into` takes the result: tensors of the caller's own, or views of them of any strides, the total's own too.
    """
    if total is None:
        return out.to(accumulate_dtype(out.dtype)), lse
    old_out, old_lse = total
    if _fusible(*total, out, lse, odds, *(into or ())):
        to = into or (torch.empty(out.shape, dtype=old_out.dtype, device=out.device), torch.empty_like(old_lse))
        _fused()(old_out, old_lse, out, lse, odds, *to)
        return to
    # the part's share, 1 / (1 + exp(old - new)); NaN is -inf - -inf: neither saw anything
    share = torch.sigmoid(lse - old_lse + odds).nan_to_num(0.0).transpose(1, 2).unsqueeze(-1)
    merged = torch.lerp(old_out, out.to(accumulate_dtype(out.dtype)), share), torch.logaddexp(old_lse, lse)
    return merged if into is None else (into[0].copy_(merged[0]), into[1].copy_(merged[1]))


def _fusible(*given: Tensor | float) -> bool:
    """Whether the kernel takes these (total_out, total_lse, out, ...): real tensors on one CUDA device (not fake ones),
    float32 but `out`, and no gradient to record."""
    out = given[2]
    if not isinstance(out, Tensor) or not out.is_cuda:
        return False
    tensors = [x for x in given if isinstance(x, Tensor)]
    return (
        all(type(x) is Tensor and x.device == out.device for x in tensors)
        and all(x.dtype == torch.float32 for x in tensors if x is not out)
        and out.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and 0 < out.shape[-1] <= 1024
        and 0 < out.numel() // out.shape[-1] < 2**31
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        and _fused() is not None
    )


@cache
def _fused() -> Any:
    """The kernel's launcher; None where Triton cannot be imported, or cannot compile (with a warning: it should)."""
    try:
        from .merge_triton import update
    except ImportError:
        return None
    try:
        out, lse = torch.zeros(1, 1, 1, 1, device="cuda"), torch.zeros(1, 1, 1, device="cuda")
        update(out, lse, out, lse, 0.0, out, lse)
    except Exception as error:  # no C compiler, a driver that Triton does not know, anything
        problem = f"Triton cannot be used, parts are merged by torch: {type(error).__name__}: {error}"
        warnings.warn(problem, stacklevel=2)
        return None
    return update


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
        old = total_out[:, rows], total_lse[:, :, rows]
        merged = merge(old, out, lse, odds, old if self._owned else None)
        if not self._owned:  # all rows
            self._total, self._owned = merged, True

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
