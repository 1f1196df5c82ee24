"""`ring(pair)`: keys and values travel around the ranks while each rank keeps its queries (arXiv:2310.01889).

True P2P, O(S/N) memory. The next transfer is posted before the compute that hides it, the last hop is not made. In
backward the keys travel once more, and each contribution to dk and dv goes once, in the inputs' dtype, straight to the
rank that owns those keys, which sums in float32. A ring of one rank has all keys, and queries from any places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kept
from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from ..level import keys_at_top
from ..masks import part_of_bias
from ..merge import Merged
from .comm import Comm, Pending, Template
from .layout import count
from .schedule import Block, Schedule

KEYS, GRADS = 0, 1  # message tags
STATES = 1 << 20  # random states that the edge may need within one block
BLOCKS = 1 << 6  # blocks that one rank's queries and another's keys may make


def ring(pair: OpPair, comm: Comm, schedule: Schedule, wanted: Wanted) -> OpPair:
    """The pair over one ring. Its mask has this rank's rows and the columns of all keys, in global order; the causal
    limit and the window are the schedule's.

    `wanted` is what any rank of the ring wants: a rank computes the gradients its peers need, even if not its own.
    dbias is what this rank's queries add to the gradient of the whole mask.
    """
    op = _Ring(pair, comm, schedule, wanted)
    claims = replace(pair.claims, double_backward=False)
    return replace(pair, forward=op.forward, backward=op.backward, claims=claims)


@dataclass(frozen=True)
class _Ring:
    pair: OpPair
    comm: Comm
    schedule: Schedule
    wanted: Wanted

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
        options = replace(options, return_lse=True)
        merged, saved = Merged(q, v.shape[-1], flat=mask.bias is not None), []
        for owner, keys, values in _travel(self.comm, self.schedule, k, v):
            for number, block in enumerate(self._blocks(owner, mask)):
                rows, cols, own = block.rows, block.cols, _part(mask, block)
                state = _state(rng, owner, number)
                part = self.pair.forward(q[:, rows], keys[:, cols], values[:, cols], own, state, options)
                top = keys_at_top(own, rows.stop - rows.start, cols.stop - cols.start, q.dtype)
                merged.add(rows, part.out, part.lse, top)
                saved.append(part.saved)
        return ForwardOut(*merged.result(), None, kept.join(saved))

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        out: Tensor,
        lse: Tensor,
        rng: Tensor | None,
        saved: tuple[Tensor, ...],
        options: Options,
        _: Wanted,
    ) -> Grads:
        wanted, inputs = self.wanted, (q, k, v, mask.bias)
        totals = [_zeros(x) if w and x is not None else None for x, w in zip(inputs, wanted, strict=True)]
        dq, dk, dv, dbias = totals
        steps = iter(kept.part(saved, sum(len(self._blocks(owner, mask)) for owner in range(self.comm.size))))
        arriving: list[Pending[list[Tensor]]] = []
        for owner, keys, values in _travel(self.comm, self.schedule, k, v):
            added = _Added(keys, values, wanted)
            for number, block in enumerate(self._blocks(owner, mask)):
                rows, cols = block.rows, block.cols
                grads = self.pair.backward(
                    grad_out[:, rows], None if grad_lse is None else grad_lse[:, :, rows],
                    q[:, rows], keys[:, cols], values[:, cols], _part(mask, block), out[:, rows], lse[:, :, rows],
                    _state(rng, owner, number), next(steps), options, wanted,
                )  # fmt: skip
                if dq is not None and grads.dq is not None:
                    dq[:, rows] += grads.dq
                if dbias is not None and grads.dbias is not None:
                    part_of_bias(dbias, rows, block.columns).add_(grads.dbias)
                added.add(cols, grads)
            if owner == self.comm.rank:
                _add(added.sums(), dk, dv, wanted)
            elif wanted.k or wanted.v:
                arriving.append(self._contribute(owner, added.leaving(), k, v))
        for pending in arriving:
            _add(pending.wait(), dk, dv, wanted)
        sums = zip(totals, inputs, strict=True)
        return Grads(*(None if total is None or x is None else total.to(x.dtype) for total, x in sums))

    def _blocks(self, owner: int, mask: Mask) -> tuple[Block, ...]:
        return self.schedule.blocks(self.comm.rank, owner, joined=all(x is None for x in mask.tensors))

    def _contribute(self, owner: int, leaving: list[Tensor], k: Tensor, v: Tensor) -> Pending[list[Tensor]]:
        """Send what this rank adds to `owner`'s dk and dv; at the same step the rank just as far ahead sends ours."""
        mine = self.comm.rank
        source = (mine + (mine - owner)) % self.comm.size
        form = [Template(tuple(x.shape), x.dtype) for x, w in ((k, self.wanted.k), (v, self.wanted.v)) if w]
        to = owner if self.schedule.works(mine, owner) else None
        from_ = source if self.schedule.works(source, mine) else None
        return self.comm.shift(leaving if to is not None else [], to, form, from_, k.device, GRADS)


class _Added:
    """What one rank's queries add to the dk and dv of another's keys, block by block."""

    def __init__(self, k: Tensor, v: Tensor, wanted: Wanted) -> None:
        self._like = [x for x, want in ((k, wanted.k), (v, wanted.v)) if want]
        self._wanted = wanted
        self._sums: list[Tensor] = []
        self._owned = False

    def add(self, cols: slice, grads: Grads) -> None:
        parts = [g for g, want in ((grads.dk, self._wanted.k), (grads.dv, self._wanted.v)) if want and g is not None]
        if not self._sums and all(cols == slice(0, x.shape[1]) for x in self._like):
            self._sums = parts
            return
        if not self._owned:
            first, self._owned = self._sums, True
            self._sums = [_zeros(x) for x in self._like]
            for total, part in zip(self._sums, first, strict=False):
                total += part
        for total, part in zip(self._sums, parts, strict=True):
            total[:, cols] += part

    def sums(self) -> list[Tensor]:
        """[dk], [dv] or [dk, dv] as wanted; nothing where no block was."""
        return self._sums

    def leaving(self) -> list[Tensor]:
        """The same in the inputs' dtype."""
        return [total.to(x.dtype) for total, x in zip(self._sums, self._like, strict=False)]


def _part(mask: Mask, block: Block) -> Mask:
    return replace(mask.at(block.rows, block.columns), causal=block.causal, since=block.since)


def _state(rng: Tensor | None, owner: int, number: int) -> Tensor | None:
    """The random state of one block, the same in both directions; no two blocks of a rank draw the same mask."""
    if rng is None:
        return None
    return rng + torch.tensor([0, (owner * BLOCKS + number) * STATES], device=rng.device)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=accumulate_dtype(like.dtype), device=like.device)


def _travel(comm: Comm, schedule: Schedule, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (owner, k, v) for every rank's keys, own first; the next ones are under way while the caller computes."""
    size, mine = comm.size, comm.rank
    block = [k, v]
    for step in range(size):
        pending = None
        if step < size - 1:
            coming = count(schedule.k[(mine - step - 1) % size])
            form = [Template((x.shape[0], coming, *x.shape[2:]), x.dtype) for x in (k, v)]
            pending = comm.shift(block, (mine + 1) % size, form, (mine - 1) % size, k.device, KEYS)
        yield (mine - step) % size, block[0], block[1]
        if pending is not None:
            block = pending.wait()


def _add(parts: list[Tensor], dk: Tensor | None, dv: Tensor | None, wanted: Wanted) -> None:
    """Add one contribution, [dk], [dv] or [dk, dv] as wanted, to the float32 sums; an empty one adds nothing."""
    totals = [total for total, want in ((dk, wanted.k), (dv, wanted.v)) if want]
    for total, part in zip(totals, parts, strict=False):
        if total is not None:
            total += part
