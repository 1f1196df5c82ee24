"""On a GPU merging is one kernel of Triton: right by float64, for any strides, in place, and as torch has it."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringtrue import merge as merging
from ringtrue.merge import merge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def problem(q_len: int, heads: int, width: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """total_out, total_lse, out, lse, odds; some rows of each part see nothing, in both, and lie far apart."""
    torch.manual_seed(seed)
    wide = {"device": "cuda", "dtype": torch.float32}
    total, out = (torch.randn(2, q_len, heads, width, **wide) for _ in range(2))
    lse = [3 * torch.randn(2, heads, q_len, **wide) for _ in range(3)]
    for x, values, first in ((lse[0], total, 0), (lse[1], out, 1)):
        x[..., first::5] = -math.inf
        values.masked_fill_((x == -math.inf).transpose(1, 2).unsqueeze(-1), 0.0)
    lse[0][..., 3::7] += 1e4
    lse[1][..., 4::7] += 1e30
    blind = torch.rand(lse[0].shape, device="cuda") < 0.1
    for x, values in ((lse[0], total), (lse[1], out)):
        x.masked_fill_(blind, -math.inf)
        values.masked_fill_(blind.transpose(1, 2).unsqueeze(-1), 0.0)
    return [total, lse[0], out.to(dtype), lse[1], lse[2]]


def right(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor, odds: Tensor | float) -> tuple[Tensor, Tensor]:
    """In float64, from the definition."""
    old, new = total_lse.double(), lse.double()
    both = torch.logaddexp(old, new)
    weigh = torch.logaddexp(old, new + odds)
    weigh = weigh.masked_fill(weigh == -math.inf, 0.0)
    shares = ((x - weigh).exp().transpose(1, 2).unsqueeze(-1) for x in (old, new + odds))
    return total.double() * next(shares) + out.double() * next(shares), both


def assert_near(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert [x.dtype for x in found] == [torch.float32] * 2
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=2e-7, atol=2e-6)


def merge_into(total: Tensor, total_lse: Tensor, *part: Any) -> None:
    merge((total, total_lse), *part, into=(total, total_lse))


def kernel_ran(*given: Tensor) -> bool:
    return merging._fusible(*given, 0.0)


@EVERY_DTYPE
@pytest.mark.parametrize("odds", [0.0, -0.7, "by row"])
@pytest.mark.parametrize(("q_len", "heads", "width"), [(1, 1, 1), (37, 3, 40), (130, 4, 64), (77, 5, 128), (9, 2, 257)])
def test_right_by_float64(dtype: torch.dtype, odds: float | str, q_len: int, heads: int, width: int) -> None:
    *given, by_row = problem(q_len, heads, width, dtype)
    weigh = by_row if odds == "by row" else odds
    assert kernel_ran(*given)
    before = [x.clone() for x in given]
    found = merge((given[0], given[1]), given[2], given[3], weigh)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))
    assert_near(found, right(*given, weigh))
    merge_into(*given, weigh)
    assert torch.equal(given[0], found[0])
    assert torch.equal(given[1], found[1])


def stored(x: Tensor, order: str) -> Tensor:
    """The same numbers under other strides."""
    if order == "heads outermost":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "width outermost":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    if order == "misaligned":
        room = x.new_zeros(x.numel() + 1)
        return room[1:].view(x.shape).copy_(x)
    return x


@EVERY_DTYPE
@pytest.mark.parametrize("order", ["plain", "heads outermost", "width outermost", "misaligned"])
def test_any_strides_and_slices_of_rows(dtype: torch.dtype, order: str) -> None:
    total, total_lse, out, lse, odds = problem(64, 3, 40, dtype)
    total, total_lse = stored(total, order), total_lse.transpose(1, 2).contiguous().transpose(1, 2)
    before, before_lse = total.clone(), total_lse.clone()
    rows, part = slice(10, 41), stored(out, order)[:, 5:36]
    given = total[:, rows], total_lse[:, :, rows], part, lse[:, :, 5:36]
    expected = right(*given, odds[:, :, rows])
    merge_into(*given, odds[:, :, rows])
    assert_near((total[:, rows], total_lse[:, :, rows]), expected)
    for rest in (slice(0, 10), slice(41, 64)):
        assert torch.equal(total[:, rest], before[:, rest])
        assert torch.equal(total_lse[:, :, rest], before_lse[:, :, rest])


@pytest.mark.parametrize("far", [1e3, 1e30, math.inf])
@pytest.mark.parametrize("swap", [False, True])
def test_a_part_that_weighs_nothing_leaves_the_other_as_it_is(far: float, swap: bool) -> None:
    heavy = torch.randn(1, 3, 2, 4, device="cuda"), torch.randn(1, 2, 3, device="cuda")
    light = torch.randn(1, 3, 2, 4, device="cuda"), torch.full((1, 2, 3), -far, device="cuda")
    first, second = (light, heavy) if swap else (heavy, light)
    found = merge(first, *second)
    assert torch.equal(found[0], heavy[0])
    assert torch.equal(found[1], heavy[1])


def test_nan_is_not_hidden() -> None:
    total, total_lse, out, lse, _ = problem(5, 2, 8, torch.float32)
    lse[:, :, 2] = math.nan
    _, found = merge((total, total_lse), out, lse)
    assert found[:, :, 2].isnan().all()


@EVERY_DTYPE
def test_the_same_numbers_without_triton(dtype: torch.dtype) -> None:
    *given, odds = problem(50, 3, 64, dtype)
    fused = merge((given[0], given[1]), given[2], given[3], odds)
    with mock.patch.object(merging, "_fused", return_value=None):
        plain = merge((given[0], given[1]), given[2], given[3], odds)
        merge_into(*given, odds)
    for found in (plain, (given[0], given[1])):
        torch.testing.assert_close(found, fused, rtol=1e-6, atol=1e-6)


def test_a_thousand_parts_do_not_drift() -> None:
    """Many steps of one sum, against float64."""
    torch.manual_seed(1)
    outs, lses = torch.randn(300, 1, 4, 2, 8, device="cuda"), torch.randn(300, 1, 2, 4, device="cuda")
    total = torch.zeros(1, 4, 2, 8, device="cuda"), torch.full((1, 2, 4), -math.inf, device="cuda")
    for out, lse in zip(outs, lses, strict=True):
        merge_into(*total, out, lse)
    weights = lses.double().softmax(0).transpose(2, 3).unsqueeze(-1)
    torch.testing.assert_close(total[0].double(), (weights * outs.double()).sum(0), rtol=0, atol=3e-6)
    torch.testing.assert_close(total[1].double(), lses.double().logsumexp(0), rtol=0, atol=5e-6)


def test_float64_fake_and_tracked_tensors_go_through_torch() -> None:
    total, total_lse, out, lse, _ = problem(5, 2, 8, torch.float32)
    assert not kernel_ran(total.double(), total_lse.double(), out.double(), lse.double())
    assert not kernel_ran(total, total_lse, out.clone().requires_grad_(), lse)
    with FakeTensorMode() as fake:
        given = [fake.from_tensor(x) for x in (total, total_lse, out, lse)]
        assert not kernel_ran(*given)
        merge_into(*given)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    given = problem(64, 3, 40, torch.bfloat16)
    merge_into(*given)
    try:
        torch.cuda.set_sync_debug_mode("error")
        merge_into(*given)
        merge((given[0], given[1]), given[2], given[3], 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_than_two_to_the_31_numbers() -> None:
    """Offsets beyond 32 bits."""
    rows, width = 2**31 // 128 + 5, 128
    total, out = (torch.zeros(1, rows, 1, width, device="cuda", dtype=d) for d in (torch.float32, torch.bfloat16))
    lse = torch.zeros(1, 1, rows, device="cuda")
    out[:, -1] = 2.0
    merge_into(total, lse, out, lse.clone())
    assert [float(x) for x in (total[0, -1, 0, 0], total[0, -1, 0, -1], total[0, 0, 0, 0])] == [1.0, 1.0, 0.0]
    assert lse[0, 0, [0, -1]].tolist() == pytest.approx([math.log(2)] * 2)
