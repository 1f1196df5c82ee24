"""A random state of ours becomes one of a CUDA kernel: another for every seed and offset, far from its neighbours."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import ringtrue as rt
from ringtrue.backends import _philox
from ringtrue.backends._philox import drawing, kernel_state, replayed

CPU = torch.device("cpu")
PINNED = [3008887562355236760, 767368133409110620, 1697974441462356036]


def state(seed: int, offset: int = 0) -> int:
    return kernel_state(torch.tensor([seed, offset]))


def test_every_state_is_one_that_torch_takes() -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        for offset in (0, 1, 2**40):
            assert 0 <= state(seed, offset) < 2**62
            assert state(seed, offset) % 4 == 0


def test_neighbours_are_far_apart() -> None:
    """A kernel counts Philox offsets up by what it draws; no two parts of a call may come that near."""
    states = sorted({state(seed, offset) for seed in range(50) for offset in range(200)})
    assert len(states) == 10_000
    assert min(b - a for a, b in pairwise(states)) > 2**32


def test_each_bit_of_seed_and_offset_changes_half_of_the_bits() -> None:
    for bit in range(62):
        for other in (state(1 << bit, 0), state(0, 1 << bit)):
            assert 12 < (state(0) ^ other).bit_count() < 50


def test_masks_of_today_are_those_of_tomorrow() -> None:
    """A checkpoint that was saved between forward and backward, or a seed in a paper."""
    assert [state(0), state(0, 1), state(1)] == PINNED


def test_what_backward_reads_is_that_state() -> None:
    rng = torch.tensor([5, 3])
    assert replayed(rng, 0.1, CPU, 2).tolist() == [kernel_state(rng)] * 2
    assert replayed(rng, 0.1, CPU).dtype == torch.int64
    assert replayed(None, 0.0, CPU, 2).shape == (2,)


def test_without_dropout_no_generator_is_touched() -> None:
    assert isinstance(drawing(None, 0.0, CPU), nullcontext)


def test_the_generator_has_its_own_state_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    own = SimpleNamespace(seed=3, offset=8)
    generator = SimpleNamespace(
        initial_seed=lambda: own.seed,
        get_offset=lambda: own.offset,
        manual_seed=lambda seed: vars(own).update(seed=seed, offset=0),
        set_offset=lambda offset: vars(own).update(offset=offset),
    )
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    rng = torch.tensor([5, 3])
    with pytest.raises(RuntimeError, match="the kernel"), drawing(rng, 0.1, torch.device("cuda", 1)):
        seen.append((own.seed, own.offset))
        raise RuntimeError("the kernel")
    assert seen == [(kernel_state(rng),) * 2]
    assert (own.seed, own.offset) == (3, 8)
    assert not _philox._turn.locked()


def test_a_captured_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rng = torch.tensor([5, 3])
    for use in (lambda: drawing(rng, 0.1, CPU), lambda: replayed(rng, 0.1, CPU)):
        with pytest.raises(rt.UnsupportedError, match="every replay would drop the same"):
            use()
    replayed(None, 0.0, CPU)
