"""Merging partial attention over disjoint keys is attention over all of them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calls import assert_close, eager, qkv
from calls import one_thread as one_thread
from ringtrue.merge import merge


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    total = None
    for out, lse in parts:
        total = merge(total, out, lse)
    assert total is not None
    return total


@settings(derandomize=True, max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 9), max_size=4).map(sorted), seed=st.integers(0, 99), order=st.randoms())
def test_parts_of_any_size_in_any_order(cuts: list[int], seed: int, order: object) -> None:
    q, k, v = qkv(5, 9, dtype=torch.float64, seed=seed)
    keep = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(seed)) < 0.4
    edges = [0, *cuts, 9]
    spans = [slice(a, b) for a, b in pairwise(edges) if a < b]
    order.shuffle(spans)  # type: ignore[attr-defined]
    out, lse = merged([eager(q, k[:, s], v[:, s], keep[..., s]) for s in spans])
    whole, whole_lse = eager(q, k, v, keep)
    assert_close(out, whole)
    assert_close(lse, whole_lse)


@pytest.mark.parametrize("far", [1e3, 1e30, math.inf])
@pytest.mark.parametrize("swap", [False, True])
def test_a_part_that_weighs_nothing_leaves_the_other_as_it_is(far: float, swap: bool) -> None:
    heavy = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    light = torch.randn(1, 3, 2, 4), torch.full((1, 2, 3), -far)
    out, lse = merged([light, heavy] if swap else [heavy, light])
    assert torch.equal(out, heavy[0])
    assert torch.equal(lse, heavy[1])


def test_rows_that_see_nothing_anywhere_stay_at_nothing() -> None:
    nothing = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -math.inf)
    out, lse = merged([nothing, nothing, nothing])
    assert torch.equal(out, nothing[0])
    assert torch.equal(lse, nothing[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_kept_in_float32(dtype: torch.dtype) -> None:
    """A thousand equal parts: in 16 bits the sum would have stopped growing long before."""
    part = torch.full((1, 1, 1, 1), 0.1, dtype=dtype), torch.zeros(1, 1, 1)
    out, lse = merged([part] * 1000)
    assert out.dtype == lse.dtype == torch.float32
    assert out.item() == pytest.approx(part[0].item(), rel=1e-5)
    assert lse.item() == pytest.approx(math.log(1000), rel=1e-5)


def test_float64_stays_float64_and_arguments_stay_as_they_are() -> None:
    a, b = ((torch.randn(1, 3, 2, 4, dtype=torch.float64), torch.randn(1, 2, 3, dtype=torch.float64)) for _ in "ab")
    before = [x.clone() for x in (*a, *b)]
    out, lse = merge(a, *b)
    assert out.dtype == lse.dtype == torch.float64
    assert all(torch.equal(x, y) for x, y in zip((*a, *b), before, strict=True))


@pytest.mark.parametrize("odds", [0.0, 0.7, "by row"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_in_place_is_the_same_and_writes_nothing_else(odds: float | str, dtype: torch.dtype) -> None:
    """Into a slice of rows, as a ring with balanced chunks adds a step."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.randn(2, 9, 3, 4, dtype=wide), torch.randn(2, 3, 9, dtype=wide)
    out, lse = torch.randn(2, 5, 3, 4).to(dtype), torch.randn(2, 3, 5, dtype=wide)
    total[1][0, 0, 2:5] = lse[0, 1, :3] = lse[0, 0, 2] = -math.inf
    weigh = torch.randn(2, 3, 5, dtype=wide) if odds == "by row" else odds
    before = [x.clone() for x in total]
    rows = slice(2, 7)
    expected = merge((total[0][:, rows], total[1][:, :, rows]), out, lse, weigh)
    assert all(torch.equal(x, y) for x, y in zip(total, before, strict=True))
    own = total[0][:, rows], total[1][:, :, rows]
    merge(own, out, lse, weigh, into=own)
    torch.testing.assert_close((total[0][:, rows], total[1][:, :, rows]), expected, rtol=0, atol=1e-6)
    for rest in (slice(0, 2), slice(7, 9)):
        assert torch.equal(total[0][:, rest], before[0][:, rest])
        assert torch.equal(total[1][:, :, rest], before[1][:, :, rest])


def test_from_nothing() -> None:
    total = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -math.inf)
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    merge(total, out, lse, into=total)
    assert torch.equal(total[0], out)
    assert torch.equal(total[1], lse)
