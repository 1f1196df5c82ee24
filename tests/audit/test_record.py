"""A report survives JSON, and its schema is documented."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

import reported
from ringtrue.audit.judge import Verdict
from ringtrue.audit.outcome import VERDICTS, HeatMap, Outcome, Report
from ringtrue.audit.record import SCHEMA, from_json, to_json

PAGE = Path(__file__).parents[2] / "docs" / "audit" / "report.md"


def test_round_trip_of_a_real_audit() -> None:
    report = reported.measured()
    assert from_json(to_json(report)) == report
    assert to_json(from_json(to_json(report))) == to_json(report)


def test_round_trip_of_every_verdict() -> None:
    report = reported.composed()
    again = from_json(to_json(report))
    assert repr(again) == repr(report)  # NaN is not equal to itself
    assert to_json(again) == to_json(report)


def test_every_error_is_in_it_on_a_pass_too() -> None:
    found = json.loads(to_json(reported.measured()))
    passed = [o for o in found["outcomes"] if o["verdict"] == "pass"]
    assert passed
    for outcome in passed:
        assert [q["quantity"] for q in outcome["quantities"]] == ["out", "dq", "dk", "dv"]
        for q in outcome["quantities"]:
            assert 0 < q["error_2"] <= q["bound_2"]
            assert 0 < q["error_inf"] <= q["bound_inf"]


def test_it_is_strict_json_with_counts_and_exit_code() -> None:
    report = reported.composed()

    def refuse(word: str) -> float:
        raise AssertionError(word)

    found = json.loads(to_json(report), parse_constant=refuse)
    assert found["schema"] == {"name": "ringtrue-audit", "version": SCHEMA}
    assert found["exit_code"] == 1
    assert found["counts"] == {verdict: 2 if verdict == "pass" else 1 for verdict in VERDICTS}
    assert found["environment"] == report.environment
    dq = found["outcomes"][1]["quantities"][1]
    assert dq["error_inf"] == "inf"
    assert math.isinf(from_json(to_json(report)).outcomes[1].quantities[1].error_inf)


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": 3}', '{"schema": {"name": "other", "version": 1}}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a report of ringtrue audit"):
        from_json(text)


def test_another_schema_is_refused() -> None:
    text = to_json(reported.composed()).replace(f'"version": {SCHEMA}', f'"version": {SCHEMA + 1}')
    with pytest.raises(ValueError, match=f"a report of schema {SCHEMA + 1}; this release reads {SCHEMA}"):
        from_json(text)


@pytest.mark.parametrize("kind", [Report, Outcome, Verdict, HeatMap])
def test_the_schema_is_documented(kind: type) -> None:
    page = PAGE.read_text("utf-8")
    assert f"schema version {SCHEMA}" in page
    assert [f.name for f in fields(kind) if f"`{f.name}`" not in page] == []
    assert [v for v in VERDICTS if f"`{v}`" not in page] == []
