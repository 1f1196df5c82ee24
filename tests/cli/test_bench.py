"""`ringtrue bench` as a command: what is printed and written, exit codes, bad usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

import torch
from typer.testing import CliRunner

from ringtrue.bench import overhead, pair
from ringtrue.bench.timing import Times
from ringtrue.cli.app import app

TINY = ["--device", "cpu", "--dtype", "float32", "--shape", "1,8,2,16", "--repetitions", "2"]


def bench(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})
    return done.exit_code, done.output


def test_pair(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    code, out = bench("pair", *TINY, "--json", str(path), "--commit", "abc")
    assert code == 0, out
    found = json.loads(path.read_text())
    assert f"written: {path}" in out
    assert found["versions"]["commit"] == "abc"
    assert found["settings"] == {"dtype": "float32", "device": "cpu", "repetitions": 2}
    compared = [name for name, why in pair.backends("cpu").items() if not why]
    assert [m["backend"] for m in found["measured"]] == [name for name in compared for _ in range(2)]
    for m in found["measured"]:
        assert m["shape"] == [1, 8, 2, 16]
        assert min(m["ours"]["median_s"], m["torch"]["median_s"], m["time_ratio"]) > 0
        assert m["ours"]["extra_peak_bytes"] is m["memory_ratio"] is None
    for name, why in found["not_measured"].items():
        assert f"{name} not measured: {why}" in out
    for name in compared:
        assert name in out
    assert "Memory is not measured on a CPU." in out
    assert "…" not in out


def test_pair_where_nothing_can_be_measured() -> None:
    (name, why), *_ = ((name, why) for name, why in pair.backends("cpu").items() if why)
    code, out = bench("pair", *TINY, "--backend", f"_{name}")
    assert code == 3
    assert f"{name} not measured: {why}" in out


def test_a_call_that_a_side_cannot_take_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("No available kernel.")

    monkeypatch.setattr(pair, "sdpa", refuse)
    code, out = bench("pair", *TINY)
    assert code == 3
    assert "not measured: RuntimeError: No available kernel." in out


def times(seconds: float) -> Times:
    return Times((seconds, seconds), calls=3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the measurement: what is in it is what the command finds."""
    given: dict[str, Any] = {"absent": "", "ways": {overhead.DISPATCHER: 20e-6, overhead.OURS: 31e-6}}

    def measure(repetitions: int) -> overhead.Overhead:
        ways = {way: times(seconds) for way, seconds in given["ways"].items()}
        return overhead.Overhead(dict.fromkeys(overhead.TARGETS, ways), given["absent"])

    monkeypatch.setattr(overhead, "measure", measure)
    return given


def test_overhead(measured: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    code, out = bench("overhead", "--json", str(path))
    assert code == 0, out
    for part, target in overhead.TARGETS.items():
        assert f"{part}: rt.attention takes 1.55 x diffusers' dispatcher; the aim is at most {target} x" in out
    found = json.loads(path.read_text())
    assert found["targets"] == overhead.TARGETS
    assert found["not_measured"] == ""
    assert found["parts"]["no grad"][overhead.OURS]["ratio"] == pytest.approx(1.55)
    assert found["versions"]["device"] == "cpu"
    assert "…" not in out


def test_overhead_without_diffusers(measured: dict[str, Any]) -> None:
    measured |= {"absent": "[package-missing] diffusers is not installed", "ways": {overhead.OURS: 31e-6}}
    code, out = bench("overhead")
    assert code == 3
    assert "diffusers' dispatcher not measured: [package-missing] diffusers is not installed" in out
    assert "the aim" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("pair --device tpu", "cpu, cuda"),
        ("pair --device cpu --dtype int8", "float32, bfloat16, float16, float64"),
        ("pair --device cpu --shape 1,2,3", "has 3 sizes"),
        ("pair --device cpu --shape 1,0,2,8", "at least 1"),
        ("pair --device cpu --backend nothing", "is not one of"),
        ("pair --device cpu --repetitions 0", "greater than or equal to 1"),
        ("pair --device cpu --json no/such/folder/x.json", "there is no folder"),
        ("overhead --json .", "is a folder; name a file"),
        ("overhead --shape 1,2,3,4", "No such option"),
        ("speed", "No such command"),
    ],
)
def test_bad_usage(arguments: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "compare", lambda *_: pytest.fail("it was measured"))
    monkeypatch.setattr(overhead, "measure", lambda *_: pytest.fail("it was measured"))
    code, out = bench(*arguments.split())
    assert code == 2
    assert said in " ".join(out.replace("│", " ").split())


def test_cuda_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out = bench("pair")
    assert code == 2
    assert "no CUDA device" in out
