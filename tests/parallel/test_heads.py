"""Heads over ranks and rounds: every one once, with the key head it reads; and what rounds hide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from draws import build, draw, failures
from recipes import Recipe

import ringtrue as rt
from ringtrue.parallel import agreement, ulysses
from ringtrue.parallel import heads as heads_of
from ringtrue.parallel.heads import LEAST, Shares, head_shares, rounds_of
from ringtrue.parallel.twin import Rank, World

SIZES = [(8, 8, 4), (3, 3, 2), (6, 2, 4), (12, 3, 4), (2, 1, 4), (30, 30, 4), (8, 2, 3), (24, 8, 2), (5, 5, 2)]


def heads_read(shares: Shares, heads: int, kv_heads: int) -> list[int]:
    """The query heads of all shares; each is held beside the key head that it reads."""
    for share in shares:
        reads = [h * kv_heads // heads for h in range(share.q.start, share.q.stop)]
        index = share.index or [i * share.kv_heads // max(share.heads, 1) for i in range(share.heads)]
        assert [share.kv.start + i for i in index] == reads
    return [h for share in shares for h in range(share.q.start, share.q.stop)]


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), SIZES)
def test_every_head_is_computed_once(heads: int, kv_heads: int, degree: int) -> None:
    assert heads_read(head_shares(heads, kv_heads, degree), heads, kv_heads) == list(range(heads))


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), SIZES)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_rounds_are_the_same_heads_rank_by_rank(heads: int, kv_heads: int, degree: int, most: int) -> None:
    rounds = rounds_of(heads, kv_heads, degree, most)
    by_rank = tuple(share for rank in zip(*rounds, strict=True) for share in rank)
    assert heads_read(by_rank, heads, kv_heads) == list(range(heads))
    assert len(rounds) == max(1, min(most, kv_heads // degree, heads // degree // LEAST))


@contextmanager
def rounds_at_most(most: int) -> Iterator[None]:
    """On the CPU too, and with rounds of a single head."""
    with patch.dict(agreement.ROUNDS, cpu=most), patch.object(heads_of, "LEAST", 1):
        yield


@pytest.mark.parametrize("most", [2, 3])
def test_numbers_do_not_depend_on_rounds(most: int) -> None:
    """Every draw with enough heads, float masks and their gradients among them."""
    seen = 0
    for seed in range(300):
        problem = draw(seed)
        degree, ring = problem.degrees
        if ring == 1 < degree and problem.inputs.k.shape[2] >= 2 * degree:
            with rounds_at_most(most):
                failed = failures(problem)
            assert not failed, (seed, str(problem), failed)
            seen += 1
    assert seen > 5


def test_heads_joined_round_by_round_are_caught() -> None:
    """Not rank by rank: every number is there, in another head."""
    by_round = lambda parts, dim: torch.cat([piece for part in parts for piece in part], dim)
    problem = build(Recipe(ulysses=2, q=(5, 4), kv_heads=4))
    with rounds_at_most(2):
        assert not failures(problem)
        with patch.object(ulysses, "_by_rank", by_round):
            assert failures(problem)


def order_of_events(mesh: Rank) -> list[str]:
    """What one rank does in a forward and backward, in order."""
    cp, done = rt.ContextParallel(rt.ContextParallelConfig(2, 1, mesh=mesh)), []
    pair, exchange = rt.op_pair("native_math"), cp.groups.ulysses.exchange

    def telling(what: str, fn: Any) -> Any:
        def run(*args: Any) -> Any:
            done.append(what)
            return fn(*args)

        return run

    counting = replace(pair, forward=telling("forward", pair.forward), backward=telling("backward", pair.backward))
    q = torch.randn(1, 3, 4, 8, requires_grad=True)
    with patch.object(cp.groups.ulysses, "exchange", telling("exchange", exchange)):
        rt.attention(q, q, q, parallel=cp, backend=counting).sum().backward()
    return done


def test_exchanges_are_posted_before_what_hides_them() -> None:
    with rounds_at_most(2):
        for done in World(2).run(order_of_events):
            half = ["exchange", "exchange", "forward", "exchange", "forward", "exchange"]
            assert done == [*half, *("backward" if what == "forward" else what for what in half)]
