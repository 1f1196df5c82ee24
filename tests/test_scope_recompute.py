"""Activation checkpointing runs a call again while backward runs: in its scope it is right, outside it is refused."""

from __future__ import annotations

import contextlib
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
from ringtrue.backends import REGISTRY

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


def same_random_numbers(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return rt.attention(torch.nn.functional.dropout(q, 0.5), k, v)


@CHECKPOINTS
def test_our_checkpoint_recomputes_as_its_forward_ran(reentrant: bool, ran: list[str]) -> None:
    """After all scopes were left, and inside of another one: the forward's backend, also where it named none."""
    a, b = recorder("a", ran), recorder("b", ran)
    for inside in (None, b):
        q, k, v = qkv(grad=True)
        with rt.attention_backend(a):
            out = rt.checkpoint(rt.attention, q, k, v, use_reentrant=reentrant)
        with contextlib.nullcontext() if inside is None else rt.attention_backend(inside):
            out.backward(like(q))
        gradients_are_right(q, k, v, (q.grad, k.grad, v.grad))
    assert ran == ["a forward", "a forward", "a backward"] * 2
    unscoped = rt.checkpoint(rt.attention, *qkv(grad=True), use_reentrant=reentrant)
    with rt.attention_backend(b):
        unscoped.backward(like(unscoped))
    assert len(ran) == 6


@CHECKPOINTS
def test_torchs_checkpoint_takes_the_scope_that_it_is_in(reentrant: bool, ran: list[str]) -> None:
    """What the documentation says of it: recomputed inside of another scope, a call takes that one."""
    q, k, v = qkv(grad=True)
    with rt.attention_backend(recorder("a", ran)):
        out = checkpoint(rt.attention, q, k, v, use_reentrant=reentrant)
    with rt.attention_backend(recorder("b", ran)):
        out.backward(like(q))  # type: ignore[union-attr]
    assert ran[:2] == ["a forward", "b forward"]


@CHECKPOINTS
def test_our_checkpoint_inside_of_torchs_never_runs_with_another(reentrant: bool, ran: list[str]) -> None:
    """The outer recompute lost the scope. torch then calls the inner one again (reentrant), which must not carry that
    loss along as if it were a choice, or only recomputes what the first one had carried."""

    def inner(*x: Tensor) -> Any:
        return rt.checkpoint(rt.attention, *x, use_reentrant=reentrant)

    q, k, v = qkv(grad=True)
    with rt.attention_backend(recorder("a", ran)):
        lost = checkpoint(inner, q, k, v, use_reentrant=reentrant)
    with contextlib.suppress(rt.ScopeError):
        lost.backward(like(q))  # type: ignore[union-attr]
        gradients_are_right(q, k, v, (q.grad, k.grad, v.grad))
        assert not reentrant
    assert {x[0] for x in ran} == {"a"}
    assert (q.grad is None) == reentrant
    with rt.attention_backend(recorder("a", ran)):
        kept = rt.checkpoint(inner, q, k, v, use_reentrant=reentrant)
    q.grad = k.grad = v.grad = None
    kept.backward(like(q))
    gradients_are_right(q, k, v, (q.grad, k.grad, v.grad))


@CHECKPOINTS
def test_our_checkpoint_carries_the_context(reentrant: bool) -> None:
    seen: list[object] = []

    def look(x: Tensor) -> Tensor:
        seen.append(scope.current_context())
        return x.sin()  # keeps its input, or nothing would be recomputed

    context = object()
    x = torch.ones(1, requires_grad=True)
    scope.enter_context(context)
    out = rt.checkpoint(look, x, use_reentrant=reentrant)
    scope.leave_context()
    out.backward()
    assert seen == [context, context]
    assert scope.current_context() is scope.traced_context()[0] is None


@CHECKPOINTS
def test_our_checkpoint_keeps_random_state_and_torchs_options(reentrant: bool) -> None:
    q, k, v = qkv(grad=True)
    torch.manual_seed(5)
    expected = torch.autograd.grad(same_random_numbers(q, k, v), (q, k, v), like(q))
    torch.manual_seed(5)
    out = rt.checkpoint(same_random_numbers, q, k, v, use_reentrant=reentrant, preserve_rng_state=True)
    torch.rand(3)
    out.backward(like(q))
    for x, e in zip((q, k, v), expected, strict=True):
        assert_close(x.grad, e)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@CHECKPOINTS
@pytest.mark.parametrize("left", [False, True], ids=["inside", "after"])
def test_on_cuda_autograds_own_thread_recomputes(reentrant: bool, left: bool) -> None:
    name = next(b.name for b in reversed(REGISTRY) if "cuda" in b.pairs and b.unavailable("cuda") is None)
    for run in (rt.checkpoint, checkpoint):
        q, k, v = (x.detach().cuda().requires_grad_() for x in qkv())
        with contextlib.ExitStack() as stack:
            stack.enter_context(rt.attention_backend(name))
            out = run(rt.attention, q, k, v, use_reentrant=reentrant)
            if left:
                stack.close()
            if run is checkpoint:  # inside of the scope, too: that thread has none
                with refused(rt.ScopeError, "use rt.checkpoint"):
                    out.backward(like(q.cpu()).cuda())  # type: ignore[union-attr]
            else:
                out.backward(like(q.cpu()).cuda())
                expected = torch.autograd.grad(eager(q, k, v)[0], (q, k, v), like(q.cpu()).cuda())
                for x, e in zip((q, k, v), expected, strict=True):
                    assert_close(x.grad, e)
