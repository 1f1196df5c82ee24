"""How evenly a causal ring is loaded, in tiles of what the pair is asked to compute."""

from __future__ import annotations

import pytest
import torch
from counting import Counting

import ringtrue as rt
from ringtrue.parallel.twin import Rank, World

LIMIT = 1.05  # slowest over mean
TILE = 16


def slowest(degrees: tuple[int, int], length: int, balance: str, side: int, mask: object = None) -> float:
    """The largest share of the work over the mean share."""
    ulysses, ring = degrees

    def body(mesh: Rank) -> int:
        config = rt.ContextParallelConfig(ulysses, ring, mesh=mesh, load_balance=balance)  # type: ignore[arg-type]
        cp = rt.ContextParallel(config)
        count = Counting()
        q = cp.shard(torch.zeros(1, length, ulysses, 1), 1)
        rt.attention(q, q, q, rt.Causal() if mask is None else mask, backend=count.pair(), parallel=cp)
        return count.tiles(side)

    work = World(ulysses * ring, wait=30.0).run(body)
    return max(work) * len(work) / sum(work)


@pytest.mark.parametrize("ring", [2, 4, 8, 16])
def test_head_tail_loads_all_ranks_alike(ring: int) -> None:
    assert slowest((1, ring), 64 * ring, "head_tail", TILE) <= LIMIT


@pytest.mark.parametrize("ring", [2, 4, 8, 16])
def test_head_tail_of_an_odd_length(ring: int) -> None:
    """Chunks differ by a token; so does the work, place by place."""
    assert slowest((1, ring), 64 * ring + ring + 1, "head_tail", 1) <= LIMIT


@pytest.mark.parametrize("ring", [2, 4])
def test_head_tail_inside_ulysses(ring: int) -> None:
    assert slowest((2, ring), 64 * ring, "head_tail", TILE) <= LIMIT


@pytest.mark.parametrize("ring", [2, 4, 8, 16])
def test_contiguous_shards_do_not(ring: int) -> None:
    """The last rank of a causal ring sees everything: nearly twice the mean."""
    assert slowest((1, ring), 64 * ring, "none", TILE) > 1.4


def test_without_a_mask_both_are_even() -> None:
    for balance in ("none", "head_tail"):
        assert slowest((1, 4), 256, balance, TILE, rt.Window()) <= LIMIT
