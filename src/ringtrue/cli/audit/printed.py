"""The printed report: a row a subject, then everything that is wrong, one after the other, then the conclusion."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...audit.judge import Verdict
from ...audit.outcome import (
    BAD,
    INTERRUPTED,
    NOT_RUN,
    NOTHING_RAN_CODE,
    OUT_OF_TIME,
    PASS,
    RIGHT_CODE,
    VERDICTS,
    Outcome,
    Report,
)
from ..output import say

_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # an error's text may hold colours of its own
MOST = 20  # kinds of wrong outcomes of one subject that are told, by one each; all are in every written report
_NUMBER = re.compile(r"-?\d[\d.e+-]*")


def print_report(report: Report, console: Console, most: int = MOST) -> None:
    """Print the whole report; readable from 80 columns on."""
    console.print(summary(report))
    for name in _names(report):
        kinds = list(alike([o for o in report.outcomes if o.subject == name and o.bad]).values())
        for first, *others in kinds[:most]:
            console.print()
            for line in told(first):
                _line(console, line)
            if others:
                _line(console, Text(f"    and {len(others)} more like it: {_ids(others)}", "dim"))
        if left := sum(map(len, kinds[most:])):
            _line(console, Text(f"\n{name}: {left} more; --json and --html have them all", "yellow"))
        for reason, count in _not_run(report, name).items():
            _line(console, Text(f"\n{name}: {count} not run: {reason}", "yellow"))
    _conclusion(report, console)


def alike(wrong: list[Outcome]) -> dict[tuple[object, ...], list[Outcome]]:
    """Wrong outcomes by what is to be seen of them: the fault named, else the error raised, else law and quantities."""
    kinds: dict[tuple[object, ...], list[Outcome]] = {}
    for o in wrong:
        said = _NUMBER.sub("#", o.diagnosis or ("" if o.quantities else o.reason))
        off = () if said else (o.check.partition("/")[0], *(v.quantity for v in o.quantities if not v.ok))
        kinds.setdefault((o.verdict, said, off), []).append(o)
    return kinds


def _ids(outcomes: list[Outcome]) -> str:
    shown = ", ".join(o.check for o in outcomes[:4])
    return f"{shown} …" if outcomes[4:] else shown


def _not_run(report: Report, name: str) -> Counter[str]:
    """Why, where a whole subject did not run, or the audit was ended; what a law has not to ask is in the reports."""
    own = [o for o in report.outcomes if o.subject == name and o.verdict == NOT_RUN]
    whole = all(o.verdict == NOT_RUN for o in report.outcomes if o.subject == name)
    return Counter(o.reason for o in own if whole or o.reason in (OUT_OF_TIME, INTERRUPTED))


def summary(report: Report) -> Table:
    """How many of each verdict; a verdict that nobody got has no column, but for pass and wrong."""
    counts = {name: Counter(o.verdict for o in report.outcomes if o.subject == name) for name in _names(report)}
    shown = [v for v in VERDICTS if v in VERDICTS[:2] or any(c[v] for c in counts.values())]
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    made.add_column("subject", overflow="fold")
    for verdict in shown:
        made.add_column(verdict, justify="right", max_width=11, min_width=5)
    for name, count in counts.items():
        cells = [Text(str(count[v] or "·"), _style(v) if count[v] else "dim") for v in shown]
        made.add_row(Text(name), *cells)
    return made


def told(outcome: Outcome) -> Iterator[Text]:
    """What there is to know of a wrong outcome, line by line; what is indented says how far by its spaces."""
    what = f"{outcome.subject}  {outcome.check}"
    yield Text.assemble(("✗ ", "bold red"), (what, "bold"), (f"  {outcome.verdict}", "red"))
    if outcome.reason:
        yield Text(f"    {outcome.reason}")
    for verdict in outcome.quantities:
        if not verdict.ok:
            yield Text.assemble("    ", _measured(verdict))
    if within := [f"{v.quantity} {v.strain:.2f}" for v in outcome.quantities if v.ok]:
        yield Text(f"    within bounds (share of what is allowed): {', '.join(within)}", "dim")
    if outcome.diagnosis:
        yield Text(f"    {outcome.diagnosis}", "yellow")
    if outcome.replay:
        yield Text(f"    replay: {outcome.replay}", "cyan")


def _measured(v: Verdict) -> Text:
    if v.problem:
        return Text.assemble((f"{v.quantity:<6}", "bold"), v.problem)
    norms = (("2-norm", v.error_2, v.bound_2), ("largest", v.error_inf, v.bound_inf))
    parts = [f"{name} {e:.2e} ({_times(e, b)} of {b:.2e})" for name, e, b in norms]
    return Text.assemble((f"{v.quantity:<6}", "bold"), "   ".join(parts))


def _times(error: float, bound: float) -> str:
    return f"{error / bound:.3g} x" if bound else "beyond all"


def _names(report: Report) -> list[str]:
    return list(dict.fromkeys([*report.subjects, *(o.subject for o in report.outcomes)]))


def _line(console: Console, line: Text) -> None:
    """Indented lines wrap under themselves on a terminal; elsewhere each is one line."""
    line.plain = _UNPRINTABLE.sub("\ufffd", line.plain)
    if console.is_terminal:
        left = len(line.plain) - len(line.plain.lstrip(" "))
        console.print(Padding(line[left:], (0, 0, 0, left)), highlight=False)
    else:
        say(console, line)


def _conclusion(report: Report, console: Console) -> None:
    for problem in report.problems:
        say(console, Text(f"waivers: {problem}", "red"))
    style = {RIGHT_CODE: "bold green", NOTHING_RAN_CODE: "bold yellow"}.get(report.exit_code, "bold red")
    end = f" ({report.seconds:.0f} s, exit {report.exit_code})"
    say(console, Text.assemble("\n", (report.headline, style), end))


def _style(verdict: str) -> str:
    return "bold red" if verdict in BAD else "green" if verdict == PASS else "yellow"
