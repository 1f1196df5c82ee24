"""The demo's bounds: what counts as out of them, and which exit code follows. Pure arithmetic, no processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .settings import Mode

GRADIENT_FACTOR = 1.5  # times the worst parameter of the yardstick
LOSS_FACTOR = 3.0  # times what one process is off by
LOSS_FLOOR = 1e-6
TINY = 1e-6  # of the largest true gradient: below, an error is judged absolutely, in units of that largest one

WITHIN, OUTSIDE, USAGE, NEVER_RAN, BROKEN = 0, 1, 2, 3, 4  # exit codes


@dataclass(frozen=True)
class Errors:
    """Relative 2-norm errors against the float64 model at step 0."""

    forward: float
    by_parameter: Mapping[str, float]

    @property
    def parameter(self) -> str:
        """The parameter with the worst gradient; not a number is worse than any."""
        return max(self.by_parameter, key=lambda name: _badness(self.by_parameter[name]))

    @property
    def gradient(self) -> float:
        return self.by_parameter[self.parameter]


@dataclass(frozen=True)
class Run:
    """One training run: its losses per rank (before each step, and after the last), its time, its errors."""

    losses: tuple[tuple[float, ...], ...]
    seconds: float
    errors: Errors


@dataclass(frozen=True)
class Outcome:
    """What came of one mode.

    run        None when it was not run, for `reason`
    plant_ran  in how many calls, over all ranks, the plant changed something
    """

    mode: Mode
    run: Run | None = None
    reason: str = ""
    ratio: float = math.nan
    loss_off: tuple[float, ...] = ()
    loss_allowed: tuple[float, ...] = ()
    plant_ran: int = 0

    @property
    def gradient_within(self) -> bool:
        return self.ratio <= GRADIENT_FACTOR

    @property
    def first_loss_outside(self) -> int | None:
        """The first step whose loss is too far from one process's."""
        pairs = zip(self.loss_off, self.loss_allowed, strict=True)
        return next((step for step, (off, allowed) in enumerate(pairs) if not off <= allowed), None)

    @property
    def within(self) -> bool:
        return self.run is not None and self.gradient_within and self.first_loss_outside is None


def errors(out: Tensor, grads: Mapping[str, Tensor], true_out: Tensor, true_grads: Mapping[str, Tensor]) -> Errors:
    """||x - truth|| / ||truth|| of the output and of every parameter's gradient."""
    norms = {name: _norm(grad) for name, grad in true_grads.items()}
    largest = max(norms.values())
    by_parameter = {
        name: _norm(grads[name].double() - grad) / (norms[name] if norms[name] >= TINY * largest else largest)
        for name, grad in true_grads.items()
    }
    return Errors(_norm(out.double() - true_out) / _norm(true_out), by_parameter)


def judged(mode: Mode, run: Run, references: Mapping[str, Run], plant_ran: int = 0) -> Outcome:
    """Hold a mode's run against the yardstick, and its losses against those of one process with the same backend."""
    yardstick, single, truth = (references[name] for name in ("eager", "single", "float64"))
    steps = range(len(single.losses[0]))
    return Outcome(
        mode,
        run,
        ratio=ratio(run.errors.gradient, yardstick.errors.gradient),
        loss_off=tuple(worst(abs(losses[i] - single.losses[0][i]) for losses in run.losses) for i in steps),
        loss_allowed=tuple(allowed(single.losses[0][i], truth.losses[0][i]) for i in steps),
        plant_ran=plant_ran,
    )


def ratio(error: float, yardstick: float) -> float:
    """How many times the yardstick's error; nothing can be judged by a yardstick that is not finite."""
    if not math.isfinite(yardstick):
        return math.nan
    return error / yardstick if yardstick else (math.inf if error else 1.0)


def allowed(single: float, truth: float) -> float:
    """How far a loss may be from that of one process with the same backend."""
    return LOSS_FACTOR * abs(single - truth) + LOSS_FLOOR


def worst(values: Iterable[float]) -> float:
    """The largest; not a number if any is not."""
    return max(values, key=_badness)


def exit_code(outcomes: Iterable[Outcome], plant: str | None) -> int:
    """OUTSIDE only because of numbers; NEVER_RAN when something that was asked for did not run."""
    outcomes = list(outcomes)
    ran = [outcome for outcome in outcomes if outcome.run is not None]
    if not ran or (plant is not None and any(outcome.plant_ran == 0 for outcome in ran)):
        return NEVER_RAN
    if any(not outcome.within for outcome in ran):
        return OUTSIDE
    return WITHIN if len(ran) == len(outcomes) else NEVER_RAN


def _badness(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x.double()).item()
