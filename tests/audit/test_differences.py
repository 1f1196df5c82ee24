"""Finite differences hold the truth's own gradients, and would see a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringtrue.audit import differences as module
from ringtrue.audit.cases import case
from ringtrue.audit.differences import differences
from ringtrue.audit.inputs import Inputs, build
from ringtrue.audit.truth import Truth

NAMES = ["length-5", "gqa", "float-hqk", "softcap", "grad-lse", "bias", "causal-tall", "segments-apart"]


@pytest.mark.parametrize("name", NAMES)
def test_the_truth_is_right(name: str) -> None:
    found = differences(build(case(name)))
    assert len(found) >= 3
    assert all(v.ok and v.strain < 0.1 for v in found), [str(v) for v in found]


@pytest.mark.parametrize("quantity", ["dq", "dk", "dv", "dbias"])
def test_a_wrong_truth_is_seen(quantity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.truth_of

    def wrong(inputs: Inputs) -> Truth:
        found = right(inputs)
        return replace(found, values=found.values._replace(**{quantity: getattr(found.values, quantity) * 1.001}))

    monkeypatch.setattr(module, "truth_of", wrong)
    assert [v.quantity for v in differences(build(case("float-hqk"))) if not v.ok] == [quantity]
