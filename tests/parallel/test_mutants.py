"""Historical faults under a ring, and faults of gather alone; the self-test plants all others between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draws import Draw, build, context, failures, on_ranks
from recipes import Recipe

import ringtrue as rt
from calls import SLOW
from ringtrue.contract import Mask
from ringtrue.parallel.twin import Rank, World
from ringtrue.plants import PLANTS, ran
from ringtrue.plants.between_ranks import planted


def problem(degrees: tuple[int, int], lengths: tuple[int, ...], mask: str = "none") -> Draw:
    """float32, two samples, GQA; "first hidden": no query sees a key of the first two shards."""
    q_len = sum(lengths)
    numbers = torch.Generator().manual_seed(7)
    base = build(Recipe(dtype="float32", dim=8, uses=("out",))).inputs
    q, grad_out = (torch.randn((2, q_len, 4, 8), generator=numbers) for _ in range(2))
    k, v = (torch.randn((2, q_len, 2, 8), generator=numbers) for _ in range(2))
    keep = torch.rand((2, q_len), generator=numbers) > 0.4
    if mask == "first hidden":
        keep[:, : sum(lengths[:2])] = False
    masks = Mask() if mask == "none" else Mask(key_keep=keep)
    return Draw(degrees, lengths, lengths, replace(base, q=q, k=k, v=v, grad_out=grad_out, mask=masks))


PROBLEMS = {
    "ring": problem((1, 4), (3, 2, 4, 1)),
    "hidden": problem((1, 3), (5, 2, 6), "first hidden"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_are_right_without_a_fault(name: str) -> None:
    assert not failures(PROBLEMS[name])


HERE = [s.name for s in rt.backends() if s.device == "cpu" and s.unavailable is None and s.name not in SLOW]


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("plant", PLANTS)
def test_historical_faults_under_a_ring(plant: str, backend: str) -> None:
    """What only a ring shows (stale K/V) and what it must not hide, through the public call."""
    problem = PROBLEMS["hidden"]
    on_ranks(problem, backend)  # where its claims refuse this, there is nothing to show
    pair = PLANTS[plant](rt.op_pair(backend))
    failed = failures(problem, pair)
    assert ran(pair)
    assert failed


def gathered_in_order(mesh: Rank) -> bool:
    """head_tail: this rank's tokens are two chunks that are not neighbours."""
    cp = rt.ContextParallel(rt.ContextParallelConfig(2, 2, mesh=mesh, load_balance="head_tail"))
    x = torch.arange(13.0)
    return torch.equal(cp.gather(cp.shard(x, 0), 0), x)


def test_gather_joins_in_global_order() -> None:
    assert World(4).run(gathered_in_order) == [True] * 4
    with planted("gather joins in rank order"):
        assert not any(World(4).run(gathered_in_order))


def gathered_gradient(mesh: Rank) -> bool:
    """Each rank weights the gathered tensor differently, so that one rank's own slice is not the whole gradient."""
    cp = context(PROBLEMS["ring"], mesh)
    x = torch.arange(3.0 + cp.rank).requires_grad_()
    whole = cp.gather(x, 0)
    weights = [torch.arange(1.0, whole.numel() + 1) * (r + 1) for r in range(cp.size)]
    (got,) = torch.autograd.grad((whole * weights[cp.rank]).sum(), x)
    start = sum(3 + r for r in range(cp.rank))
    return torch.equal(got, sum(weights)[start : start + x.numel()])  # type: ignore[index]


def test_gather_backward_sums_over_ranks() -> None:
    assert World(4).run(gathered_gradient) == [True] * 4
    with planted("gather backward missing the sum"):
        assert not any(World(4).run(gathered_gradient))
