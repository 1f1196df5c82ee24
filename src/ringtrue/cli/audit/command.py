"""`ringtrue audit`: what was asked for, checked before anything runs; then the audit, and what is written of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console

from ...audit.checks import DTYPES, GROUPS, Check, checks, of_the_truth
from ...audit.junit import to_junit
from ...audit.outcome import Outcome, Report
from ...audit.record import to_json
from ...audit.subject import Subject
from ...bench.environment import environment
from ...subjects import FAMILIES, TRUTH, found
from ..options import device_here, one_of
from ..output import say, writable
from .lanes import Work, audited
from .tasks import Ask

SILENCE = 180.0  # seconds; compiling a kernel for the first time takes long


def audit(
    subjects: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUBJECT...", help=f"{', '.join(FAMILIES)}, FAMILY/WHICH, or package.module:function."),
    ] = None,
    group: Annotated[str, typer.Option(help=f"Which checks: {', '.join(GROUPS)}.")] = "smoke",
    only: Annotated[str, typer.Option(metavar="PATTERN", help="Only ids like 'call/causal*'.")] = "*",
    seed: Annotated[int, typer.Option(min=0, help="Other numbers for the same cases.")] = 0,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(DTYPES)}.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side, on a GPU too.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds of silence after which a check hangs.")] = SILENCE,
    layout: Annotated[str, typer.Option(help="Of package.module:function: bshd, bhsd or packed.")] = "bshd",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything measured, as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML, for CI.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Show subjects and checks, run nothing.")] = False,
) -> None:
    """Prove or disprove anybody's attention: forward and backward against a float64 truth, and laws that need none.

    Exit status: 0 all right, 1 something is wrong, 2 usage, 3 nothing ran.
    """
    console = Console()
    writers = [
        (writable(path, option), writer)
        for path, option, writer in ((json, "--json", to_json), (junit, "--junit", to_junit))
    ]
    one_of("--group", group, GROUPS)
    for name in dtype or ():
        one_of("--dtype", name, DTYPES)
    device_here(device)
    if (here := str(Path.cwd())) not in sys.path:  # for package.module:function; worker processes inherit the path
        sys.path.insert(0, here)
    asked = [(Ask(s.name, device, layout), s) for name in _some(subjects) for s in _found(name, device, layout)]
    checked = (Work(Ask(TRUTH.name, "cpu"), tuple(of_the_truth(only, seed))) for _ in range(group != "parallel"))
    work = [*checked, *(Work(ask, tuple(planned(s, group, dtype, only, seed))) for ask, s in asked)]
    if list_only:
        _list(console, work)
        return
    start, total = perf_counter(), sum(len(w.checks) for w in work)
    done: list[Outcome] = []

    def on_outcome(outcome: Outcome) -> None:
        done.append(outcome)
        if outcome.bad:
            say(console, f"[{len(done)}/{total}] {outcome.subject} {outcome.check}: {outcome.verdict} {outcome.reason}")

    outcomes = audited(work, jobs, timeout, on_outcome)
    about = {TRUTH.name: TRUTH.about} | {s.name: s.about for _, s in asked}
    report = Report(
        tuple(outcomes), environment(device), about, " ".join(["ringtrue", *sys.argv[1:]]), perf_counter() - start
    )
    for file, writer in writers:
        if file is not None:
            file.write_text(writer(report), "utf-8")
            say(console, f"written: {file}")
    _print(console, report)
    raise typer.Exit(report.exit_code)


def planned(subject: Subject, group: str, dtypes: Sequence[str] | None, only: str, seed: int = 0) -> list[Check]:
    """What a subject is put to: all of a group in the dtypes that it claims, one plain call in each other."""
    asked = [d for d in DTYPES if d in (dtypes or DTYPES)]
    claimed = [d for d in asked if d in subject.says.dtypes]
    own = checks(group, dtypes=claimed, only=only, seed=seed, chunks=subject.pair is not None)
    if group == "parallel":  # one refusal says it for a subject that claims nothing of the kind
        return own if subject.says.ranks else own[:1]
    others = checks("smoke", dtypes=[d for d in asked if d not in claimed], only=only, seed=seed)
    return [*own, *(check for check in others if check.id.startswith("call/length-33/"))]


def _some(subjects: list[str] | None) -> list[str]:
    if not subjects:
        raise typer.BadParameter(f"name one: {', '.join(FAMILIES)}, or package.module:function", param_hint="SUBJECT")
    return subjects


def _found(name: str, device: str, layout: str) -> list[Subject]:
    try:
        return found(name, device, layout=layout)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SUBJECT") from error


def _list(console: Console, work: list[Work]) -> None:
    for one in work:
        say(console, f"{one.ask.name}: {len(one.checks)} checks")
        for check in one.checks:
            say(console, f"  {check.id}")


def _print(console: Console, report: Report) -> None:
    from collections import Counter

    for name in report.subjects:
        counts = Counter(o.verdict for o in report.outcomes if o.subject == name)
        say(console, f"{name}: {dict(counts)}")
    say(console, f"{report.seconds:.1f} s")
