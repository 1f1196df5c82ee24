"""What the ranks of a context agree on for one call, and what follows: joint(globalise(ulysses(level(ring(pair)))))."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from ..contract import OpPair, Wanted
from ..level import Places, level
from .comm import Alone, Groups
from .config import ContextParallelConfig
from .globalise import globalise
from .heads import rounds_of
from .joint import joint
from .layout import Layout, Spans, behind, contiguous, count, head_tail, lengths_of, together
from .ring import ring
from .schedule import Schedule
from .ulysses import ulysses

KEY_KINDS = ("key_keep", "key_bias", "k_segments")  # parts of a mask that are sharded like the keys


@dataclass(frozen=True)
class Plan:
    """Values only: every rank of the context holds the same, but for `rank`.

    q_lengths, k_lengths  tokens per context rank, as each rank passes them: a joint prefix is in all of them
    alignments, window    causal alignments ("top_left", "bottom_right") and the window's first and last key asked for
    key_kinds             those of KEY_KINDS that some rank has; one without key_keep beside others keeps all its keys
    mask_rows             a dense mask that differs by row
    mask_shape            batch, heads and columns of a dense mask, where any rank has more than one
    wanted                gradients that any rank wants
    most_rounds           in how many rounds the heads may go under Ulysses
    """

    rank: int
    config: ContextParallelConfig
    heads: int
    kv_heads: int
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    joint_prefix: int = 0
    kv_replicated: bool = False
    alignments: frozenset[str] = frozenset()
    window: tuple[int | None, int | None] = (None, None)
    key_kinds: frozenset[str] = frozenset()
    mask_rows: bool = False
    mask_shape: tuple[int, int, int] = (1, 1, 1)
    wanted: Wanted = Wanted(False, False, False)
    most_rounds: int = 1

    @cached_property
    def q(self) -> Layout:
        """Where the queries of every rank lie, each token of a joint prefix on one of them."""
        return layout_of(self.config, self.q_lengths, self.joint_prefix)

    @cached_property
    def k(self) -> Layout | None:
        """Where the keys of every rank lie; None where every rank has all of them."""
        return None if self.kv_replicated else layout_of(self.config, self.k_lengths, self.joint_prefix)

    @property
    def totals(self) -> tuple[int, int]:
        """Queries and keys of all ranks."""
        keys = self.k_lengths[0] if self.k is None else sum(map(count, self.k))
        return sum(map(count, self.q)), keys

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """Causal limit and window of a query at position 0: it sees keys since to causal; several ends all apply."""
        since, upto = self.window
        queries, keys = self.totals
        last = [0 if a == "top_left" else keys - queries for a in self.alignments] + ([] if upto is None else [upto])
        # beyond, they hide no more and no less
        causal, since = (x if x is None else max(min(x, keys), -queries) for x in (min(last, default=None), since))
        return causal, since

    @property
    def rounds(self) -> int:
        """In how many rounds heads go under Ulysses: rows of a mask that is the same for all heads travel once."""
        rows = self.mask_rows or "k_segments" in self.key_kinds
        return 1 if rows or self.config.ring_degree > 1 else self.most_rounds

    def numbers(self) -> tuple[int, ...]:
        """What only all ranks together know, for `agreement.again`; as many numbers for every call of a context."""
        kinds = (kind in self.key_kinds for kind in KEY_KINDS)
        return tuple(
            map(int, (*self.q_lengths, *self.k_lengths, self.mask_rows, *self.mask_shape, *kinds, *self.wanted))
        )

    @staticmethod
    def count(size: int) -> int:
        """How many numbers there are in a context of `size` ranks."""
        return 2 * size + 4 + len(KEY_KINDS) + len(Wanted._fields)

    def compose(self, groups: Groups, pair: OpPair) -> OpPair:
        """The pair over this context. Its mask is the user's: this rank's rows, key masks sharded like the keys."""
        own = self.q[self.rank]
        if self.k is None:
            _, keys = self.totals
            whole = ((0, keys),) if keys else ()
            pair = self._ring(pair, Alone("replicated keys"), (own,), (whole,))
        else:
            pair = self._exchanging(groups, pair, self.k)
        kinds = [kind for kind in KEY_KINDS if kind in self.key_kinds and self.k is not None]
        comm = groups.context
        pair = globalise(
            pair, comm, self.k, self.totals[1], kinds, self.ends, self.mask_rows, self.mask_shape, self.wanted
        )
        return joint(pair, comm, self.joint_prefix, self.mask_rows, self.k is not None) if self.joint_prefix else pair

    def _exchanging(self, groups: Groups, pair: OpPair, k: Layout) -> OpPair:
        degree = self.config.ulysses_degree
        by_group = [slice(first, first + degree) for first in range(0, self.config.size, degree)]
        if self.config.ring_degree > 1:
            queries, keys = (tuple(together(layout[group]) for group in by_group) for layout in (self.q, k))
            pair = self._ring(pair, groups.ring, queries, keys)
        if degree > 1:
            group = by_group[self.rank // degree]
            rounds = rounds_of(self.heads, self.kv_heads, degree, self.rounds)
            pair = ulysses(pair, groups.ulysses, rounds, self.q[group], k[group], self.wanted, self.mask_rows)
        return pair

    def _ring(self, pair: OpPair, comm: object, q: Layout, k: Layout) -> OpPair:
        mine = comm.rank  # type: ignore[attr-defined]
        return level(ring(pair, comm, Schedule(q, k, *self.ends), self.wanted), places(q[mine]))  # type: ignore[arg-type]


def layout_of(config: ContextParallelConfig, lengths: Sequence[int], prefix: int = 0) -> Layout:
    """Where the tokens of every rank lie, from how many each passes."""
    own = [length - prefix for length in lengths]
    if config.load_balance == "head_tail":
        layout = head_tail(sum(own), config.ulysses_degree, config.ring_degree)
    else:
        layout = contiguous(own)
    return behind(prefix, layout) if prefix else layout


def balanced_lengths(config: ContextParallelConfig, total: int) -> tuple[int, ...]:
    """Tokens per rank under load_balance="head_tail"."""
    return lengths_of(head_tail(total, config.ulysses_degree, config.ring_degree))


def places(spans: Spans) -> Places:
    """Which of a rank's queries are neighbours, and how far their positions are ahead of their places."""
    starts = (0, *accumulate(stop - start for start, stop in spans))
    return tuple((slice(a, b), start - a) for (a, b), (start, _) in zip(pairwise(starts), spans, strict=True))
