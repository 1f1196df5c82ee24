"""The judge passes what is right, fails what is wrong, and says which quantity it was."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ringtrue.audit.cases import CASES, case
from ringtrue.audit.inputs import Case, Inputs, build
from ringtrue.audit.judge import NAMES, Verdict, judge, judged, relative_errors, truth_of
from ringtrue.audit.noise import noise
from ringtrue.audit.rule import RULE
from ringtrue.audit.truth import Quantities
from ringtrue.audit.yardstick import eager, yardstick
from ringtrue.contract import accumulate_dtype

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def exact(inputs: Inputs) -> Quantities:
    """The truth, rounded once to the dtypes a pair returns."""
    values, dtype, bias = truth_of(inputs).values, inputs.q.dtype, inputs.mask.bias
    out, dq, dk, dv = (x.to(dtype) for x in (values.out, values.dq, values.dk, values.dv))
    dbias = None if bias is None else values.dbias.to(bias.dtype)
    return Quantities(out, values.lse.to(accumulate_dtype(dtype)), dq, dk, dv, dbias)


def failing(verdicts: list[Verdict]) -> list[str]:
    return [v.quantity for v in verdicts if not v.ok]


@EVERY_DTYPE
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_the_truth_passes(case: Case, dtype: torch.dtype) -> None:
    inputs = build(replace(case, dtype=dtype))
    found = judged(exact(inputs), inputs)
    assert failing(found) == []
    assert [v.quantity for v in found] == list(NAMES[: 6 if inputs.wanted.bias else 5])


@EVERY_DTYPE
@pytest.mark.parametrize("name", NAMES)
def test_each_quantity_fails_on_its_own(name: str, dtype: torch.dtype) -> None:
    """A gain of one percent is far beyond rounding in every dtype but must not touch the other verdicts."""
    inputs = build(replace(case("float-hqk"), dtype=dtype))
    right = exact(inputs)
    wrong = right._replace(**{name: getattr(right, name) * 1.02})
    assert failing(judged(wrong, inputs)) == [name]


@EVERY_DTYPE
@pytest.mark.parametrize("name", NAMES)
def test_a_single_wrong_number_is_found(name: str, dtype: torch.dtype) -> None:
    """The maximum finds in one place what the 2-norm over thousands would not."""
    inputs = build(replace(case("float-bhqk"), q_len=60, k_len=70, dtype=dtype))
    right = exact(inputs)
    x = getattr(right, name).clone(memory_format=torch.contiguous_format)
    x.view(-1)[x.numel() // 2] += 0.1 * x.abs().max()
    assert failing(judged(right._replace(**{name: x}), inputs)) == [name]


@EVERY_DTYPE
def test_gradients_that_are_zero_have_a_scale(dtype: torch.dtype) -> None:
    """One key: dq and dk are exactly zero; rounding of that problem's size passes, anything larger does not."""
    inputs = build(replace(case("one-key"), dtype=dtype))
    truth, right = truth_of(inputs), exact(inputs)
    assert truth.values.dq.abs().max() < 1e-13
    scale = noise(truth, inputs)
    for name in ("dq", "dk"):
        assert 0 < getattr(scale, name).max() < 2 * RULE.unit[dtype] * 20
        rounding = getattr(scale, name).to(dtype)
        assert failing(judged(right._replace(**{name: rounding}), inputs)) == []
        assert failing(judged(right._replace(**{name: 10 * rounding}), inputs)) == [name]


@EVERY_DTYPE
def test_an_upstream_gradient_of_zero_allows_only_zero(dtype: torch.dtype) -> None:
    inputs = build(replace(case("length-5"), dtype=dtype))
    inputs = replace(inputs, grad_out=torch.zeros_like(inputs.grad_out))
    right = exact(inputs)
    assert failing(judged(right, inputs)) == []
    wrong = right._replace(dv=torch.full_like(right.dv, 1e-6))
    found = judged(wrong, inputs)
    assert failing(found) == ["dv"]
    assert next(v for v in found if v.quantity == "dv").strain == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_fails(name: str, value: float) -> None:
    inputs = build(case("float-hqk"))
    right = exact(inputs)
    x = getattr(right, name).clone(memory_format=torch.contiguous_format)
    x.view(-1)[3] = value
    found = judged(right._replace(**{name: x}), inputs)
    assert failing(found) == [name]
    assert ("NaN" if math.isnan(value) else "infinite") in str(found[NAMES.index(name)])


@pytest.mark.parametrize("wrong", [0.0, math.inf, math.nan, -1e38])
def test_lse_of_rows_that_see_nothing_is_exactly_minus_infinity(wrong: float) -> None:
    inputs = build(case("bool-blind"))
    right = exact(inputs)
    blind = right.lse == -math.inf
    assert blind.any()
    assert failing(judged(right._replace(lse=right.lse.masked_fill(blind, wrong)), inputs)) == ["lse"]
    assert failing(judged(right._replace(lse=right.lse.masked_fill(~blind, -math.inf)), inputs)) == ["lse"]


def test_shape_dtype_and_absence_are_named() -> None:
    inputs = build(replace(case("float-hqk"), dtype=torch.bfloat16))
    right = exact(inputs)
    wrong = Quantities(
        right.out.float(), right.lse.unsqueeze(-1), None, right.dk[:, 1:], right.dv, right.dbias.sum(1, keepdim=True)
    )
    found = {v.quantity: str(v) for v in judged(wrong, inputs)}
    assert found["out"] == "out   FAIL  is (2, 13, 3, 16) torch.float32, must be (2, 13, 3, 16) torch.bfloat16"
    assert "(2, 3, 13, 1)" in found["lse"]
    assert "missing" in found["dq"]
    assert "(2, 17, 3, 16)" in found["dk"]
    assert found["dv"].startswith("dv    ok")
    assert "(1, 1, 13, 18)" in found["dbias"]


def test_only_what_was_asked_for_is_judged() -> None:
    inputs = build(case("float-hqk"))
    inputs = replace(
        inputs,
        wanted=inputs.wanted._replace(q=False, bias=False),
        options=replace(inputs.options, return_lse=False),
    )
    found = judged(Quantities(exact(inputs).out, None, None, *exact(inputs)[3:5]), inputs)
    assert [v.quantity for v in found] == ["out", "dk", "dv"]
    assert failing(found) == []


def test_lse_rounded_to_bfloat16_fails_in_bfloat16() -> None:
    """The reason why the terms of the rule are not added, and why lse has no N in 16 bits."""
    for name in ("length-16", "length-33", "gqa", "causal"):
        inputs = build(replace(case(name), dtype=torch.bfloat16))
        right = exact(inputs)
        assert failing(judged(right._replace(lse=right.lse.bfloat16().float()), inputs)) == ["lse"]


@EVERY_DTYPE
def test_the_larger_term_is_the_bound(dtype: torch.dtype) -> None:
    inputs = build(replace(case("length-33"), dtype=dtype))
    truth, yard = truth_of(inputs), yardstick(inputs)
    scale, right = noise(truth, inputs), exact(inputs)
    for v in judge(right, truth, yard, inputs):
        ref, n = getattr(truth.values, v.quantity), getattr(scale, v.quantity)
        off = torch.zeros_like(ref) if yard is None else getattr(yard, v.quantity).double() - ref
        n = torch.zeros_like(ref) if n is None else n
        floor = RULE.floor[dtype]
        assert v.bound_2 == pytest.approx(max(1.5 * off.norm() + floor * ref.norm(), 3 * n.norm()).item())
        assert v.bound_inf == pytest.approx(max(2 * off.abs().max() + floor * ref.abs().max(), 6 * n.max()).item())


def test_the_table() -> None:
    """The numbers of the design, once more, so that none changes unnoticed."""
    assert (RULE.yard_2, RULE.yard_inf, RULE.noise_2, RULE.noise_inf) == (1.5, 2.0, 3.0, 6.0)
    assert [RULE.floor[d] for d in DTYPES] == [1e-12, 1e-6, 1e-4, 1e-4]
    assert [RULE.unit[d] for d in DTYPES] == [2.0**-52, 2.0**-24, 2.0**-9, 2.0**-12]
    assert [RULE.unit_32(d) for d in DTYPES] == [2.0**-52, 2.0**-24, 2.0**-24, 2.0**-24]


def rounded_weights(inputs: Inputs, unit: torch.dtype) -> Quantities:
    """The truth's formulas with P rounded to a 16-bit dtype wherever it is multiplied, as tensor cores take it."""
    truth = truth_of(inputs)
    weights = truth.weights.to(unit).double()
    q, k, v, g = (x.double().transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
    scores = truth.weights * (truth.grad_weights - (g * (weights @ v)).sum(-1, keepdim=True))
    scale = inputs.options.scale
    found: tuple[Tensor, ...] = (weights @ v, scale * scores @ k, scale * scores.mT @ q, weights.mT @ g)
    out, dq, dk, dv = (x.transpose(1, 2) for x in found)
    return Quantities(out, None, dq, dk, dv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_n_is_the_size_of_rounding(dtype: torch.dtype) -> None:
    """Weights rounded once err by N within a factor of four, never by more than N."""
    inputs = build(Case("n", 64, 64, heads=4, head_dim=32, dtype=dtype))
    truth = truth_of(inputs)
    found, scale = rounded_weights(inputs, dtype), noise(truth, inputs)
    for name in ("out", "dv"):
        error = (getattr(found, name) - getattr(truth.values, name)).norm()
        assert 0.25 < error / getattr(scale, name).norm() < 1
    for name in ("dq", "dk"):
        error = (getattr(found, name) - getattr(truth.values, name)).norm()
        assert 0.02 < error / getattr(scale, name).norm() < 1


def test_n_sums_over_the_query_heads_of_a_group_and_over_broadcast_dims() -> None:
    one = build(Case("n", 9, 11, heads=4, kv_heads=2, mask="float:qk", dtype=torch.bfloat16))
    k, v = (x.repeat_interleave(2, 2) for x in (one.k, one.v))
    wide = replace(one, k=k, v=v, mask=replace(one.mask, dense=one.mask.dense.expand(2, 4, -1, -1)))
    compact, full = noise(truth_of(one), one), noise(truth_of(wide), wide)
    torch.testing.assert_close(compact.dk**2, (full.dk**2).unflatten(2, (2, 2)).sum(3))
    torch.testing.assert_close(compact.dv**2, (full.dv**2).unflatten(2, (2, 2)).sum(3))
    u_bias = 2.0**-24
    own, parts = ((u_bias * truth_of(x).values.dbias) ** 2 for x in (one, wide))
    torch.testing.assert_close(compact.dbias**2 - own, (full.dbias**2 - parts).sum((0, 1), keepdim=True))


def test_dropout_is_judged_by_the_mask_that_was_drawn() -> None:
    inputs = build(replace(case("length-33"), dtype=torch.bfloat16))
    keep = torch.rand(2, 3, 33, 33, generator=torch.Generator().manual_seed(0)) > 0.3
    drawn = replace(inputs, dropout=keep / 0.7)
    other = replace(inputs, dropout=keep.roll(1, -1) / 0.7)
    yard = eager(drawn, torch.bfloat16)
    assert failing(judged(yard, drawn)) == []
    assert failing(judged(yard, other)) == ["out", "dq", "dk", "dv"]


def test_verdicts_read_well() -> None:
    good = Verdict("out", True, 1e-3, 2e-3, 1e-4, 5e-4)
    bad = Verdict("dbias", False, 3e-3, 2e-3, 1e-4, 5e-4)
    assert str(good) == "out   ok    2-norm 1.000e-03 <= 2.000e-03  max 1.000e-04 <= 5.000e-04"
    assert str(bad) == "dbias FAIL  2-norm 3.000e-03 >  2.000e-03  max 1.000e-04 <= 5.000e-04"
    assert good.strain == pytest.approx(0.5)
    assert bad.strain == pytest.approx(1.5)
    assert str(Verdict("dq", False, problem="missing")) == "dq    FAIL  missing"


def test_relative_errors() -> None:
    inputs = build(case("length-16"))
    truth = truth_of(inputs)
    found = relative_errors(truth.values._replace(dk=truth.values.dk * 1.25), truth)
    assert found == pytest.approx({"out": 0.0, "dq": 0.0, "dk": 0.25, "dv": 0.0})
