"""Scopes choose per thread and per task, backward reads none, and a recompute that lost its scope is refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringtrue as rt
from calls import HERE, assert_close, eager, like, qkv, refused
from calls import one_thread as one_thread
from ringtrue import scope
from ringtrue.contract import OpPair

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


def recorder(name: str, ran: list[str]) -> OpPair:
    """A right pair that writes down when it runs."""
    pair = HERE[0].pairs["cpu"]

    def forward(*args: Any) -> Any:
        ran.append(f"{name} forward")
        return pair.forward(*args)

    def backward(*args: Any) -> Any:
        ran.append(f"{name} backward")
        return pair.backward(*args)

    return replace(pair, name=name, forward=forward, backward=backward)


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


CHECKPOINTS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])


def gradients_are_right(q: Tensor, k: Tensor, v: Tensor, got: tuple[Tensor | None, ...]) -> None:
    expected = torch.autograd.grad(eager(q, k, v)[0], (q, k, v), like(q))
    for g, e in zip(got, expected, strict=True):
        assert_close(g, e)


@CHECKPOINTS
def test_recomputed_inside_its_scope(reentrant: bool, ran: list[str]) -> None:
    q, k, v = qkv(grad=True)
    with rt.attention_backend(recorder("a", ran)):
        checkpoint(rt.attention, q, k, v, use_reentrant=reentrant).backward(like(q))  # type: ignore[union-attr]
    assert ran == ["a forward", "a forward", "a backward"]
    gradients_are_right(q, k, v, (q.grad, k.grad, v.grad))


@CHECKPOINTS
def test_recomputed_outside_its_scope_is_refused(reentrant: bool, ran: list[str]) -> None:
    q, k, v = qkv(grad=True)
    with rt.attention_backend(recorder("a", ran)):
        out = checkpoint(rt.attention, q, k, v, use_reentrant=reentrant)
    with refused(
        rt.ScopeError, "recomputed", "outside its backend scope", "attention(q=float32[2, 6, 4, 8]", "backend="
    ):
        out.backward(like(q))  # type: ignore[union-attr]
    assert ran == ["a forward"]
    assert q.grad is k.grad is v.grad is None


def named(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return rt.attention(q, k, v, backend=LAST)


def with_a_scope_of_its_own(q: Tensor, k: Tensor, v: Tensor) -> Any:
    with rt.attention_backend(LAST):
        return rt.attention(q, k, v)


@CHECKPOINTS
@pytest.mark.parametrize("fn", [named, with_a_scope_of_its_own])
def test_what_chooses_for_itself_can_be_recomputed_anywhere(reentrant: bool, fn: Callable[..., Any]) -> None:
    q, k, v = qkv(grad=True)
    with rt.attention_backend(FIRST):
        out = checkpoint(fn, q, k, v, use_reentrant=reentrant)
    out.backward(like(q))
    gradients_are_right(q, k, v, (q.grad, k.grad, v.grad))


@CHECKPOINTS
def test_without_any_scope_a_recompute_is_an_ordinary_call(reentrant: bool) -> None:
    q, k, v = qkv(grad=True)
    checkpoint(rt.attention, q, k, v, use_reentrant=reentrant).backward(like(q))  # type: ignore[union-attr]
    gradients_are_right(q, k, v, (q.grad, k.grad, v.grad))


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
