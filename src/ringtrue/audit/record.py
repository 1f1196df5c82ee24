"""A report as JSON and back; docs/audit/report.md has the schema. Every measured error is in it, on a pass too."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from .outcome import VERDICTS, Outcome, Report

SCHEMA = 1  # raised when a field goes or changes its meaning; new fields do not raise it


def to_json(report: Report) -> str:
    """Strict JSON; inf and NaN, for which it has no word, are the strings "inf", "-inf" and "nan"."""
    counts = Counter(outcome.verdict for outcome in report.outcomes)
    value = {
        "schema": {"name": "ringtrue-audit", "version": SCHEMA},
        "command": report.command,
        "seconds": report.seconds,
        "exit_code": report.exit_code,
        "problems": list(report.problems),
        "environment": report.environment,
        "subjects": report.subjects,
        "counts": {verdict: counts[verdict] for verdict in VERDICTS},
        "outcomes": [outcome.to_dict() for outcome in report.outcomes],
    }
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(text: str) -> Report:
    """The report that `to_json` wrote. ValueError for anything else, and for a schema that this release cannot read."""
    found: Any = json.loads(text)
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, dict) or schema.get("name") != "ringtrue-audit":
        raise ValueError("not a report of ringtrue audit: it has no schema of that name")
    if schema.get("version") != SCHEMA:
        raise ValueError(f"a report of schema {schema.get('version')}; this release reads {SCHEMA}")
    return Report(
        tuple(Outcome.from_dict(outcome) for outcome in found["outcomes"]),
        found["environment"],
        found["subjects"],
        found["command"],
        found["seconds"],
        tuple(found.get("problems", ())),
    )
