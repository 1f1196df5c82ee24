"""Every mode against the float64 truth, over random lengths, heads and masks; the twin and gloo give the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from draws import Draw, draw, joined, on_twin, play

import ringtrue as rt
from gloo import Pool
from ringtrue.audit.judge import judged

NAMES = tuple(dict.fromkeys(s.name for s in rt.backends() if s.device == "cpu" and s.unavailable is None))
DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("block", range(8))
def test_every_mode_equals_the_truth(block: int) -> None:
    """Exchanged heads, travelling keys, empty shards, empty rows: nothing of it may be seen in the numbers."""
    for seed in range(block * 20, block * 20 + 20):
        problem = draw(seed, DTYPES[seed % len(DTYPES)], NAMES)
        failed = [str(v) for v in judged(on_twin(problem), problem.inputs) if not v.ok]
        assert not failed, (seed, str(problem), failed)


def small(seed: int) -> Draw:
    """A draw for real processes: every other one in 16 bits."""
    return draw(seed, (torch.float64, torch.bfloat16)[seed % 2], NAMES)


def on_gloo(rank: int, world: int, seed: int) -> tuple[torch.Tensor, ...]:
    return play(None, small(seed))


def ten() -> list[int]:
    """Ten seeds over at most four ranks, every kind of mask and every backend among them."""
    return [seed for seed in range(1000, 1060) if small(seed).size in (2, 3, 4)][:10]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many as a process of the pool has: how work is cut over threads changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", ten())
def test_twin_and_gloo_agree_bitwise(pool: Pool, seed: int) -> None:
    problem = small(seed)
    real = joined(pool.run(on_gloo, problem.size, seed))
    for name, ours, theirs in zip(real._fields, real, on_twin(problem), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs), (name, str(problem))  # type: ignore[arg-type]
