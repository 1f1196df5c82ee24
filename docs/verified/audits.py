"""Audits run elsewhere, made short enough to keep: counts, and of what is wrong its numbers, reason and diagnosis.

python docs/verified/audits.py NAME --commit HASH REPORT.json [REPORT.json ...]     (written by ringtrue audit --json)

writes docs/verified/NAME.json and NAME.md. Heat maps, snippets and the numbers of what passed are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from ringtrue.audit.outcome import VERDICTS, Outcome, Report
from ringtrue.audit.record import from_json

HERE = Path(__file__).parent


def short(outcome: Outcome) -> dict[str, Any]:
    """One wrong outcome in a few words."""
    wrong = {v.quantity: v.problem or f"{v.strain:.3g} x its bound" for v in outcome.quantities if not v.ok}
    told = {"reason": outcome.reason[:160], "diagnosis": outcome.diagnosis, "wrong": wrong}
    return {"check": outcome.check, "verdict": outcome.verdict, **{k: v for k, v in told.items() if v}}


def compact(report: Report, commit: str) -> dict[str, Any]:
    """A report as plain values."""
    subjects = {}
    for name in report.subjects:
        own = [o for o in report.outcomes if o.subject == name]
        counts = Counter(o.verdict for o in own)
        worst = max((o.strain for o in own if o.verdict == "pass" and o.strain <= 1), default=0.0)
        subjects[name] = {
            "about": report.subjects[name],
            "counts": {v: counts[v] for v in VERDICTS if counts[v]},
            "worst share of a bound that passed": round(worst, 3),
            "wrong": [short(o) for o in own if o.bad],
        }
    environment = {**report.environment, "commit": commit}
    return {
        "command": re.sub(r" --json \S+", "", report.command),  # where it was written is nobody's business
        "seconds": round(report.seconds),
        "environment": environment,
        "subjects": subjects,
    }


def table(audits: list[dict[str, Any]]) -> str:
    """Everything as a page."""
    lines: list[str] = []
    for audit in audits:
        env = ", ".join(f"{k} {v}" for k, v in audit["environment"].items() if v not in ("not installed", "cuda"))
        lines += [f"## `{audit['command']}`", "", f"{env}. {audit['seconds']} s.", ""]
        lines += ["| subject | " + " | ".join(VERDICTS) + " |", "| -- |" + " -- |" * len(VERDICTS)]
        for name, found in audit["subjects"].items():
            lines.append(f"| {name} | " + " | ".join(str(found["counts"].get(v, "")) for v in VERDICTS) + " |")
        rows = [(name, w) for name, found in audit["subjects"].items() for w in found["wrong"]]
        if rows:
            lines += ["", "| subject | check | verdict | what is said |", "| -- | -- | -- | -- |"]
        for name, w in rows:
            numbers = ", ".join(f"{q} {x}" for q, x in w.get("wrong", {}).items())
            said = "; ".join(filter(None, (w.get("diagnosis"), w.get("reason"), numbers)))
            lines.append(f"| {name} | {w['check']} | {w['verdict']} | {said.replace('|', '/')} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("name")
    arguments.add_argument("--commit", required=True)
    arguments.add_argument("reports", nargs="+", type=Path)
    asked = arguments.parse_args()
    audits = [compact(from_json(path.read_text("utf-8")), asked.commit) for path in asked.reports]
    (HERE / f"{asked.name}.json").write_text(json.dumps(audits, indent=1) + "\n", "utf-8")
    (HERE / f"{asked.name}.md").write_text(f"# {asked.name}\n\n{table(audits)}", "utf-8")


if __name__ == "__main__":
    main()
