"""The ring law on every registered pair, and the two mutants that lose bits at every step."""

from __future__ import annotations

import pytest
import torch
from rings import errors, growths

import ringtrue as rt
from calls import SLOW
from ringtrue.plants.between_ranks import planted

HERE = [s for s in rt.backends() if s.device == "cpu" and s.unavailable is None and s.name not in SLOW]
PAIRS = [rt.op_pair(s.name, s.device) for s in HERE]
EVERY_PAIR = pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.name)
# beside one that computes in float32 a ring rounds once and the law leaves it room for that
IN_16_BITS = pytest.mark.parametrize(
    "pair", [p for p in PAIRS if p.claims.arithmetic == "16-bit"], ids=lambda p: p.name
)
DTYPE = torch.bfloat16


@EVERY_PAIR
def test_errors_do_not_grow_with_the_ring(pair: rt.OpPair) -> None:
    """Six seeds, worst: 1, 2 and 16 ranks."""
    failed = [str(g) for g in growths(pair, DTYPE) if not g.ok]
    assert not failed


@IN_16_BITS
@pytest.mark.parametrize("fault", ["merge in bf16", "dk/dv summed in bf16"])
def test_rounding_at_every_step_is_caught(pair: rt.OpPair, fault: str) -> None:
    with planted(fault):
        sixteen = errors(pair, 16, DTYPE)
    broken = {g.quantity for g in growths(pair, DTYPE, sixteen) if not g.ok}
    assert broken >= ({"out"} if fault == "merge in bf16" else {"dk", "dv"})
