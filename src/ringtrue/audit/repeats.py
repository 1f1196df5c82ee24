"""Laws about the same call again: its numbers, what it leaves behind, and memory that held something else before.

twice     bit for bit the same, where the subject says so; else both right by the rule (the call's own check)
growth    nothing of a call is alive after it: no cache holds its tensors
poison    every fresh tensor is filled with NaN first, so that a result nobody wrote is seen
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .asked import revealed, run
from .inputs import Inputs
from .judge import Verdict, judged
from .subject import Subject

CALLS, BOUNDED = 6, 2  # in a row; what a bounded cache keeps of two of them is allowed, what grows is not


def twice(subject: Subject, inputs: Inputs) -> list[Verdict]:
    inputs = replace(inputs, options=replace(inputs.options, deterministic=subject.says.deterministic))
    first = run(subject, inputs)
    if not subject.says.deterministic:
        drawn = revealed(subject, inputs) if inputs.options.dropout_p else None
        return judged(run(subject, inputs), replace(inputs, dropout=drawn))
    found = []
    for _ in range(3):
        again = run(subject, inputs)
        for name, a, b in zip(first._fields, first, again, strict=True):
            if a is not None and b is not None:
                differ = int((~_same(a, b)).sum())
                problem = f"differs from run to run in {differ} of {a.numel()} places" if differ else ""
                found.append(Verdict(name, not problem, 0, 0, 0, 0, problem))
    return sorted(found, key=lambda v: v.ok)[: len(first._fields)]


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def growth(subject: Subject, inputs: Inputs) -> list[Verdict]:
    """Inputs and results of several calls, other tensors each time: of how many calls is something alive afterwards?"""
    held: list[list[weakref.ref[Any]]] = []
    before, tensors = _allocated(inputs), 0
    for turn in range(CALLS + 1):
        x = replace(inputs, q=inputs.q + 0, k=inputs.k + 0, v=inputs.v + 0, grad_out=inputs.grad_out + 0)
        found = run(subject, x)
        if turn:  # the first fills what caches there are
            held.append([weakref.ref(t.untyped_storage()) for t in (x.q, x.k, x.v, *found) if t is not None])
        del x, found
        if not turn:
            gc.collect()
            before, tensors = _allocated(inputs), _tensors()
    gc.collect()
    tensors = _tensors() - tensors
    alive, grown = sum(any(ref() is not None for ref in refs) for refs in held), _allocated(inputs) - before
    problem = f"of {alive} of {CALLS} calls something is still alive" if alive > BOUNDED else ""
    if not problem and tensors >= CALLS:
        problem = f"{tensors} tensors more are alive after {CALLS} calls than before"
    if not problem and grown > 2 * inputs.q.nbytes * CALLS:
        problem = f"{grown} bytes more are allocated after {CALLS} calls than before"
    return [Verdict("memory", not problem, alive, BOUNDED, 0, 0, problem)]


def _tensors() -> int:
    """How many tensors there are in this process, whoever made them."""
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def _allocated(inputs: Inputs) -> int:
    return torch.cuda.memory_allocated() if inputs.q.is_cuda else 0


def poison(subject: Subject, inputs: Inputs) -> list[Verdict]:
    with poisoned(inputs.q.device):
        result = run(subject, inputs)
    return judged(result, inputs)


@contextmanager
def poisoned(device: torch.device) -> Iterator[None]:
    """Memory that a call is given holds NaN: torch's own switch on the CPU, freed blocks full of NaN on a GPU.

    (torch.utils.deterministic.fill_uninitialized_memory; on a GPU it would make torch take other kernels.)
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        blocks = [torch.full((size // 4,), torch.nan, device=device) for size in (*[1 << 19] * 24, *[12 << 20] * 4)]
        del blocks
        yield
        return
    switch: Any = torch.utils.deterministic
    filled, mode = switch.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    quiet = torch.is_deterministic_algorithms_warn_only_enabled()
    switch.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=quiet)
        switch.fill_uninitialized_memory = filled


REPEATS = {"twice": twice, "growth": growth, "poison": poison}
