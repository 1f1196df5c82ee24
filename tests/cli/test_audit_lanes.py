"""Processes of an audit: what kills or hangs one is an outcome, and everything after it still runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ringtrue.audit.checks import Check, checks
from ringtrue.audit.outcome import CRASH, INTERRUPTED, NOT_RUN, PASS, WRONG, Outcome
from ringtrue.cli.audit.lanes import Work, audited
from ringtrue.cli.audit.tasks import Ask

MODULE = "cli.audited_functions"


def outcomes(name: str, found: list[Check], timeout: float = 120.0) -> dict[str, Outcome]:
    told: list[Outcome] = []
    done = audited([Work(Ask(f"{MODULE}:{name}", "cpu"), tuple(found))], 1, timeout, told.append)
    assert sorted(o.check for o in told) == sorted(o.check for o in done)
    assert [o.check for o in done] == [c.id for c in found]
    return {o.check: o for o in done}


def some(*names: str) -> list[Check]:
    return [c for name in names for c in checks("smoke", dtypes=["float32"], only=f"call/{name}/*")]


def test_a_process_that_dies_is_a_crash_and_the_rest_runs() -> None:
    found = outcomes("dies_of_one_key", some("length-5", "one-key", "length-16", "length-1", "length-33"))
    verdicts = {check.split("/")[1]: o.verdict for check, o in found.items()}
    assert verdicts == {"length-5": PASS, "one-key": CRASH, "length-16": PASS, "length-1": CRASH, "length-33": PASS}
    assert "exit code -6" in found["call/one-key/float32"].reason


def test_a_process_that_hangs_is_a_crash() -> None:
    found = outcomes("hangs_with_one_query", some("one-query", "length-5"), timeout=8.0)
    assert [o.verdict for o in found.values()] == [CRASH, PASS]
    assert "no news" in found["call/one-query/float32"].reason


def test_what_an_earlier_call_left_behind_is_told_from_what_is_wrong_alone() -> None:
    order = checks("full", dtypes=["float32"], only="order/grad_out-outermost-second/*")
    assert len(order) == 1
    outcome = outcomes("remembers", order)[order[0].id]
    assert outcome.verdict == WRONG
    assert "right alone in a fresh process, wrong after a call" in outcome.diagnosis
    assert "differs in the strides of grad_out" in outcome.diagnosis


def test_ctrl_c_keeps_what_is_known_and_ends_at_once(tmp_path: Path) -> None:
    """A check that would hang for minutes is being run: the report has what came before it, and says the rest."""
    line = [sys.executable, "-m", "ringtrue.cli", "audit", f"{MODULE}:hangs_with_one_query", "--jobs", "1"]
    ids = ["call/length-5/float32", "call/one-query/float32", "call/length-16/float32"]
    asleep = tmp_path / "asleep"
    with subprocess.Popen(
        [*line, *(word for i in ids for word in ("--case", i)), "--json", str(tmp_path / "r.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TOLD_ASLEEP": str(asleep)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as audit:  # fmt: skip
        while not asleep.exists() and audit.poll() is None:
            time.sleep(0.05)
        os.killpg(audit.pid, signal.SIGINT)  # as a terminal does: everybody hears of it
        out, _ = audit.communicate(timeout=100)
    assert audit.returncode == 3, out
    verdicts = [(o["verdict"], o["reason"]) for o in json.loads((tmp_path / "r.json").read_text())["outcomes"]]
    assert verdicts == [(PASS, ""), (NOT_RUN, INTERRUPTED), (NOT_RUN, INTERRUPTED)]
