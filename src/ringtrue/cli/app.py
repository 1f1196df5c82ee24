"""The typer application: one command a line."""

from __future__ import annotations

import typer

from .demo.command import demo

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(demo)


@app.callback()
def ringtrue() -> None:
    """One attention call for PyTorch whose gradients are proven."""
