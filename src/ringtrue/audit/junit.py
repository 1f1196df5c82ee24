"""A report as JUnit XML, for the pages of a CI system: a suite a subject, a test a check."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from .outcome import BAD, CRASH, PASS, Outcome, Report

# what XML 1.0 has no way to write: an error's text may hold terminal colours, and more
_UNWRITABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> str:
    """A crash is an error, what else is wrong a failure; refused, waived and not run are skipped, with the reason."""
    root = ElementTree.Element("testsuites", {"name": "ringtrue audit", **_counts(report.outcomes)})
    names = dict.fromkeys([*report.subjects, *(outcome.subject for outcome in report.outcomes)])
    for name in names:
        outcomes = tuple(outcome for outcome in report.outcomes if outcome.subject == name)
        suite = ElementTree.SubElement(root, "testsuite", {"name": _text(name), **_counts(outcomes)})
        properties = ElementTree.SubElement(suite, "properties")
        about = {"about": report.subjects.get(name, ""), "command": report.command, **report.environment}
        for key, value in about.items():
            ElementTree.SubElement(properties, "property", name=_text(key), value=_text(value))
        for outcome in outcomes:
            _add(suite, outcome)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add(suite: ElementTree.Element, outcome: Outcome) -> None:
    law = outcome.check.split("/", 1)[0]
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_text(f"{outcome.subject}.{law}".replace("/", ".")),
        name=_text(outcome.check),
        time=f"{outcome.seconds:.3f}",
    )
    kind = {PASS: "", CRASH: "error"}.get(outcome.verdict, "failure" if outcome.verdict in BAD else "skipped")
    message = ": ".join(filter(None, (outcome.verdict, outcome.diagnosis or outcome.reason)))
    if kind == "skipped":
        ElementTree.SubElement(case, kind, message=_text(message))
    elif kind:
        told = ElementTree.SubElement(case, kind, type=outcome.verdict, message=_text(message))
        parts = (outcome.reason, outcome.diagnosis, *map(str, outcome.quantities), outcome.replay, outcome.snippet)
        told.text = _text("\n".join(filter(None, parts)))
    if not outcome.bad and outcome.quantities:
        ElementTree.SubElement(case, "system-out").text = _text("\n".join(map(str, outcome.quantities)))


def _counts(outcomes: tuple[Outcome, ...]) -> dict[str, str]:
    crashes = sum(outcome.verdict == CRASH for outcome in outcomes)
    bad, passed = sum(outcome.bad for outcome in outcomes), sum(outcome.verdict == PASS for outcome in outcomes)
    return {
        "tests": str(len(outcomes)),
        "failures": str(bad - crashes),
        "errors": str(crashes),
        "skipped": str(len(outcomes) - bad - passed),
        "time": f"{sum(outcome.seconds for outcome in outcomes):.3f}",
    }


def _text(text: str) -> str:
    return _UNWRITABLE.sub("\ufffd", text)
