"""A diagnosis is right or empty: known faults are named, everything else is left unexplained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ringtrue.audit.cases import CASES, case
from ringtrue.audit.diagnosis import diagnose
from ringtrue.audit.inputs import Inputs, build
from ringtrue.audit.judge import expected_of, judged, truth_of
from ringtrue.audit.truth import Quantities


def right(x: Inputs) -> Quantities:
    """The truth in the dtypes that are asked for."""
    values = truth_of(x).values
    asked = {n: getattr(values, n).to(dtype) for n, (_, dtype) in expected_of(x).items()}
    return Quantities(*(asked.get(n) for n in Quantities._fields))


def perturbed(x: Inputs, names: tuple[str, ...], by: float, seed: int) -> Quantities:
    draw, found = torch.Generator().manual_seed(seed), right(x)
    for name in names:
        t = getattr(found, name)
        if t is not None and t.numel():
            size = float(t[t.isfinite()].norm()) / max(1, t.numel()) ** 0.5 if bool(t.isfinite().any()) else 1.0
            noise = torch.randn(t.shape, generator=draw, dtype=torch.float64) * by * max(size, 1e-2)
            found = found._replace(**{name: (t.double() + noise).to(t.dtype)})
    return found


SPREAD = {
    torch.float32: ("length-33", "bool-keep", "window", "grad-lse-causal-gqa-bias", "heads-outermost"),
    torch.bfloat16: ("heavy-tailed-masked", "softcap-masked", "float-blind"),
}
GROUPS: tuple[tuple[str, ...], ...] = (("dq", "dk", "dv"), ("out",), ("dk", "dv"), ("lse",), ("dk",), ("dv",))


@pytest.mark.parametrize(("dtype", "name"), [(d, n) for d, names in SPREAD.items() for n in names], ids=str)
def test_numbers_without_a_cause_stay_unexplained(dtype: torch.dtype, name: str) -> None:
    x = build(replace(case(name), dtype=dtype))
    for turn, by in enumerate((0.05, 0.5, 3.0)):
        for names in GROUPS[turn::3]:
            result = perturbed(x, names, by, turn)
            assert not all(v.ok for v in judged(result, x))
            assert diagnose(x, result) == "", (names, by)


def test_right_numbers_have_no_diagnosis() -> None:
    for each in CASES[::9]:
        x = build(each)
        assert diagnose(x, right(x)) == "", each.id


def forms(x: Inputs) -> Iterator[tuple[Quantities, str]]:
    good = right(x)
    assert good.lse is not None
    assert good.dk is not None
    assert good.out is not None
    yield good._replace(dk=None), "dk is missing"
    yield good._replace(dk=good.dk.double()), "dk is returned in float64 for float32 inputs"
    yield good._replace(lse=good.lse.transpose(1, 2)), "lse is laid out as (B, Sq, H)"
    yield good._replace(lse=torch.nn.functional.pad(good.lse, (0, 15))), "lse is padded from 33 to 48 queries"
    yield good._replace(lse=good.lse.bfloat16().float()), "lse is right but for rounding to bfloat16"
    yield good._replace(dk=2 * good.dk, dq=2 * good.dq), "the number of ranks, where a sum counts each of 2"  # type: ignore[operator]
    yield good._replace(dq=4 * good.dq), "1 / scale: the scale is missing"  # type: ignore[operator]
    yield good._replace(out=1.01 * good.out), "out is 1.01 times what must come back"
    yield good._replace(dk=0 * good.dk), "dk is zero"
    yield good._replace(dk=torch.full_like(good.dk, torch.nan)), "dk is NaN in all places"
    late = torch.where(torch.arange(33)[:, None, None] < 32, good.dk, torch.nan)
    yield good._replace(dk=late), "dk is NaN from token 32 on"


def test_form_is_told_from_numbers() -> None:
    x = build(case("length-33"))
    for result, words in forms(x):
        assert words in diagnose(x, result)
    stray = right(x)
    assert stray.dk is not None
    stray.dk[0, 3, 1, 2] = torch.nan
    assert diagnose(x, stray) == ""


def test_a_form_that_explains_only_a_part_is_not_named() -> None:
    x = build(case("length-33"))
    result = perturbed(x, ("dq",), 0.5, 3)
    assert result.dk is not None
    assert diagnose(x, result._replace(dk=result.dk.double())) == ""


def test_shapes_that_no_fault_gives_are_left_alone() -> None:
    """Nothing that a subject returns may end the audit."""
    x = build(case("wide-values"))
    good = right(x)
    for name in ("out", "lse", "dq", "dk", "dv"):
        t = getattr(good, name)
        for odd in (t[..., :-1], t[:, :0], t.flatten(), t.unsqueeze(0), t[0], t.new_zeros(())):
            assert diagnose(x, good._replace(**{name: odd})) == "", (name, odd.shape)
    assert diagnose(x, good._replace(dk=good.dv, dv=good.dk)) == "dk and dv are in each other's place"


def test_a_bias_that_is_not_summed() -> None:
    x = build(case("float-qk"))
    result = right(x)
    steps = truth_of(x)
    full = (steps.weights * (steps.grad_weights - steps.delta)).float()
    assert "dbias is not summed" in diagnose(x, result._replace(dbias=full))
    assert diagnose(x, result._replace(dbias=full.roll(1, 2))) == ""


def test_a_factor_is_the_number_of_ranks_where_nothing_nearer_is() -> None:
    x = build(case("length-33"))
    wrong = right(x)._replace(dq=4 * right(x).dq)  # type: ignore[operator]
    assert diagnose(x, wrong) == "dq is 4 times what must come back, that is 1 / scale: the scale is missing"
    assert "or the number of ranks" in diagnose(x, wrong, ranks=True)


def test_one_fault_reads_alike_in_every_dtype() -> None:
    texts = set()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = build(replace(case("length-33"), dtype=dtype))
        texts.add(diagnose(x, right(x)._replace(dq=4 * right(x).dq)))  # type: ignore[operator]
    assert texts == {"dq is 4 times what must come back, that is 1 / scale: the scale is missing"}


@pytest.mark.parametrize("name", ["length-33", "length-5", "causal"])
def test_the_other_layout_is_named(name: str) -> None:
    """A function of (B, H, S, D) that was audited without --layout bhsd."""
    x = build(case(name))
    names = ("q", "k", "v", "grad_out")
    turned = right(replace(x, **{n: getattr(x, n).transpose(1, 2) for n in names}))
    back = (None if t is None else t.transpose(1, 2) for t in (turned.out, turned.lse, turned.dq, turned.dk, turned.dv))
    assert "--layout" in diagnose(x, Quantities(*back))
