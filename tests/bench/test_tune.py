"""`ringtrue tune`: what is wrong, raises, has no backward or may download gets no place; the rest is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

import torch
from typer.testing import CliRunner

import ringtrue as rt
from calls import backend_of, qkv, unreachable
from calls import one_thread as one_thread
from ringtrue import api, prepared, select, tuned
from ringtrue.backends import native_math
from ringtrue.bench import timing
from ringtrue.bench import tune as tunes
from ringtrue.cli.app import app
from ringtrue.contract import Backend, ForwardOut, Grads, OpPair, Reason

SHAPE = tunes.Shape(tokens=16, heads=3, head_dim=8, dtype=torch.float32, causal=True)
MATH = native_math.BACKEND.pairs["cpu"]


def named(name: str, **changes: Any) -> Backend:
    return backend_of(replace(MATH, name=name, **changes))


def scaled(name: str, which: str, head: int | slice = slice(None)) -> Backend:
    """A fault of 5 percent: in out, or in a gradient, of all heads or of one."""

    def off(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, :, head] *= 1.05
        return x

    def forward(*arguments: Any) -> ForwardOut:
        found = MATH.forward(*arguments)
        return found._replace(out=off(found.out)) if which == "out" else found

    def backward(*arguments: Any) -> Grads:
        found = MATH.backward(*arguments)
        return found._replace(**{which: off(getattr(found, which))}) if which != "out" else found

    return named(name, forward=forward, backward=backward)


def raises(*arguments: Any) -> Any:
    raise RuntimeError("no kernel image is available\nand more")


def dying(pair: OpPair, calls: int) -> Callable[..., ForwardOut]:
    """Right for so many calls, then out of memory."""
    left = [calls]

    def forward(*arguments: Any) -> ForwardOut:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("not enough")
        return pair.forward(*arguments)

    return forward


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("RINGTRUE_TUNED", str(tmp_path / "tuned.json"))
    tuned.forget()
    prepared.forget()
    select.survey.cache_clear()
    yield tmp_path / "tuned.json"
    tuned.forget()
    prepared.forget()
    select.survey.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the registry by what is given, and the clock by the order of the names."""

    def put(*backends: Backend) -> None:
        for module in (select, api):
            monkeypatch.setattr(module, "REGISTRY", backends)
        place = {b.name: float(n) for n, b in enumerate(sorted(backends, key=lambda b: b.name), 1)}

        def in_turn(work: dict[str, Any], device: str, repetitions: int, least_s: float) -> dict[str, timing.Times]:
            for call in work.values():
                call()
            return {name: timing.Times((place[name],), 1) for name in work}

        monkeypatch.setattr(tunes, "in_turn", in_turn)

    return put


def states(shape: tunes.Shape = SHAPE) -> dict[str, str]:
    return {o.backend: o.state for o in tunes.measure(shape, "cpu", 0.01)}


@pytest.mark.parametrize("which", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("head", [slice(None), 0, 2], ids=["all heads", "the first", "the last"])
def test_what_is_wrong_gets_no_time(which: str, head: int | slice, install: Callable[..., None]) -> None:
    install(scaled("a", which, head), named("b"))
    wrong, right = sorted(tunes.measure(SHAPE, "cpu", 0.01), key=lambda o: o.backend)
    assert (wrong.state, wrong.seconds) == ("wrong", None)
    assert wrong.why.startswith(which)
    assert (right.state, right.seconds) == ("right", 2.0)
    kept = tunes.remembered(SHAPE, [wrong, right])
    assert (kept.order, kept.wrong, kept.failed) == (("b",), {"a": wrong.why}, {})


def test_everything_that_gets_no_place_and_why(install: Callable[..., None]) -> None:
    missing = Reason("package-missing", "it is not installed")
    install(
        named("raises", forward=raises),
        named("raises in backward", backward=raises),
        named("dies later", forward=dying(MATH, 1)),
        named("right"),
        backend_of(unreachable("forward only", backward=False)),
        backend_of(unreachable("no causal", causal="none")),
        replace(backend_of(unreachable("missing")), unavailable=lambda device: missing),
        replace(backend_of(unreachable("hub")), fetch=lambda device: pytest.fail("it was downloaded")),
        replace(backend_of(unreachable("elsewhere")), pairs={"cuda": MATH}),
    )
    outcomes = tunes.measure(SHAPE, "cpu", 0.01)
    assert {o.backend: o.state for o in outcomes} == {
        "right": "right",
        "raises": "error",
        "raises in backward": "error",
        "dies later": "error",
        "forward only": "refused",
        "no causal": "refused",
        "missing": "refused",
        "hub": "left alone",
    }
    why = {o.backend: o.why for o in outcomes}
    assert why["raises"] == "RuntimeError: no kernel image is available"
    assert "[no-backward]" in why["forward only"]
    assert "[causal]" in why["no causal"]
    assert why["missing"] == str(missing)


def test_the_fastest_first_and_what_is_much_slower_is_not_measured_again(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(*(named(name) for name in "ba"))
    assert [(o.backend, o.seconds) for o in tunes.measure(SHAPE, "cpu", 0.01)] == [("a", 1.0), ("b", 2.0)]
    monkeypatch.setattr(tunes, "TIE", 2.0)  # then both are as fast, and the registry's order holds
    assert [(o.backend, o.seconds) for o in tunes.measure(SHAPE, "cpu", 0.01)] == [("b", 2.0), ("a", 1.0)]
    monkeypatch.setattr(tunes, "SLOW", 1.5)
    monkeypatch.setattr(tunes, "TIE", 1.0)
    assert [(o.backend, o.state) for o in tunes.measure(SHAPE, "cpu", 0.01)] == [("a", "right"), ("b", "slow")]


def test_long_calls_are_judged_at_a_length_that_can_be(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def forward(q: torch.Tensor, *arguments: Any) -> ForwardOut:
        seen.append(q.shape[1])
        return MATH.forward(q, *arguments)

    monkeypatch.setattr(tunes, "JUDGED", {"cpu": 8})
    install(named("a", forward=forward))
    assert states(replace(SHAPE, causal=False)) == {"a": "right"}
    assert (seen[0], set(seen[1:])) == (8, {16})


def test_a_kernel_that_takes_the_device_with_it_ends_it(
    install: Callable[..., None], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access no later result is of any worth: not even "failed"."""
    install(named("bad", forward=raises), named("good"))
    monkeypatch.setattr(tunes, "_alive", raises)
    code, out = ringtrue(*SMALL)
    assert code == 3
    assert "bad failed, and no kernel can run in this process any more: RuntimeError: no kernel image" in out
    assert "ringtrue tune --without bad" in out
    assert not file.exists()
    assert ringtrue(*SMALL, "--without", "_bad")[0] == 0
    assert tuned.read(file)[0]["shapes"][0].order == ("good",)


def ringtrue(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    return done.exit_code, done.output


SMALL = ("--device", "cpu", "--seq", "8", "--heads", "2", "--head-dim", "8", "--seconds", "0.001", "--not-causal")


def test_the_command_remembers_and_auto_follows(install: Callable[..., None], file: Path) -> None:
    install(named("b"), named("a"), scaled("wrong", "dq"))
    code, out = ringtrue(*SMALL)
    assert code == 1  # something was wrong
    assert [line.split()[0] for line in out.splitlines() if " 1.00" in line or " 2.00" in line] == ["a", "b"]
    assert "wrong: wrong, dq" in out
    assert f"remembered: {file}" in out
    found = rt.explain(*qkv(8))
    assert (found.backend, found.order[:2]) == ("a", ("a", "b"))
    assert "wrong is left out, it was wrong here: dq" in found.order_from
    code, out = ringtrue(*SMALL, "--print-only", "--json")
    (shape,) = json.loads(out)["shapes"]
    assert [(each["backend"], each["seconds"]) for each in shape["backends"]] == [
        ("a", 1.0),
        ("b", 2.0),
        ("wrong", None),
    ]


def test_nothing_is_written_that_is_not_to_be(
    install: Callable[..., None], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(named("a"))
    assert ringtrue(*SMALL, "--print-only")[0] == 0
    assert not file.exists()
    monkeypatch.setenv("RINGTRUE_TUNED", "off")
    code, out = ringtrue(*SMALL)
    assert code == 3
    assert "not remembered: RINGTRUE_TUNED is off" in out
    file.mkdir()
    monkeypatch.setenv("RINGTRUE_TUNED", str(file))
    code, out = ringtrue(*SMALL)
    assert code == 3
    assert "cannot be written" in out


def test_nothing_to_measure(install: Callable[..., None], file: Path) -> None:
    install(named("raises", forward=raises))
    code, out = ringtrue(*SMALL)
    assert code == 3
    assert "raises: error, RuntimeError: no kernel image is available" in out
    assert not file.exists()


@pytest.mark.parametrize(
    "wrong", ["--dtype int8", "--without nobody", "--device npu", "--seq 0", "--seconds 0", "--nothing"]
)
def test_bad_usage(wrong: str) -> None:
    assert ringtrue(*wrong.split())[0] == 2


def test_with_the_clock_and_the_backends_that_are_here(file: Path) -> None:
    code, out = ringtrue(*SMALL)
    assert code == 0, out
    (entry,) = tuned.read(file)
    assert entry["key"] == tuned.key("cpu")
    assert {"native_flash", "native_math"} <= set(entry["shapes"][0].order)
