"""The typer application: one command a line."""

from __future__ import annotations

from typing import Annotated

import typer

import ringtrue as rt

from .audit.command import audit
from .backends import backends
from .bench import bench
from .demo.command import demo
from .doctor import doctor
from .explain import explain
from .tune import tune

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(audit)
app.command()(backends)
app.command()(explain)
app.command()(doctor)
app.command()(tune)
app.add_typer(bench, name="bench")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ringtrue {rt.__version__}")
        raise typer.Exit


@app.callback()
def ringtrue(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """One attention call for PyTorch whose gradients are proven."""
