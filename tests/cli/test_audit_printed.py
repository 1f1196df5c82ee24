"""What `ringtrue audit` prints: a table of counts, every wrong outcome with its numbers, and how far it is."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

import reported
from ringtrue.audit.outcome import Outcome, Report
from ringtrue.cli.audit.printed import print_report
from ringtrue.cli.audit.progress import PAUSE, Progress


def printed(report: Report, width: int = 100, *, terminal: bool = True, most: int = 20) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, no_color=True, _environ={"TERM": "dumb"})
    print_report(report, console, most)
    return file.getvalue().splitlines()


def test_a_wrong_outcome_is_told() -> None:
    report = reported.measured()
    shown = printed(report)
    text = "\n".join(shown)
    assert "✗ test/no-scale  call/length-5/float32  wrong" in text
    assert "    replay: ringtrue audit test/no-scale --case call/length-5/float32" in text
    wrong = [v for o in report.outcomes if o.bad for v in o.quantities if not v.ok]
    assert wrong
    for verdict in wrong:
        assert f"{verdict.quantity:<6}2-norm {verdict.error_2:.2e} (" in text
        assert f"of {verdict.bound_inf:.2e})" in text
    assert shown[-1] == "wrong: 1 of 2 checks that ran, in 1 of 2 subjects (2 s, exit 1)"


def test_a_row_a_subject_with_every_count() -> None:
    rows = [line.split() for line in printed(reported.measured())[:6]]
    assert ["test/right", "1", "·"] in rows
    assert ["test/no-scale", "·", "1"] in rows


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits(width: int) -> None:
    shown = printed(reported.composed(), width)
    assert max(map(len, shown)) <= width
    assert not any(ord(c) < 32 for line in shown for c in line)
    text = " ".join(" ".join(shown).split())
    for word in ("ran though not claimed", "NaN in 3 of 64 places", "dq is what a scale of 1 gives"):
        assert word in text, word


def test_texts_of_strangers_are_no_markup() -> None:
    outcome = Outcome("[bold]x[/bold]", "call/[red]y/float32", "crash", reason="[link=x]boom[/link] [/]")
    text = "\n".join(printed(Report((outcome,)), terminal=False))
    assert "[bold]x[/bold]  call/[red]y/float32  crash" in text
    assert "[link=x]boom[/link] [/]" in text


def several(diagnoses: list[str]) -> Report:
    wrong = next(o for o in reported.composed().outcomes if o.verdict == "wrong")
    return Report(tuple(replace(wrong, check=f"call/{i}/float32", diagnosis=d) for i, d in enumerate(diagnoses)))


def test_one_of_each_kind_is_told_and_the_rest_counted() -> None:
    shown = printed(several(["dq is zero", "dk is zero", "dv is zero", "out is zero", "lse is zero"]), most=3)
    assert sum(line.startswith("✗") for line in shown) == 3
    assert any("2 more; --json and --html have them all" in line for line in shown)


def test_what_is_alike_is_told_once() -> None:
    """Numbers may differ; a second fault is not hidden behind a hundred of the first."""
    shown = printed(several(["dq is 4 times"] * 40 + ["dq is 3.99 times", "dk is zero"]), terminal=False)
    assert sum(line.startswith("✗") for line in shown) == 2
    assert any("40 more like it: call/1/float32, call/2/float32" in line for line in shown)


def test_why_nothing_ran_is_told() -> None:
    report = Report((Outcome("lib/x", "call/gqa/float32", "not run", "lib is not installed"),))
    assert "lib/x: 1 not run: lib is not installed" in printed(report, terminal=False)


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        (("pass", "refused as claimed"), "right: all 1 checks that ran (0 s, exit 0)"),
        (("pass", "waived"), "right: all 2 checks that ran, 1 of them waived (0 s, exit 0)"),
        (("not run", "refused as claimed"), "nothing ran, so nothing is known (0 s, exit 3)"),
        ((), "nothing ran, so nothing is known (0 s, exit 3)"),
    ],
)
def test_the_conclusion(verdicts: tuple[str, ...], words: str) -> None:
    outcomes = tuple(Outcome("s", f"call/{i}/float32", verdict) for i, verdict in enumerate(verdicts))
    assert printed(Report(outcomes))[-1] == words


def test_progress_is_quiet_without_a_terminal() -> None:
    console, seconds = Console(file=io.StringIO(), width=100), [0.0]
    right, wrong = Outcome("s/a", "call/x/float32", "pass"), Outcome("s/b", "call/y/float32", "wrong")
    with Progress(console, lambda: seconds[0]) as progress:
        for done in range(1, 31):
            seconds[0] += PAUSE / 10
            progress.on_outcome(wrong if done == 15 else right, done, 30)
    lines = console.file.getvalue().splitlines()
    assert lines == [
        "[   15 s] s/a: 10 of 30 checks",
        "✗ s/b  call/y/float32  wrong",
        "[   30 s] s/a: 20 of 30 checks, 1 wrong",
        "[   45 s] s/a: 30 of 30 checks, 1 wrong",
    ]


def test_progress_is_a_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, _environ={"TERM": "xterm"})
    with Progress(console) as progress:
        progress.on_outcome(Outcome("s/a", "call/x/float32", "crash"), 3, 7)
    text = console.file.getvalue()
    assert "3/7" in text
    assert "1 wrong" in text
    assert "✗" in text
