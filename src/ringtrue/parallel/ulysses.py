"""`ulysses(pair)`: ranks trade tokens for heads, so that each attends over all tokens of its group (arXiv:2309.14509).

Key heads travel once to every rank that needs them; gradients of key heads that several ranks hold are summed by their
owner, in float32. Forward moves q, k, v and out, backward grad_out, dq, dk and dv: nothing is exchanged twice. Tokens
of a group are joined in global order, however they lie on its ranks.

Heads go in rounds: all exchanges are posted before the first attention, so that those of one round hide behind the
attention of another, and each round's results leave while the next one is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .. import kept
from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from .comm import Comm, Template
from .heads import Share, Shares
from .layout import Layout, count, dealt, in_order

ROUND = 1 << 40  # random states that one round may need

Sent = tuple[Tensor, Layout, str]  # a tensor, where its tokens lie, and which heads it has (Share.of)


def ulysses(
    pair: OpPair,
    comm: Comm,
    rounds: tuple[Shares, ...],
    q: Layout,
    k: Layout,
    wanted: Wanted,
    mask_rows: bool,
) -> OpPair:
    """The pair over one Ulysses group, whose ranks hold the tokens `q` and `k` and compute the heads of `rounds`.

    Its mask has this rank's rows and the columns of all keys; `mask_rows` says that a dense mask differs by row; its
    segments have rows always. `wanted` is what any rank wants. It keeps what backward needs in the exchanged layout.
    dbias has this rank's rows; without rows it is what this rank's heads and the group's queries add.
    """
    op = _Ulysses(tuple(_Round(pair, comm, shares, q, k, wanted, mask_rows) for shares in rounds))
    claims = replace(pair.claims, double_backward=False)
    return replace(pair, forward=op.forward, backward=op.backward, claims=claims, reads_inputs=False)


@dataclass(frozen=True)
class _Ulysses:
    rounds: tuple[_Round, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
        coming = [one.send_inputs(q, k, v, mask) for one in self.rounds]
        leaving, saved = [], []
        for number, (one, arrive) in enumerate(zip(self.rounds, coming, strict=True)):
            result = one.forward(arrive(), mask, _state(rng, number), options)
            leaving.append(one.send_results(result, options))
            saved.append(result.saved)
        parts = [arrive() for arrive in leaving]
        out, *lse = (_by_rank([part[i] for part in parts], 2) for i in range(len(parts[0])))
        absent = saved[0][4].new_empty(0)
        return ForwardOut(out, lse[0].transpose(1, 2) if lse else absent, rng, kept.join(saved))

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
        own = kept.part(saved, len(self.rounds))
        coming = [one.send_upstream(grad_out, grad_lse, options) for one in self.rounds]
        leaving, of_bias = [], []
        for number, (one, arrive) in enumerate(zip(self.rounds, coming, strict=True)):
            grads = one.backward(arrive(), mask, _state(rng, number), own[number], options)
            leaving.append(one.send_grads(grads, mask))
            rest = grads.dbias is not None and not one.rows_of(grads.dbias)
            of_bias.append(one.of_all_heads(grads.dbias, mask) if rest else None)  # type: ignore[arg-type]
        parts = [arrive() for arrive in leaving]
        last = self.rounds[-1]
        dq, dk, dv, rows = (
            None if part[0] is None else last.joined([x for x in part if x is not None], self.rounds, kind)
            for part, kind in zip(zip(*parts, strict=True), ("q", "kv", "kv", last.rows_kind(mask)), strict=True)
        )
        if rows is not None:
            return Grads(dq, dk, dv, rows.transpose(1, 2))
        return Grads(dq, dk, dv, _added([x for x in of_bias if x is not None]))


@dataclass(frozen=True)
class _Round:
    """One exchange, attention and exchange back, of some heads of every rank."""

    pair: OpPair
    comm: Comm
    shares: Shares
    q: Layout
    k: Layout
    wanted: Wanted
    mask_rows: bool

    @property
    def mine(self) -> Share:
        return self.shares[self.comm.rank]

    def send_inputs(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Callable[[], list[Tensor]]:
        """All tokens of the group for this rank's heads: q, k, v, and what of the mask has rows."""
        sent = [(q, self.q, "q"), (k, self.k, "kv"), (v, self.k, "kv")]
        return self._to_heads(sent + [(x, self.q, kind) for x, kind in self._rows(mask)])

    def forward(self, inputs: list[Tensor], mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
        qs, ks, vs, *rows = inputs
        ks, vs = (self._expand(x) for x in (ks, vs))
        result = self.pair.forward(qs, ks, vs, self._mask(mask, rows), rng, replace(options, return_lse=True))
        return result._replace(saved=(qs, ks, vs, result.out, result.lse, *rows, *result.saved))

    def send_results(self, result: ForwardOut, options: Options) -> Callable[[], list[list[Tensor]]]:
        parts = [result.out] + ([result.lse.transpose(1, 2)] if options.return_lse else [])
        return self._to_tokens([(x, self.q, "q") for x in parts])

    def send_upstream(self, grad_out: Tensor, grad_lse: Tensor | None, options: Options) -> Callable[[], list[Tensor]]:
        """grad_out, and where lse was given out its gradient: zeros where nobody here has one, for peers may."""
        sent = [(grad_out, self.q, "q")]
        if options.return_lse:
            batch, length, heads, _ = grad_out.shape
            nothing = grad_out.new_zeros(batch, heads, length, dtype=accumulate_dtype(grad_out.dtype))
            sent.append(((nothing if grad_lse is None else grad_lse).transpose(1, 2), self.q, "q"))
        return self._to_heads(sent)

    def backward(
        self, upstream: list[Tensor], mask: Mask, rng: Tensor | None, saved: tuple[Tensor, ...], options: Options
    ) -> Grads:
        grad_out, *of_lse = upstream
        qs, ks, vs, outs, lses, *inner = saved
        rows = [inner.pop(0) for _ in self._rows(mask)]
        grads = self.pair.backward(
            grad_out, of_lse[0].transpose(1, 2) if of_lse else None, qs, ks, vs, self._mask(mask, rows), outs, lses,
            rng, tuple(inner), options, self.wanted,
        )  # fmt: skip
        return grads._replace(dk=self._fold(grads.dk), dv=self._fold(grads.dv))

    def send_grads(self, grads: Grads, mask: Mask) -> Callable[[], list[list[Tensor] | None]]:
        """Gradients back to the ranks that own the tokens: of q, k, v and the rows of a mask, None where not wanted."""
        rows = None if grads.dbias is None or not self.rows_of(grads.dbias) else grads.dbias.transpose(1, 2)
        told = ((grads.dq, self.q, "q"), (grads.dk, self.k, "kv"), (grads.dv, self.k, "kv"))
        all_told = (*told, (rows, self.q, self.rows_kind(mask)))
        sent = [(x, layout, kind) for x, layout, kind in all_told if x is not None]
        arrive = self._to_tokens(sent) if sent else list

        def finish() -> list[list[Tensor] | None]:
            done = iter(arrive())
            return [None if x is None else next(done) for x, _, _ in all_told]

        return finish

    def rows_of(self, dbias: Tensor) -> bool:
        """Whether the gradient of a float mask goes back row by row; that of a key bias does not, whatever has rows."""
        return self.mask_rows and dbias.dim() == 4

    def rows_kind(self, mask: Mask) -> str:
        return "q" if mask.dense is not None and mask.dense.shape[1] > 1 else ""

    def of_all_heads(self, dbias: Tensor, mask: Mask) -> Tensor:
        """What this rank's heads add to the gradient of a mask without rows; other heads of it get nothing here."""
        if dbias.dim() != 4 or not self.rows_kind(mask):
            return dbias
        full = dbias.new_zeros(dbias.shape[0], mask.dense.shape[1], *dbias.shape[2:])  # type: ignore[union-attr]
        full[:, self.mine.q] = dbias
        return full

    def joined(self, parts: list[list[Tensor]], rounds: tuple[_Round, ...], kind: str) -> Tensor:
        """The heads of all ranks from all rounds; a head that several ranks had is summed in float32."""
        slices = [share.of(kind) for shares in zip(*(one.shares for one in rounds), strict=True) for share in shares]
        pieces = [piece for rank in zip(*parts, strict=True) for piece in rank]
        if kind and all(a.stop == b.start for a, b in pairwise(slices)):  # nobody holds a head twice
            return torch.cat(pieces, 2)
        shape = (*pieces[0].shape[:2], slices[-1].stop, *pieces[0].shape[3:])
        total = torch.zeros(shape, dtype=accumulate_dtype(pieces[0].dtype), device=pieces[0].device)
        for where, piece in zip(slices, pieces, strict=True):
            total[:, :, where] += piece
        return total.to(pieces[0].dtype)

    def _rows(self, mask: Mask) -> list[tuple[Tensor, str]]:
        """What has a row for each query, rows in dim 1 and heads in dim 2, and which heads it has."""
        parts = []
        if self.mask_rows and mask.dense is not None:
            parts.append((mask.dense.transpose(1, 2), self.rows_kind(mask)))
        if mask.q_segments is not None:
            parts.append((mask.q_segments[:, :, None, None], ""))
        return parts

    def _mask(self, mask: Mask, rows: list[Tensor]) -> Mask:
        """The mask for all tokens of the group as rows, and this rank's heads."""
        dense, left = mask.dense, [x.transpose(1, 2) for x in rows]
        if self.mask_rows and dense is not None:
            dense = left.pop(0)
        elif dense is not None and dense.shape[1] > 1:
            dense = dense[:, self.mine.q]
        segments = None if mask.q_segments is None else left.pop(0)[:, 0, :, 0]
        return replace(mask, dense=dense, q_segments=segments)

    def _to_heads(self, sent: list[Sent]) -> Callable[[], list[Tensor]]:
        """(B, tokens here, all heads, ...) -> (B, tokens of the group, heads here, ...)."""
        parcels = [[x[:, :, share.of(kind)] for x, _, kind in sent] for share in self.shares]
        forms = [
            [Template(_shape(x, count(layout[rank]), self.mine, kind), x.dtype) for x, layout, kind in sent]
            for rank in range(self.comm.size)
        ]
        pending = self.comm.exchange(parcels, forms, sent[0][0].device)

        def finish() -> list[Tensor]:
            parts = zip(zip(*pending.wait(), strict=True), sent, strict=True)
            return [in_order(pieces, layout, 1) for pieces, (_, layout, _) in parts]

        return finish

    def _to_tokens(self, sent: list[Sent]) -> Callable[[], list[list[Tensor]]]:
        """(B, tokens of the group, heads here, ...) -> for each, from every rank (B, tokens here, heads there, ...)."""
        mine = self.comm.rank
        parcels = [list(pieces) for pieces in zip(*(dealt(x, layout, 1) for x, layout, _ in sent), strict=True)]
        forms = [
            [Template(_shape(x, count(layout[mine]), share, kind), x.dtype) for x, layout, kind in sent]
            for share in self.shares
        ]
        pending = self.comm.exchange(parcels, forms, sent[0][0].device)
        return lambda: [list(pieces) for pieces in zip(*pending.wait(), strict=True)]

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


def _shape(x: Tensor, length: int, share: Share, kind: str) -> tuple[int, ...]:
    where = share.of(kind)
    return (x.shape[0], length, where.stop - where.start, *x.shape[3:])


def _by_rank(parts: list[list[Tensor]], dim: int) -> Tensor:
    """Pieces of every rank, from every round, in the order of heads."""
    return torch.cat([piece for rank in zip(*parts, strict=True) for piece in rank], dim)


def _state(rng: Tensor | None, number: int) -> Tensor | None:
    """Every round draws masks of its own."""
    return rng if rng is None or number == 0 else rng + torch.tensor([0, number * ROUND], device=rng.device)


def _added(parts: list[Tensor]) -> Tensor | None:
    """The sum over rounds, in float32."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.stack([x.to(accumulate_dtype(x.dtype)) for x in parts]).sum(0).to(parts[0].dtype)
