"""Where each rank's tokens lie in the one global sequence: spans of positions, integers only, the same on every rank.

contiguous   rank after rank, of any length
head_tail    chunks r and 2R-1-r of 2R on ring rank r, so that a causal ring gives every rank as much to do (the balance
             of Llama 3's context parallelism, arXiv:2407.21783, section 3.3.2)
behind       the tokens of a joint prefix, which every rank holds, cut over the ranks, before each rank's own
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

Span: TypeAlias = tuple[int, int]  # the first position, and the one after the last; never empty
Spans: TypeAlias = tuple[Span, ...]  # the tokens of one rank, in the order in which it holds them
Layout: TypeAlias = tuple[Spans, ...]  # of every rank


def cuts(length: int, parts: int) -> tuple[Span, ...]:
    """Where torch.tensor_split cuts: `parts` pieces, empty ones too, the longer ones first."""
    size, longer = length // parts, length % parts  # torch cannot trace divmod
    bounds = [i * size + min(i, longer) for i in range(parts + 1)]
    return tuple(pairwise(bounds))


def count(spans: Spans) -> int:
    """How many tokens."""
    return sum(stop - start for start, stop in spans)


def lengths_of(layout: Layout) -> tuple[int, ...]:
    """Tokens per rank."""
    return tuple(map(count, layout))


def contiguous(lengths: Sequence[int]) -> Layout:
    """(3, 0, 2) -> [0, 3), nothing, [3, 5)."""
    return tuple(_coalesced([span]) for span in pairwise((0, *accumulate(lengths))))


def head_tail(total: int, ulysses_degree: int, ring_degree: int) -> Layout:
    """2R chunks; ring rank r has chunks r and 2R-1-r in this order, cut contiguously among its Ulysses ranks."""
    chunks = cuts(total, 2 * ring_degree)
    layout: list[Spans] = []
    for ring_rank in range(ring_degree):
        held = _coalesced([chunks[ring_rank], chunks[-1 - ring_rank]])
        layout += [_part(held, *piece) for piece in cuts(count(held), ulysses_degree)]
    return tuple(layout)


def behind(prefix: int, layout: Layout) -> Layout:
    """The same with `prefix` tokens before all, of which every rank takes its piece first."""
    pieces = cuts(prefix, len(layout))
    return tuple(
        _coalesced([piece, *((start + prefix, stop + prefix) for start, stop in spans)])
        for piece, spans in zip(pieces, layout, strict=True)
    )


def together(layout: Layout) -> Spans:
    """The tokens of several ranks in global order."""
    return _coalesced(sorted(span for spans in layout for span in spans))


def positions(spans: Spans) -> Tensor:
    """The global position of every token: int64 (tokens,)."""
    return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in spans)])


def in_order(parts: Sequence[Tensor], layout: Layout, dim: int) -> Tensor:
    """What the ranks of `layout` hold, joined along `dim` in global order."""
    pieces: list[tuple[Span, Tensor]] = []
    for part, spans in zip(parts, layout, strict=True):
        held = part.split([stop - start for start, stop in spans], dim) if len(spans) > 1 else [part]
        pieces += zip(spans, held, strict=False)  # a rank without tokens holds an empty tensor
    if not pieces:
        return parts[0].narrow(dim, 0, 0)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])], dim)


def dealt(x: Tensor, layout: Layout, dim: int) -> list[Tensor]:
    """What each rank of `layout` holds of a tensor that is in their global order; views where they can be."""
    owned = sorted((span, rank) for rank, spans in enumerate(layout) for span in spans)
    pieces = x.split([stop - start for (start, stop), _ in owned], dim) if owned else ()
    found: list[list[Tensor]] = [[] for _ in layout]
    for (_, rank), piece in zip(owned, pieces, strict=True):
        found[rank].append(piece)
    nothing = x.narrow(dim, 0, 0)
    return [torch.cat(own, dim) if len(own) > 1 else own[0] if own else nothing for own in found]


def _coalesced(spans: Sequence[Span]) -> Spans:
    """Without empty spans, and neighbours as one."""
    found: list[Span] = []
    for start, stop in spans:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _part(spans: Spans, first: int, last: int) -> Spans:
    """The tokens first to last - 1 of a rank, counted in its own order."""
    found, before = [], 0
    for start, stop in spans:
        begin, end = max(first - before, 0), min(last - before, stop - start)
        if begin < end:
            found.append((start + begin, start + end))
        before += stop - start
    return _coalesced(found)
