"""The rectangles of a ring cover exactly what may be seen."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ringtrue.parallel import layout
from ringtrue.parallel.layout import Layout
from ringtrue.parallel.schedule import Schedule


def seen(schedule: Schedule, worker: int, owner: int, joined: bool) -> Tensor:
    """(queries of the worker, keys of the owner): how many rectangles show a key to a query."""
    count = torch.zeros(layout.count(schedule.q[worker]), layout.count(schedule.k[owner]), dtype=torch.int64)
    for block in schedule.blocks(worker, owner, joined):
        rows, cols = (torch.arange(s.stop - s.start) for s in (block.rows, block.cols))
        shown = torch.ones(len(rows), len(cols), dtype=torch.bool)
        if block.causal is not None:
            shown &= cols <= rows[:, None] + block.causal
        if block.since is not None:
            shown &= cols >= rows[:, None] + block.since
        assert shown.any(), block
        count[block.rows, block.cols] += shown
    return count


def truth(schedule: Schedule, worker: int, owner: int) -> Tensor:
    """The same from global positions."""
    rows, cols = layout.positions(schedule.q[worker])[:, None], layout.positions(schedule.k[owner])
    shown = torch.ones(rows.shape[0], cols.shape[0], dtype=torch.bool)
    if schedule.causal is not None:
        shown &= cols <= rows + schedule.causal
    if schedule.since is not None:
        shown &= cols >= rows + schedule.since
    return shown.long()


def drawn(seed: int) -> Schedule:
    pick = random.Random(seed)
    ranks, kind = pick.choice((1, 2, 3, 4)), pick.choice(("contiguous", "head_tail", "prefix", "cross"))

    def lengths() -> list[int]:
        return [pick.randint(0, 4) for _ in range(ranks)]

    q: Layout = layout.contiguous(lengths())
    if kind == "head_tail":
        q = layout.head_tail(pick.randint(0, 20), 1, ranks)
    elif kind == "prefix":
        q = layout.behind(pick.randint(0, 5), q)
    k = layout.contiguous(lengths()) if kind == "cross" else q
    return Schedule(q, k, pick.choice((None, 0, 0, 1, -2, 5)), pick.choice((None, None, -1, -3, 1)))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("block", range(4))
def test_all_that_is_visible_is_in_one_rectangle(block: int, joined: bool) -> None:
    for seed in range(block * 100, block * 100 + 100):
        schedule = drawn(seed)
        for worker in range(schedule.size):
            for owner in range(schedule.size):
                assert torch.equal(seen(schedule, worker, owner, joined), truth(schedule, worker, owner)), (
                    seed,
                    schedule,
                )
                assert schedule.works(worker, owner) == bool(truth(schedule, worker, owner).any())


def test_columns_are_the_global_positions_of_the_keys() -> None:
    for seed in range(100):
        schedule = drawn(seed)
        for owner in range(schedule.size):
            held = layout.positions(schedule.k[owner])
            for block in schedule.blocks(0, owner):
                assert held[block.cols].tolist() == list(range(block.columns.start, block.columns.stop))


def test_a_balanced_causal_ring_makes_one_call_a_step() -> None:
    """Own keys are one causal call, keys from before half of them, keys from behind half of the queries."""
    places = layout.head_tail(64, 1, 4)
    schedule = Schedule(places, places, causal=0)
    for worker in range(4):
        for owner in range(4):
            (block,) = schedule.blocks(worker, owner, joined=True)
            assert block.full == (worker != owner)


def test_what_a_window_does_not_reach_is_left_out() -> None:
    places = layout.contiguous((4,) * 4)
    schedule = Schedule(places, places, 0, -3)
    works = [[o for o in range(4) if schedule.works(w, o)] for w in range(4)]
    assert works == [[0], [0, 1], [1, 2], [2, 3]]
