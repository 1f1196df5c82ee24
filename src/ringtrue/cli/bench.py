"""`ringtrue bench pair` and `ringtrue bench overhead`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text

from ..bench import overhead as overheads
from ..bench import pair as pairs
from ..bench.environment import environment
from ..bench.timing import Times
from .options import DTYPES, bshd, device_here, one_of
from .output import say, table, writable, write

NEVER_RAN = 3
SHAPES = {"cuda": ("1,4608,24,128", "1,16384,24,128"), "cpu": ("1,512,4,64",)}
DEFAULTS = "; ".join(f"{' and '.join(shapes)} on {device}" for device, shapes in SHAPES.items())

bench = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure what our own layers cost.")

Json = Annotated[Path | None, typer.Option(help="Write all numbers to this file, with the versions they belong to.")]
Commit = Annotated[str, typer.Option(help="ringtrue's commit, for the file, where git cannot tell.")]


@bench.command()
def pair(
    shape: Annotated[list[str] | None, typer.Option(help=f"B,S,H,D; may be repeated. Default: {DEFAULTS}.")] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    backend: Annotated[list[str] | None, typer.Option(help="May be repeated; default: all that can be.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Measurements of each side.")] = 50,
    json: Json = None,
    commit: Commit = "",
) -> None:
    """Time every native backend against the same kernel called through torch, on the same tensors, in turn.

    Exit 0: measured, whatever the figures. 2: bad usage. 3: nothing asked for could be measured.
    """
    device_here(device)
    shapes = [bshd("--shape", text) for text in shape or SHAPES[device]]
    if any(size == 0 for sizes in shapes for size in sizes):
        raise typer.BadParameter("sizes are at least 1", param_hint="--shape")
    kind = getattr(torch, one_of("--dtype", dtype, DTYPES))
    known = pairs.backends(device)
    asked = [one_of("--backend", name.removeprefix("_"), known) for name in backend or known]
    json, console = writable(json), Console(soft_wrap=False)
    skipped = {name: known[name] for name in asked if known[name]}
    measured: list[pairs.Measured] = []
    for name in (name for name in asked if name not in skipped):
        say(console, f"measuring {name} ...")
        try:
            measured += pairs.compare(name, shapes, kind, device, repetitions)
        except (RuntimeError, NotImplementedError) as error:  # torch says so when its kernel cannot take a call
            skipped[name] = f"{type(error).__name__}: {error}"
    _show_pairs(measured, skipped, dtype, device, console)
    if json is not None:
        settings = {"dtype": dtype, "device": device, "repetitions": repetitions}
        figures = {"measured": [_pair_figures(m) for m in measured], "not_measured": skipped}
        write({"versions": environment(device, commit), "settings": settings, **figures}, json, console)
    raise typer.Exit(0 if measured else NEVER_RAN)


@bench.command()
def overhead(
    repetitions: Annotated[int, typer.Option(min=1, help="Measurements of each way.")] = 50,
    json: Json = None,
    commit: Commit = "",
) -> None:
    """Time a call with tiny tensors on a CPU: what is paid beside the kernel, next to diffusers' dispatcher.

    Exit 0: measured, whatever the figures. 2: bad usage. 3: no diffusers to compare with.
    """
    json, console = writable(json), Console(soft_wrap=False)
    found = overheads.measure(repetitions)
    _show_overhead(found, console)
    if json is not None:
        settings = {"shape": overheads.SHAPE, "dtype": "float32", "threads": 1, "repetitions": repetitions}
        versions = environment("cpu", commit)
        write({"versions": versions, "settings": settings, **_overhead_figures(found)}, json, console)
    raise typer.Exit(NEVER_RAN if found.absent else 0)


def _show_pairs(
    measured: list[pairs.Measured], skipped: dict[str, str], dtype: str, device: str, console: Console
) -> None:
    for sizes in dict.fromkeys(m.shape for m in measured):
        grid = table("", "ringtrue\nms", "torch\nms", "\nratio", "\nspread", "extra\nMB", "torch's\nMB")
        for m in (m for m in measured if m.shape == sizes):
            ours, theirs = m.ours, m.torch
            times = f"{ours.times.median * 1e3:.3f}", f"{theirs.times.median * 1e3:.3f}", f"{m.time_ratio:.3f}"
            spread = f"{max(ours.times.spread, theirs.times.spread):.1%}"
            memory = _megabytes(ours.extra_peak), _megabytes(theirs.extra_peak)
            label = m.backend if m.part == pairs.FORWARD else "  + backward"
            grid.add_row(label, *times, spread, *memory)
        title = (
            f"\n(B,S,H,D) = {sizes}, {dtype}, {device}: ringtrue, and F.scaled_dot_product_attention on the same kernel"
        )
        say(console, Text(title, "bold"))
        console.print(grid)
    if measured:
        say(
            console,
            "\nMedian times; ratio: the median of ringtrue / torch; spread: the middle 80 percent, the wider one.",
        )
        memory_is = "extra MB: what one call adds to the memory allocated, at its peak"
        say(console, memory_is if device == "cuda" else "Memory is not measured on a CPU.")
    for name, why in skipped.items():
        say(console, Text.assemble((name, "yellow"), f" not measured: {why}"))


def _show_overhead(found: overheads.Overhead, console: Console) -> None:
    say(console, Text(f"one call at {overheads.SHAPE}, float32, one CPU thread; microseconds", "bold"))
    heads = [head for part in found.times for head in (part.replace("+", "+\n"), "spread", "ratio")]
    grid = table("", *heads)
    for way in next(iter(found.times.values())):
        cells = []
        for part, times in found.times.items():
            against = found.ratio(part, way)
            said = "" if against is None else f"{against:.2f}"
            cells += [f"{times[way].median * 1e6:.1f}", f"{times[way].spread:.0%}", said]
        grid.add_row(way, *cells)
    console.print(grid)
    for part, target in overheads.TARGETS.items():
        seen = found.ratio(part)
        if seen is not None:
            style = "green" if seen <= target else "red"
            words = Text.assemble(f"{part}: {overheads.OURS} takes ", (f"{seen:.2f} x", style))
            say(console, words.append(f" {overheads.DISPATCHER}; the aim is at most {target} x"))
    if found.absent:
        say(console, Text.assemble((overheads.DISPATCHER, "yellow"), f" not measured: {found.absent}"))


def _pair_figures(m: pairs.Measured) -> dict[str, Any]:
    sides = {"ours": m.ours, "torch": m.torch}
    return {
        "backend": m.backend,
        "shape": m.shape,
        "part": m.part,
        **{name: {**_times(side.times), "extra_peak_bytes": side.extra_peak} for name, side in sides.items()},
        "time_ratio": m.time_ratio,
        "memory_ratio": m.memory_ratio,
    }


def _overhead_figures(found: overheads.Overhead) -> dict[str, Any]:
    parts = {
        part: {way: {**_times(t), "ratio": found.ratio(part, way)} for way, t in times.items()}
        for part, times in found.times.items()
    }
    return {"parts": parts, "targets": overheads.TARGETS, "not_measured": found.absent}


def _times(times: Times) -> dict[str, Any]:
    return {"median_s": times.median, "spread": times.spread, "calls": times.calls, "seconds": times.seconds}


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"
