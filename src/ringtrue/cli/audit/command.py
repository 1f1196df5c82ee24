"""`ringtrue audit`: what was asked for, checked before anything runs; then the audit, and what is written of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...audit.checks import DTYPES, GROUPS
from ...audit.junit import to_junit
from ...audit.record import to_json
from ...audit.subject import Says
from ...audit.waivers import Waiver
from ...audit.waivers import read as read_waivers
from ...subjects import FAMILIES
from ...subjects.claims_file import read as read_claims
from ...subjects.function import LAYOUTS
from ..options import device_here, one_of
from ..output import say, writable
from .page import to_html, unavailable
from .planned import Choice, Plan, planned
from .printed import print_report
from .progress import Progress
from .run import Manner, run

WRITERS = {"json": to_json, "junit": to_junit, "html": to_html}
SILENCE = 180.0  # seconds; compiling a kernel for the first time takes long


def audit(
    subjects: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUBJECT...", help=f"{', '.join(FAMILIES)}, FAMILY/WHICH, or package.module:function."),
    ] = None,
    group: Annotated[str, typer.Option(help=f"Which checks: {', '.join(GROUPS)}.")] = "smoke",
    case: Annotated[list[str] | None, typer.Option(metavar="ID", help="This check alone, of no group.")] = None,
    only: Annotated[str, typer.Option(metavar="PATTERN", help="Only ids like 'call/causal*'.")] = "*",
    seed: Annotated[int, typer.Option(min=0, help="Other numbers for the same cases.")] = 0,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(DTYPES)}.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side, on a GPU too.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds of silence after which a check hangs.")] = SILENCE,
    limit: Annotated[float | None, typer.Option(min=1, help="Seconds after which no other check begins.")] = None,
    layout: Annotated[str, typer.Option(help=f"Of package.module:function: {', '.join(LAYOUTS)}.")] = "bshd",
    claims: Annotated[Path | None, typer.Option(metavar="FILE", help="What package.module:function claims.")] = None,
    waive: Annotated[Path | None, typer.Option(metavar="FILE", help="Known faults, each with reason and link.")] = None,
    shrink: Annotated[bool, typer.Option("--shrink", help="Make wrong cases smaller.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything measured, as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML, for CI.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one page: a matrix, heat maps.")] = None,
    self_test: Annotated[bool, typer.Option("--self-test", help="Plant known faults; all must be caught.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Show subjects and checks, run nothing.")] = False,
) -> None:
    """Prove or disprove anybody's attention: forward and backward against a float64 truth, and laws that need none.

    Exit status: 0 all right, 1 something is wrong, 2 usage or a stale waiver, 3 nothing ran, or not everything in time.
    """
    console = Console()
    writers = [(writable(p, f"--{w}"), w) for p, w in ((json, "json"), (junit, "junit"), (html, "html"))]
    if html is not None and (why := unavailable()):
        raise typer.BadParameter(why, param_hint="--html")
    if self_test:
        raise typer.Exit(_self_test(console, json, only))
    choice = Choice(_one(group, "--group", GROUPS), tuple(case or ()), only, seed, _each(dtype, "--dtype", DTYPES))
    plan = _plan(subjects, device_here(device), choice, _one(layout, "--layout", LAYOUTS), _claims(claims))
    if list_only:
        _list(console, plan)
        return
    options = _repeated(layout, claims)
    manner = Manner(device, jobs, timeout, limit, seed, options, _waivers(waive), shrink)
    with Progress(console) as progress:
        report = run(plan, manner, " ".join(["ringtrue", *sys.argv[1:]]), progress.on_outcome)
    print_report(report, console)
    for path, word in writers:
        if path is not None:
            path.write_text(WRITERS[word](report), "utf-8")
            say(console, f"written: {path}")
    raise typer.Exit(report.exit_code)


def _repeated(layout: str, claims: Path | None) -> str:
    """What a replay line says of a function again."""
    words = [f"--layout {layout}"] if layout != "bshd" else []
    return " ".join([*words, *([f"--claims {shlex.quote(str(claims))}"] if claims else [])])


def _one(value: str, option: str, valid: tuple[str, ...]) -> str:
    return one_of(option, value, valid)


def _each(values: list[str] | None, option: str, valid: Iterable[str]) -> tuple[str, ...]:
    return tuple(one_of(option, value, tuple(valid)) for value in values or ())


def _plan(subjects: list[str] | None, device: str, choice: Choice, layout: str, claims: Says | None) -> Plan:
    if not subjects:
        raise typer.BadParameter(f"name one: {', '.join(FAMILIES)}, or package.module:function", param_hint="SUBJECT")
    if (here := str(Path.cwd())) not in sys.path:  # for package.module:function; worker processes inherit the path
        sys.path.insert(0, here)
    try:
        plan = planned(subjects, device, choice, layout=layout, claims=claims)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="SUBJECT, --case" if choice.cases else "SUBJECT") from error
    if not plan.total:
        raise typer.BadParameter(f"no check of {choice.group} has an id like {choice.only!r}", param_hint="--only")
    return plan


def _claims(path: Path | None) -> Says | None:
    try:
        return None if path is None else read_claims(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--claims") from error


def _waivers(path: Path | None) -> tuple[Waiver, ...]:
    try:
        return () if path is None else tuple(read_waivers(path))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--waive") from error


def _self_test(console: Console, json: Path | None, only: str) -> int:
    from .selftest import self_test

    return self_test(console, json, only)


def _list(console: Console, plan: Plan) -> None:
    for one in plan.work:
        say(console, f"{one.ask.name}: {len(one.checks)} checks  {plan.subjects[one.ask.name].unavailable()}".rstrip())
        for check in one.checks:
            say(console, f"  {check.id}")
