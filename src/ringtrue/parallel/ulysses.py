"""`ulysses(pair)`: ranks trade tokens for heads, so that each attends over all tokens of its group (arXiv:2309.14509).

Any number of heads on any degree: query heads are cut along key heads where there are enough of those, else evenly, and
key heads travel once to every rank that needs them. Gradients of key heads that several ranks hold are summed by their
owner, in float32. Forward moves q, k, v and out, backward grad_out, dq, dk and dv: nothing is exchanged twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from .comm import Comm, Template


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


def head_shares(heads: int, kv_heads: int, degree: int) -> tuple[Share, ...]:
    """Which heads each of `degree` ranks computes; some may have none."""
    group = heads // kv_heads if kv_heads else 1
    if kv_heads >= degree:
        return tuple(Share(slice(a * group, b * group), slice(a, b)) for a, b in _cut(kv_heads, degree))
    return tuple(_share(a, b, group) for a, b in _cut(heads, degree))


def _share(start: int, stop: int, group: int) -> Share:
    if start == stop:
        return Share(slice(start, stop), slice(start // group, start // group))
    first, last = start // group, (stop - 1) // group + 1
    even = last - first == 1 or (start == first * group and stop == last * group)
    index = None if even else tuple(h // group - first for h in range(start, stop))
    return Share(slice(start, stop), slice(first, last), index)


def _cut(n: int, parts: int) -> list[tuple[int, int]]:
    """Where torch.tensor_split cuts n items."""
    size, longer = divmod(n, parts)
    bounds = [i * size + min(i, longer) for i in range(parts + 1)]
    return list(pairwise(bounds))


def ulysses(
    pair: OpPair,
    comm: Comm,
    shares: tuple[Share, ...],
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    wanted: Wanted,
    mask_rows: bool,
) -> OpPair:
    """The pair over one Ulysses group, whose ranks hold `q_lengths` and `k_lengths` tokens and compute `shares`.

    Its mask has this rank's rows and the columns of all keys; `mask_rows` says that a dense mask differs by row.
    `wanted` is what any rank wants. It keeps what backward needs in the exchanged layout.
    """
    op = _Ulysses(pair, comm, shares, q_lengths, k_lengths, wanted, mask_rows)
    claims = replace(pair.claims, dlse=False, dbias=False, double_backward=False)
    return replace(pair, forward=op.forward, backward=op.backward, claims=claims, reads_inputs=False)


@dataclass(frozen=True)
class _Ulysses:
    pair: OpPair
    comm: Comm
    shares: tuple[Share, ...]
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    wanted: Wanted
    mask_rows: bool

    @property
    def mine(self) -> Share:
        return self.shares[self.comm.rank]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
        qs, ks, vs, *rows = self._scatter_heads(q, k, v, mask)
        ks, vs = (self._expand(x) for x in (ks, vs))
        inner = replace(options, return_lse=True)
        result = self.pair.forward(qs, ks, vs, self._mask(mask, rows), rng, inner)
        parts = [result.out] + ([result.lse.transpose(1, 2)] if options.return_lse else [])
        out, *lse = self._gather_heads(parts)
        absent = result.lse.new_empty(0)
        saved = (qs, ks, vs, result.out, result.lse, *rows, *result.saved)
        return ForwardOut(out, lse[0].transpose(1, 2) if lse else absent, result.rng, saved)

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: None,
        k: None,
        v: None,
        mask: Mask,
        out: None,
        lse: None,
        rng: object,
        saved: tuple[Tensor, ...],
        options: Options,
        _: Wanted,
    ) -> Grads:
        qs, ks, vs, outs, lses, *inner = saved
        rows = [inner.pop(0)] if self.mask_rows else []
        forms = [
            [Template((*_lead(grad_out, n), self.mine.heads, grad_out.shape[-1]), grad_out.dtype)]
            for n in self.q_lengths
        ]
        parcels = [[grad_out[:, :, share.q]] for share in self.shares]
        received = self.comm.exchange(parcels, forms, grad_out.device).wait()
        grads = self.pair.backward(
            torch.cat([one for (one,) in received], 1), None, qs, ks, vs, self._mask(mask, rows), outs, lses, rng,
            tuple(inner), options, self.wanted,
        )  # fmt: skip
        return self._return_tokens(grads.dq, self._fold(grads.dk), self._fold(grads.dv))

    def _scatter_heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> list[Tensor]:
        """All tokens of the group for this rank's heads: q, k, v, and the rows of a mask that has rows."""
        kv_lengths = (self.q_lengths, self.k_lengths, self.k_lengths)
        heads = (self.mine.heads, self.mine.kv_heads, self.mine.kv_heads)
        parcels = [[q[:, :, s.q], k[:, :, s.kv], v[:, :, s.kv]] for s in self.shares]
        forms = [
            [
                Template((*_lead(x, n[rank]), h, x.shape[-1]), x.dtype)
                for x, n, h in zip((q, k, v), kv_lengths, heads, strict=True)
            ]
            for rank in range(self.comm.size)
        ]
        if self.mask_rows and mask.dense is not None:
            dense = mask.dense.transpose(1, 2)  # (b, rows, h, k): rows are joined like tokens
            per_head = dense.shape[2] > 1
            for rank, share in enumerate(self.shares):
                parcels[rank].append(dense[:, :, share.q] if per_head else dense)
                count = self.mine.heads if per_head else 1
                form = (*_lead(dense, self.q_lengths[rank]), count, dense.shape[-1])
                forms[rank].append(Template(form, dense.dtype))
        received = self.comm.exchange(parcels, forms, q.device).wait()
        joined = [torch.cat(parts, 1) for parts in zip(*received, strict=True)]
        return [*joined[:3], *(x.transpose(1, 2) for x in joined[3:])]

    def _gather_heads(self, parts: list[Tensor]) -> list[Tensor]:
        """This rank's tokens for all heads, from (B, tokens of the group, heads here, ...) tensors."""
        mine = self.comm.rank
        parcels = [list(pieces) for pieces in zip(*(x.split(self.q_lengths, 1) for x in parts), strict=True)]
        forms = [
            [Template((*_lead(x, self.q_lengths[mine]), share.heads, *x.shape[3:]), x.dtype) for x in parts]
            for share in self.shares
        ]
        received = self.comm.exchange(parcels, forms, parts[0].device).wait()
        return [torch.cat(pieces, 2) for pieces in zip(*received, strict=True)]

    def _return_tokens(self, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> Grads:
        """Gradients back to the ranks that own the tokens; those of a key head that several ranks had are summed."""
        mine = self.comm.rank
        grads = [
            (g, n, kv)
            for g, n, kv in ((dq, self.q_lengths, False), (dk, self.k_lengths, True), (dv, self.k_lengths, True))
            if g is not None
        ]
        if not grads:
            return Grads(None, None, None)
        parcels = [list(pieces) for pieces in zip(*(g.split(n, 1) for g, n, _ in grads), strict=True)]
        forms = [
            [
                Template((*_lead(g, n[mine]), share.kv_heads if kv else share.heads, g.shape[-1]), g.dtype)
                for g, n, kv in grads
            ]
            for share in self.shares
        ]
        received = self.comm.exchange(parcels, forms, grads[0][0].device).wait()
        done = iter(
            [
                self._joined(list(pieces), kv)
                for pieces, (_, _, kv) in zip(zip(*received, strict=True), grads, strict=True)
            ]
        )
        return Grads(*(None if g is None else next(done) for g in (dq, dk, dv)))

    def _joined(self, pieces: list[Tensor], kv: bool) -> Tensor:
        slices = [share.kv if kv else share.q for share in self.shares]
        if all(a.stop == b.start for a, b in pairwise(slices)):  # nobody holds a head twice
            return torch.cat(pieces, 2)
        shape = (*pieces[0].shape[:2], slices[-1].stop, pieces[0].shape[-1])
        total = torch.zeros(shape, dtype=accumulate_dtype(pieces[0].dtype), device=pieces[0].device)
        for where, piece in zip(slices, pieces, strict=True):
            total[:, :, where] += piece
        return total.to(pieces[0].dtype)

    def _mask(self, mask: Mask, rows: list[Tensor]) -> Mask:
        """The mask for all tokens of the group as rows, and this rank's heads."""
        dense = mask.dense
        if rows:
            dense = rows[0]
        elif dense is not None and dense.shape[1] > 1:
            dense = dense[:, self.mine.q]
        causal = None if mask.causal is None else mask.causal - sum(self.q_lengths[: self.comm.rank])
        return Mask(dense, mask.key_keep, mask.key_bias, causal=causal)

    def _expand(self, x: Tensor) -> Tensor:
        """One key head per query head where the share's heads do not group evenly; they travelled compact."""
        index = self.mine.index
        return x if index is None else x[:, :, list(index)]

    def _fold(self, grad: Tensor | None) -> Tensor | None:
        """Undo `_expand` for a gradient, summing in float32."""
        index = self.mine.index
        if grad is None or index is None:
            return grad
        shape = (*grad.shape[:2], self.mine.kv_heads, grad.shape[-1])
        total = torch.zeros(shape, dtype=accumulate_dtype(grad.dtype), device=grad.device)
        for head, kv_head in enumerate(index):
            total[:, :, kv_head] += grad[:, :, head]
        return total.to(grad.dtype)


def _lead(x: Tensor, length: int) -> tuple[int, int]:
    return x.shape[0], length
