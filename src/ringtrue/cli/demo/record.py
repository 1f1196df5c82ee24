"""The report as plain values: every number, and the versions it belongs to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .judge import GRADIENT_FACTOR, LOSS_FACTOR, LOSS_FLOOR, Outcome, Run
from .run import Report
from .words import conclusion, verdict


def as_dict(report: Report) -> dict[str, Any]:
    """The whole report as plain values."""
    settings = {**asdict(report.settings), "modes": [mode.name for mode in report.settings.modes]}
    return {
        "versions": dict(report.versions),
        "settings": settings,
        "problem": {**report.problem, "text_lengths": report.settings.text_lengths},
        "bounds": {"gradient_factor": GRADIENT_FACTOR, "loss_factor": LOSS_FACTOR, "loss_floor": LOSS_FLOOR},
        "one_process": {name: _run(run) for name, run in report.references.items()},
        "modes": {outcome.mode.name: _outcome(outcome) for outcome in report.outcomes},
        "conclusion": conclusion(report),
        "exit_code": report.exit_code,
        "seconds": report.seconds,
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "forward_error": run.errors.forward,
        "gradient_error": run.errors.gradient,
        "parameter": run.errors.parameter,
        "losses": run.losses[0],
        "seconds": run.seconds,
        "gradient_errors": dict(run.errors.by_parameter),
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    common = {"ranks": outcome.mode.ranks, "ran": outcome.run is not None, "verdict": verdict(outcome)}
    if outcome.run is None:
        return {**common, "reason": outcome.reason}
    return {
        **common,
        **_run(outcome.run),
        "within": outcome.within,
        "times_yardstick": outcome.ratio,
        "loss_differences": outcome.loss_off,
        "loss_allowed": outcome.loss_allowed,
        "losses_by_rank": outcome.run.losses,
        "plant_ran": outcome.plant_ran,
    }
