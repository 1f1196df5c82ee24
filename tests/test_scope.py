"""Scopes choose per thread and per task, backward reads none, and a recompute that lost its scope is refused."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import ringtrue as rt
from calls import HERE, qkv, recorder, refused
from calls import one_thread as one_thread
from ringtrue import scope

NAMES = [b.name for b in HERE]
FIRST, LAST = NAMES[0], NAMES[-1]


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether a scope was ever entered is kept for the whole process; here each test starts without."""
    monkeypatch.setattr(scope, "_entered", set())
    yield
    assert rt.current_backend() == "auto"


@pytest.fixture
def ran() -> list[str]:
    return []


def test_nests_and_restores(ran: list[str]) -> None:
    q, k, v = qkv()
    a, b = recorder("a", ran), recorder("b", ran)
    with rt.attention_backend(a):
        rt.attention(q, k, v)
        with rt.attention_backend(b):
            rt.attention(q, k, v)
            rt.attention(q, k, v, backend=a)
        rt.attention(q, k, v)
        with rt.attention_backend(LAST):
            assert rt.current_backend() == LAST
    rt.attention(q, k, v)
    assert ran == [f"{x} forward" for x in "abaa"]


def test_restores_on_exceptions_at_every_depth() -> None:
    def inner() -> None:
        with rt.attention_backend(LAST):
            raise KeyError("inner")

    with pytest.raises(ValueError, match="outer"), rt.attention_backend(FIRST):
        with pytest.raises(KeyError):
            inner()
        assert rt.current_backend() == FIRST
        raise ValueError("outer")
    assert rt.current_backend() == "auto"


def test_a_generator_closed_in_another_context_ends_quietly() -> None:
    def lines() -> Iterator[int]:
        with rt.attention_backend(LAST):
            yield 1

    generator = lines()
    contextvars.copy_context().run(next, generator)
    assert rt.current_backend() == "auto"
    generator.close()  # type: ignore[attr-defined]
    assert rt.current_backend() == "auto"


@pytest.mark.parametrize("wrong", ["nobody", "", None, 3, ["auto"]])
def test_an_unknown_name_is_refused_on_entering_and_changes_nothing(wrong: Any) -> None:
    with rt.attention_backend(LAST):
        with refused(rt.ArgumentError, "attention_backend", repr(wrong), *NAMES, "auto"), rt.attention_backend(wrong):
            pytest.fail("entered")
        assert rt.current_backend() == LAST


def test_an_underscore_in_front_is_diffusers_way_of_writing() -> None:
    with rt.attention_backend(f"_{LAST}"):
        assert rt.current_backend() == LAST


def test_a_thread_has_its_own() -> None:
    seen: dict[str, object] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        seen["before"] = rt.current_backend()
        with rt.attention_backend(FIRST):
            inside.set()
            done.wait(10)
            seen["inside"] = rt.current_backend()
        seen["after"] = rt.current_backend()

    with rt.attention_backend(LAST):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
        assert rt.current_backend() == LAST
        done.set()
        thread.join(10)
    assert seen == {"before": "auto", "inside": FIRST, "after": "auto"}


def test_a_task_has_its_own_and_starts_with_its_makers() -> None:
    async def work(name: str, turn: asyncio.Event, next_turn: asyncio.Event) -> list[object]:
        seen = [rt.current_backend()]
        with rt.attention_backend(name):
            next_turn.set()
            await turn.wait()
            seen.append(rt.current_backend())
        return [*seen, rt.current_backend()]

    async def both() -> list[list[object]]:
        a, b = asyncio.Event(), asyncio.Event()
        with rt.attention_backend(LAST):
            tasks = [asyncio.create_task(work(FIRST, a, b)), asyncio.create_task(work("auto", b, a))]
        return [*await asyncio.gather(*tasks), [rt.current_backend()]]

    assert asyncio.run(both()) == [[LAST, FIRST, LAST], [LAST, "auto", LAST], ["auto"]]


def test_backward_uses_what_forward_had_chosen(ran: list[str]) -> None:
    q, k, v = qkv(grad=True)
    with rt.attention_backend(recorder("a", ran)):
        out = rt.attention(q, k, v)
    with rt.attention_backend(recorder("b", ran)):
        out.sum().backward()
    assert ran == ["a forward", "a backward"]


ENVIRONMENT = """
import os, sys
import torch
def load(value):
    for name in [n for n in sys.modules if n.split(".")[0] == "ringtrue"]:
        del sys.modules[name]
    os.environ.pop("RINGTRUE_BACKEND", None)
    if value is not None:
        os.environ["RINGTRUE_BACKEND"] = value
    import ringtrue
    return ringtrue
names = sys.argv[1:]
for value in (None, "", "auto", *names, *("_" + n for n in names)):
    rt = load(value)
    assert rt.current_backend() == (value or "auto").removeprefix("_"), value
    os.environ["RINGTRUE_BACKEND"] = "nobody"  # read once, at import: too late to matter
    q = torch.ones(1, 2, 1, 4)
    assert rt.explain(q, q, q).backend == (names[0] if value in (None, "", "auto") else value.removeprefix("_"))
    rt.attention(q, q, q)
    with rt.attention_backend(names[0]):
        assert rt.current_backend() == names[0]
for value in ("nobody", names[0].upper(), " " + names[0]):
    try:
        load(value)
    except ValueError as error:
        text = str(error)
        assert "RINGTRUE_BACKEND" in text and repr(value) in text and all(n in text for n in (*names, "auto")), text
    else:
        raise SystemExit(f"{value!r} was accepted")
print("read")
"""


def test_the_environment_variable_is_read_once_and_an_unknown_value_is_an_error() -> None:
    """BR-59: set before, set after, unknown, in the wrong case, empty."""
    done = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT, *NAMES],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "read", done.stderr
