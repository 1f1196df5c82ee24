"""`ringtrue backends`: all of them with what can run here and why not, and all that one of them claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import ringtrue as rt

from . import claims
from .options import one_of
from .output import as_json, reason, say, table

WIDE = 400  # columns of what is no terminal: a line a backend, whole
LABEL = 40  # columns of the terminal that the questions take
DEVICES = {"cpu": "CPU", "cuda": "CUDA", "npu": "NPU", "xla": "XLA"}


def backends(
    name: Annotated[str, typer.Argument(help="All that this backend claims; without it a line a backend.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON, always with all claims.")] = False,
) -> None:
    """Show every backend on every kind of device, and whether it can run here; of one that is named, all it claims.

    Runs no kernel and downloads nothing. Exit 0, also where some backends cannot run here. 2: bad usage.
    """
    supports = rt.backends()
    if name:
        known = dict.fromkeys(support.name for support in supports)
        plain = one_of("NAME", name.removeprefix("_"), known)
        supports = tuple(support for support in supports if support.name == plain)
    if json:
        typer.echo(as_json([as_dict(support) for support in supports]))
        return
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDE
    (show_one if name else show)(supports, console)


def show(supports: Sequence[rt.Support], console: Console) -> None:
    """A line a backend and device, those that run here first; the reasons are cut where a terminal ends."""
    grid = table("", "device", "verified", "trains", "ring", "runs here, or why not")
    for column in grid.columns:
        column.justify = "left"
    grid.columns[-1].overflow = "ellipsis"
    for support in sorted(supports, key=lambda support: support.unavailable is not None):
        said, why = claims.brief(support.claims), support.unavailable
        here = Text("yes", "green") if why is None else Text(f"[{why.code}] {why.text}", "yellow")
        device = DEVICES.get(support.device, support.device)
        grid.add_row(support.name, device, claims.verified(support), said.trains, said.ring, here)
    console.print(grid)
    say(console, "\nverified: how the kernel itself was proven, here or on other machines (docs/verified).")
    say(console, "trains: gives gradients. ring: can be a step of a ring; every backend goes under Ulysses.")
    say(
        console,
        "All that one claims, and the whole reason: ringtrue backends NAME. What is installed: ringtrue doctor.",
    )


def show_one(supports: Sequence[rt.Support], console: Console) -> None:
    """One backend: a column a device, a row a question; then why it cannot run here."""
    columns = claims.columns(supports)
    say(console, Text.assemble((supports[0].name, "bold"), f": {supports[0].summary}"))
    grid = table("", *(DEVICES.get(column.devices[0], column.devices[0]) for column in columns))
    for index, column in enumerate(grid.columns):
        column.no_wrap, column.justify = False, "left"
        column.max_width = None if index else LABEL
    here = (Text("yes", "green") if s.unavailable is None else Text("no", "yellow") for s in supports)
    grid.add_row("runs here", *here)
    grid.add_row("verified", *(claims.verified(support) for support in supports))
    for index, question in enumerate(claims.rows()):
        grid.add_row(question, *(column.cells[index] for column in columns))
    console.print(grid)
    say(console, "\nWhat kernels lack and the library adds (mask forms, causal offsets, grouped heads) is included.")
    for package in supports[0].packages:
        say(console, f"needs {package.module}: {package.install}")
    for support in supports:
        if support.verified.startswith("docs/"):
            say(console, f"verified on {support.device}: {support.verified}")
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
        "verified": support.verified,
        "packages": [asdict(package) for package in support.packages],
        "fetches": support.fetches,
        "claims": claims.plain(support.claims),
    }
