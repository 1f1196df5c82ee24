"""Shows what the demo is doing: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """Stages that begin, advance and end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.start = monotonic()
        self._names: dict[int, str] = {}
        self._bars = Bars(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, name: str, total: int) -> int:
        """A new stage of `total` parts; returns its number."""
        stage = self._bars.add_task(name, total=total, note="")
        self._names[stage] = name
        self._line(f"{name} ...")
        return stage

    def advance(self, stage: int) -> None:
        """One part is done."""
        self._bars.advance(TaskID(stage))

    def end(self, stage: int, note: str = "") -> None:
        """All parts are done."""
        task = TaskID(stage)
        self._bars.update(task, completed=self._bars.tasks[task].total, note=note)
        self._line(f"{self._names[stage]}: {note or 'done'}")

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            line = f"[{monotonic() - self.start:5.1f} s] {text}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
