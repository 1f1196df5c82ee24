"""`ringtrue audit` as typed: usage is checked before anything runs, exit codes, and what is kept when time is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ringtrue.audit.outcome import NOT_RUN, OUT_OF_TIME, PASS, Outcome
from ringtrue.cli.app import app
from ringtrue.cli.audit import lanes
from ringtrue.cli.audit.lanes import Clock, Work, audited
from ringtrue.cli.audit.planned import Choice, planned
from ringtrue.cli.audit.run import Manner, replayable
from ringtrue.cli.audit.tasks import Ask


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, ["audit", *words], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name one: ours"),
        (["nobody"], "unknown subject 'nobody'"),
        (["ours/nobody"], "unknown subject 'ours/nobody'"),
        (["no_such_module:f"], "cannot import 'no_such_module'"),
        (["ours", "--group", "everything"], "smoke, full, parallel"),
        (["ours", "--dtype", "float8"], "float32, bfloat16"),
        (["ours", "--only", "nothing*"], "no check of smoke has an id like"),
        (["ours", "--case", "call/no-such-case/float32"], "no-such-case"),
        (["ours", "--case", "law/length-33/float32"], "unknown law"),
        (["ours", "--layout", "sbhd"], "bshd, bhsd, packed"),
        (["ours", "--waive", "/no/such/file"], "No such file"),
        (["ours", "--claims", "/no/such/file"], "No such file"),
        (["ours", "--json", "/no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_bad_usage_is_told_before_anything_runs(words: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "Pool", lambda *_: pytest.fail("a process was started"))
    result = typed(*words)
    assert result.exit_code == 2
    assert told in " ".join(result.output.replace("│", " ").split())


def test_a_list_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "Pool", lambda *_: pytest.fail("a process was started"))
    result = typed("ours/native_math", "--only", "call/causal*", "--list")
    assert result.exit_code == 0
    assert "call/causal-wide/bfloat16" in result.output


def test_one_check_from_its_replay_line(tmp_path: Path) -> None:
    """Green, exit 0, and everything measured in the file."""
    result = typed("ours/native_math", "--case", "call/causal@heads=1/float32", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    (outcome,) = json.loads((tmp_path / "r.json").read_text())["outcomes"]
    assert outcome["verdict"] == PASS
    assert {q["quantity"] for q in outcome["quantities"]} == {"out", "lse", "dq", "dk", "dv"}
    assert outcome["replay"] == "ringtrue audit ours/native_math --case call/causal@heads=1/float32"


def test_what_has_not_begun_when_time_is_over_is_not_run() -> None:
    plan = planned(["ours/native_math"], "cpu", Choice(only="call/length*"))
    outcomes = audited(plan.work, 1, 10.0, lambda outcome: None, limit=-1.0)
    assert len(outcomes) == plan.total
    assert {(o.verdict, o.reason) for o in outcomes} == {(NOT_RUN, OUT_OF_TIME)}
    clock = Clock(None)
    assert not clock.over
    clock.stop()
    assert clock.over


def test_a_replay_line_repeats_what_matters() -> None:
    outcome = Outcome("m:f", "call/causal*/float32", PASS)
    manner = Manner("cuda", 2, 10.0, seed=3, options="--layout bhsd")
    line = "ringtrue audit m:f --case 'call/causal*/float32' --layout bhsd --seed 3 --device cuda"
    assert replayable(outcome, manner).replay == line


def test_work_is_in_the_order_it_was_planned() -> None:
    """The truth first, then subjects as they were named, each once."""
    plan = planned(["ours/native_math", "ours"], "cpu", Choice())
    names = [work.ask.name for work in plan.work]
    assert names[:2] == ["truth", "ours/native_math"]
    assert len(set(names)) == len(names)
    assert isinstance(plan.work[0], Work)
    assert plan.work[1].ask == Ask("ours/native_math", "cpu")
