"""Which ring rank works on whose keys at which step: integers only, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


def starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Where each contiguous shard begins: (3, 0, 2) -> (0, 3, 3)."""
    return (0, *accumulate(lengths))[:-1]


@dataclass(frozen=True)
class Schedule:
    """One ring: tokens per ring rank, and the causal offset for the *first* global query (None = not causal)."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: int | None = None

    @property
    def size(self) -> int:
        return len(self.q_lengths)

    def columns(self, owner: int) -> slice:
        """The global key columns that `owner` holds."""
        start = starts(self.k_lengths)[owner]
        return slice(start, start + self.k_lengths[owner])

    def works(self, worker: int, owner: int) -> bool:
        """Whether any query of `worker` may see any key of `owner`, as far as lengths and causality tell."""
        if self.q_lengths[worker] == 0 or self.k_lengths[owner] == 0:
            return False
        if self.causal is None:
            return True
        last_query = starts(self.q_lengths)[worker] + self.q_lengths[worker] - 1
        return last_query + self.causal >= starts(self.k_lengths)[owner]
