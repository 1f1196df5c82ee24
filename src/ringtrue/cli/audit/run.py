"""Runs a plan and makes a report of it: replay lines, waivers, smaller cases of what is wrong."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from ...audit.checks import Check
from ...audit.outcome import CRASH, Outcome, Report
from ...audit.shrink import way
from ...audit.waivers import Waiver, apply
from ...bench.environment import environment
from .lanes import Work, audited, shrunken
from .planned import Plan

OnOutcome = Callable[[Outcome, int, int], None]
SHRUNKEN = 6  # wrong cases that are made smaller, each of another kind


@dataclass(frozen=True)
class Manner:
    """How a plan is run. options: what a replay line repeats beside subject and case; timeout in seconds."""

    device: str
    jobs: int
    timeout: float
    limit: float | None = None
    seed: int = 0
    options: str = ""
    waivers: tuple[Waiver, ...] = ()
    shrink: bool = False


def run(plan: Plan, manner: Manner, command: str, on_outcome: OnOutcome) -> Report:
    """Everything that came of it."""
    start = perf_counter()
    done = 0

    def tell(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        on_outcome(outcome, done, plan.total)

    outcomes = audited(plan.work, manner.jobs, manner.timeout, tell, manner.limit)
    if manner.shrink:
        outcomes += [replayable(o, manner) for o in smaller(plan.work, outcomes, manner)]
    outcomes = [replayable(o, manner) for o in outcomes]
    outcomes, problems = apply(outcomes, manner.waivers)
    about = {name: subject.about for name, subject in plan.subjects.items()}
    seconds = perf_counter() - start
    return Report(tuple(outcomes), environment(manner.device), about, command, seconds, tuple(problems))


def replayable(outcome: Outcome, manner: Manner) -> Outcome:
    """With the line that runs this check alone."""
    case = shlex.quote(outcome.check)
    words = ["ringtrue audit", shlex.quote(outcome.subject), "--case", case, manner.options]
    words += [f"--seed {manner.seed}"] if manner.seed else []
    words += [f"--device {manner.device}"] if manner.device != "cpu" else []
    return replace(outcome, replay=" ".join(filter(None, words)))


def smaller(work: Sequence[Work], outcomes: Sequence[Outcome], manner: Manner) -> list[Outcome]:
    """One wrong case of each kind as small as it still is wrong: as outcomes of their own, found in other processes."""
    asks = {one.ask.name: (one.ask, {check.id: check for check in one.checks}) for one in work}
    kinds: dict[tuple[str, str, tuple[str, str]], tuple[str, Check]] = {}
    for outcome in outcomes:
        check = asks[outcome.subject][1][outcome.check]
        if outcome.bad and outcome.verdict != CRASH and check.ranks.size == 1:
            kinds.setdefault((outcome.subject, check.law, way(outcome)), (outcome.subject, check))
    first = list(kinds.values())[:SHRUNKEN]
    return shrunken([(asks[name][0], check) for name, check in first], manner.timeout)
