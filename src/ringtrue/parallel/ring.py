"""`ring(pair)`: keys and values travel around the ranks while each rank keeps its queries (arXiv:2310.01889).

True P2P, O(S/N) memory. The next transfer is posted before the compute that hides it, the last hop is not made. In
backward the keys travel once more, and each contribution to dk and dv goes once, in the inputs' dtype, straight to the
rank that owns those keys, which sums in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kept
from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from ..merge import merge
from .comm import Comm, Pending, Template
from .schedule import Schedule

KEYS, GRADS = 0, 1  # message tags


def ring(pair: OpPair, comm: Comm, schedule: Schedule, wanted: Wanted) -> OpPair:
    """The pair over one ring. Its mask has this rank's rows and the columns of all keys, in ring order.

    `wanted` is what any rank of the ring wants: a rank computes the gradients its peers need, even if not its own.
    """
    op = _Ring(pair, comm, schedule, wanted)
    # the gradient of lse, and of a float mask, are not passed around yet
    claims = replace(pair.claims, dlse=False, dbias=False, double_backward=False)
    return replace(pair, forward=op.forward, backward=op.backward, claims=claims)


@dataclass(frozen=True)
class _Ring:
    pair: OpPair
    comm: Comm
    schedule: Schedule
    wanted: Wanted

    def works(self, owner: int) -> bool:
        return self.schedule.works(self.comm.rank, owner)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
        options = replace(options, return_lse=True)
        total: tuple[Tensor, Tensor] | None = None
        saved = []
        for owner, keys, values in _travel(self.comm, self.schedule, k, v):
            if self.works(owner):
                part = self.pair.forward(q, keys, values, self._part(mask, q, owner), rng, options)
                total = merge(total, part.out, part.lse)
                saved.append(part.saved)
        if total is None:  # no query here, or none that sees a key
            batch, q_len, heads, _ = q.shape
            lse = torch.full((batch, heads, q_len), float("-inf"), dtype=accumulate_dtype(q.dtype), device=q.device)
            return ForwardOut(q.new_zeros(batch, q_len, heads, v.shape[-1]), lse)
        return ForwardOut(total[0].to(q.dtype), total[1], None, kept.join(saved))

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
        rng: object,
        saved: tuple[Tensor, ...],
        options: Options,
        _: Wanted,
    ) -> Grads:
        dq, dk, dv = (torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in (q, k, v))
        steps = iter(kept.part(saved, sum(self.works(owner) for owner in range(self.comm.size))))
        arriving: list[Pending[list[Tensor]]] = []
        for owner, keys, values in _travel(self.comm, self.schedule, k, v):
            grads = Grads(None, None, None)
            if self.works(owner):
                grads = self.pair.backward(
                    grad_out, None, q, keys, values, self._part(mask, q, owner), out, lse, rng, next(steps),
                    options, self.wanted,
                )  # fmt: skip
            if grads.dq is not None:
                dq += grads.dq
            leaving = [g for g in (grads.dk, grads.dv) if g is not None]
            if owner == self.comm.rank:
                _add(leaving, dk, dv, self.wanted)
            elif self.wanted.k or self.wanted.v:
                arriving.append(self._contribute(owner, leaving, k, v))
        for pending in arriving:
            _add(pending.wait(), dk, dv, self.wanted)
        sums = zip((dq, dk, dv), (q, k, v), self.wanted[:3], strict=True)
        return Grads(*(total.to(like.dtype) if want else None for total, like, want in sums))

    def _part(self, mask: Mask, q: Tensor, owner: int) -> Mask:
        return mask.at(slice(0, q.shape[1]), self.schedule.columns(owner))

    def _contribute(self, owner: int, leaving: list[Tensor], k: Tensor, v: Tensor) -> Pending[list[Tensor]]:
        """Send what this rank adds to `owner`'s dk and dv; at the same step the rank just as far ahead sends ours."""
        mine = self.comm.rank
        source = (mine + (mine - owner)) % self.comm.size
        form = [Template(tuple(x.shape), x.dtype) for x, w in ((k, self.wanted.k), (v, self.wanted.v)) if w]
        to = owner if self.works(owner) else None
        from_ = source if self.schedule.works(source, mine) else None
        return self.comm.shift(leaving, to, form, from_, k.device, GRADS)


def _travel(comm: Comm, schedule: Schedule, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (owner, k, v) for every rank's keys, own first; the next ones are under way while the caller computes."""
    size, mine = comm.size, comm.rank
    block = [k, v]
    for step in range(size):
        pending = None
        if step < size - 1:
            coming = (mine - step - 1) % size
            form = [Template((x.shape[0], schedule.k_lengths[coming], *x.shape[2:]), x.dtype) for x in (k, v)]
            pending = comm.shift(block, (mine + 1) % size, form, (mine - 1) % size, k.device, KEYS)
        yield (mine - step) % size, block[0], block[1]
        if pending is not None:
            block = pending.wait()


def _add(parts: list[Tensor], dk: Tensor, dv: Tensor, wanted: Wanted) -> None:
    """Add one contribution, [dk], [dv] or [dk, dv] as wanted, to the float32 sums; an empty one adds nothing."""
    totals = [total for total, want in ((dk, wanted.k), (dv, wanted.v)) if want]
    for total, part in zip(totals, parts, strict=False):
        total += part
