"""Write the support table of README.md from what the backends claim, and docs/faults.md: `python docs/support.py`.

They say nothing about the machine they are written on; `ringtrue backends` does. tests/test_support.py fails when one
of them differs from claims or faults.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import ringtrue as rt
from ringtrue.cli import claims
from ringtrue.faults import FAULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- support: written by docs/support.py -->\n"
END = "<!-- end of support -->\n"
FAULTS_PAGE = README.parent / "docs" / "faults.md"
FAULTS_HEAD = """# Known faults of the kernels we call

Written by docs/support.py from `src/ringtrue/faults.py`. **avoid**: the call is put so that the fault cannot show.
**pad**: the call is made larger, and the rest cut off. **guard**: the result is checked once per signature against
another kernel, or with dropout by laws that gradients keep whatever the mask. **refuse**: a claim leaves it out. A link
goes to the report, or to the nearest one where we know of none. On a GPU `tests/test_faults_cuda.py` shows that the
faults are still there without what is done about them.

torch's cuDNN fault in fifteen lines: [cudnn_backward_cache.py](cudnn_backward_cache.py).

| backend | device | seen on | what happens | what is done, and where | |
| -- | -- | -- | -- | -- | -- |
"""
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


def faults_page() -> str:
    """docs/faults.md: every known fault of a kernel, and what is done about it."""
    rows = [
        f"| `{f.backend}` | {DEVICES[f.device]} | {f.seen} | {f.what} "
        f"| {f.action}: `{f.where}` | [report]({f.link}) |\n"
        for f in FAULTS
    ]
    return FAULTS_HEAD + "".join(rows)


def _marked(cell: str) -> str:
    """Names of the library as code."""
    for name in (*claims.MASKS.values(), "backend_options"):
        if name in rt.__all__ or name == "backend_options":
            cell = cell.replace(name, f"`{name}`")
    return cell


if __name__ == "__main__":
    FAULTS_PAGE.write_text(faults_page(), "utf-8")
    README.write_text(written(README.read_text("utf-8"), rt.backends()), "utf-8")
