"""A report as one page that needs no network: a matrix of checks by subjects, and the details of every cell.

The heat maps are drawn by the page itself as SVG: plotly would add 4.8 MB to every report for coloured rectangles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ringtrue as rt

from ....audit.judge import Verdict
from ....audit.outcome import (
    BAD,
    CLAIMED_BUT_REFUSED,
    CRASH,
    NOT_RUN,
    PASS,
    RAN_UNCLAIMED,
    REFUSED,
    VERDICTS,
    WAIVED,
    WRONG,
    Outcome,
    Report,
)

# a verdict is a sign and a word as well as a colour
SIGNS = {
    PASS: "✓",
    WRONG: "✗",
    CLAIMED_BUT_REFUSED: "⊘",
    RAN_UNCLAIMED: "≠",
    CRASH: "†",
    REFUSED: "–",
    WAIVED: "~",
    NOT_RUN: "·",
}
LAWS = {
    "truth": "the truth itself, by finite differences",
    "call": "calls against the float64 truth",
    "chunk": "parts of the keys, merged",
    "order": "after other calls of the same shapes",
    "ranks": "over several processes",
    "heads": "heads in another order",
    "samples": "a sample on its own",
    "linear": "out is linear in value",
    "token": "one key changed: who moves",
    "twice": "the same call again",
    "growth": "nothing is kept alive",
    "poison": "fresh memory full of NaN",
}


@dataclass(frozen=True)
class Law:
    """Rows of the matrix that belong together; a row is a check, a cell a subject (None: not put to it)."""

    name: str
    told: str
    rows: tuple[tuple[str, str, tuple[tuple[int, Outcome] | None, ...]], ...]


def unavailable() -> str:
    """Why no page can be written here; empty where it can."""
    why = rt.optional.why_not(rt.optional.Package("jinja2", "pip install 'ringtrue[report]'", at_least="3.1"))
    return "" if why is None else str(why)


def to_html(report: Report) -> str:
    """The page. ImportError where jinja2 is missing (`unavailable` says so beforehand)."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("ringtrue.cli.audit.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    counts = Counter(outcome.verdict for outcome in report.outcomes)
    subjects = list(dict.fromkeys([*report.subjects, *(outcome.subject for outcome in report.outcomes)]))
    return pages.get_template("report.html.j2").render(
        report=report,
        subjects=[(name, report.subjects.get(name, ""), _tally(report, name)) for name in subjects],
        laws=list(_laws(report, subjects)),
        legend=[(verdict, SIGNS[verdict], slug(verdict), counts[verdict]) for verdict in VERDICTS],
        slugs={verdict: slug(verdict) for verdict in VERDICTS},
        signs=SIGNS,
        bad=sum(counts[verdict] for verdict in BAD),
        details=[_detail(outcome) for outcome in report.outcomes],
    )


def slug(verdict: str) -> str:
    """A verdict as the name of a CSS class."""
    return verdict.replace(" ", "-")


def _laws(report: Report, subjects: list[str]) -> Iterable[Law]:
    """In the order in which they ran; a law with something wrong keeps its place."""
    cells: dict[str, dict[str, dict[str, tuple[int, Outcome]]]] = {}
    for index, outcome in enumerate(report.outcomes):
        law = outcome.check.split("/", 1)[0]
        cells.setdefault(law, {}).setdefault(outcome.check, {})[outcome.subject] = (index, outcome)
    for law, rows in cells.items():
        yield Law(
            law,
            LAWS.get(law, ""),
            tuple(
                (check, check.removeprefix(f"{law}/"), tuple(found.get(name) for name in subjects))
                for check, found in rows.items()
            ),
        )


def _tally(report: Report, subject: str) -> str:
    """How many are wrong, of how many, in words for a column's heading."""
    mine = [outcome for outcome in report.outcomes if outcome.subject == subject]
    bad = sum(outcome.bad for outcome in mine)
    return f"{bad} wrong of {len(mine)}"


def _detail(outcome: Outcome) -> dict[str, Any]:
    """What the page shows of a cell; empty texts are left out, since there are thousands of cells."""
    found = {
        "subject": outcome.subject,
        "check": outcome.check,
        "verdict": outcome.verdict,
        "sign": SIGNS[outcome.verdict],
        "slug": slug(outcome.verdict),
        "seconds": f"{outcome.seconds:.2f}",
        "reason": outcome.reason,
        "diagnosis": outcome.diagnosis,
        "replay": outcome.replay,
        "snippet": outcome.snippet,
        "quantities": [
            [v.quantity, v.ok, v.problem or [f"{x:.2e}" for x in _numbers(v)], f"{v.strain:.3g}"]
            for v in outcome.quantities
        ],
        "maps": [
            {"name": m.quantity, "stretch": m.stretch, "values": [[_cell(x) for x in row] for row in m.values]}
            for m in outcome.maps
        ],
    }
    return {key: value for key, value in found.items() if value not in ("", [])}


def _numbers(v: Verdict) -> tuple[float, ...]:
    return v.error_2, v.bound_2, v.error_inf, v.bound_inf


def _cell(x: float) -> float | str:
    """JSON has no word for inf and NaN."""
    return x if x - x == 0 else str(x)
