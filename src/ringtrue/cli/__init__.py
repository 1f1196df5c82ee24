"""The command line: `ringtrue demo`, `backends`, `explain` and `bench`."""

from __future__ import annotations

import sys

NEEDED = ("rich", "typer")


def main() -> None:
    """Entry point. One line and exit 2 when the libraries of the command line are not installed."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        library = (error.name or "").split(".")[0]
        if library not in NEEDED:
            raise
        print(f'ringtrue: the command line needs {library}: pip install "ringtrue[cli,diffusers]"', file=sys.stderr)
        sys.exit(2)
    app()
