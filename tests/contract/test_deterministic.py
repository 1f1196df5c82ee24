"""A backward that claims to be deterministic gives the same bits every time; for some, under torch's own switch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from contract.subjects import KERNELS, Subject, parameters
from ringtrue.contract import Mask, Options, Wanted

CLAIMING = [parameters(s) for s in KERNELS if s.pair.claims.deterministic or s.pair.claims.deterministic_by_switch]


@pytest.fixture
def switched() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("switched")
@pytest.mark.parametrize("subject", CLAIMING)
def test_the_same_bits_every_time(subject: Subject) -> None:
    dtype = min(subject.pair.claims.dtypes, key=str)
    length = 2048 if subject.device == "cuda" else 130  # many blocks of keys add up in one dq
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, length, 4, 64, dtype=dtype, device=subject.device) for _ in range(4))
    options, wanted = Options(0.125, deterministic=True), Wanted(True, True, True)
    result = subject.pair.forward(q, k, v, Mask(), None, options)
    first, *others = (
        subject.pair.backward(g, None, q, k, v, Mask(), result.out, result.lse, None, result.saved, options, wanted)
        for _ in range(6)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[:3], other[:3], strict=True) if a is not None)  # type: ignore[arg-type]
