"""What the demo says in words: a verdict for each mode, and what a planted fault was."""

from __future__ import annotations

import math

from .judge import GRADIENT_FACTOR, NEVER_RAN, OUTSIDE, WITHIN, Outcome, worst
from .run import Report

HISTORY = {
    "kv-transposed-twice": (
        "Backward transposed the saved keys and values once more than forward, the queries not. Where heads == tokens "
        "every shape fits and nothing crashes."
    ),
    "mask-as-bias": (
        "A boolean mask went into the slot for additive masks and was added as 0 and 1, so that padding is attended to."
    ),
    "lse-missing": (
        "The log-sum-exp was computed only if the caller asked for it; under Ulysses nobody asks, and backward read "
        "memory that nobody had written (zeros stand in for it here)."
    ),
    "stale-kv": "At every step of the ring, backward read the keys and values that its first step had left behind.",
}


def verdict(outcome: Outcome) -> str:
    """One sentence or two on one mode, without its name."""
    if outcome.run is None:
        return f"not run: {outcome.reason}."
    gradient = f"{number(outcome.run.errors.gradient)} at {outcome.run.errors.parameter}{multiple(outcome)}"
    if outcome.within:
        return (
            f"within bounds. Worst gradient error {gradient} (bound {GRADIENT_FACTOR:g} x); "
            f"the losses are those of one process to within {number(worst(outcome.loss_off))}."
        )
    parts = []
    if not outcome.gradient_within:
        parts.append(f"Worst gradient error {gradient} (bound {GRADIENT_FACTOR:g} x).")
    step = outcome.first_loss_outside
    if step is not None:
        off, limit = outcome.loss_off[step], outcome.loss_allowed[step]
        when = "before the first step" if step == 0 else f"after step {step}"
        parts.append(f"The loss leaves that of one process {when}: off by {number(off)}, allowed {number(limit)}.")
    return "OUT OF BOUNDS. " + " ".join(parts)


def plant_line(report: Report) -> str:
    """What the planted fault was, and how much harm it did here."""
    plant = report.settings.plant
    assert plant is not None
    ran = [outcome for outcome in report.outcomes if outcome.run is not None]
    unchanged = [outcome.mode.name for outcome in ran if outcome.plant_ran == 0]
    if not ran or len(unchanged) == len(ran):
        return f"{HISTORY[plant]} It never ran here: no call was changed."
    biggest = max(ran, key=lambda outcome: math.inf if math.isnan(outcome.ratio) else outcome.ratio)
    assert biggest.run is not None
    calls = sum(outcome.plant_ran for outcome in ran)
    harm = (
        f"It changed {calls} attention calls here: the worst gradient error is {number(biggest.run.errors.gradient)}"
        f"{multiple(biggest)}, under {biggest.mode.name}."
    )
    return f"{HISTORY[plant]} {harm}" + (f" It never ran under {', '.join(unchanged)}." if unchanged else "")


def conclusion(report: Report) -> str:
    """The last line, which says what the exit code says."""
    ran = [outcome for outcome in report.outcomes if outcome.run is not None]
    good = [outcome.mode.name for outcome in ran if outcome.within]
    bad = [outcome.mode.name for outcome in ran if not outcome.within]
    missing = [outcome.mode.name for outcome in report.outcomes if outcome.run is None]
    planted = report.settings.plant is not None
    if report.exit_code == WITHIN:
        if planted:
            return "The fault went unnoticed: every number is within bounds."
        names = " and ".join(filter(None, [", ".join(good[:-1]), good[-1]]))
        return f"{names} train{'s' if len(good) == 1 else ''} this Flux with the gradients of one process."
    if report.exit_code == OUTSIDE:
        cause = f" The planted fault ({report.settings.plant}) did this." if planted else ""
        return f"{', '.join(bad)}: the numbers are out of bounds.{cause}"
    assert report.exit_code == NEVER_RAN
    if planted and len(missing) < len(report.outcomes):
        return "This proves nothing: the planted fault never ran."
    return f"This proves nothing about {', '.join(missing)}: not run."


def number(value: float) -> str:
    """Two or three digits: 0, 1.3e-06, 0.05, 19.79."""
    if value == 0:
        return "0"
    return f"{value:.2f}" if 0.01 <= value < 1000 else f"{value:.1e}"


def multiple(outcome: Outcome) -> str:
    """ ", 1.04 x the yardstick", or nothing when that is not a number."""
    return "" if math.isnan(outcome.ratio) else f", {times(outcome.ratio)} the yardstick"


def times(ratio: float) -> str:
    """A factor: 1.04 x, 1.4e+07 x."""
    return f"{ratio:.2f} x" if ratio < 1000 else f"{ratio:.1e} x"
