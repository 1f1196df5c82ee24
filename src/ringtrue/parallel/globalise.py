"""`globalise(pair)`: the user's mask, of which every rank holds a part, as one with the columns of *all* keys.

Key masks and segments (a bit, a number or an id a token) are gathered once, in forward; backward finds them in `saved`,
and sends each rank the gradient of its own KeyBias. Columns are in global order, rows are this rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from .comm import Comm, Template
from .layout import Layout, count, dealt, in_order

RANKS = 1 << 48  # random states that one rank may need


def globalise(
    pair: OpPair,
    comm: Comm,
    k: Layout | None,
    columns: int,
    key_kinds: Sequence[str],
    ends: tuple[int | None, int | None],
    mask_rows: bool,
    mask_shape: tuple[int, int, int],
    wanted: Wanted,
) -> OpPair:
    """The pair with such a mask, for the user's.

    k          where the keys of every rank lie; None where every rank has all of them
    columns    how many keys all ranks have together
    key_kinds  "key_keep", "key_bias", "k_segments": those that are to be gathered, in this order
    ends       causal and since of the whole call, for a query at position 0
    mask_rows  some rank's dense mask differs by row
    mask_shape batch, heads and columns of all ranks' dense masks together
    """
    op = _Globalise(pair, comm, k, columns, tuple(key_kinds), *ends, mask_rows, mask_shape, wanted)
    return replace(pair, forward=op.forward, backward=op.backward)


@dataclass(frozen=True)
class _Globalise:
    pair: OpPair
    comm: Comm
    k: Layout | None
    columns: int
    key_kinds: tuple[str, ...]
    causal: int | None
    since: int | None
    mask_rows: bool
    mask_shape: tuple[int, int, int]
    wanted: Wanted

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
        gathered = {kind: self._gather(getattr(mask, kind), k) for kind in self.key_kinds}
        whole = self._whole(mask, gathered, q.shape[1])
        result = self.pair.forward(q, k, v, whole, self._state(rng), options)
        return result._replace(rng=rng, saved=(*gathered.values(), *result.saved))

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
        _: Wanted,
    ) -> Grads:
        gathered = dict(zip(self.key_kinds, saved, strict=False))
        inner = saved[len(self.key_kinds) :]
        whole = self._whole(mask, gathered, grad_out.shape[1])
        grads = self.pair.backward(
            grad_out, grad_lse, q, k, v, whole, out, lse, self._state(rng), inner, options, self.wanted
        )
        return grads if grads.dbias is None else grads._replace(dbias=self._own(grads.dbias, mask))

    def _whole(self, mask: Mask, gathered: Mapping[str, Tensor], q_len: int) -> Mask:
        dense = mask.dense
        if dense is not None:
            batch, heads, columns = self.mask_shape
            if dense.dtype != torch.bool:
                columns = self.columns  # how many keys are alike is known here only
            rows = q_len if self.mask_rows else dense.shape[2]  # where this rank's rows are all alike
            dense = dense.expand(batch, heads, rows, max(columns, dense.shape[3]))
        return replace(mask, dense=dense, causal=self.causal, since=self.since, **gathered)

    def _gather(self, mine: Tensor | None, k: Tensor) -> Tensor:
        """A sharded (B, Sk) key mask for all keys; a rank without one beside others' KeyPadding keeps all its keys."""
        assert self.k is not None
        if mine is None:
            mine = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        forms = [[Template((k.shape[0], count(spans)), mine.dtype)] for spans in self.k]
        received = self.comm.exchange([[mine]] * self.comm.size, forms, k.device).wait()
        return in_order([part for (part,) in received], self.k, 1)

    def _own(self, dbias: Tensor, mask: Mask) -> Tensor:
        """The gradient of this rank's part of the float mask: its keys' numbers from all ranks, or its own rows."""
        bias = mask.bias
        assert bias is not None
        if dbias.dim() == 4:
            return dbias if dbias.shape == bias.shape else _summed(dbias, bias)
        if "key_bias" not in self.key_kinds:
            return dbias
        parcels = [[part] for part in dealt(dbias, self.k, 1)]  # type: ignore[arg-type]
        form = [Template(tuple(bias.shape), dbias.dtype)]
        received = self.comm.exchange(parcels, [form] * self.comm.size, dbias.device).wait()
        total = torch.zeros(bias.shape, dtype=accumulate_dtype(dbias.dtype), device=dbias.device)
        for (part,) in received:
            total += part
        return total.to(bias.dtype)

    def _state(self, rng: Tensor | None) -> Tensor | None:
        """Every rank draws masks of its own, also where all ranks have the same seed."""
        return None if rng is None else rng + torch.tensor([0, self.comm.rank * RANKS], device=rng.device)


def _summed(dbias: Tensor, like: Tensor) -> Tensor:
    return dbias.to(accumulate_dtype(dbias.dtype)).sum_to_size(like.shape).to(like.dtype)
