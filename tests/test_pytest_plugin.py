"""pytest --ringtrue-subject: an item a check, and a run that is red when something is wrong, stale or never ran."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pytest_ringtrue.items  # noqa: F401 - loaded before pytester notes which modules were there
import ringtrue.subjects.ours  # noqa: F401

pytest_plugins = ["pytester"]

MINE = """
from torch.nn.functional import scaled_dot_product_attention as sdpa

def attend(query, key, value, is_causal=False):
    assert query.shape[-1] == value.shape[-1]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return sdpa(query, key, value, is_causal=FLAG).transpose(1, 2)
"""
SUBJECT = "--ringtrue-subject=mine:attend"


@pytest.fixture
def mine(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with an attention function that drops is_causal, and a test of its own; no plugin but this one."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(mine=MINE.replace("FLAG", "False"), test_own="def test_own(): pass")
    return pytester


def run(mine: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    quiet = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    return mine.runpytest_inprocess("-p", "pytest_ringtrue", *quiet, *arguments)


def test_a_check_is_an_item(mine: pytest.Pytester) -> None:
    done = run(mine, SUBJECT, "--ringtrue-only=call/[ln]*th-?/float32", "-v")
    done.assert_outcomes(passed=2)
    done.stdout.fnmatch_lines(
        [
            "*collected 2 items",
            "mine:attend::call/length-1/float32 PASSED*",
            "mine:attend::call/length-5/float32 PASSED*",
            "ringtrue: 2 pass",
        ]
    )


def test_wrong_fails_with_its_numbers_and_replay(mine: pytest.Pytester) -> None:
    done = run(mine, SUBJECT, "--ringtrue-only=call/causal/*", "--ringtrue-group=full")
    done.assert_outcomes(failed=3)
    assert done.ret == 1
    done.stdout.fnmatch_lines(
        [
            "*_ mine:attend call/causal/float32 _*",
            "mine:attend call/causal/float32: wrong*",
            "  out   FAIL  2-norm *",
            "  replay: ringtrue audit mine:attend --case call/causal/float32",
            "ringtrue: 3 wrong",
            "FAILED mine:attend::call/causal/float32*",
        ]
    )
    done.stdout.no_fnmatch_line("*Traceback*")


def test_refused_as_claimed_is_skipped_beside_what_runs(mine: pytest.Pytester) -> None:
    done = run(mine, SUBJECT, "--ringtrue-only=call/[ln]*/float32", "-k", "length-33 or narrow-values", "-rs")
    assert {k: v for k, v in done.parseoutcomes().items() if k != "deselected"} == {"passed": 1, "skipped": 1}
    assert done.ret == 0
    done.stdout.fnmatch_lines(["SKIPPED * refused as claimed: a value dim of its own *"])


def test_a_run_in_which_nothing_ran_is_not_green(mine: pytest.Pytester) -> None:
    done = run(mine, SUBJECT, "--ringtrue-only=call/narrow-values/*")
    done.assert_outcomes(skipped=2)
    assert done.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    done.stdout.fnmatch_lines(["ringtrue: 2 refused as claimed; nothing ran, so nothing is proven"])


def test_named_paths_run_beside_it(mine: pytest.Pytester) -> None:
    run(mine, SUBJECT, "--ringtrue-only=call/length-1/float32", "test_own.py").assert_outcomes(passed=2)
    run(mine, SUBJECT, "--ringtrue-only=call/length-1/float32").assert_outcomes(passed=1)


def test_several_subjects_claims_layout(mine: pytest.Pytester) -> None:
    mine.makefile(".toml", claims='dtypes = ["float32"]\nvalue_dim = true')
    twice = (SUBJECT, "--ringtrue-subject=ours/native_math")
    run(mine, *twice, "--ringtrue-only=call/length-1/float32").assert_outcomes(passed=2)
    claims = run(mine, SUBJECT, "--ringtrue-only=call/narrow-values/*", "--ringtrue-claims=claims.toml")
    claims.assert_outcomes(failed=1)
    claims.stdout.fnmatch_lines(
        ["*claimed but refused: AssertionError*", "*--case call/narrow-values/float32 --claims claims.toml"]
    )
    run(mine, SUBJECT, "--ringtrue-only=call/length-33/float32", "--ringtrue-layout=bhsd").assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--ringtrue-subject=mine:nothing"], "'mine' has no 'nothing'"),
        (["--ringtrue-subject=nobody"], "unknown subject 'nobody': ours*"),
        ([SUBJECT, "--ringtrue-group=parallel"], "group is smoke or full*"),
        ([SUBJECT, "--ringtrue-layout=sbhd"], "layout is one of*"),
        ([SUBJECT, "--ringtrue-claims=none.toml"], "*No such file*none.toml*"),
        ([SUBJECT, "--ringtrue-waive=none.toml"], "*No such file*none.toml*"),
    ],
)
def test_mistakes_are_usage_errors(mine: pytest.Pytester, options: list[str], told: str) -> None:
    done = run(mine, *options)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"ERROR: {told}"])


WAIVER = """
[[waive]]
subject = "mine:*"
check = "call/causal*"
reason = "causal comes next"
link = "https://example.org"
"""


def test_a_waived_fault_is_an_expected_one(mine: pytest.Pytester) -> None:
    mine.makefile(".toml", waivers=WAIVER)
    options = (SUBJECT, "--ringtrue-only=call/causal/*", "--ringtrue-waive=waivers.toml", "-rx")
    done = run(mine, *options)
    done.assert_outcomes(xfailed=2)
    assert done.ret == 0
    done.stdout.fnmatch_lines(["ringtrue: 2 waived", "XFAIL*causal comes next (https://example.org); wrong*"])


def test_a_stale_waiver_is_red(mine: pytest.Pytester) -> None:
    mine.makefile(".toml", waivers=WAIVER)
    mine.makepyfile(mine=MINE.replace("FLAG", "is_causal"))
    options = (SUBJECT, "--ringtrue-only=call/causal/*", "--ringtrue-waive=waivers.toml")
    done = run(mine, *options)
    done.assert_outcomes(passed=2)
    assert done.ret == 1
    done.stdout.fnmatch_lines(
        ["ringtrue: waivers.toml, line 1: mine:* call/causal*: nothing of this is wrong any more (2 pass)*"]
    )


def test_without_the_option_nothing_is_loaded() -> None:
    code = "import sys, pytest_ringtrue; print([m for m in ('torch', 'ringtrue') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"ringtrue": "pytest_ringtrue"}
    assert "src/pytest_ringtrue" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
