"""`ringtrue backends`: what every backend claims on every kind of device, and whether it can run here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import ringtrue as rt

from . import claims
from .output import as_json, reason, say, table

LABEL = 32  # columns of the terminal that the questions take


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
    """A column a backend and device, best first, in as many tables as the width asks for; then why some cannot run."""
    columns = claims.columns(supports)
    width = max(len(column.name) for column in columns) + 3  # and what a table puts between two
    fit = max(1, (console.width - LABEL) // width)
    for start in range(0, len(columns), fit):
        console.print(_grid(columns[start : start + fit], width - 3))
    say(console, "\nWhat kernels lack and the library adds (mask forms, causal offsets, grouped heads) is included.")
    for support in supports:
        if support.unavailable is not None:
            say(console, f"{support.name} on {support.device} cannot run here: {support.unavailable}")


def _grid(columns: Sequence[claims.Column], width: int) -> Table:
    grid = table("", *(f"{column.name}\n{column.devices[0]}" for column in columns))
    for index, column in enumerate(grid.columns):
        column.no_wrap, column.justify, column.width = False, "left", width if index else LABEL - 2
    grid.add_row("can run here", *(Text("no", "yellow") if _absent(c) else Text("yes", "green") for c in columns))
    for index, question in enumerate(claims.rows()):
        grid.add_row(question, *(column.cells[index] for column in columns))
    return grid


def _absent(column: claims.Column) -> bool:
    return column.supports[0].unavailable is not None


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
