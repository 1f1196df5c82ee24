"""Write the support table of README.md from what the backends claim: `python docs/support.py`.

It says nothing about the machine it is written on; `ringtrue backends` does. tests/test_support.py fails when README
and claims differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import ringtrue as rt
from ringtrue.cli import claims

README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- support: written by docs/support.py -->\n"
END = "<!-- end of support -->\n"
DEVICES = {"cpu": "CPU", "cuda": "CUDA"}


def table(supports: Iterable[rt.Support]) -> str:
    """A column a backend (devices with the same claims share one), best first for `auto`; a row a question."""
    columns = claims.columns(supports, join=True)
    rows = [
        ["", *(f"`{column.name}`" for column in columns)],
        ["--"] * (1 + len(columns)),
        ["what it is", *(column.supports[0].summary for column in columns)],
        ["devices", *(", ".join(DEVICES.get(d, d) for d in column.devices) for column in columns)],
        *(
            [question, *(_marked(column.cells[i]) for column in columns)]
            for i, question in enumerate(map(_marked, claims.rows()))
        ),
    ]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def written(text: str, supports: Iterable[rt.Support]) -> str:
    """The text of README.md with the table between its two markers replaced. ValueError without exactly one of each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md has not exactly one of each marker: {BEGIN!r}, {END!r}")
    before, rest = text.split(BEGIN)
    return before + BEGIN + table(supports) + END + rest.split(END)[1]


def _marked(cell: str) -> str:
    """Names of the library as code."""
    for name in (*claims.MASKS.values(), "backend_options"):
        if name in rt.__all__ or name == "backend_options":
            cell = cell.replace(name, f"`{name}`")
    return cell


if __name__ == "__main__":
    README.write_text(written(README.read_text("utf-8"), rt.backends()), "utf-8")
