"""Scopes and compiled code: the choice of the moment is taken, whether the scope is inside or outside of that code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringtrue as rt
from calls import HERE, like, qkv, refused
from calls import one_thread as one_thread
from ringtrue import scope, select

FIRST, LAST = HERE[0].name, HERE[-1].name
TENSORS = qkv(grad=True)
NUMBERS = {name: rt.attention(*TENSORS, backend=name).detach() for name in (FIRST, LAST)}


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether a scope was ever entered is kept for the whole process; here each test starts without."""
    monkeypatch.setattr(scope, "_entered", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert rt.current_backend() == "auto"
    assert scope.traced_backend() == scope.traced_context() == (None, True)


def who(out: Tensor) -> str:
    """Which backend made this: their numbers differ in the last bits."""
    assert not torch.equal(NUMBERS[FIRST], NUMBERS[LAST])
    (name,) = (name for name, numbers in NUMBERS.items() if torch.equal(out, numbers))
    return name


def compiled(fn: Callable[..., Any] = rt.attention, fullgraph: bool = True) -> Callable[[], Any]:
    run = torch.compile(lambda *x: fn(*x), fullgraph=fullgraph, backend="eager")
    return lambda: run(*TENSORS)


def test_a_scope_outside_takes_effect_at_once() -> None:
    run = compiled()
    assert who(run()) == FIRST
    with rt.attention_backend(LAST):
        assert who(run()) == LAST
        with rt.attention_backend(f"_{FIRST}"):
            assert who(run()) == FIRST
        assert who(run()) == LAST
    assert who(run()) == FIRST
    with pytest.raises(KeyError), rt.attention_backend(LAST):
        raise KeyError
    assert who(run()) == FIRST


def test_a_scope_inside_and_a_name_inside() -> None:
    """BR-56 (pytorch#149725): a backend chosen inside of the compiled function."""

    def body(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with rt.attention_backend(LAST):
            one = rt.attention(q, k, v)
            with rt.attention_backend(FIRST):
                two = rt.attention(q, k, v)
            three = rt.attention(q, k, v)
        return one, two, three, rt.attention(q, k, v), rt.attention(q, k, v, backend=LAST)

    run = compiled(body)
    assert [who(x) for x in run()] == [LAST, FIRST, LAST, FIRST, LAST]
    with rt.attention_backend(LAST):
        assert [who(x) for x in run()] == [LAST, FIRST, LAST, LAST, LAST]


def test_a_graph_break_inside_a_scope_keeps_it() -> None:
    seen = []

    @torch.compiler.disable
    def opaque(q: Tensor, k: Tensor, v: Tensor) -> Any:
        seen.append((rt.current_backend(), who(rt.attention(q, k, v))))
        return q

    def body(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with rt.attention_backend(LAST):
            before = rt.attention(q, k, v)
            opaque(q, k, v)
            return before, rt.attention(q, k, v)

    assert [who(x) for x in compiled(body, fullgraph=False)()] == [LAST, LAST]
    assert seen == [(LAST, LAST)]


def test_the_default_is_read_as_the_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """RINGTRUE_BACKEND."""
    run = compiled()
    assert who(run()) == FIRST
    with monkeypatch.context() as patch:
        patch.setattr(select, "DEFAULT", LAST)
        assert who(run()) == LAST


def test_a_thread_has_its_own() -> None:
    run, seen = compiled(), []

    def other() -> None:
        seen.append(who(run()))
        with rt.attention_backend(FIRST):
            seen.append(who(run()))

    with rt.attention_backend(LAST):
        assert who(run()) == LAST
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        assert who(run()) == LAST
    assert seen == [FIRST, FIRST]


def test_another_tasks_scope_is_refused() -> None:
    """Tasks of a thread share what compiled code reads: never silently. Inside, or by name, it is each task's own."""
    run, named = compiled(), compiled(lambda q, k, v: rt.attention(q, k, v, backend=FIRST))

    async def entered(inside: asyncio.Event, done: asyncio.Event) -> None:
        with rt.attention_backend(LAST):
            inside.set()
            await done.wait()

    async def both() -> None:
        inside, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(entered(inside, done))
        await inside.wait()
        with refused(rt.ScopeError, "another asyncio task", repr(LAST), "inside of the compiled code"):
            run()
        assert who(named()) == FIRST
        done.set()
        await task

    asyncio.run(both())
    assert who(run()) == FIRST


def test_another_tasks_context_is_refused() -> None:
    cp = rt.ContextParallel(rt.ContextParallelConfig())
    run, named = compiled(), compiled(lambda q, k, v: rt.attention(q, k, v, parallel=cp))

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with cp.scope():
            return rt.attention(q, k, v)

    async def entered(here: asyncio.Event, done: asyncio.Event) -> None:
        with cp:
            run()
            here.set()
            await done.wait()

    async def both() -> None:
        here, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(entered(here, done))
        await here.wait()
        with refused(rt.ScopeError, "another asyncio task", repr(cp), "inside of the compiled code"):
            run()
        assert torch.equal(named(), compiled(inside)())
        done.set()
        await task

    asyncio.run(both())
    assert who(run()) == FIRST


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_backward_uses_what_forward_had_chosen(compiler: str) -> None:
    expected = torch.autograd.grad(rt.attention(*TENSORS, backend=LAST), TENSORS, like(TENSORS[0]))
    run = torch.compile(rt.attention, fullgraph=True, backend=compiler)
    with rt.attention_backend(LAST):
        out = run(*TENSORS)
    with rt.attention_backend(FIRST):
        got = torch.autograd.grad(out, TENSORS, like(out))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("keep", [checkpoint, rt.checkpoint])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_checkpoint_inside_of_compiled_code(keep: Callable[..., Any], compiler: str) -> None:
    """With torch's graph of the recompute the choice is compiled in; with Dynamo alone it is an eager checkpoint."""
    expected = torch.autograd.grad(rt.attention(*TENSORS, backend=LAST), TENSORS, like(TENSORS[0]))
    run = torch.compile(
        lambda *x: keep(lambda *y: rt.attention(*y) * 1, *x, use_reentrant=False), fullgraph=True, backend=compiler
    )
    with rt.attention_backend(LAST):
        out = run(*TENSORS)
    got = torch.autograd.grad(out, TENSORS, like(out))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.filterwarnings("ignore")  # what Dynamo says about tensors that are no leaves
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_a_checkpoint_around_compiled_code(reentrant: bool) -> None:
    run = torch.compile(rt.attention, fullgraph=True, backend="aot_eager")
    tensors = qkv(grad=True)
    expected = torch.autograd.grad(rt.attention(*tensors, backend=LAST), tensors, like(tensors[0]))
    with rt.attention_backend(LAST):
        lost = checkpoint(run, *tensors, use_reentrant=reentrant)
        kept = rt.checkpoint(run, *tensors, use_reentrant=reentrant)
    with refused(rt.ScopeError, "outside its backend scope", "rt.checkpoint"):
        lost.backward(like(lost))  # type: ignore[union-attr]
    with rt.attention_backend(FIRST):
        kept.backward(like(kept))
    assert all(torch.equal(x.grad, e) for x, e in zip(tensors, expected, strict=True))
