"""No pair remembers: every call of an order of calls is right, whatever ran before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from calls import SLOW
from contract.bridges import operator_pair
from contract.subjects import KERNELS, PLANTED, Subject, parameters
from ringtrue.audit.order import orders, run
from ringtrue.contract import OpPair
from ringtrue.plants.of_memories import MEMORIES

EVERY = pytest.mark.parametrize("subject", [parameters(s) for s in PLANTED])


def broken(pair: OpPair, device: str, dtype: torch.dtype, length: int = 16) -> Iterator[str]:
    """What is wrong in any order, in words."""
    for order in orders(pair.claims, dtype, device, length):
        names = " > ".join(step.name for step in order)
        for name, verdicts in run(pair, order):
            yield from (f"{names}: {name}: {v}" for v in verdicts if not v.ok)


TYPED = [
    pytest.param(s, dtype, id=f"{s}-{dtype}", marks=parameters(s).marks)  # type: ignore[attr-defined]
    for s in KERNELS
    for dtype in sorted(s.pair.claims.dtypes, key=str)[: 1 if s.pair.name in SLOW else None]
]


@pytest.mark.parametrize(("subject", "dtype"), TYPED)
def test_a_call_does_not_depend_on_what_ran_before(subject: Subject, dtype: torch.dtype) -> None:
    found = list(broken(subject.pair, subject.device, dtype))
    assert not found, "\n".join(found)


@EVERY
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("bridge", ["eager", "compiled"])
def test_a_memory_is_found(subject: Subject, name: str, bridge: str) -> None:
    memory = MEMORIES[name]
    if not memory.needs(subject.pair.claims):
        pytest.skip(f"{subject} does not claim what this memory would keep")
    dtype = min(subject.pair.claims.dtypes, key=str)
    pair = memory.on(subject.pair)
    pair = pair if bridge == "eager" else operator_pair(pair)
    assert next(broken(pair, subject.device, dtype), None)
