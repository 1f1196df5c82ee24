"""Random states that differ anywhere give other kernel seeds, also to a generator that looks at 32 bits alone."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from ringtrue.backends._mixed import mixed

OFFSETS = [0, 1, 2, *(k << shift for shift in (20, 26, 40, 48) for k in (1, 2, 3))]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_low_bits_tell_all_states_apart(seed: int) -> None:
    found = {mixed(seed, offset) & 0xFFFFFFFF for offset in OFFSETS}
    assert len(found) == len(OFFSETS)


def test_neighbouring_states_are_independent() -> None:
    """Half of the drawn bits differ, give or take."""
    drawn = []
    for offset in OFFSETS:
        numbers = torch.Generator().manual_seed(mixed(5, offset))
        drawn.append(torch.rand(4096, generator=numbers) < 0.5)
    assert all(0.45 < float((a ^ b).double().mean()) < 0.55 for a, b in combinations(drawn, 2))
