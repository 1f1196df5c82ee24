"""Into which rectangles of queries and keys a call is cut, so that a pair takes each of them; numbers only."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from ..contract import Claims, Mask
from ..masks import row_blocks

Block = tuple[slice, slice]
WRITTEN_OUT = frozenset({"segments", "window"})  # as a bias, for a block of rows at a time, where a pair takes them not


def reached(mask: Mask, q_len: int, k_len: int) -> Mask:
    """The mask without the ends that hide nothing: the first query reaches the last key, the last one the first key."""
    causal = None if mask.causal is None or mask.causal >= k_len - 1 else mask.causal
    since = None if mask.since is None or mask.since <= 1 - q_len else mask.since
    return mask if (causal, since) == (mask.causal, mask.since) else replace(mask, causal=causal, since=since)


def blocks_of(mask: Mask, q_len: int, k_len: int, claims: Claims, rows_at_once: int | None = None) -> list[Block]:
    """Rectangles (rows, cols) that cover all visible: each as the pair takes it, or rows to be written out.

    `rows_at_once`: how many rows one of them may have.
    """
    if rows_at_once is not None and q_len > rows_at_once:
        blocks = []
        for start in range(0, q_len, rows_at_once):
            part = slice(start, min(start + rows_at_once, q_len))
            own = mask.at(part, slice(0, k_len))
            for rows, cols in blocks_of(own, part.stop - start, k_len, claims):
                blocks.append((slice(rows.start + start, rows.stop + start), cols))
        return blocks
    if mask.hides_nothing and claims.key_tile is None:
        return [(slice(0, q_len), slice(0, k_len))]
    if must_be_written_out(mask, claims):
        return [(rows, part) for rows, cols in written_out(mask, q_len, k_len) for part in _tiles(cols, claims)]
    if mask.since is not None:  # the pair takes windows
        rows, cols = in_sight(mask, q_len, k_len)
        seen = _tiles(cols, claims) if rows.start < rows.stop else []
        return [block for part in seen for block in _window_blocks(mask, rows, part, claims)]
    blocks = _causal_blocks(mask.causal, slice(0, q_len), slice(0, k_len), claims)
    if all(len(_tiles(cols, claims)) == 1 for _, cols in blocks):
        return blocks
    parts = []
    for rows, cols in blocks:
        for part in _tiles(cols, claims):
            offset = None if mask.causal is None else mask.causal + rows.start - part.start
            sees_all = offset is None or offset >= part.stop - part.start - 1
            parts += _causal_blocks(None if sees_all else offset, rows, part, claims)
    return parts


def must_be_written_out(mask: Mask, claims: Claims) -> bool:
    """Whether the mask's ends or segments become part of a bias: not taken, or not beside what becomes a bias."""
    if (mask.kinds - claims.masks) & WRITTEN_OUT:
        return True
    if "dense_float" not in claims.alone or (mask.causal is None and mask.since is None):
        return False
    return bool(mask.kinds - WRITTEN_OUT - (claims.masks - claims.alone))


def _tiles(cols: slice, claims: Claims) -> list[slice]:
    """The keys as they are, or in two parts where their number is an odd multiple of the pair's tile."""
    tile = claims.key_tile
    if tile is None or (cols.stop - cols.start) % (2 * tile) != tile:
        return [cols]
    cut = cols.stop - tile * 5 // 8  # neither part is a multiple of the tile
    return [slice(cols.start, cut), slice(cut, cols.stop)]


def _causal_blocks(offset: int | None, rows: slice, cols: slice, claims: Claims) -> list[Block]:
    """The blocks of a rectangle whose query i sees keys j <= i + offset, both counted from its corner."""
    q_len, k_len = rows.stop - rows.start, cols.stop - cols.start
    if offset is None or claims.causal == "offset":
        return [(rows, cols)]
    first = max(-offset, 0)  # queries before it see nothing
    if first >= q_len:
        return []
    offset = max(offset, 0)
    rows = slice(rows.start + first, rows.stop)
    if claims.causal == "ahead":
        return [(rows, cols)]
    if claims.causal == "bottom_right":  # the last query of a block must reach just its last key
        last = rows.start + min(q_len - first, k_len - offset)
        whole = [(slice(last, rows.stop), cols)] if last < rows.stop else []
        return [(slice(rows.start, last), slice(cols.start, cols.start + last - rows.start + offset)), *whole]
    seen_by_all = [(rows, slice(cols.start, cols.start + offset))] if offset else []
    return [*seen_by_all, (rows, slice(cols.start + offset, cols.stop))]


def in_sight(mask: Mask, q_len: int, k_len: int) -> Block:
    """Queries whose window reaches some key, and keys that some window reaches; none of either where none do.

    Counted from there, the window's ends lie on either side of the line from the last query to the last key, which is
    how kernels count them (flash-attn's window_size, bottom-right, both at least 0).
    """
    since = 1 - q_len if mask.since is None else mask.since
    causal = k_len - 1 if mask.causal is None else mask.causal
    rows = slice(max(0, -causal), min(q_len, k_len - since))
    if since > causal or rows.start >= rows.stop:
        return slice(0, 0), slice(0, 0)
    return rows, slice(max(0, rows.start + since), min(k_len, rows.stop + causal))


def _window_blocks(mask: Mask, rows: slice, part: slice, claims: Claims) -> list[Block]:
    """What of a rectangle of keys in sight is in sight of these rows; beside the end of a window it is only causal."""
    own = Mask(causal=mask.causal, since=mask.since).at(rows, part)
    if own.since is None:
        return _causal_blocks(own.causal, rows, part, claims)
    seen, keys = in_sight(own, rows.stop - rows.start, part.stop - part.start)
    if seen.start >= seen.stop:
        return []
    shifted = (
        slice(rows.start + seen.start, rows.start + seen.stop), slice(part.start + keys.start, part.start + keys.stop)
    )  # fmt: skip
    queries, wide = seen.stop - seen.start, keys.stop - keys.start
    own = own.at(seen, keys)
    # flash-attn 2 takes no end beyond Sk, and Sk for none: too few keys for the first of more than Sk + 1 queries
    if claims.causal != "bottom_right" or queries <= wide + 1 or own.since is None:
        return [shifted]
    last = 0 if own.causal is None else wide - 1 - own.causal  # the first query that reaches the last key
    cuts = sorted({0, last, 1 - own.since, queries})  # and the first that does not reach the first one
    parts = [slice(shifted[0].start + a, shifted[0].start + b) for a, b in pairwise(cuts)]
    return [block for few in parts for block in _window_blocks(mask, few, shifted[1], claims)]


def written_out(mask: Mask, q_len: int, k_len: int) -> list[Block]:
    """Blocks of rows, each with the keys that a window or a causal limit leaves it."""
    blocks = []
    for rows in row_blocks(q_len):
        first = 0 if mask.since is None else max(rows.start + mask.since, 0)
        last = k_len if mask.causal is None else min(rows.stop + mask.causal, k_len)
        if first < last:
            blocks.append((rows, slice(first, last)))
    return blocks


def whole(blocks: list[Block], q: Tensor, k: Tensor) -> bool:
    """Whether the only block is the call itself."""
    return blocks == [(slice(0, q.shape[1]), slice(0, k.shape[1]))]
