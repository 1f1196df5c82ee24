"""Which ring rank works on whose keys, and in which rectangles: integers only, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from .layout import Layout, Spans


@dataclass(frozen=True)
class Block:
    """Queries that look at keys of one rank, and what hides keys there.

    rows     of the worker's queries
    cols     of the owner's keys
    columns  global positions of these keys, for masks, which have a column for every key
    causal   query i of the block sees its keys j <= i + causal; None = all
    since    query i of the block sees its keys j >= i + since; None = all
    """

    rows: slice
    cols: slice
    columns: slice
    causal: int | None = None
    since: int | None = None

    @property
    def full(self) -> bool:
        return self.causal is None and self.since is None


@dataclass(frozen=True)
class Schedule:
    """One ring: where the tokens of every ring rank lie, and the ends of what a query at position 0 sees."""

    q: Layout
    k: Layout
    causal: int | None = None
    since: int | None = None

    @property
    def size(self) -> int:
        return len(self.q)

    def works(self, worker: int, owner: int) -> bool:
        """Whether any query of `worker` may see any key of `owner`, as far as positions tell."""
        return bool(self.blocks(worker, owner))

    def blocks(self, worker: int, owner: int, joined: bool = False) -> tuple[Block, ...]:
        """Rectangles that cover all that is visible; what sees nothing is in none of them.

        `joined` makes few of many, for a mask without columns: then `columns` means nothing.
        """
        queries, keys = self.q[worker], self.k[owner]
        if joined and len(queries) > 1 and queries == keys and self.causal == 0 and self.since is None:
            rows = _places(queries)[-1].stop  # positions ascend on both sides alike
            return (Block(slice(0, rows), slice(0, rows), slice(0, rows), causal=0),)
        grid = [self._row(span, rows, keys) for span, rows in zip(queries, _places(queries), strict=True)]
        if not joined:
            return tuple(block for row in grid for block in row)
        return _stacked([_merged(row) for row in grid])

    def _row(self, span: tuple[int, int], rows: slice, keys: Spans) -> list[Block]:
        """The rectangles of one span of queries."""
        found: list[Block] = []
        q_len = rows.stop - rows.start
        if self.causal is not None and self.since is not None and self.since > self.causal:
            return found  # nothing lies between the ends
        for (start, stop), cols in zip(keys, _places(keys), strict=True):
            causal = None if self.causal is None else self.causal + span[0] - start
            since = None if self.since is None else self.since + span[0] - start
            k_len = stop - start
            if (causal is not None and causal + q_len - 1 < 0) or (since is not None and since > k_len - 1):
                continue
            if causal is not None and causal >= k_len - 1:
                causal = None
            if since is not None and since <= 1 - q_len:
                since = None
            found.append(Block(rows, cols, slice(start, stop), causal, since))
        return found


def _places(spans: Spans) -> list[slice]:
    """Where each span lies among the tokens of its rank."""
    return [slice(a, b) for a, b in pairwise((0, *accumulate(stop - start for start, stop in spans)))]


def _merged(row: list[Block]) -> list[Block]:
    """Neighbouring keys that the same queries see all of, as one."""
    found: list[Block] = []
    for block in row:
        last = found[-1] if found else None
        if last is not None and last.full and block.full and last.cols.stop == block.cols.start:
            cols = slice(last.cols.start, block.cols.stop)
            found[-1] = Block(block.rows, cols, cols)
        else:
            found.append(block)
    return found


def _stacked(grid: list[list[Block]]) -> tuple[Block, ...]:
    """Neighbouring queries that see all of the same keys and nothing else, as one."""
    found: list[list[Block]] = []
    for row in grid:
        last = found[-1] if found else []
        alone = len(last) == len(row) == 1 and last[0].full and row[0].full
        if alone and last[0].cols == row[0].cols and last[0].rows.stop == row[0].rows.start:
            rows = slice(last[0].rows.start, row[0].rows.stop)
            found[-1] = [Block(rows, row[0].cols, row[0].cols)]
        else:
            found.append(row)
    return tuple(block for row in found for block in row)
