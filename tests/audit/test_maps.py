"""Heat maps show where a quantity is off, and do not mind what a broken subject gives."""

from __future__ import annotations

import math

import pytest
import torch

from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case, Inputs, build
from ringtrue.audit.judge import judged, truth_of
from ringtrue.audit.maps import COLUMNS, allowed, maps_of
from ringtrue.audit.truth import Quantities
from ringtrue.contract import accumulate_dtype


def right_of(inputs: Inputs) -> Quantities:
    values, dtype = truth_of(inputs).values, inputs.q.dtype
    bias = inputs.mask.bias
    dtypes = {"lse": accumulate_dtype(dtype), "dbias": dtype if bias is None else bias.dtype}
    return Quantities(*(x if x is None else x.to(dtypes.get(n, dtype)) for n, x in values._asdict().items()))


def maps(inputs: Inputs, result: Quantities) -> dict[str, tuple[tuple[float, ...], ...]]:
    return {m.quantity: m.values for m in maps_of(inputs, result, judged(result, inputs))}


def test_nothing_wrong_no_map() -> None:
    inputs = build(case("gqa"))
    assert maps(inputs, right_of(inputs)) == {}


def test_the_place_and_the_share() -> None:
    inputs = build(case("gqa"))  # (2, 33, 6, 16) on 21 keys of 2 heads
    right = right_of(inputs)
    right.out[1, 7, 4, 3] += 2.0
    right.dk[0, 20, 1, 0] -= 3.0
    found, bounds = maps(inputs, right), allowed(inputs)
    assert found.keys() == {"out", "dk"}
    assert (len(found["out"]), len(found["out"][0])) == (6, 33)
    assert (len(found["dk"]), len(found["dk"][0])) == (2, 21)
    assert found["out"][4][7] == pytest.approx(2.0 / bounds["out"][1], rel=1e-2)
    assert found["dk"][1][20] == pytest.approx(3.0 / bounds["dk"][1], rel=1e-2)
    assert max(x for i, row in enumerate(found["out"]) for j, x in enumerate(row) if (i, j) != (4, 7)) < 1


def test_bounds_are_the_judges() -> None:
    inputs = build(case("float-of-input"))
    right = right_of(inputs)
    for verdict in judged(right._replace(dq=right.dq + 1), inputs):
        assert allowed(inputs)[verdict.quantity] == (verdict.bound_2, verdict.bound_inf)


def test_nan_and_inf_are_shown_where_they_are() -> None:
    inputs = build(case("bool-blind"))  # lse is -inf in the rows that see nothing, rightly
    right = right_of(inputs)
    right.out[0, 3, 1, 0] = math.nan
    right.lse[1, 2, 0] = math.inf
    found = maps(inputs, right)
    assert math.isnan(found["out"][1][3])
    assert found["lse"][2][0] == math.inf
    assert found["lse"][0][1] == 0  # -inf, as it must be


def test_missing_and_misshapen_have_no_map() -> None:
    inputs = build(case("length-5"))
    right = right_of(inputs)
    broken = right._replace(out=None, dq=right.dq[:, :3], dk=right.dk + 1)
    assert maps(inputs, broken).keys() == {"dk"}
    assert maps_of(inputs, None, judged(broken, inputs)) == ()


def test_wrong_dtype_still_has_a_map() -> None:
    inputs = build(case("length-5"))
    right = right_of(inputs)
    assert maps(inputs, right._replace(dq=right.dq.double() + 1)).keys() == {"dq"}


@pytest.mark.parametrize(
    ("name", "size"), [("float-hqk", (3, 13)), ("float-k", (1, 18)), ("float-q", (1, 13)), ("bias", (1, 21))]
)
def test_gradients_of_masks(name: str, size: tuple[int, int]) -> None:
    inputs = build(case(name))
    right = right_of(inputs)
    found = maps(inputs, right._replace(dbias=right.dbias + 100))
    assert (len(found["dbias"]), len(found["dbias"][0])) == size


def test_long_sequences_are_cut_into_stretches() -> None:
    inputs = build(case("length-129"))
    right = right_of(inputs)
    right.dv[0, 128, 2, 0] += 5
    (found,) = maps_of(inputs, right, judged(right, inputs))
    assert (found.stretch, len(found.values[0])) == (3, 43)
    assert len(found.values[0]) <= COLUMNS
    assert found.values[2][42] > 1 > found.values[2][41]


def test_sixteen_bits() -> None:
    inputs = build(Case("maps-bf16", 9, 9, causal=0, dtype=torch.bfloat16))
    right = right_of(inputs)
    assert maps(inputs, right._replace(dq=right.dq * 2)).keys() == {"dq"}
