"""Shows how far an audit is: a bar on a terminal, a line now and then elsewhere; what is wrong at once."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from ...audit.outcome import Outcome
from ..output import say

PAUSE = 15.0  # seconds between lines where there is no terminal


class Progress:
    """Told of every outcome: `with Progress(console) as progress: ... progress.on_outcome(outcome, done, total)`."""

    def __init__(self, console: Console, now: Callable[[], float] = monotonic) -> None:
        self.console, self.now, self.start = console, now, now()
        self.said, self.wrong = self.start, 0
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[wrong]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("audit", total=None, wrong="")

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def on_outcome(self, outcome: Outcome, done: int, total: int) -> None:
        """One more is done."""
        self.wrong += outcome.bad
        wrong = f"{self.wrong} wrong" if self.wrong else ""
        if outcome.bad:
            say(self.console, Text.assemble(("✗ ", "red"), f"{outcome.subject}  {outcome.check}  {outcome.verdict}"))
        self._bars.update(
            self._task, completed=done, total=total, description=outcome.subject, wrong=f"[red]{wrong}[/]"
        )
        if not self.console.is_terminal and self.now() - self.said >= PAUSE:
            self.said = self.now()
            share = ", ".join(filter(None, (f"{done} of {total} checks", wrong)))
            say(self.console, f"[{self.now() - self.start:5.0f} s] {outcome.subject}: {share}")
