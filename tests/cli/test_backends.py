"""`ringtrue backends` and `ringtrue --version`: everything that is claimed, as a table and as data."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import replace

import pytest

pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

import ringtrue as rt
from ringtrue.cli import backends as command
from ringtrue.cli import claims
from ringtrue.cli.app import app


def ringtrue(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})
    return done.exit_code, done.output


def runs_here() -> rt.Support:
    return next(support for support in rt.backends() if support.unavailable is None)


def test_version() -> None:
    assert ringtrue("--version") == (0, f"ringtrue {rt.__version__}\n")


def test_a_line_a_backend_and_device_with_the_exact_reason() -> None:
    code, out = ringtrue("backends")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    for support in rt.backends():
        (line,) = [words for words in lines if words[:2] == [support.name, support.device.upper()]]
        why = support.unavailable
        assert " ".join(line).endswith("yes" if why is None else f"[{why.code}] {why.text}")
    assert lines[2][-1] == "yes"  # what runs here comes first


def test_in_a_narrow_terminal_a_line_stays_one() -> None:
    long = rt.Reason("package-broken", "it cannot be imported: ImportError: " + "an undefined symbol " * 9)
    printed = io.StringIO()
    command.show([replace(runs_here(), unavailable=long)], Console(file=printed, force_terminal=True, width=90))
    assert sum("[package-broken]" in line for line in printed.getvalue().splitlines()) == 1
    assert "undefined symbol an" not in printed.getvalue()
    assert "…" in printed.getvalue()


@pytest.mark.parametrize("name", sorted({support.name for support in rt.backends()}))
def test_one_backend_with_every_question_and_the_whole_reason(name: str) -> None:
    code, out = ringtrue("backends", f"_{name}")
    assert code == 0
    for question in claims.rows():
        assert question in out
    for support in (s for s in rt.backends() if s.name == name):
        assert support.summary in out
        assert all(f"needs {package.module}: {package.install}" in out for package in support.packages)
        if support.unavailable is not None:
            assert f"{support.name} on {support.device} cannot run here: {support.unavailable}" in out
    assert {s["name"] for s in json.loads(ringtrue("backends", name, "--json")[1])} == {name}


def test_an_unknown_name_lists_the_known_ones() -> None:
    code, out = ringtrue("backends", "nothing")
    assert code == 2
    assert all(support.name in out for support in rt.backends())


def test_json_has_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = rt.Reason("package-missing", "it is not installed", remedy="pip install it")
    here = runs_here()
    monkeypatch.setattr(rt, "backends", lambda: (here, replace(here, name="gone", unavailable=gone)))
    code, out = ringtrue("backends", "--json")
    assert code == 0
    first, second = json.loads(out)
    assert first.keys() == {field.name for field in dataclasses.fields(rt.Support)} | {"can_run_here"}
    assert first["claims"].keys() == {field.name for field in dataclasses.fields(rt.Claims)}
    assert (first["can_run_here"], first["unavailable"]) == (True, None)
    assert first["claims"]["dtypes"] == sorted(str(d).removeprefix("torch.") for d in here.claims.dtypes)
    assert (second["can_run_here"], second["unavailable"]["code"]) == (False, "package-missing")


def test_a_field_without_words_is_shown_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Wider(rt.Claims):
        new_ability: bool = True
        new_kinds: frozenset[str] = frozenset({"b", "a"})
        new_limit: int | None = None

    monkeypatch.setattr(rt, "Claims", Wider)
    here = replace(runs_here(), claims=Wider(**vars(runs_here().claims)))
    (column,) = claims.columns([here])
    said = dict(zip(claims.rows(), column.cells, strict=True))
    assert (said["new ability"], said["new kinds"], said["new limit"]) == ("yes", "a, b", "none")


def test_devices_with_the_same_claims_share_a_column() -> None:
    here = runs_here()
    other = replace(here, device="tpu")
    narrow = replace(here, device="xpu", claims=replace(here.claims, dtypes=frozenset()))
    assert [c.devices for c in claims.columns([here, other, narrow], join=True)] == [(here.device, "tpu"), ("xpu",)]
    assert len(claims.columns([here, other, narrow])) == 3
