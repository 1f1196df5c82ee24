"""`ringtrue backends`: what every backend claims on every kind of device, and whether it can run here."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import ringtrue as rt

from . import claims
from .output import as_json, reason, say, table


def backends(json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False) -> None:
    """Show what every backend claims on every kind of device, and whether it can run here; runs no kernel.

    Exit 0, also where some backends cannot run here.
    """
    supports = rt.backends()
    if json:
        typer.echo(as_json([as_dict(support) for support in supports]))
        return
    show(supports, Console(soft_wrap=False))


def show(supports: tuple[rt.Support, ...], console: Console) -> None:
    """A table with a column a backend and device, best first, then why some cannot run here."""
    columns = claims.columns(supports)
    grid = table("", *(f"{column.name}\n{column.devices[0]}" for column in columns))
    for column, shown in zip(grid.columns[1:], columns, strict=True):
        column.no_wrap, column.justify, column.overflow, column.min_width = False, "left", "fold", len(shown.name)
    here = (Text("no", "yellow") if c.supports[0].unavailable else Text("yes", "green") for c in columns)
    grid.add_row("can run here", *here)
    for index, question in enumerate(claims.rows()):
        grid.add_row(question, *(column.cells[index] for column in columns))
    console.print(grid)
    say(console, "\nWhat kernels lack and the library adds (mask forms, causal offsets, grouped heads) is included.")
    for support in supports:
        if support.unavailable is not None:
            say(console, f"{support.name} on {support.device} cannot run here: {support.unavailable}")


def as_dict(support: rt.Support) -> dict[str, Any]:
    """One backend on one kind of device, as plain values."""
    return {
        "name": support.name,
        "device": support.device,
        "summary": support.summary,
        "can_run_here": support.unavailable is None,
        "unavailable": reason(support.unavailable),
        "claims": claims.plain(support.claims),
    }
