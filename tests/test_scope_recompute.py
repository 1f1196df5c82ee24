"""Activation checkpointing runs a call again while backward runs: in its scope it is right, outside it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringtrue as rt
from calls import HERE, assert_close, eager, like, qkv, recorder, refused
from calls import one_thread as one_thread
from ringtrue import scope

FIRST, LAST = HERE[0].name, HERE[-1].name


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether a scope was ever entered is kept for the whole process; here each test starts without."""
    monkeypatch.setattr(scope, "_entered", set())
    yield
    assert rt.current_backend() == "auto"


@pytest.fixture
def ran() -> list[str]:
    return []


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
