"""`ulysses(pair)`: ranks trade tokens for heads, so that each attends over all tokens of its group (arXiv:2309.14509).

Any number of heads on any degree: query heads are cut along key heads where there are enough of those, else evenly, and
key heads travel once to every rank that needs them. Gradients of key heads that several ranks hold are summed by their
owner, in float32. Forward moves q, k, v and out, backward grad_out, dq, dk and dv: nothing is exchanged twice. Tokens
of a group are joined in global order, however they lie on its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from .comm import Comm, Template
from .layout import Layout, count, cuts, dealt, in_order


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
        return tuple(Share(slice(a * group, b * group), slice(a, b)) for a, b in cuts(kv_heads, degree))
    return tuple(_share(a, b, group) for a, b in cuts(heads, degree))


def _share(start: int, stop: int, group: int) -> Share:
    if start == stop:
        return Share(slice(start, stop), slice(start // group, start // group))
    first, last = start // group, (stop - 1) // group + 1
    even = last - first == 1 or (start == first * group and stop == last * group)
    index = None if even else tuple(h // group - first for h in range(start, stop))
    return Share(slice(start, stop), slice(first, last), index)


def ulysses(
    pair: OpPair,
    comm: Comm,
    shares: tuple[Share, ...],
    q: Layout,
    k: Layout,
    wanted: Wanted,
    mask_rows: bool,
) -> OpPair:
    """The pair over one Ulysses group, whose ranks hold the tokens `q` and `k` and compute the heads `shares`.

    Its mask has this rank's rows and the columns of all keys; `mask_rows` says that a dense mask differs by row; its
    segments have rows always. `wanted` is what any rank wants. It keeps what backward needs in the exchanged layout.
    dbias has this rank's rows; without rows it is what this rank's heads and the group's queries add.
    """
    op = _Ulysses(pair, comm, shares, q, k, wanted, mask_rows)
    claims = replace(pair.claims, double_backward=False)
    return replace(pair, forward=op.forward, backward=op.backward, claims=claims, reads_inputs=False)


@dataclass(frozen=True)
class _Ulysses:
    pair: OpPair
    comm: Comm
    shares: tuple[Share, ...]
    q: Layout
    k: Layout
    wanted: Wanted
    mask_rows: bool

    @property
    def mine(self) -> Share:
        return self.shares[self.comm.rank]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
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
        rng: Tensor | None,
        saved: tuple[Tensor, ...],
        options: Options,
        _: Wanted,
    ) -> Grads:
        qs, ks, vs, outs, lses, *inner = saved
        rows = [inner.pop(0) for _ in self._row_parts(mask)]
        grad_out, *of_lse = self._scatter_upstream(grad_out, grad_lse, lses, options)
        grads = self.pair.backward(
            grad_out, of_lse[0] if of_lse else None, qs, ks, vs, self._mask(mask, rows), outs, lses, rng, tuple(inner),
            options, self.wanted,
        )  # fmt: skip
        return self._return_tokens(grads.dq, self._fold(grads.dk), self._fold(grads.dv), grads.dbias, mask)

    def _row_parts(self, mask: Mask) -> list[tuple[Tensor, bool]]:
        """What has a row for each query, rows in dim 1 and heads in dim 2, and whether it differs by head."""
        parts = []
        if self.mask_rows and mask.dense is not None:
            parts.append((mask.dense.transpose(1, 2), mask.dense.shape[1] > 1))
        if mask.q_segments is not None:
            parts.append((mask.q_segments[:, :, None, None], False))
        return parts

    def _scatter_heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> list[Tensor]:
        """All tokens of the group for this rank's heads: q, k, v, and what of the mask has rows."""
        sent = [(q, self.q, "q"), (k, self.k, "kv"), (v, self.k, "kv")]
        sent += [(x, self.q, "q" if per_head else "") for x, per_head in self._row_parts(mask)]
        received = self._to_heads(sent)
        return [*received[:3], *(x.transpose(1, 2) for x in received[3:])]

    def _scatter_upstream(
        self, grad_out: Tensor, grad_lse: Tensor | None, lse: Tensor, options: Options
    ) -> list[Tensor]:
        """grad_out, and where lse was given out its gradient, zeros where nobody here has one: peers may."""
        sent = [(grad_out, self.q, "q")]
        if options.return_lse:
            batch, length, heads, _ = grad_out.shape
            of_lse = lse.new_zeros(batch, heads, length) if grad_lse is None else grad_lse
            sent.append((of_lse.transpose(1, 2), self.q, "q"))
        grad_out, *rest = self._to_heads(sent)
        return [grad_out, *(x.transpose(1, 2) for x in rest)]

    def _to_heads(self, sent: list[tuple[Tensor, Layout, str]]) -> list[Tensor]:
        """(B, tokens here, all heads, ...) -> (B, tokens of the group, heads here, ...); each with its layout and kind
        of heads: "q", "kv", or "" for one that is the same for all heads."""
        parcels = [[_heads(x, share, kind) for x, _, kind in sent] for share in self.shares]
        forms = [
            [Template(_shape(x, count(layout[rank]), self.mine, kind), x.dtype) for x, layout, kind in sent]
            for rank in range(self.comm.size)
        ]
        received = self.comm.exchange(parcels, forms, sent[0][0].device).wait()
        parts = zip(zip(*received, strict=True), sent, strict=True)
        return [in_order(pieces, layout, 1) for pieces, (_, layout, _) in parts]

    def _gather_heads(self, parts: list[Tensor]) -> list[Tensor]:
        """This rank's tokens for all heads, from (B, tokens of the group, heads here, ...) tensors."""
        received = self._to_tokens([(x, self.q, "q") for x in parts])
        return [torch.cat(pieces, 2) for pieces in received]

    def _to_tokens(self, sent: list[tuple[Tensor, Layout, str]]) -> list[list[Tensor]]:
        """(B, tokens of the group, heads here, ...) -> for each, from every rank (B, tokens here, heads there, ...)."""
        mine = self.comm.rank
        parcels = [list(pieces) for pieces in zip(*(dealt(x, layout, 1) for x, layout, _ in sent), strict=True)]
        forms = [
            [Template(_shape(x, count(layout[mine]), share, kind), x.dtype) for x, layout, kind in sent]
            for share in self.shares
        ]
        received = self.comm.exchange(parcels, forms, sent[0][0].device).wait()
        return [list(pieces) for pieces in zip(*received, strict=True)]

    def _return_tokens(
        self, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None, mask: Mask
    ) -> Grads:
        """Gradients back to the ranks that own the tokens; those of a key head that several ranks had are summed."""
        per_head = mask.dense is not None and mask.dense.shape[1] > 1
        of_rows = dbias.transpose(1, 2) if dbias is not None and self.mask_rows else None
        told = ((dq, self.q, "q"), (dk, self.k, "kv"), (dv, self.k, "kv"), (of_rows, self.q, "q" if per_head else ""))
        sent = [(x, layout, kind) for x, layout, kind in told if x is not None]
        done = iter(self._to_tokens(sent) if sent else [])
        dq, dk, dv, rows = (None if x is None else self._joined(next(done), kind) for x, _, kind in told)
        if rows is not None:
            return Grads(dq, dk, dv, rows.transpose(1, 2))
        if dbias is not None and dbias.dim() == 4 and per_head:  # of this rank's heads; the others add theirs
            full = dbias.new_zeros(dbias.shape[0], self.shares[-1].q.stop, *dbias.shape[2:])
            full[:, self.mine.q] = dbias
            dbias = full
        return Grads(dq, dk, dv, dbias)

    def _joined(self, pieces: list[Tensor], kind: str) -> Tensor:
        """The heads of all ranks; a head that several ranks had is summed in float32."""
        slices = [{"q": share.q, "kv": share.kv, "": slice(0, 1)}[kind] for share in self.shares]
        if all(a.stop == b.start for a, b in pairwise(slices)):  # nobody holds a head twice
            return torch.cat(pieces, 2)
        shape = (*pieces[0].shape[:2], slices[-1].stop, *pieces[0].shape[3:])
        total = torch.zeros(shape, dtype=accumulate_dtype(pieces[0].dtype), device=pieces[0].device)
        for where, piece in zip(slices, pieces, strict=True):
            total[:, :, where] += piece
        return total.to(pieces[0].dtype)

    def _mask(self, mask: Mask, rows: list[Tensor]) -> Mask:
        """The mask for all tokens of the group as rows, and this rank's heads."""
        dense, left = mask.dense, list(rows)
        if self.mask_rows and dense is not None:
            dense = left.pop(0)
        elif dense is not None and dense.shape[1] > 1:
            dense = dense[:, self.mine.q]
        segments = None if mask.q_segments is None else left.pop(0)[:, 0, :, 0]
        return replace(mask, dense=dense, q_segments=segments)

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


def _heads(x: Tensor, share: Share, kind: str) -> Tensor:
    return x[:, :, {"q": share.q, "kv": share.kv, "": slice(None)}[kind]]


def _shape(x: Tensor, length: int, share: Share, kind: str) -> tuple[int, ...]:
    heads = {"q": share.heads, "kv": share.kv_heads, "": x.shape[2]}[kind]
    return (x.shape[0], length, heads, *x.shape[3:])
