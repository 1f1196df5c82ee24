"""The operators of compiled calls, called as a graph calls them but without compiling: every mode, and with faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from draws import build, on_ranks
from playing import Result
from problems import Draw
from recipes import Recipe, recipe

import ringtrue as rt
from calls import one_thread as one_thread
from ringtrue import api, together, tracing
from ringtrue.parallel import traced
from ringtrue.parallel.context import DeclaredCall

NAMES = ("auto", *dict.fromkeys(s.name for s in rt.backends() if s.device == "cpu" and s.unavailable is None))


def through_operators(problem: Draw) -> list[Result]:
    place = patch.object(traced, "here", lambda: ("a function", 0))
    with patch.object(api, "_run", tracing.run), place:
        return on_ranks(problem)


def differing(problem: Draw) -> list[str]:
    """What is not, bit by bit, as in the eager call."""
    found = []
    for rank, pair in enumerate(zip(through_operators(problem), on_ranks(problem), strict=True)):
        for name, a, b in zip(Result._fields, *pair, strict=True):
            if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
                found.append(f"rank {rank}: {name}")
    return found


def comes_back(problem: Draw) -> bool:
    """Whether all ranks want gradients, or none: compiled code takes no other calls."""
    return len({any(problem.wanted(rank, name) for name in "qkvb") for rank in range(problem.size)}) == 1


def test_every_mode_gives_the_eager_numbers() -> None:
    told = [recipe(Random(seed), backends=NAMES) for seed in range(100)]
    problems = [(str(t), problem) for t, problem in zip(told, map(build, told), strict=True) if comes_back(problem)]
    assert len(problems) > 50
    assert [(text, found) for text, problem in problems if (found := differing(problem))] == []


# ---- faults of this bridge -------------------------------------------------------------------------------------------

_given, _again = together._given, tracing._Ranks.again


def lse_forgotten(result: Any, *rest: Any) -> Any:
    """The log-sum-exp that only backward reads is kept as zeros."""
    return _given(result._replace(lse=torch.zeros_like(result.lse)), *rest)


def planned_alone(self: Any, *inputs: Any) -> Any:
    """Backward composes from what this rank knows by itself."""
    *rest, numbers = inputs
    context = tracing._declared(rest[-1])
    size = context.context.size if isinstance(context, DeclaredCall) else context.size
    own = [inputs[0].shape[1]] * size + [inputs[1].shape[1]] * size
    return _again(self, *rest, [numbers[0], *own, *numbers[1 + 2 * size :]])


def own_wishes(self: Any, *inputs: Any) -> Any:
    """Backward computes what this rank wants, not what its peers do."""
    *rest, numbers = inputs
    return _again(self, *rest, [*numbers[:-4], *map(int, rest[4].requires_grad)])


def first_backend(choice: Any) -> int:
    """Backward takes another pair than forward did."""
    return 0 if choice.backend != api.REGISTRY[0].name else 1


def prefix_forgotten(self: Any, *inputs: Any) -> Any:
    """Backward takes a joint prefix for tokens of each rank."""
    *rest, shared, numbers = inputs
    return _again(self, *rest, shared._replace(lengths=[]), numbers)


def no_gradient_of_lse(self: Any, *inputs: Any) -> Any:
    call, pair = _again(self, *inputs)
    return call, replace(pair, backward=lambda grad_out, _, *rest: pair.backward(grad_out, None, *rest))


def another_draw(self: Any, *inputs: Any) -> Any:
    """Backward drops other weights than forward did."""
    call, pair = _again(self, *inputs)
    return call, replace(pair, backward=lambda *given: pair.backward(*given[:8], given[8] + 1, *given[9:]))


RING, BOTH = Recipe(ring=2, q=(3, 4), wants=("qkv",)), Recipe(ulysses=2, ring=2, q=(3, 2, 4, 1), wants=("qkv",))
FAULTS: dict[str, tuple[Any, str, Any, Recipe]] = {
    "lse forgotten": (together, "_given", lse_forgotten, replace(RING, lse=False)),
    "planned alone": (tracing._Ranks, "again", planned_alone, replace(RING, ring=1, ulysses=2, q=(3, 4), k=(4, 3))),
    "own wishes": (tracing._Ranks, "again", own_wishes, replace(RING, wants=("q", "kv"))),
    "another backend": (tracing, "_number", first_backend, replace(BOTH, dropout=0.4, backend="native_math")),
    "prefix forgotten": (tracing._Ranks, "again", prefix_forgotten, replace(RING, prefix=2)),
    "no gradient of lse": (tracing._Ranks, "again", no_gradient_of_lse, replace(RING, lse=True)),
    "another draw": (tracing._Ranks, "again", another_draw, replace(BOTH, dropout=0.4)),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    place, attribute, fault, _ = FAULTS[name]
    with patch.object(place, attribute, fault):
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    problem = build(FAULTS[name][3])
    assert differing(problem) == []
    with planted(name):
        try:
            found = differing(problem)
        except Exception as error:
            found = [str(error)]
    assert found
