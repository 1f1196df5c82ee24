"""JUnit XML that a CI system can read, whatever a subject's errors contain."""

from __future__ import annotations

from xml.etree import ElementTree

import reported
from ringtrue.audit.junit import to_junit

KINDS = {
    "pass": None,
    "wrong": "failure",
    "claimed but refused": "failure",
    "ran though not claimed": "failure",
    "crash": "error",
    "refused as claimed": "skipped",
    "waived": "skipped",
    "not run": "skipped",
}


def test_every_verdict_is_of_its_kind() -> None:
    report = reported.composed()
    root = ElementTree.fromstring(to_junit(report).encode())
    cases = list(root.iter("testcase"))
    assert len(cases) == len(report.outcomes)
    for outcome, case in zip(report.outcomes, cases, strict=True):
        assert case.get("name") == outcome.check
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        assert kinds == [kind for kind in [KINDS[outcome.verdict]] if kind]
    skipped = {case.find("skipped").get("message").split(":")[0] for case in cases if case.find("skipped") is not None}
    assert skipped == {"refused as claimed", "waived", "not run"}
    assert all("alert(1)" in found.get("message") for found in root.iter("skipped"))  # the reason


def test_counts_add_up() -> None:
    root = ElementTree.fromstring(to_junit(reported.composed()).encode())
    found = {name: int(root.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    assert found == {"tests": 9, "failures": 3, "errors": 1, "skipped": 3}
    for name, total in found.items():
        assert sum(int(suite.get(name)) for suite in root.iter("testsuite")) == total
    assert [suite.get("name") for suite in root.iter("testsuite")] == ["one/<i>name</i>", "two/right"]


def test_a_failure_says_what_to_know() -> None:
    root = ElementTree.fromstring(to_junit(reported.measured()).encode())
    (failure,) = [f for f in root.iter("failure") if "--case call/length-5/float32" in f.text]
    assert failure.get("type") == "wrong"
    assert "dq    FAIL  2-norm" in failure.text
    assert "ringtrue audit test/no-scale --case call/length-5/float32" in failure.text
    assert "out   ok" in next(root.iter("system-out")).text
