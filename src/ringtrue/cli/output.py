"""What every command prints and writes alike."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import ringtrue as rt


def say(console: Console, text: str | Text) -> None:
    """A paragraph: wrapped on a terminal, one line elsewhere."""
    console.print(text, soft_wrap=not console.is_terminal, highlight=False, markup=False)


def table(*columns: str) -> Table:
    """A table without borders; every column but the first is right-aligned."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left", no_wrap=True)
    return made


def as_json(value: Any) -> str:
    """Strict JSON: what is not finite is written as a string."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def write(value: Any, path: Path, console: Console) -> None:
    """Write JSON to a file and say where it is."""
    path.write_text(as_json(value) + "\n", "utf-8")
    say(console, f"written: {path}")


def writable(path: Path | None, option: str = "--json") -> Path | None:
    """The path of a file that can be written, or bad usage: found out before anything runs."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file", param_hint=option)
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent}", param_hint=option)
    return path


def reason(why: rt.Reason | None) -> dict[str, str] | None:
    """A reason as plain values."""
    return None if why is None else asdict(why)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
