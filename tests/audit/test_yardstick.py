"""The yardstick loses what its precision loses, never more, and never a NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringtrue.audit.cases import CASES, case
from ringtrue.audit.inputs import Case, build
from ringtrue.audit.judge import truth_of
from ringtrue.audit.truth import Quantities
from ringtrue.audit.yardstick import eager, yardstick

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def error(x: Quantities, name: str, ref: Quantities) -> float:
    a, b = getattr(x, name).double(), getattr(ref, name)
    there = b.isfinite()
    return float((a - b)[there].norm() / b[there].norm())


def test_float64_has_none() -> None:
    assert yardstick(build(replace(case("causal"), dtype=torch.float64))) is None


@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("name", ["length-33", "gqa", "causal", "bool-bqk", "float-hqk", "keep-blind", "softcap"])
def test_it_is_off_by_about_its_precision(name: str, dtype: torch.dtype) -> None:
    inputs = build(replace(case(name), dtype=dtype))
    yard, values = yardstick(inputs), truth_of(inputs).values
    assert yard is not None
    for quantity in ("out", "lse", "dq", "dk", "dv", *(["dbias"] if inputs.mask.bias is not None else [])):
        assert UNIT[dtype] / 20 < error(yard, quantity, values) < 30 * UNIT[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_it_is_there_and_finite_for_every_case(case: Case, dtype: torch.dtype) -> None:
    inputs = build(replace(case, dtype=dtype))
    yard, values = yardstick(inputs), truth_of(inputs).values
    assert yard is not None
    assert torch.equal(yard.lse == -torch.inf, values.lse == -torch.inf)
    for x, ref in zip(yard, values, strict=True):
        assert (x is None) == (ref is None)
        if x is not None:
            assert x.shape == ref.shape
            assert not x.isnan().any()


def test_scores_are_kept_in_the_low_precision_and_lse_is_not() -> None:
    """The largest error of lse is that of scores rounded to bfloat16, and its values are finer than bfloat16's."""
    inputs = build(replace(case("length-33"), dtype=torch.bfloat16))
    yard = yardstick(inputs)
    assert yard is not None
    assert yard.lse is not None
    assert yard.lse.dtype == torch.float32
    assert not torch.equal(yard.lse, yard.lse.bfloat16().float())
    assert error(yard, "lse", truth_of(inputs).values) > 2.0**-14


def test_one_that_is_not_finite_is_replaced_by_float32() -> None:
    """float32's lowest number is -inf in bfloat16: rows of nothing else become NaN there, but not in float32."""
    inputs = build(Case("lowest", 7, 9, mask="float_lowest_rows:bqk", dtype=torch.bfloat16))
    assert eager(inputs, torch.bfloat16).out.isnan().any()
    yard, wide = yardstick(inputs), eager(inputs, torch.float32)
    assert yard is not None
    assert all(torch.equal(a, b) for a, b in zip(yard, wide, strict=True))


def test_the_mask_gradient_has_the_masks_shape_and_dtype() -> None:
    for mask, shape in (("float:hqk", (1, 3, 5, 6)), ("float_input:k", (1, 1, 1, 6)), ("bias", (2, 6))):
        inputs = build(Case("bias", 5, 6, mask=mask, dtype=torch.float16))
        yard = yardstick(inputs)
        assert yard is not None
        assert yard.dbias is not None
        assert yard.dbias.shape == shape
        assert yard.dbias.dtype == inputs.mask.bias.dtype


def test_dropout_and_the_gradient_of_lse_take_part() -> None:
    base = build(replace(case("length-16"), dtype=torch.float32))
    keep = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) > 0.3
    for inputs in (replace(base, dropout=keep / 0.7), replace(base, grad_lse=torch.randn(2, 3, 16))):
        yard, values = yardstick(inputs), truth_of(inputs).values
        assert all(error(yard, name, values) < 1e-5 for name in ("out", "lse", "dq", "dk", "dv"))
