"""Write the support table of README.md, docs/backends.md and docs/faults.md: `python docs/support.py`.

They are what the backends claim and what is known of their faults, and say nothing about the machine they are written
on; `ringtrue backends` does. tests/test_support.py fails when one of them differs from claims or faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import ringtrue as rt
from ringtrue.backends import REGISTRY
from ringtrue.cli import claims
from ringtrue.edge import widened
from ringtrue.faults import FAULTS
from ringtrue.order import ROWS, Row

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN = "<!-- support: written by docs/support.py -->\n"
END = "<!-- end of support -->\n"
BACKENDS_PAGE = ROOT / "docs" / "backends.md"
BACKENDS_HEAD = """# What every backend claims

Written by docs/support.py from the claims in `src/ringtrue/backends/` and the notes in `docs/backends/`; what kernels
lack and the library adds (mask forms, causal offsets, grouped heads, head dims) is included. The tests hold every claim
on every device they run on. **verified** says how the kernel itself was proven: on a named GPU (a page of
`docs/verified/`), in every run of the tests, or not; "glue, with a stand-in" means that only our code around it was,
with a module that has the kernel's signatures and computes with another one. `ringtrue backends` says what can run on
your machine.
"""
AUTO_HEAD = """
## auto

`backend="auto"`, the default, takes the first name of an order that fits the call and has a backward. The orders are
data (`src/ringtrue/order.py`), each taken from measurements: of several rows that are for a call the first holds. A
name that is not installed is passed over, and a package that is broken costs its place alone; an optional package is
imported for calls that its claims take, never for others. `explain()` and `ringtrue explain` say which order it was and
where that comes from. Under context parallelism the order is that of rank 0, and all ranks take the first that fits
everywhere. Where nothing is exchanged (`lengths="equal"`, declared lengths) and in compiled code on one device it is
the order of long calls without a mask, so that it hangs on nothing that may differ (all ranks have the same packages,
by contract, where nothing is exchanged).

`ringtrue tune` measures every backend that fits on your machine, forward with backward, over a few shapes (`--seq`,
`--heads`, `--head-dim`, `--dtype`, `--causal`), judges each by the audit's rule before it is timed, and remembers the
order in a small file: `ringtrue/tuned.json` in the user's cache folder (`XDG_CACHE_HOME`), or where `RINGTRUE_TUNED`
says; `RINGTRUE_TUNED=off` switches it off. Eager calls without a tensor mask, padding or segments whose lengths and
head dim are within a factor of 4 of a measured shape, of the same dtype and causal alike, take its order, with what
else is declared behind it; what was wrong here is left out, what raised comes last, and kernels that may be downloaded
are not measured. The file is keyed by the device and the versions of ringtrue, torch, cuDNN and every package that a
backend needs: with others it is not used. A file that cannot be read is not used either, with one warning. `explain`
tells all of this. Ranks may have different files: that of rank 0 counts, and none where nothing is exchanged (under
`parallelize`, too). Times within 3 % of the fastest count as equal.

| device | calls | order | measured on |
| -- | -- | -- | -- |
"""
NOTES = ROOT / "docs" / "backends"  # <backend>.md: what stands before that backend's section, by hand
FAULTS_PAGE = ROOT / "docs" / "faults.md"
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
DEVICES = {"cpu": "CPU", "cuda": "CUDA", "npu": "NPU", "xla": "XLA"}


def declared() -> tuple[rt.Support, ...]:
    """Every backend with the claims of its newest release, whichever is installed here."""
    whole = {(b.name, device): widened(pair.claims) for b in REGISTRY for device, pair in b.pairs.items()}
    return tuple(replace(found, claims=whole[found.name, found.device]) for found in rt.backends())


def table(supports: Iterable[rt.Support]) -> str:
    """A row a backend and what it claims (devices with the same claims share one), in a few words."""
    rows = [["", "what it is", "devices", "verified", "dtypes", "head dims", "masks", "trains", "ring", "also"]]
    rows.append(["--"] * len(rows[0]))
    for column in claims.columns(supports, join=True):
        said = claims.brief(column.supports[0].claims)
        rows.append(
            [
                f"`{column.name}`",
                column.supports[0].summary,
                ", ".join(_device(support) for support in column.supports),
                _each(column.supports),
                said.dtypes, said.head_dims, _marked(said.masks), said.trains, said.ring, said.also,
            ]
        )  # fmt: skip
    return _rows(rows)


def page(supports: Iterable[rt.Support]) -> str:
    """docs/backends.md: every question to every backend, a section a backend, a column a device."""
    groups: dict[str, list[rt.Support]] = {}
    for support in supports:
        groups.setdefault(support.name, []).append(support)
    head = BACKENDS_HEAD + AUTO_HEAD + _rows(_order(row) for row in ROWS)
    return head + "".join(_section(name, group) for name, group in groups.items())


def _order(row: Row) -> Sequence[str]:
    """A row of the declared order, in words."""
    gpu = "" if row.capability is None else f" {row.capability[0]}.{row.capability[1]}"
    kinds = (
        f"from {row.at_least:,} weights a head on" if row.at_least else "",
        {None: "", True: "causal", False: "not causal"}[row.causal],
        {None: "", True: "with a mask", False: "without a mask"}[row.masked],
    )
    page = row.page.removeprefix("docs/")
    names = ", ".join(f"`{name}`" for name in row.names)
    return (
        DEVICES.get(row.device, row.device) + gpu,
        ", ".join(filter(None, kinds)) or "all",
        names,
        f"[{row.on}]({page})",
    )


def _section(name: str, supports: Sequence[rt.Support]) -> str:
    columns = claims.columns(supports)
    rows = [
        ["", *(DEVICES.get(support.device, support.device) for support in supports)],
        ["--"] * (1 + len(supports)),
        ["verified", *(_verified(support, "verified/") for support in supports)],
        *(
            [question, *(_marked(column.cells[i]) for column in columns)]
            for i, question in enumerate(map(_marked, claims.rows()))
        ),
    ]
    notes = NOTES / f"{name}.md"
    before = "\n" + notes.read_text("utf-8").strip() + "\n" if notes.is_file() else ""
    needs = "".join(f"\nNeeds `{package.module}`: {package.install}.\n" for package in supports[0].packages)
    return f"{before}\n## {name}\n\n{supports[0].summary}\n{needs}\n{_rows(rows)}"


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


def _device(support: rt.Support) -> str:
    """Its name, and which GPUs where not all of them will do."""
    which = claims.capability(support.claims)
    return DEVICES.get(support.device, support.device) + ("" if which == "any" else f" {which}")


def _each(supports: Sequence[rt.Support]) -> str:
    """How each device's kernel was proven; devices are named where the answers differ."""
    said = [_verified(support, "docs/verified/") for support in supports]
    if len(set(said)) == 1:
        return said[0]
    return "; ".join(f"{DEVICES.get(s.device, s.device)} {words}" for s, words in zip(supports, said, strict=True))


def _verified(support: rt.Support, folder: str) -> str:
    """How it was proven, with a link to the page; `folder` is docs/verified as seen from the page that is written."""
    said, path = claims.verified(support), support.verified
    return f"[{said}]({folder}{path.removeprefix('docs/verified/')})" if path.startswith("docs/verified/") else said


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _marked(cell: str) -> str:
    """Names of the library as code."""
    for name in (*claims.MASKS.values(), "backend_options"):
        if name in rt.__all__ or name == "backend_options":
            cell = cell.replace(name, f"`{name}`")
    return cell


if __name__ == "__main__":
    FAULTS_PAGE.write_text(faults_page(), "utf-8")
    BACKENDS_PAGE.write_text(page(declared()), "utf-8")
    README.write_text(written(README.read_text("utf-8"), declared()), "utf-8")
