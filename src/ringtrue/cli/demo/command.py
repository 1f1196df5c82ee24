"""`ringtrue demo`: options, checks, exit codes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import ringtrue as rt

from ... import plants
from ..options import DTYPES, backends_here, device_here, one_of
from ..output import say, writable, write
from ..pool import WorkerError
from . import record, report
from .judge import BROKEN, USAGE
from .progress import Progress
from .run import run
from .settings import Mode, Settings, UsageError, parse_modes

INSTALL = 'pip install "ringtrue[cli,diffusers]"'
INTERRUPTED = 130


def demo(
    device: Annotated[str, typer.Option(help="cpu, or cuda: one process a GPU.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "float32",
    backend: Annotated[str, typer.Option(help="A name of ringtrue.backends(), or auto.")] = "auto",
    modes: Annotated[
        str, typer.Option(help="ulyssesU, ringR and UxR (Ulysses degree x ring degree), joined by commas.")
    ] = "ulysses2,ring2,2x2",
    image_tokens: Annotated[int, typer.Option(min=1, help="Any number; it need not divide.")] = 81,
    text_tokens: Annotated[int, typer.Option(min=1, help="Any number; with 1, some ranks hold none.")] = 23,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps (SGD with momentum).")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data.")] = 0,
    plant: Annotated[
        str, typer.Option(help="Run a historical fault under every mode: " + ", ".join(plants.PLANTS) + ".")
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Give up after so many seconds without news.")] = 180,
) -> None:
    """Train a small real Flux in one process and under context parallelism, and compare every gradient.

    Exit 0: every mode is within bounds. 1: a number is out of bounds.
    2: bad usage. 3: something asked for never ran. 4: a process failed.
    """
    settings = Settings(
        modes=_modes(modes),
        device=device_here(device),
        dtype=one_of("--dtype", dtype, DTYPES),
        backend=one_of("--backend", backend.removeprefix("_"), ("auto", *backends_here(device))),
        image_tokens=image_tokens,
        text_tokens=text_tokens,
        steps=steps,
        seed=seed,
        plant=one_of("--plant", plant, plants.PLANTS) if plant else None,
        timeout=timeout,
    )
    json = writable(json)
    console = Console(soft_wrap=False)
    if importlib.util.find_spec("diffusers") is None:
        typer.echo(f"ringtrue demo needs diffusers: {INSTALL}", err=True)
        raise typer.Exit(USAGE)
    raise typer.Exit(perform(settings, json, console))


def perform(settings: Settings, json: Path | None, console: Console) -> int:
    """Run, print, write -> exit code."""
    planted = f"with a planted fault, {settings.plant}" if settings.plant else "with the gradients of one process?"
    say(console, f"ringtrue {rt.__version__} demo: a real Flux trains under context parallelism, {planted}")
    try:
        with Progress(console) as progress:
            found = run(settings, progress)
    except WorkerError as error:
        typer.echo(f"the demo could not be finished\n{error}", err=True)
        return BROKEN
    except KeyboardInterrupt:
        typer.echo("interrupted; all processes are ended", err=True)
        return INTERRUPTED
    report.show(found, console)
    if json is not None:
        write(record.as_dict(found), json, console)
    return found.exit_code


def _modes(text: str) -> tuple[Mode, ...]:
    try:
        return parse_modes(text)
    except UsageError as error:
        raise typer.BadParameter(str(error), param_hint="--modes") from error
