"""`ringtrue doctor`: what is installed, what of it is broken and why, and what mends it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .installed import VERSION, Installed, Part, look
from .output import as_json, reason, say, table

BROKEN = 1
WIDE = 200  # columns of what is no terminal


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Show what is installed, what of it is broken and why, and the one command that mends it.

    Imports every optional package, runs no kernel, downloads nothing. Exit 0: nothing that is installed is broken. 1:
    something is (what is not installed is not broken). 2: bad usage.
    """
    found = look()
    if json:
        typer.echo(as_json(as_dict(found)))
    else:
        console = Console(soft_wrap=False)
        if not console.is_terminal:
            console.width = WIDE
        show(found, console)
    raise typer.Exit(BROKEN if found.troubles else 0)


def show(found: Installed, console: Console) -> None:
    """The versions, a line a package, what is broken, and what was seen to work together."""
    names = {part.name for part in found.parts}
    for name, version in found.versions.items():
        if name not in names:
            say(console, f"{name} {version}")
    grid = table("\npackage", "\nversion", "\nmodule", "\nstate", "\nneeded by")
    for column in grid.columns:
        column.justify = "left"
    grid.columns[-1].no_wrap = False
    for part in sorted(found.parts, key=lambda part: (state(part) == "not installed", part.name)):
        style = {"works": "green", "broken": "red"}.get(state(part), "")
        grid.add_row(
            part.name, part.version or "-", part.package.module, Text(state(part), style), ", ".join(part.serves)
        )
    console.print(grid)
    for trouble in found.troubles:
        say(
            console,
            Text.assemble("\n", (trouble.name, "bold red"), f" is broken: [{trouble.why.code}] {trouble.why.text}"),
        )
        for label, seen in (("needs", trouble.why.limit), ("is", trouble.why.value), ("mend it", trouble.why.remedy)):
            if seen:
                say(console, f"  {label}: {seen}")
    if not found.troubles:
        say(console, Text("\nNothing that is installed is broken.", "green"))
    say(console, f"\n{together(found)}")


def together(found: Installed) -> str:
    """How far the versions here are from the nearest that were seen to work together."""
    known, differs = found.nearest, found.nearest.differences(found.versions)
    seen = ", ".join(f"{name} {version}" for name, version in known.versions.items())
    if not differs:
        return f"These versions were seen to work together ({known.what}: {seen}): {known.page}"
    here = ", ".join(f"{name} {mine}, there {theirs}" for name, (mine, theirs) in differs.items())
    return f"Nearest versions that were seen to work together ({known.what}: {seen}): {known.page}. Other here: {here}"


def state(part: Part) -> str:
    """In two words."""
    if part.why is None:
        return "works"
    return "broken" if part.broken else "other release" if part.why.code == VERSION else "not installed"


def as_dict(found: Installed) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "versions": dict(found.versions),
        "packages": [
            {
                "name": part.name,
                "version": part.version,
                "state": state(part),
                "why": reason(part.why),
                "needed_by": part.serves,
                **asdict(part.package),
            }
            for part in found.parts
        ],
        "broken": [{"name": trouble.name, "why": reason(trouble.why)} for trouble in found.troubles],
        "seen_to_work": {
            "page": found.nearest.page,
            "versions": dict(found.nearest.versions),
            "other_here": {name: mine for name, (mine, _) in found.nearest.differences(found.versions).items()},
        },
    }
