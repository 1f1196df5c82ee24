"""`ringtrue tune`: measure every backend that fits, on this machine, and remember it for `auto`."""

from __future__ import annotations

import datetime
import math
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

import ringtrue as rt

from ..bench import tune as tunes
from .options import DTYPES, device_here, one_of
from .output import as_json, say, table

WRONG, NEVER_RAN = 1, 3
LENGTHS = {"cuda": (1024, 4608, 16384), "cpu": (128, 512)}
DEFAULTS = {"cuda": (24, 128, "bfloat16"), "cpu": (4, 64, "float32")}
PRETTY = {"wrong": "bold red", "error": "red", "refused": "yellow"}


def tune(
    seq: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens; may be repeated. Default: 1024, 4608 and 16384 on cuda; 128 and 512 on cpu."),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Default: 24 on cuda, 4 on cpu.")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(min=1, help="May be repeated. Default: 128 on cuda, 64 on cpu.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=", ".join(DTYPES) + "; may be repeated. Default: bfloat16 on cuda, float32 on cpu."),
    ] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--not-causal", help="Default: both.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = "",
    seconds: Annotated[
        float, typer.Option(min=0.001, help="What measuring one backend at one shape may take, about.")
    ] = 0.5,
    without: Annotated[list[str] | None, typer.Option(help="A backend to leave alone; may be repeated.")] = None,
    remember: Annotated[
        bool, typer.Option("--remember/--print-only", help="Write the file that auto reads, or print only.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Judge and time every backend that fits, forward with backward, and remember the order for auto on this machine.

    The file is keyed by device and versions; RINGTRUE_TUNED names another one, or is off.

    Exit 0: measured. 1: measured, and a backend was wrong (it is left out). 2: bad usage. 3: nothing could be measured,
    or not remembered.
    """  # fmt: skip
    device = device_here(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usual_heads, usual_dim, usual_dtype = DEFAULTS[device]
    kinds = [getattr(torch, one_of("--dtype", name, DTYPES)) for name in dtype or [usual_dtype]]
    shapes = [
        tunes.Shape(tokens, heads or usual_heads, dim, kind, is_causal)
        for kind in kinds
        for dim in head_dim or [usual_dim]
        for is_causal in ((False, True) if causal is None else (causal,))
        for tokens in seq or LENGTHS[device]
    ]
    known = [support.name for support in rt.backends()]
    left_out = {one_of("--without", name.removeprefix("_"), known) for name in without or ()}
    console = Console(soft_wrap=False, quiet=json)
    found = _measured(shapes, device, seconds, left_out, console)
    outcomes = [outcome for each in found.values() for outcome in each]
    timed = any(outcome.seconds is not None for outcome in outcomes)
    kept = _remember(found, device, console) if remember and timed else ""
    if json:
        typer.echo(as_json(as_dict(found, device, kept)))
    if not timed or (remember and not kept):
        raise typer.Exit(NEVER_RAN)
    raise typer.Exit(WRONG if any(outcome.state == "wrong" for outcome in outcomes) else 0)


Figures = dict[tunes.Shape, tuple[tunes.Outcome, ...]]


def _measured(shapes: list[tunes.Shape], device: str, seconds: float, without: set[str], console: Console) -> Figures:
    """Every shape in turn, shown as it comes; exit 3 where the device is lost."""
    found: Figures = {}
    for shape in shapes:
        say(console, Text(f"\n{shape}", "bold"))
        try:
            found[shape] = tunes.measure(shape, device, seconds, without)
        except tunes.DeviceLostError as error:
            name, said = error.args
            typer.echo(f"{name} failed, and no kernel can run in this process any more: {said}", err=True)
            typer.echo(f"nothing is remembered; leave it out: ringtrue tune --without {name}", err=True)
            raise typer.Exit(NEVER_RAN) from error
        show(found[shape], console)
    return found


def show(outcomes: tuple[tunes.Outcome, ...], console: Console) -> None:
    """A line a backend, the fastest first, and why the others have no time."""
    grid = table("", "ms", "x the fastest")
    timed = [outcome for outcome in outcomes if outcome.seconds is not None]
    for outcome in timed:
        assert outcome.seconds is not None
        ratio = outcome.seconds / min(each.seconds or math.inf for each in timed)
        grid.add_row(outcome.backend, f"{outcome.seconds * 1e3:.3f}", f"{ratio:.2f}")
    if timed:
        console.print(grid)
    for outcome in outcomes:
        if outcome.seconds is None and outcome.state != "refused":
            say(
                console,
                Text.assemble(
                    (f"{outcome.backend}: {outcome.state}", PRETTY.get(outcome.state, "")), f", {outcome.why}"
                ),
            )
    refused = [outcome.backend for outcome in outcomes if outcome.state == "refused"]
    if refused:
        say(console, f"cannot run it here (ringtrue explain says why): {', '.join(refused)}")


def _remember(found: Figures, device: str, console: Console) -> str:
    """The path of the file; "" where nothing was written."""
    path = rt.tuned.place()
    if path is None:
        say(console, f"\nnot remembered: {rt.tuned.VARIABLE} is off, or there is no home")
        return ""
    measured = [tunes.remembered(shape, each) for shape, each in found.items()]
    try:
        readable = rt.tuned.remember(
            path, device, datetime.date.today().isoformat(), [m for m in measured if m.order or m.wrong]
        )
    except OSError as error:
        say(console, Text(f"\nnot remembered: {path} cannot be written: {error}", "red"))
        return ""
    rt.tuned.forget()
    if not readable:
        say(console, f"\nwhat was in {path} could not be read, and is gone")
    say(
        console,
        f"\nremembered: {path}. auto takes this order here, as explain says; {rt.tuned.VARIABLE}=off switches it off",
    )
    return str(path)


def as_dict(found: Figures, device: str, kept: str) -> dict[str, Any]:
    """The same as plain values, with what it hangs on."""
    return {
        "key": rt.tuned.key(device),
        "remembered": kept,
        "shapes": [
            {
                "tokens": shape.tokens,
                "heads": shape.heads,
                "head_dim": shape.head_dim,
                "dtype": str(shape.dtype).removeprefix("torch."),
                "causal": shape.causal,
                "backends": [vars(outcome) for outcome in outcomes],
            }
            for shape, outcomes in found.items()
        ],
    }
