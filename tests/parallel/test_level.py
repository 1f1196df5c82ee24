"""Queries whose every bias is huge and finite are ordinary queries, alone, across heads and across rings."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from draws import Draw, on_twin
from torch import Tensor

import ringtrue as rt
from calls import SLOW
from ringtrue import level
from ringtrue.audit.inputs import Inputs
from ringtrue.audit.judge import judged
from ringtrue.contract import Mask, Options, Wanted
from ringtrue.parallel import ring
from ringtrue.parallel.twin import Rank, World

LENGTHS = (4, 3, 5, 2)
NAMES = [s.name for s in rt.backends() if s.device == "cpu" and s.unavailable is None and s.name not in SLOW]
LOWEST = -3.3e38


def problem(fill: float, kind: str, dtype: torch.dtype, degrees: tuple[int, int], causal: bool, backend: str) -> Draw:
    """Two samples of 14 tokens; some queries, or all of a sample, lie wholly at `fill`."""
    numbers, n = torch.Generator().manual_seed(1), sum(LENGTHS)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers)

    if kind == "key":
        keys = normal(2, n)
        keys[0] = fill
        mask = Mask(key_bias=keys.to(dtype))
    else:
        rows = normal(2, 1, n, n)
        rows[0, :, 3:6] = rows[1, :, :4] = fill
        mask = Mask(dense=rows.to(dtype))
    mask = Mask(mask.dense, None, mask.key_bias, causal=0 if causal else None)
    q, k, v, grad_out = (normal(2, n, 4, 8).to(dtype) for _ in range(4))
    inputs = Inputs(q, k, v, mask, Options(scale=8**-0.5, return_lse=True), grad_out, None, Wanted(True, True, True))
    lengths = LENGTHS if degrees != (1, 1) else (n,)
    return Draw(degrees, lengths, lengths, inputs, "top_left" if causal else None, backend)


def failures(*args: object) -> list[str]:
    made = problem(*args)  # type: ignore[arg-type]
    return [str(v) for v in judged(on_twin(made), made.inputs) if not v.ok]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("fill", [-1e5, -1e9, 1e9])
@pytest.mark.parametrize("degrees", [(1, 1), (4, 1), (1, 4), (2, 2)], ids=["alone", "ulysses", "ring", "both"])
def test_huge_rows_are_ordinary_rows(backend: str, fill: float, degrees: tuple[int, int]) -> None:
    for kind in ("dense", "key"):
        for dtype, causal in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
            assert not failures(fill, kind, dtype, degrees, causal, backend)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("degrees", [(1, 1), (4, 1), (1, 4), (2, 2)], ids=["alone", "ulysses", "ring", "both"])
def test_rows_at_the_lowest_number(backend: str, degrees: tuple[int, int]) -> None:
    """The answer is the mean of the values, and its gradient, also where a ring's steps have some of the keys each."""
    for kind in ("dense", "key"):
        for causal in (False, True):
            assert not failures(LOWEST, kind, torch.float32, degrees, causal, backend)


@pytest.mark.parametrize("backend", NAMES)
def test_steps_that_do_not_count_their_keys_are_caught(backend: str) -> None:
    """Equal log-sum-exps of three and of five keys at the lowest number weigh alike then."""
    with patch.object(ring, "keys_at_top", lambda *_: None):
        assert failures(LOWEST, "dense", torch.float32, (1, 4), False, backend)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("fill", [-1e9, LOWEST])
def test_without_the_level_it_is_caught(backend: str, fill: float) -> None:
    def untouched(mask: Mask, q_len: int, k_len: int, dtype: torch.dtype, one_row: bool | None = None) -> level.Levels:
        shape = (1, 1, 1)
        return level.Levels(*(torch.full(shape, x, dtype=dtype) for x in (0.0, 1.0, 0.0)))

    with patch.object(level, "row_levels", untouched):
        assert failures(fill, "dense", torch.float32, (1, 1), False, backend)


def test_a_chunk_of_one_query_has_a_row_of_its_own() -> None:
    """Balanced chunks of single tokens: the last key, hidden from the query before it, must not decide its level."""
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 9, 2, 4), generator=numbers, dtype=torch.float64) for _ in "qkv")
    mask = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    mask[..., 7, :8] = -1e9

    def rank(mesh: Rank) -> Tensor:
        cp = rt.ContextParallel(rt.ContextParallelConfig(1, 4, mesh=mesh, load_balance="head_tail"))
        own = (cp.shard(x, 1) for x in (q, k, v))
        return cp.gather(rt.attention(*own, mask[:, :, cp.positions(9)], is_causal=True, parallel=cp), 1)

    expected = rt.attention(q, k, v, torch.zeros_like(mask), is_causal=True)
    for out in World(4).run(rank):
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
