"""docs/audit/your-own-kernel.md, walked from top to bottom: its commands run here and print what it says.

The commands run in this process: that an audit has processes of its own is tested elsewhere. Numbers of measurements
are not compared, words and counts are.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

import pytest_ringtrue.items  # noqa: F401 - loaded before pytester notes which modules were there
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import Outcome
from ringtrue.cli.app import app
from ringtrue.cli.audit import run
from ringtrue.cli.audit.lanes import Work
from ringtrue.cli.audit.tasks import shrink_one

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "audit" / "your-own-kernel.md").read_text("utf-8")
EXAMPLE = (ROOT / "examples" / "my_attention.py").read_text("utf-8")
BLOCK = re.compile(r"(?:Save as\s+`(?P<name>[\w.]+)`:\n+)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
MEASURED = re.compile(r"^ +(?:(out|lse|d\w+) +2-norm|within bounds)")
NUMBER = re.compile(r"\b\d[\d.]*(?:e[-+]\d+)?(?!-norm)")


def audited(
    work: Sequence[Work], jobs: int, timeout: float, on_outcome: Callable[[Outcome], None], limit: float | None
) -> list[Outcome]:
    """`lanes.audited` without processes."""
    found = []
    for one in work:
        subject = one.ask.subject()
        for check in one.checks:
            found.append(examine(subject, check))
            on_outcome(found[-1])
    return found


def plain(text: str) -> list[str]:
    """Lines with numbers of measurements and spaces made alike; nothing of rules and empty lines."""
    lines = (NUMBER.sub("#", line) if MEASURED.match(line) else line for line in text.splitlines())
    lines = (" ".join(re.sub(r"\(\d+ s, ", "(", line).replace("─", "").split()) for line in lines)
    return [line for line in lines if line]


def told(expected: str, printed: str) -> None:
    """Every line of the page is there, in its order; between two that no … parts, nothing else is."""
    have, at = plain(printed), 0
    for part in re.split(r"^…\n", expected, flags=re.MULTILINE):
        lines = plain(part)
        if lines:
            starts = [i for i in range(at, len(have)) if have[i : i + len(lines)] == lines]
            assert starts, f"{lines} not in\n" + "\n".join(have[at:])
            at = starts[0] + len(lines)


def mended(code: str, diff: str) -> str:
    old, new = ("".join(line[1:] + "\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+")
    assert code.count(old) == 1
    return code.replace(old, new)


def test_the_walk(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "audited", audited)
    monkeypatch.setattr(run, "shrunken", lambda asked, timeout: [shrink_one(None, *one) for one in asked])
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.syspath_prepend(pytester.path)
    file, commands = pytester.path / "my_attention.py", 0
    file.write_text(EXAMPLE, "utf-8")
    for block in BLOCK.finditer(PAGE):
        text = block["text"]
        if block["kind"] == "diff":
            file.write_text(mended(file.read_text("utf-8"), text), "utf-8")
        elif block["name"]:
            (pytester.path / block["name"]).write_text(text, "utf-8")
        elif block["kind"] == "console":
            command, _, expected = text.removeprefix("$ ").partition("\n")
            told(expected, said(command, pytester))
            commands += 1
    assert commands == PAGE.count("```console") == 7


def said(command: str, pytester: pytest.Pytester) -> str:
    """What a command prints, in the folder of the walk."""
    sys.modules.pop("my_attention", None)
    word, *arguments = shlex.split(command)
    if word == "pytest":
        quiet = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
        done = pytester.runpytest_inprocess("-p", "pytest_ringtrue", *quiet, *arguments)
        assert done.ret == 0
        return str(done.stdout)
    assert word == "ringtrue"
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})
    stale = "waivers:" in result.output
    assert result.exit_code == (2 if stale else int(re.findall(r"exit (\d)\)", result.output)[-1])), result.output
    return result.output
