"""`ring(pair)`: keys and values travel around the ranks while each rank keeps its queries (arXiv:2310.01889).

True P2P, O(S/N) memory. The next transfer is posted before the compute that hides it, the last hop is not made. In
backward the keys travel once more, and each contribution to dk and dv goes once, in the inputs' dtype, straight to the
rank that owns those keys, which sums in float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from ..merge import merge
from .comm import Comm, Pending, Template
from .schedule import Schedule

KEYS, GRADS = 0, 1  # message tags


def ring(pair: OpPair, comm: Comm, schedule: Schedule, wanted: Wanted) -> OpPair:
    """The pair over one ring. Its mask has this rank's rows and the columns of all keys, in ring order.

    `wanted` is what any rank of the ring wants: a rank computes the gradients its peers need, even if not its own.
    """
    mine = comm.rank

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
        options = replace(options, return_lse=True)
        total: tuple[Tensor, Tensor] | None = None
        saved: tuple[Tensor, ...] = ()
        for owner, (keys, values) in _travel(comm, schedule, k, v):
            if schedule.works(mine, owner):
                part = pair.forward(q, keys, values, _part(mask, q, schedule.columns(owner)), rng, options)
                total = merge(total, part.out, part.lse)
                saved += part.saved
        if total is None:  # no query here, or none that sees a key
            batch, q_len, heads, _ = q.shape
            lse = torch.full((batch, heads, q_len), float("-inf"), dtype=accumulate_dtype(q.dtype), device=q.device)
            return ForwardOut(q.new_zeros(batch, q_len, heads, v.shape[-1]), lse)
        return ForwardOut(total[0].to(q.dtype), total[1], None, saved)

    def backward(
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
        owners = [o for o in range(schedule.size) if schedule.works(mine, o)]
        per_step = len(saved) // max(len(owners), 1)
        dq, dk, dv = (torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) for x in (q, k, v))
        arriving: list[Pending[list[Tensor]]] = []
        steps = 0
        for owner, (keys, values) in _travel(comm, schedule, k, v):
            grads = Grads(None, None, None)
            if schedule.works(mine, owner):
                kept = saved[steps * per_step : (steps + 1) * per_step]
                part = _part(mask, q, schedule.columns(owner))
                grads = pair.backward(grad_out, None, q, keys, values, part, out, lse, rng, kept, options, wanted)
                steps += 1
            if grads.dq is not None:
                dq += grads.dq
            leaving = [g for g in (grads.dk, grads.dv) if g is not None]
            if owner == mine:
                _add(leaving, dk, dv, wanted)
            elif wanted.k or wanted.v:
                arriving.append(_contribute(comm, schedule, owner, leaving, k, v, wanted))
        for pending in arriving:
            _add(pending.wait(), dk, dv, wanted)
        sums = ((dq, q, wanted.q), (dk, k, wanted.k), (dv, v, wanted.v))
        return Grads(*(total.to(like.dtype) if want else None for total, like, want in sums))

    # what a ring adds over its pair is not differentiable through lse, and has no float mask gradient yet
    return replace(pair, forward=forward, backward=backward, claims=replace(pair.claims, dlse=False, dbias=False))


def _part(mask: Mask, q: Tensor, columns: slice) -> Mask:
    return mask.at(slice(0, q.shape[1]), columns)


def _travel(comm: Comm, schedule: Schedule, k: Tensor, v: Tensor):  # type: ignore[no-untyped-def]
    """Yield (owner, (k, v)) for every rank's keys, own first; the next ones are under way while the caller computes."""
    size, mine = comm.size, comm.rank
    block = (k, v)
    for step in range(size):
        pending = None
        if step < size - 1:
            coming = (mine - step - 1) % size
            form = [Template(_resized(x, schedule.k_lengths[coming]), x.dtype) for x in (k, v)]
            pending = comm.shift(block, (mine + 1) % size, form, (mine - 1) % size, k.device, KEYS)
        yield (mine - step) % size, block
        if pending is not None:
            block = tuple(pending.wait())


def _contribute(
    comm: Comm, schedule: Schedule, owner: int, leaving: list[Tensor], k: Tensor, v: Tensor, wanted: Wanted
) -> Pending[list[Tensor]]:
    """Send what this rank adds to `owner`'s dk and dv; at the same step the rank just as far behind sends ours."""
    size, mine = comm.size, comm.rank
    source = (mine + (mine - owner)) % size
    form = [Template(tuple(x.shape), x.dtype) for x, w in ((k, wanted.k), (v, wanted.v)) if w]
    return comm.shift(
        leaving,
        owner if schedule.works(mine, owner) else None,
        form,
        source if schedule.works(source, mine) else None,
        k.device,
        GRADS,
    )


def _add(parts: list[Tensor], dk: Tensor, dv: Tensor, wanted: Wanted) -> None:
    """Add one contribution, [dk], [dv] or [dk, dv] as wanted, to the float32 sums; an empty one adds nothing."""
    totals = [total for total, want in ((dk, wanted.k), (dv, wanted.v)) if want]
    for total, part in zip(totals, parts, strict=False):
        total += part


def _resized(x: Tensor, length: int) -> tuple[int, ...]:
    return (x.shape[0], length, *x.shape[2:])
