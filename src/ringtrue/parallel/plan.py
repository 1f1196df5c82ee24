"""What the ranks of a context agree on for one call, and what follows: globalise(ulysses(ring(pair)))."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted
from ..level import level
from .comm import Comm, Groups, Template
from .ring import ring
from .schedule import Schedule, starts
from .ulysses import head_shares, ulysses


@dataclass(frozen=True)
class Plan:
    """Values only: every rank of the context holds the same, but for `rank`.

    q_lengths, k_lengths  tokens per context rank, in global order
    alignments            causal alignments asked for ("top_left", "bottom_right"); empty = not causal
    key_kinds             key masks that some rank has ("key_keep", "key_bias"); one without key_keep keeps all its keys
    mask_rows             a dense mask that differs by row
    wanted                gradients that any rank wants
    """

    rank: int
    ulysses_degree: int
    ring_degree: int
    heads: int
    kv_heads: int
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    alignments: frozenset[str] = frozenset()
    key_kinds: frozenset[str] = frozenset()
    mask_rows: bool = False
    wanted: Wanted = Wanted(False, False, False)

    @property
    def causal(self) -> int | None:
        """The offset for the first global query: query i sees keys j <= i + offset; several alignments all apply."""
        bottom = sum(self.k_lengths) - sum(self.q_lengths)
        offsets = [0 if a == "top_left" else bottom for a in self.alignments]
        return min(offsets) if offsets else None

    def compose(self, groups: Groups, pair: OpPair) -> OpPair:
        """The pair over this context. Its mask is the user's: this rank's rows, key masks sharded like the keys."""
        degree = self.ulysses_degree
        first = self.rank - self.rank % degree  # the first context rank of this rank's Ulysses group
        group = slice(first, first + degree)
        if self.ring_degree > 1:
            per_ring = [
                tuple(sum(n[r * degree : (r + 1) * degree]) for r in range(self.ring_degree))
                for n in (self.q_lengths, self.k_lengths)
            ]
            pair = ring(pair, groups.ring, Schedule(per_ring[0], per_ring[1], self.causal), self.wanted)
        if degree > 1:
            shares = head_shares(self.heads, self.kv_heads, degree)
            lengths = self.q_lengths[group], self.k_lengths[group]
            pair = ulysses(pair, groups.ulysses, shares, *lengths, self.wanted, self.mask_rows)
        return globalise(level(pair), groups.context, self)


def globalise(pair: OpPair, comm: Comm, plan: Plan) -> OpPair:
    """Turn the user's mask into one with this rank's rows and the columns of *all* keys, in global order.

    Key masks (one bit or number a token) are gathered once, in forward; backward finds them in `saved`.
    """
    keys, total = tuple(sorted(plan.key_kinds)), sum(plan.k_lengths)

    def whole(mask: Mask, gathered: Mapping[str, Tensor], q_len: int) -> Mask:
        dense = mask.dense
        if plan.mask_rows and dense is not None and dense.shape[2] != q_len:  # this rank's rows are all alike
            dense = dense.expand(-1, -1, q_len, -1)
        if dense is not None and dense.dtype != torch.bool and dense.shape[3] == 1 < total:
            dense = dense.expand(-1, -1, -1, total)  # how many keys are alike is known here only
        causal = None if plan.causal is None else plan.causal + starts(plan.q_lengths)[plan.rank]
        return Mask(dense, gathered.get("key_keep"), gathered.get("key_bias"), causal=causal)

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
        gathered = {kind: _gather_keys(getattr(mask, kind), k, comm, plan) for kind in keys}
        result = pair.forward(q, k, v, whole(mask, gathered, q.shape[1]), rng, options)
        return result._replace(saved=(*gathered.values(), *result.saved))

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
        wanted: Wanted,
    ) -> Grads:
        gathered = dict(zip(keys, saved, strict=False))
        full = whole(mask, gathered, grad_out.shape[1])
        inner = saved[len(keys) :]
        return pair.backward(grad_out, grad_lse, q, k, v, full, out, lse, rng, inner, options, plan.wanted)

    return replace(pair, forward=forward, backward=backward)


def _gather_keys(mine: Tensor | None, k: Tensor, comm: Comm, plan: Plan) -> Tensor:
    """A sharded (B, Sk) key mask for all keys; a rank that has none beside others' KeyPadding keeps all its keys."""
    if mine is None:
        mine = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    forms = [[Template((k.shape[0], n), mine.dtype)] for n in plan.k_lengths]
    received = comm.exchange([[mine]] * comm.size, forms, k.device).wait()
    return torch.cat([part for (part,) in received], 1)
