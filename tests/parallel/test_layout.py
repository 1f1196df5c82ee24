"""Where tokens lie: every one on one rank, joined in global order and dealt out again."""

from __future__ import annotations

import pytest
import torch

from ringtrue.parallel import layout
from ringtrue.parallel.layout import Layout

LAYOUTS = {
    "contiguous": layout.contiguous((3, 0, 2, 1)),
    "nobody has any": layout.contiguous((0, 0)),
    "head_tail ring": layout.head_tail(13, 1, 3),
    "head_tail in ulysses": layout.head_tail(22, 2, 2),
    "head_tail, fewer tokens than chunks": layout.head_tail(3, 1, 4),
    "behind a prefix": layout.behind(5, layout.contiguous((3, 0, 2))),
    "head_tail behind a prefix": layout.behind(3, layout.head_tail(16, 2, 2)),
}
EVERY = pytest.mark.parametrize("places", LAYOUTS.values(), ids=LAYOUTS)


@EVERY
def test_every_position_is_on_one_rank(places: Layout) -> None:
    held = torch.cat([layout.positions(spans) for spans in places])
    assert held.sort().values.tolist() == list(range(sum(layout.lengths_of(places))))
    assert held.dtype == torch.int64


@EVERY
def test_joined_in_global_order_and_dealt_out_again(places: Layout) -> None:
    parts = [layout.positions(spans)[None, :, None].expand(2, -1, 3) for spans in places]
    whole = layout.in_order(parts, places, 1)
    assert whole[0, :, 0].tolist() == list(range(whole.shape[1]))
    for part, again in zip(parts, layout.dealt(whole, places, 1), strict=True):
        assert torch.equal(part, again)


def test_head_tail_as_written() -> None:
    """Chunks (r, 2R-1-r) on ring rank r, cut contiguously among its Ulysses ranks; the longer chunks come first."""
    assert layout.head_tail(10, 1, 2) == (((0, 3), (8, 10)), ((3, 8),))
    assert layout.head_tail(8, 2, 2) == (((0, 2),), ((6, 8),), ((2, 4),), ((4, 6),))
    assert layout.head_tail(12, 2, 2) == (((0, 3),), ((9, 12),), ((3, 6),), ((6, 9),))
    assert layout.head_tail(6, 2, 1) == (((0, 3),), ((3, 6),))


def test_a_prefix_is_cut_over_the_ranks_in_front() -> None:
    assert layout.behind(3, layout.contiguous((2, 1))) == (((0, 2), (3, 5)), ((2, 3), (5, 6)))
    assert layout.behind(1, layout.contiguous((2, 1))) == (((0, 3),), ((3, 4),))
    assert layout.together(layout.behind(3, layout.contiguous((2, 1)))) == ((0, 6),)


@pytest.mark.parametrize(("length", "parts"), [(7, 3), (2, 4), (0, 2), (8, 4)])
def test_cuts_are_tensor_splits(length: int, parts: int) -> None:
    pieces = torch.arange(length).tensor_split(parts)
    assert [stop - start for start, stop in layout.cuts(length, parts)] == [piece.numel() for piece in pieces]
