"""What several calls of one pair keep for backward, joined into the one flat tuple a pair may keep, and parted again.

A causal step may be one call or two, so how many tensors each kept is written beside them; nothing kept stays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def join(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """One tuple: how many tensors each part has, int64 on the CPU, then all of them."""
    counts = [len(part) for part in parts]
    return (torch.tensor(counts, device="cpu"), *(x for part in parts for x in part)) if any(counts) else ()


def part(saved: tuple[Tensor, ...], number: int) -> list[tuple[Tensor, ...]]:
    """The `number` parts that were joined."""
    if not saved:
        return [()] * number
    counts, *rest = saved
    left = iter(rest)
    return [tuple(next(left) for _ in range(count)) for count in counts.tolist()]
