"""flex_attention as a subject: every form of mask as a function of the place."""

from __future__ import annotations

import pytest
import torch

from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import PASS, REFUSED
from ringtrue.subjects import flex, found
from subjects.asking import call, told

(EAGER,) = (s for s in found("flex", "cpu") if s.name == "flex/eager")


@pytest.mark.parametrize("asked", ["all-of-them", "softcap-masked"])
def test_right(asked: str) -> None:
    outcome = examine(EAGER, Check(case(asked)))
    assert outcome.verdict == PASS, outcome
    assert {v.quantity for v in outcome.quantities} == {"out", "lse"}  # a CPU has no backward for q, k and v


@pytest.mark.parametrize("asked", ["dropout", "only-q"])
def test_refused(asked: str) -> None:
    assert examine(EAGER, Check(case(asked))).verdict == REFUSED


def test_the_lines_of_a_bug_report_compute_the_same() -> None:
    x = call("segments-window-float", says=EAGER.says)
    assert torch.equal(told(EAGER, x), EAGER.run(x).out)  # type: ignore[arg-type]


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (compiled,) = found("flex/compiled", "cpu")
    assert compiled.unavailable() == "no C++ compiler: no-such-compiler"
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert flex.no_compiler("cuda") == "Triton is not installed"
