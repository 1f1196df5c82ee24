"""`joint(pair)`: tokens that every rank holds, such as a text beside its part of a video, count once.

Inside, such a prefix is sharded like all else: a rank computes one piece of its rows and holds one piece of its keys.
So nothing is computed twice, and all ranks get the same rows of out, bit by bit: those of one rank. The incoming
gradient of those rows is what each rank makes of them (Partial), and is summed by the rank that computed them, in
float32; the gradients of q, k and v of the prefix are 0 but for that piece (Partial, too).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from .comm import Comm, Template
from .layout import cuts


def joint(pair: OpPair, comm: Comm, prefix: int, mask_rows: bool, keys: bool = True) -> OpPair:
    """The pair for q, k and v of which the first `prefix` tokens are the same on every rank.

    mask_rows  a dense mask has rows, in the order of q
    keys       False: k and v have no prefix, every rank holds all of them
    """
    op = _Joint(pair, comm, prefix, mask_rows, keys)
    return replace(pair, forward=op.forward, backward=op.backward)


@dataclass(frozen=True)
class _Joint:
    pair: OpPair
    comm: Comm
    prefix: int
    mask_rows: bool
    keys: bool

    @property
    def piece(self) -> tuple[int, int]:
        return cuts(self.prefix, self.comm.size)[self.comm.rank]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
        result = self.pair.forward(
            self._cut(q, 1), self._cut_key(k), self._cut_key(v), self._cut_mask(mask), rng, options
        )
        first, last = self.piece
        parts = [(result.out, 1)] + ([(result.lse, 2)] if options.return_lse else [])
        gathered = self._gather([x.narrow(dim, 0, last - first) for x, dim in parts], [dim for _, dim in parts])
        out, *lse = (
            torch.cat([prefix, x.narrow(dim, last - first, x.shape[dim] - last + first)], dim)
            for prefix, (x, dim) in zip(gathered, parts, strict=True)
        )
        # an lse that nobody asked for stays as backward reads it
        return result._replace(out=out, lse=lse[0] if lse else result.lse)

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor | None,
        k: Tensor | None,
        v: Tensor | None,
        mask: Mask,
        out: Tensor | None,
        lse: Tensor | None,
        rng: Tensor | None,
        saved: tuple[Tensor, ...],
        options: Options,
        wanted: Wanted,
    ) -> Grads:
        upstream = [(grad_out, 1)]
        if options.return_lse:  # peers may have a gradient of it
            batch, length, heads, _ = grad_out.shape
            zeros = grad_out.new_zeros(batch, heads, length, dtype=accumulate_dtype(grad_out.dtype))
            upstream.append((zeros if grad_lse is None else grad_lse, 2))
        grad_out, *of_lse = self._sum(upstream)
        if lse is not None and options.return_lse:
            lse = self._cut(lse, 2)
        q, out = (None if x is None else self._cut(x, 1) for x in (q, out))
        k, v = (None if x is None else self._cut_key(x) for x in (k, v))
        upstream_lse = of_lse[0] if of_lse else None
        grads = self.pair.backward(
            grad_out, upstream_lse, q, k, v, self._cut_mask(mask), out, lse, rng, saved, options, wanted
        )
        dq, dk, dv, dbias = grads
        keyed = self._spread if self.keys else _unchanged
        if dbias is not None and dbias.dim() == 2:
            dbias = keyed(dbias, 1)
        elif self._has_rows(mask):
            dbias = self._spread(dbias, 2)
        return Grads(self._spread(dq, 1), keyed(dk, 1), keyed(dv, 1), dbias)

    def _cut(self, x: Tensor, dim: int) -> Tensor:
        """This rank's piece of the prefix, and its own tokens."""
        first, last = self.piece
        own = x.narrow(dim, self.prefix, x.shape[dim] - self.prefix)
        return own if first == last else torch.cat([x.narrow(dim, first, last - first), own], dim)

    def _cut_key(self, x: Tensor) -> Tensor:
        return self._cut(x, 1) if self.keys else x

    def _cut_mask(self, mask: Mask) -> Mask:
        dense = mask.dense
        if dense is not None and self._has_rows(mask):
            dense = self._cut(dense, 2)
        q_ids = None if mask.q_segments is None else self._cut(mask.q_segments, 1)
        keep, bias, k_ids = (
            None if x is None else self._cut_key(x) for x in (mask.key_keep, mask.key_bias, mask.k_segments)
        )
        return replace(mask, dense=dense, key_keep=keep, key_bias=bias, q_segments=q_ids, k_segments=k_ids)

    def _has_rows(self, mask: Mask) -> bool:
        return self.mask_rows and mask.dense is not None and mask.dense.shape[2] > 1

    def _gather(self, pieces: list[Tensor], dims: list[int]) -> list[Tensor]:
        """The prefix rows of all ranks."""
        forms = [
            [Template(_with(x, dim, last - first), x.dtype) for x, dim in zip(pieces, dims, strict=True)]
            for first, last in cuts(self.prefix, self.comm.size)
        ]
        received = self.comm.exchange([pieces] * self.comm.size, forms, pieces[0].device).wait()
        return [torch.cat(parts, dim) for parts, dim in zip(zip(*received, strict=True), dims, strict=True)]

    def _sum(self, upstream: list[tuple[Tensor, int]]) -> list[Tensor]:
        """Gradients of this rank's piece from all ranks, and of its own tokens."""
        first, last = self.piece
        pieces = cuts(self.prefix, self.comm.size)
        parcels = [[x.narrow(dim, start, stop - start) for x, dim in upstream] for start, stop in pieces]
        form = [Template(_with(x, dim, last - first), x.dtype) for x, dim in upstream]
        received = self.comm.exchange(parcels, [form] * self.comm.size, upstream[0][0].device).wait()
        found = []
        for parts, (x, dim) in zip(zip(*received, strict=True), upstream, strict=True):
            total = torch.zeros(parts[0].shape, dtype=accumulate_dtype(x.dtype), device=x.device)
            for part in parts:
                total += part
            own = x.narrow(dim, self.prefix, x.shape[dim] - self.prefix)
            found.append(torch.cat([total.to(x.dtype), own], dim))
        return found

    def _spread(self, grad: Tensor | None, dim: int) -> Tensor | None:
        """A gradient of what `_cut` gave, as one of what it was given."""
        if grad is None:
            return None
        first, last = self.piece
        held, own = grad.narrow(dim, 0, last - first), grad.narrow(dim, last - first, grad.shape[dim] - last + first)
        before, after = (grad.new_zeros(_with(grad, dim, n)) for n in (first, self.prefix - last))
        return torch.cat([before, held, after, own], dim)


def _unchanged(grad: Tensor | None, dim: int) -> Tensor | None:
    return grad


def _with(x: Tensor, dim: int, length: int) -> tuple[int, ...]:
    return (*x.shape[:dim], length, *x.shape[dim + 1 :])
