"""What was joined comes back part by part, however many tensors each part kept."""

from __future__ import annotations

import pytest
import torch

from ringtrue import kept


@pytest.mark.parametrize("counts", [(), (0,), (0, 0, 0), (2,), (1, 0, 3), (0, 2)])
def test_parts_come_back(counts: tuple[int, ...]) -> None:
    parts = [tuple(torch.full((i + 1,), float(n)) for n in range(count)) for i, count in enumerate(counts)]
    back = kept.part(kept.join(parts), len(parts))
    assert [len(part) for part in back] == list(counts)
    assert all(torch.equal(a, b) for a, b in zip(sum(parts, ()), sum(back, ()), strict=True))


def test_nothing_kept_is_nothing() -> None:
    assert kept.join([(), ()]) == ()
