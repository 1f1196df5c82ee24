"""The arithmetic of the bounds, and which exit code follows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ringtrue.cli.demo.judge import NEVER_RAN, OUTSIDE, WITHIN, Errors, Outcome, Run, errors, exit_code, judged, worst
from ringtrue.cli.demo.run import why_not
from ringtrue.cli.demo.settings import Mode, Settings

MODE = Mode(1, 2)


def a_run(gradient: float, losses: tuple[tuple[float, ...], ...]) -> Run:
    return Run(losses, 1.0, Errors(1e-7, {"w": gradient, "b": gradient / 2}))


REFERENCES = {
    "float64": a_run(0.0, ((2.0, 1.0),)),
    "eager": a_run(1e-6, ((2.0, 1.0),)),
    "single": a_run(1e-6, ((2.0, 1.0 + 1e-6),)),
}


def test_errors_are_relative_to_the_truth_of_each_parameter() -> None:
    truth = {"big": torch.tensor([3.0, 4.0]).double(), "small": torch.tensor([5e-3]).double()}
    grads = {"big": torch.tensor([3.0, 4.5]), "small": torch.tensor([6e-3])}
    found = errors(torch.tensor([1.0, 1.0]), grads, torch.tensor([1.0, 2.0]).double(), truth)
    assert found.by_parameter == pytest.approx({"big": 0.1, "small": 0.2})
    assert (found.parameter, found.gradient) == ("small", pytest.approx(0.2))
    assert found.forward == pytest.approx(1 / math.sqrt(5))


def test_a_vanishing_gradient_is_judged_by_the_largest() -> None:
    truth = {"big": torch.tensor([10.0]).double(), "gone": torch.tensor([1e-6]).double()}
    grads = {"big": torch.tensor([10.0]), "gone": torch.tensor([1e-3])}
    found = errors(torch.ones(1), grads, torch.ones(1).double(), truth)
    assert found.by_parameter["gone"] == pytest.approx(1e-4, rel=2e-3)
    assert found.by_parameter["big"] == 0


def test_not_a_number_is_worse_than_any() -> None:
    found = Errors(0.0, {"a": 1.0, "b": math.nan, "c": 2.0})
    assert found.parameter == "b"
    assert math.isnan(found.gradient)
    assert math.isnan(worst([1.0, math.nan, 3.0]))
    assert worst([1.0, 3.0, 2.0]) == 3.0


@pytest.mark.parametrize(("gradient", "within"), [(1.49e-6, True), (1.51e-6, False), (math.nan, False)])
def test_the_gradient_bound(gradient: float, within: bool) -> None:
    outcome = judged(MODE, a_run(gradient, ((2.0, 1.0),)), REFERENCES)
    assert outcome.within is within
    assert outcome.first_loss_outside is None


@pytest.mark.parametrize("yardstick", [math.nan, math.inf])
def test_a_yardstick_that_is_not_finite_lets_nothing_pass(yardstick: float) -> None:
    references = {**REFERENCES, "eager": a_run(yardstick, ((2.0, 1.0),))}
    assert not judged(MODE, a_run(1e-9, ((2.0, 1.0),)), references).within


@pytest.mark.parametrize(("off", "within"), [(3.9e-6, True), (4.1e-6, False), (math.nan, False)])
def test_the_loss_bound_is_three_times_what_one_process_is_off_by_plus_1e6(off: float, within: bool) -> None:
    single = REFERENCES["single"].losses[0]
    outcome = judged(MODE, a_run(1e-6, (single, (single[0], single[1] - off))), REFERENCES)  # the second rank differs
    assert outcome.loss_allowed == pytest.approx((1e-6, 4e-6))
    assert outcome.within is within
    assert outcome.first_loss_outside == (None if within else 1)


GOOD = judged(MODE, a_run(1e-6, ((2.0, 1.0),)), REFERENCES)
BAD = judged(MODE, a_run(1e-3, ((2.0, 1.0),)), REFERENCES)
ABSENT = Outcome(MODE, reason="no GPU")


def planted(outcome: Outcome, calls: int) -> Outcome:
    return replace(outcome, plant_ran=calls)


@pytest.mark.parametrize(
    ("outcomes", "plant", "code"),
    [
        ([GOOD, GOOD], None, WITHIN),
        ([GOOD, BAD], None, OUTSIDE),
        ([BAD, ABSENT], None, OUTSIDE),
        ([GOOD, ABSENT], None, NEVER_RAN),
        ([ABSENT], None, NEVER_RAN),
        ([planted(BAD, 4), ABSENT], "stale-kv", OUTSIDE),
        ([planted(BAD, 4), planted(GOOD, 4)], "stale-kv", OUTSIDE),
        ([planted(GOOD, 4)], "stale-kv", WITHIN),
        ([planted(GOOD, 0)], "stale-kv", NEVER_RAN),
        ([planted(BAD, 0)], "stale-kv", NEVER_RAN),  # out of bounds, but not because of the plant
        ([planted(BAD, 4), planted(BAD, 0)], "stale-kv", NEVER_RAN),
        ([ABSENT], "stale-kv", NEVER_RAN),
    ],
)
def test_exit_codes(outcomes: list[Outcome], plant: str | None, code: int) -> None:
    assert exit_code(outcomes, plant) == code


def test_why_a_mode_does_not_run() -> None:
    assert why_not(Mode(2, 2), Settings(), 0) == ""
    assert why_not(Mode(2, 2), Settings(device="cuda"), 2) == "needs 4 GPUs, this machine has 2"
    assert why_not(Mode(2, 1), Settings(device="cuda"), 2) == ""
    assert "rings" in why_not(Mode(2, 1), Settings(plant="stale-kv"), 0)
    assert why_not(Mode(2, 2), Settings(plant="stale-kv"), 0) == ""
    assert why_not(Mode(2, 1), Settings(plant="lse-missing"), 0) == ""
