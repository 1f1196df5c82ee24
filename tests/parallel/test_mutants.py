"""Each fault between ranks makes a right problem fail, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draws import Draw, build, context, failures, on_ranks, verdicts
from recipes import Recipe

import ringtrue as rt
from mutants.parallel_faults import planted
from ringtrue.contract import Mask
from ringtrue.parallel.twin import Rank, World
from ringtrue.plants import PLANTS, ran


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
    "masked": problem((2, 2), (3, 4, 2, 5), "some"),
    "empty shard": problem((1, 3), (4, 0, 5)),
    "dropout in a ring": build(Recipe(ring=4, q=(3, 2, 4, 1), dropout=0.4)),
    "balanced": build(Recipe(ring=2, q=(5, 5), balanced=True, causal="top_left")),
    "balanced, key mask": build(Recipe(ring=2, q=(5, 5), balanced=True, key="keep")),
    "joint, causal": build(Recipe(ulysses=2, q=(3, 4), prefix=4, causal="top_left")),
    "joint": build(Recipe(ulysses=2, ring=2, q=(3, 2, 4, 1), prefix=3)),
    "whole keys": build(Recipe(ulysses=2, q=(3, 4), k=(5,), replicated=True)),
    "window": build(Recipe(ring=3, q=(4, 3, 4), window=(3, None))),
    "lse alone": build(Recipe(ulysses=2, q=(4, 3), uses=("lse",))),
    "key bias": build(Recipe(ring=3, q=(4, 4, 4), key="bias", wants=("qkvb",))),
    "documents": build(Recipe(ring=3, q=(4, 4, 4), segments="q")),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_are_right_without_a_fault(name: str) -> None:
    assert not failures(PROBLEMS[name])


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("merge without -inf care", "hidden"),
        ("lse 0 for an empty row in one ring step", "hidden"),
        ("last ring step left out", "ring"),
        ("key mask of the wrong rank", "masked"),
        ("merge in bf16", "ring"),
        ("dk/dv summed in bf16", "ring"),
        ("one random state for all ring steps", "dropout in a ring"),
        ("tokens joined in rank order", "joint, causal"),
        ("key mask joined in rank order", "balanced, key mask"),
        ("prefix gradient not summed", "joint"),
        ("replicated dk summed twice", "whole keys"),
        ("window offset local", "window"),
        ("lse gradient dropped under Ulysses", "lse alone"),
        ("dbias of another rank's keys", "key bias"),
        ("segments of the wrong rank", "documents"),
        ("head_tail positions contiguous", "balanced"),
    ],
)
def test_fault_is_caught(fault: str, name: str) -> None:
    with planted(fault):
        assert failures(PROBLEMS[name])


def test_a_prefix_that_counts_on_every_rank_is_caught() -> None:
    """Its rows, computed on every rank, may differ in their last bits, too."""
    with planted("prefix counted on every rank"):
        results = on_ranks(PROBLEMS["joint"])
    with pytest.raises(AssertionError, match=r"of the prefix differ|FAIL"):
        found = [str(v) for v in verdicts(results, PROBLEMS["joint"]) if not v.ok]
        assert not found, found


def blocks_of_masks(told: Recipe) -> list[torch.Tensor]:
    """What was dropped where one rank looked at another's keys, per head."""
    masks = [r.drawn.split(told.q[0], 3) for r in on_ranks(build(told))]  # type: ignore[union-attr]
    return [head for mask in masks for block in mask for head in block.unbind(1)]


ALONE = {
    "every ring step drops the same places": Recipe(ring=3, q=(6, 6, 6), dropout=0.5, kv_heads=1, batch=1),
    "every rank drops the same places": Recipe(ulysses=3, q=(6, 6, 6), dropout=0.5, kv_heads=3, batch=1),
}


@pytest.mark.parametrize("fault", ALONE)
def test_no_two_blocks_drop_the_same_places(fault: str) -> None:
    """Gradients of equal masks would be right, so nothing else would show it. All ranks have the same seed."""

    def equal_pairs() -> int:
        blocks = blocks_of_masks(ALONE[fault])
        return sum(torch.equal(a, b) for i, a in enumerate(blocks) for b in blocks[:i])

    assert equal_pairs() == 0
    with planted(fault):
        assert equal_pairs() > 0


def test_talking_decided_locally_is_reported_as_a_missing_hop() -> None:
    """On real ranks this is a hang; the twin says who waits for whom."""
    with planted("whether to talk decided locally"), pytest.raises(rt.CommunicationError) as caught:
        failures(PROBLEMS["empty shard"])
    assert "ring" in str(caught.value)


HERE = [s.name for s in rt.backends() if s.device == "cpu" and s.unavailable is None]


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
