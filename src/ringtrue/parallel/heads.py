"""Which heads each rank of a Ulysses group computes: any number of heads on any degree, integers only.

Query heads are cut along key heads where there are enough of those, else evenly; then several ranks read one key head.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import cuts


@dataclass(frozen=True)
class Share:
    """The heads of one rank: query heads, the key heads they read, and which reads which if not grouped evenly."""

    q: slice
    kv: slice
    index: tuple[int, ...] | None = None

    @property
    def heads(self) -> int:
        return self.q.stop - self.q.start

    @property
    def kv_heads(self) -> int:
        return self.kv.stop - self.kv.start

    def of(self, kind: str) -> slice:
        """Its heads of a tensor that has query heads ("q"), key heads ("kv"), or one for all ("")."""
        return {"q": self.q, "kv": self.kv, "": slice(0, 1)}[kind]


Shares = tuple[Share, ...]
LEAST = 3  # query heads of a rank in a round; fewer leave a GPU half idle: docs/verified/2026-11-30-1xH200-rounds.md


def head_shares(heads: int, kv_heads: int, degree: int) -> Shares:
    """Which heads each of `degree` ranks computes; some may have none."""
    group = heads // kv_heads if kv_heads else 1
    if kv_heads >= degree:
        return tuple(_along_keys(a, b, group) for a, b in cuts(kv_heads, degree))
    return tuple(_share(a, b, group) for a, b in cuts(heads, degree))


def rounds_of(heads: int, kv_heads: int, degree: int, most: int) -> tuple[Shares, ...]:
    """The same in up to `most` rounds, each with some of every rank's key heads: one is exchanged while another is
    computed. One round where heads are too few."""
    rounds = max(1, min(most, kv_heads // degree, heads // degree // LEAST))
    if rounds == 1:
        return (head_shares(heads, kv_heads, degree),)
    group = heads // kv_heads
    parts = [[(a + x, a + y) for x, y in cuts(b - a, rounds)] for a, b in cuts(kv_heads, degree)]
    return tuple(tuple(_along_keys(a, b, group) for a, b in of_round) for of_round in zip(*parts, strict=True))


def _along_keys(first: int, last: int, group: int) -> Share:
    return Share(slice(first * group, last * group), slice(first, last))


def _share(start: int, stop: int, group: int) -> Share:
    if start == stop:
        return Share(slice(start, stop), slice(start // group, start // group))
    first, last = start // group, (stop - 1) // group + 1
    even = last - first == 1 or (start == first * group and stop == last * group)
    index = None if even else tuple(h // group - first for h in range(start, stop))
    return Share(slice(start, stop), slice(first, last), index)
