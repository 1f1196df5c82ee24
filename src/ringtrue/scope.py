"""Scopes choose, per thread and per asyncio task; what was chosen travels with the call (backward reads no scope).

Code that torch.compile traces cannot read a context variable. It reads a mirror, an attribute per thread on which torch
sets a guard: another scope outside of compiled code is another compilation. Tasks of one thread share the mirror, so
what was read there is held against the context variable when the call runs (`confirm`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from .contract import OpPair
from .errors import ScopeError, message

_backend: ContextVar[str | OpPair | None] = ContextVar("ringtrue_backend", default=None)
# a stack, so that one context may be entered from many threads or tasks without shared state
_contexts: ContextVar[tuple[object, ...]] = ContextVar("ringtrue_contexts", default=())
_carried: ContextVar[bool] = ContextVar("ringtrue_carried", default=False)  # `checkpoint` brought the scopes along
_entered: set[str] = set()  # which kinds of scope this process ever entered: only ever grows


class _Mirror(threading.local):
    def __init__(self) -> None:  # in each thread; torch 2.13 sets no guard on a default of the class
        self.backend: str | OpPair | None = None
        self.traced = False  # whether that backend's scope was entered by compiled code itself
        self.context: object | None = None
        self.context_traced = False  # whether that context was


_mirror = _Mirror()


def _reflect() -> None:
    """The mirror as the context variables are now: on leaving, too, for tasks may leave in any order."""
    contexts = _contexts.get()
    _mirror.backend, _mirror.traced = _backend.get(), False
    _mirror.context, _mirror.context_traced = contexts[-1] if contexts else None, False


@contextlib.contextmanager  # a generator: torch 2.13 forgets a class's __enter__ at a graph break inside
def backend_scope(backend: str | OpPair) -> Iterator[None]:
    """Calls inside that name no backend take this one; restores on exceptions."""
    if torch.compiler.is_compiling():
        before = _mirror.backend, _mirror.traced
        _mirror.backend, _mirror.traced = backend, True
        try:
            yield
        finally:
            _mirror.backend, _mirror.traced = before
        return
    _entered.add("backend")
    token = _backend.set(backend)
    _reflect()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a generator that is closed in another context: nothing was set there
            _backend.reset(token)
        _reflect()


@contextlib.contextmanager
def context_scope(context: AbstractContextManager[object]) -> Iterator[None]:
    """`with context:`, which torch can trace, too."""
    if torch.compiler.is_compiling():
        before = _mirror.context, _mirror.context_traced
        _mirror.context, _mirror.context_traced = context, True
        try:
            yield
        finally:
            _mirror.context, _mirror.context_traced = before
        return
    with context:
        yield


def enter_context(context: object) -> None:
    """Calls from here on that pass no `parallel` run under `context`, until `leave_context`."""
    _entered.add("context")
    _contexts.set((*_contexts.get(), context))
    _reflect()


def leave_context() -> None:
    """Undo the last `enter_context` of this thread or task."""
    _contexts.set(_contexts.get()[:-1])
    _reflect()


def current_backend(call: object = "") -> str | OpPair | None:
    """The backend in scope, or None. ScopeError, with the call (or what `call()` says), in a recompute that lost it."""
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


def traced_backend() -> tuple[str | OpPair | None, bool]:
    """For code that torch traces: the backend in scope, or None, and whether it comes from outside of that code."""
    return _mirror.backend, not _mirror.traced


def traced_context() -> tuple[object | None, bool]:
    """For code that torch traces: the context in scope, or None, and whether it comes from outside of that code."""
    return _mirror.context, not _mirror.context_traced


def confirm_backend(traced: str | None, call: object = "") -> None:
    """A compiled call that took this backend (None: none) from outside of its code finds it there when it runs, too."""
    if traced is not None and _recomputing():  # compiled into the backward graph, as its forward had it
        return
    found = current_backend(call)
    if found != traced and not _recomputing():
        _refuse_stranger("backend", traced, found, call)


def confirm_context(traced: object | None, call: object = "") -> None:
    """A compiled call that found this context (None: none) outside of its code finds it there when it runs, too."""
    if traced is not None and _recomputing():  # compiled into the backward graph, as its forward had it
        return
    found = current_context(call)
    if found is not traced and not _recomputing():
        _refuse_stranger("context", traced, found, call)


def _refuse_stranger(kind: str, traced: object, found: object, call: object) -> None:
    problem = f"compiled code saw the {kind} scope of another asyncio task of this thread"
    remedy = "pass backend= and parallel= to the call, or enter the scope inside of the compiled code"
    raise ScopeError(message(problem, call=call, limit=f"this task's: {found!r}", value=repr(traced), remedy=remedy))


def _recomputing() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _refuse_recompute(kind: str, remedy: str, call: object) -> None:
    """Activation checkpointing recomputes after the scope was left, on CUDA in another thread: never silently."""
    if kind in _entered and _recomputing() and not _carried.get():
        problem = f"attention was recomputed during backward outside its {kind} scope"
        said = call() if callable(call) else call
        raise ScopeError(message(problem, call=said, remedy=f"use rt.checkpoint, or pass {remedy} to the call itself"))


def checkpoint(fn: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` that recomputes `fn` in the scopes of its forward, wherever backward runs.

    Backend and context are those of this call, also where `backward` is called inside another scope, after all scopes
    were left, or in autograd's thread for a CUDA device. Random state is preserved as torch does it
    (`preserve_rng_state`). `kwargs` go to torch's: its own options, the rest to `fn` (with `use_reentrant=False` only).
    """
    if torch.compiler.is_compiling():  # what is compiled into the backward graph asks no scope
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=use_reentrant, **kwargs)
    state = _backend.get(), _contexts.get(), _carried.get() or not _recomputing()

    def inside(*given: Any, **named: Any) -> Any:
        with _restored(*state):
            return fn(*given, **named)

    return torch_checkpoint.checkpoint(inside, *args, use_reentrant=use_reentrant, **kwargs)


@contextlib.contextmanager
def _restored(backend: str | OpPair | None, contexts: tuple[object, ...], carried: bool) -> Iterator[None]:
    """Both scopes as they were, for compiled code too."""
    undo = (
        partial(_backend.reset, _backend.set(backend)),
        partial(_contexts.reset, _contexts.set(contexts)),
        partial(_carried.reset, _carried.set(carried)),
    )
    _reflect()
    try:
        yield
    finally:
        for reset in undo:
            reset()
        _reflect()
