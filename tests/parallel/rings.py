"""The ring law's problem: 16-bit, Gaussian, non-causal, S = 512, equal shards, on 1, 2 and 16 in-process ranks."""

from __future__ import annotations

from functools import cache

import torch
from draws import Draw, on_twin

from ringtrue.audit.inputs import Inputs
from ringtrue.audit.judge import relative_errors, truth_of
from ringtrue.audit.laws import Growth, ring_law
from ringtrue.audit.truth import Truth
from ringtrue.contract import Mask, OpPair, Options, Wanted

SEEDS = range(6)
LENGTH, HEADS, DIM = 512, 2, 64


@cache
def gaussian(seed: int, dtype: torch.dtype, length: int = LENGTH) -> Inputs:
    numbers = torch.Generator().manual_seed(seed)
    q, k, v, grad_out = (torch.randn((2, length, HEADS, DIM), generator=numbers).to(dtype) for _ in range(4))
    return Inputs(q, k, v, Mask(), Options(scale=DIM**-0.5, return_lse=True), grad_out, None, Wanted(True, True, True))


@cache
def exact(seed: int, dtype: torch.dtype) -> Truth:
    return truth_of(gaussian(seed, dtype))


def errors(pair: OpPair, ranks: int, dtype: torch.dtype) -> list[dict[str, float]]:
    """Per seed, the relative errors of out, dq, dk and dv over a ring of `ranks`."""
    lengths = (LENGTH // ranks,) * ranks
    return [
        relative_errors(on_twin(Draw((1, ranks), lengths, lengths, gaussian(seed, dtype)), pair), exact(seed, dtype))
        for seed in SEEDS
    ]


@cache
def right(pair: OpPair, ranks: int, dtype: torch.dtype) -> list[dict[str, float]]:
    """The errors of the unbroken ring, computed once for all tests of a process."""
    return errors(pair, ranks, dtype)


def growths(pair: OpPair, dtype: torch.dtype, sixteen: list[dict[str, float]] | None = None) -> list[Growth]:
    """The ring law's verdicts; `sixteen` replaces the errors at 16 ranks (those of a mutant)."""
    one, two = right(pair, 1, dtype), right(pair, 2, dtype)
    return ring_law(one, two, sixteen or right(pair, 16, dtype), pair.claims.arithmetic)
