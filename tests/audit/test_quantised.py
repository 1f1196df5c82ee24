"""The yardstick of kernels that quantise: close to the truth, rightly coarse, and only for pairs that claim it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringtrue.audit import quantised
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Inputs, build
from ringtrue.audit.judge import judged, truth_of
from ringtrue.audit.noise import noise
from ringtrue.audit.truth import Quantities
from ringtrue.audit.yardstick import yardstick
from ringtrue.contract import Arithmetic, Wanted

KINDS: tuple[Arithmetic, ...] = ("8-bit", "8-bit values")


def inputs(name: str, arithmetic: Arithmetic) -> Inputs:
    x = build(replace(case(name), dtype=torch.bfloat16))
    return replace(x, arithmetic=arithmetic, wanted=Wanted(False, False, False))


@pytest.mark.parametrize("arithmetic", KINDS)
@pytest.mark.parametrize("name", ["length-129", "gqa", "causal-wide", "bool-blind", "peaked", "many-channels"])
def test_it_is_off_by_what_int8_costs(name: str, arithmetic: Arithmetic) -> None:
    x = inputs(name, arithmetic)
    yard, right = yardstick(x), truth_of(x).values
    assert yard is not None
    error = float((yard.out.double() - right.out).norm() / right.out.norm())
    assert 0.002 < error < (0.06 if arithmetic == "8-bit values" or name == "peaked" else 0.03)
    seen = right.lse.isfinite()
    assert torch.equal(yard.lse.isfinite(), seen)
    assert float((yard.lse.double() - right.lse)[seen].abs().max()) < (0.3 if name == "peaked" else 0.05)


@pytest.mark.parametrize("arithmetic", KINDS)
def test_the_rounding_scale_is_of_the_size_of_the_error(arithmetic: Arithmetic) -> None:
    x = inputs("length-129", arithmetic)
    right = truth_of(x)
    out, lse = quantised.eager(x)
    scale = noise(right, x)
    for found, ref, size in ((out, right.values.out, scale.out), (lse, right.values.lse, scale.lse)):
        assert 0.3 < float((found.double() - ref).norm() / size.norm()) < 2


@pytest.mark.parametrize("levels", [127, 31])
def test_too_few_levels_are_found(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs("length-129", "8-bit")
    with monkeypatch.context() as coarse:
        coarse.setattr(quantised, "LEVELS", levels)
        out, lse = quantised.eager(x)
    assert all(v.ok for v in judged(Quantities(out, lse), x)) == (levels == 127)


@pytest.mark.parametrize("arithmetic", ["float32", "16-bit"])
def test_a_pair_that_does_not_claim_it_may_not_quantise(arithmetic: Arithmetic) -> None:
    x = inputs("length-129", arithmetic)
    out, lse = quantised.eager(replace(x, arithmetic="8-bit"))
    assert not any(v.ok for v in judged(Quantities(out, lse), x))


def test_gradients_keep_the_ordinary_yardstick_and_scale() -> None:
    plain = build(replace(case("length-33"), dtype=torch.bfloat16))
    claimed = replace(plain, arithmetic="8-bit")
    for make in (yardstick, lambda x: noise(truth_of(x), x)):
        before, after = make(plain), make(claimed)
        assert all(torch.equal(getattr(before, n), getattr(after, n)) for n in ("dq", "dk", "dv"))
        assert not torch.equal(before.out, after.out)
