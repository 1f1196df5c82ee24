"""Scopes choose, per thread and per asyncio task; what was chosen travels with the call (backward reads no scope)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from .contract import OpPair
from .errors import ScopeError, message

_backend: ContextVar[str | OpPair | None] = ContextVar("ringtrue_backend", default=None)
# a stack, so that one context may be entered from many threads or tasks without shared state
_contexts: ContextVar[tuple[object, ...]] = ContextVar("ringtrue_contexts", default=())
_entered: set[str] = set()  # which kinds of scope this process ever entered: only ever grows


@contextlib.contextmanager
def backend_scope(backend: str | OpPair) -> Iterator[None]:
    """Calls inside that name no backend take this one; restores on exceptions."""
    _entered.add("backend")
    token = _backend.set(backend)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a generator that is closed in another context: nothing was set there
            _backend.reset(token)


def enter_context(context: object) -> None:
    """Calls from here on that pass no `parallel` run under `context`, until `leave_context`."""
    _entered.add("context")
    _contexts.set((*_contexts.get(), context))


def leave_context() -> None:
    """Undo the last `enter_context` of this thread or task."""
    _contexts.set(_contexts.get()[:-1])


def current_backend(call: object = "") -> str | OpPair | None:
    """The backend in scope, or None. ScopeError in a recompute that may have lost its scope."""
    found = _backend.get()
    if found is None:
        _refuse_recompute("backend", 'backend="auto"', call)
    return found


def current_context(call: object = "") -> object | None:
    """The context in scope, or None. ScopeError in a recompute that may have lost its scope."""
    stack = _contexts.get()
    if not stack:
        _refuse_recompute("context", "parallel=cp, or parallel=False", call)
        return None
    return stack[-1]


def _refuse_recompute(kind: str, remedy: str, call: object) -> None:
    """Activation checkpointing recomputes after the scope was left, on CUDA in another thread: never silently."""
    if kind in _entered and torch._C._current_graph_task_id() >= 0:
        problem = f"attention was recomputed during backward outside its {kind} scope"
        raise ScopeError(message(problem, call=call, remedy=f"pass {remedy} to the call itself"))
