"""`level(pair)`: queries whose float mask lies wholly at a huge value, such as float32's lowest, are ordinary queries.

A constant added to all biases of one query changes lse but not attention; yet a float32 lse of -1e9 has no bits left
for the log of a sum, and weights that backward recomputes from it do not sum to 1. So such a row is moved to 0 before
the kernel sees it, and its lse back after. Beyond `FLAT` not even float64 keeps the scores by the bias: all keys at
the top count alike (out is the mean of their values), each recomputed weight is 1, and grad_out is divided by their
number; such a row is moved to a power of two near it, which a kernel that works in base 2 scales by log2(e) exactly,
and which does not overflow there (float32's lowest number does: seen on H200 with torch's memory-efficient and
cuDNN's kernel). Rows at ordinary levels are left as they are, bit by bit. Where the keys of a flat row come in parts,
in the edge or in a ring, each part is weighed by how many of its keys are at the top (`keys_at_top`). Not mended: under
a causal mask, a window or segments a KeyBias with which some queries see huge levels only and others do not (one row is
made for all of them): beyond `SWALLOWED` such a query counts as flat, below it its numbers are as coarse as its scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from .masks import allowed, row_blocks
from .merge import SWALLOWED

HUGE = 1024.0  # below it, float32 keeps 1e-4 of a log; eager attention loses as much when it adds the bias
FLAT = 2.0**53
HIGHEST = 2.0**127  # beyond it a kernel that works in base 2 overflows


Places = tuple[tuple[slice, int], ...]  # some queries, and how far their positions are ahead of their places


def level(pair: OpPair, places: Places | None = None) -> OpPair:
    """The pair with huge rows of a float mask moved to 0 and back.

    `places` says where the queries lie that a rank of a context has, whose causal limit and window count from the
    first of all queries; without it they are all there."""
    op, shaped = _Level(pair, places), _Level(replace(pair, forward=pair.shapes), places)
    return replace(pair, forward=op.forward, backward=op.backward, shapes=shaped.forward)


@dataclass(frozen=True)
class _Level:
    pair: OpPair
    places: Places | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
        if mask.bias is None or options.levelled:
            return self.pair.forward(q, k, v, mask, rng, options)
        options = replace(options, levelled=True)
        rows = self._rows(mask, q.shape[1], k)
        shift, at_top, top = _levels(mask, rows, accumulate_dtype(q.dtype))
        result = self.pair.forward(q, k, v, _moved(_whole(mask, rows), shift), rng, options)
        lse = own = result.lse
        lse = lse.clone() if lse.numel() == 0 else torch.where(own.abs() == HIGHEST, top, own + shift)
        return result._replace(lse=lse, saved=(shift, at_top, own, lse.clone(), *result.saved))

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
        if mask.bias is None or options.levelled:
            return self.pair.backward(grad_out, grad_lse, q, k, v, mask, out, lse, rng, saved, options, wanted)
        options = replace(options, levelled=True)
        shift, at_top, own, given, *inner = saved
        if lse is not None and lse.numel():
            # our own lse comes back as it was; one that came from more keys is moved
            same = own + (lse - lse.detach()).nan_to_num(0.0)  # a second derivative is still lse's
            lse = torch.where(lse == given, same, lse - shift)
        grad_out = (grad_out / at_top.transpose(1, 2).unsqueeze(-1).to(shift.dtype)).to(grad_out.dtype)
        grad_lse = None if grad_lse is None else grad_lse / at_top
        moved = _moved(_whole(mask, self._rows(mask, grad_out.shape[1], k)), shift)
        grads = self.pair.backward(grad_out, grad_lse, q, k, v, moved, out, lse, rng, tuple(inner), options, wanted)
        return grads if grads.dbias is None else grads._replace(dbias=_to_user(grads.dbias, mask))

    def _rows(self, mask: Mask, q_len: int, k: Tensor | None) -> list[_Rows]:
        """The mask of every run of neighbouring queries, as one whose first query is at position 0."""
        if self.places is not None or k is None:
            k_len = mask.bias.shape[-1]  # type: ignore[union-attr]  # k has one rank's keys, the mask those of all
        else:
            k_len = k.shape[1]
        found = []
        for rows, moved in self.places or ((slice(0, q_len), 0),):
            ahead, count = rows.start + moved, rows.stop - rows.start
            # an end that hides nothing stays a number: every rank must see the same kind of mask
            causal, since = (None if end is None else end + ahead for end in (mask.causal, mask.since))
            own = replace(mask.at(rows, slice(0, k_len)), causal=causal, since=since)
            found.append(_Rows(count, k_len, _joined(own, count, k_len, _one_row(mask))))
        return found


class _Rows(NamedTuple):
    q_len: int
    k_len: int
    mask: Mask


def _one_row(mask: Mask) -> bool:
    """Whether the tensors of the mask are the same for all queries, whatever segments and positions hide."""
    return mask.dense is None or mask.dense.shape[2] == 1


def _whole(mask: Mask, rows: list[_Rows]) -> Mask:
    """The masks of all queries as one."""
    first = rows[0].mask
    if _one_row(mask):
        return replace(mask, dense=first.dense, key_bias=first.key_bias)
    dense = first.dense if len(rows) == 1 else _cat([(r.mask.dense, r.q_len) for r in rows], 2)
    return Mask(dense, mask.key_keep, causal=mask.causal)


def _levels(mask: Mask, rows: list[_Rows], dtype: torch.dtype) -> Levels:
    found = [row_levels(r.mask, r.q_len, r.k_len, dtype, _one_row(mask)) for r in rows]
    if len(found) == 1:
        return found[0]
    counts = [r.q_len for r in rows]
    shift, at_top, top = (_cat(list(zip(parts, counts, strict=True)), 2) for parts in zip(*found, strict=True))
    return Levels(found[0].shift if _one_row(mask) else shift, at_top, top)


def _cat(parts: list[tuple[Any, int]], dim: int) -> Tensor:
    """Tensors joined along a dim in which each stands for so many places."""
    return torch.cat([x.expand(*x.shape[:dim], count, *x.shape[dim + 1 :]) for x, count in parts], dim)


def keys_at_top(mask: Mask, q_len: int, k_len: int, dtype: torch.dtype) -> Tensor | None:
    """How many keys of a part count alike in each query at a flat level, else 1; None without a float mask."""
    return None if mask.bias is None else row_levels(mask, q_len, k_len, accumulate_dtype(dtype)).at_top


class Levels(NamedTuple):
    """Per query, broadcastable to (B, H, Sq): how far to move its biases; the keys at the top of a flat row, or 1; the
    highest of its biases."""

    shift: Tensor
    at_top: Tensor
    top: Tensor


def row_levels(mask: Mask, q_len: int, k_len: int, dtype: torch.dtype, one_row: bool | None = None) -> Levels:
    """Found from the float mask and the keys that are kept; a bias per key moves per sample. `one_row`: the mask's one
    row is for other queries, too, and not that of a single query."""
    mask = _as_wide_as(mask, k_len)
    user = mask.bias if mask.key_bias is None else mask.key_bias[:, None, None, :]
    bias = user.detach().to(dtype)  # type: ignore[union-attr]
    if mask.key_keep is not None:
        bias = bias.masked_fill(~mask.key_keep[:, None, None, :], -torch.inf)
    if bias.shape[3] == 0 or k_len == 0:  # no maximum of nothing
        return Levels(*(bias.new_full(bias.shape[:3], x) for x in (0.0, 1.0, -torch.inf)))
    whole, one_row = bias.amax(-1), bias.shape[2] == 1 if one_row is None else one_row
    if mask.since is not None or mask.q_segments is not None:
        top, at_top = _seen(bias, mask, q_len, k_len)
        mover = _for_any(bias, whole) if one_row else top
    elif mask.causal is None:
        top, at_top, mover = whole, (bias == whole.unsqueeze(-1)).sum(-1), whole
    else:
        top, at_top = _reached(bias, q_len, mask.causal)
        mover = _common(bias, whole) if one_row else top
    level = torch.where(mover.abs() < FLAT, 0.0, _power_of_two(mover))
    shift = torch.where((mover.abs() > HUGE) & mover.isfinite(), mover - level, 0.0)
    limit = FLAT if dtype == torch.float64 else SWALLOWED
    flat = ((top - shift).abs() >= limit) & top.isfinite() & (at_top > 0)
    return Levels(shift, torch.where(flat, at_top, 1), top)


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two in x, with its sign: where kernels that count in base 2 scale without rounding."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(mantissa.sign() / 2, exponent)


def _reached(bias: Tensor, q_len: int, causal: int) -> tuple[Tensor, Tensor]:
    """Per query of a causal mask: the highest bias among the keys it reaches, and how many of them have it."""
    running = bias.cummax(-1).values
    places = torch.arange(bias.shape[3], device=bias.device)
    raised = running[..., 1:] > running[..., :-1]  # a new highest begins here
    begins = torch.cat([torch.zeros_like(raised[..., :1]), raised], -1) if bias.shape[3] > 1 else running < running
    begin = torch.where(begins, places, 0).cummax(-1).values
    equal = (bias == running).cumsum(-1)
    count = equal - equal.gather(-1, begin) + 1
    reach = (torch.arange(q_len, device=bias.device) + causal).clamp(0, bias.shape[3] - 1)[None, None, :, None]
    return running.take_along_dim(reach, -1).squeeze(-1), count.take_along_dim(reach, -1).squeeze(-1)


def _common(bias: Tensor, whole: Tensor) -> Tensor:
    """How far one row for all queries may move without taking any of them further from 0, whatever keys they reach.

    The same on every rank of a context: it must not depend on which queries are here.
    """
    first = bias.cummax(-1).values  # what the query that reaches fewest keys has at its top comes first
    lowest = first.masked_fill(first == -torch.inf, torch.inf).amin(-1)
    return torch.where(whole < 0, whole, lowest.clamp_min(0.0))


def _seen(bias: Tensor, mask: Mask, q_len: int, k_len: int) -> tuple[Tensor, Tensor]:
    """Per query beside a window or segments: the highest bias among the keys it sees, and how many of them have it;
    written out for a block of rows at a time."""
    hides = replace(mask, dense=None, key_bias=None, key_keep=None)
    tops, counts = [], []
    # a symbol, while torch traces: nothing is computed
    blocks = row_blocks(q_len) if type(q_len) is int else []
    for rows in blocks or [slice(0, q_len)]:
        places = allowed(hides.at(rows, slice(0, k_len)), rows.stop - rows.start, k_len, bias.device)
        own = bias[:, :, rows] if bias.shape[2] > 1 else bias.expand(-1, -1, rows.stop - rows.start, -1)
        own = own if places is None else torch.where(places, own, -torch.inf)
        tops.append(own.amax(-1))
        counts.append((own == tops[-1].unsqueeze(-1)).sum(-1))
    return torch.cat(tops, 2), torch.cat(counts, 2)


def _for_any(bias: Tensor, whole: Tensor) -> Tensor:
    """How far one row for all queries may move without taking any of them further from 0, whichever keys they see."""
    lowest = bias.masked_fill(bias == -torch.inf, torch.inf).amin(-1)
    return torch.where(whole < 0, whole, lowest.clamp_min(0.0))


def _joined(mask: Mask, q_len: int, k_len: int, one_row: bool) -> Mask:
    """A float mask beside what else hides single keys from a query, as one: only both tell what is at its top.

    That is a bool mask beside a bias per key, and for a mask that has rows already a window or segments; the causal end
    stays as it is.
    """
    if mask.key_bias is not None and mask.dense is not None:
        dense = mask.key_bias[:, None, None, :].masked_fill(~mask.dense, -torch.inf)
        mask = replace(mask, dense=dense, key_bias=None)
    bounded = mask.since is not None or mask.q_segments is not None
    if one_row or not bounded or mask.dense is None:
        return mask
    places = allowed(replace(mask, dense=None, key_keep=None, causal=None), q_len, k_len, mask.dense.device)
    dense = mask.dense if places is None else torch.where(places, mask.dense, -torch.inf)
    return Mask(dense, mask.key_keep, causal=mask.causal)


def _as_wide_as(mask: Mask, k_len: int) -> Mask:
    """One column for all keys, as that many."""
    dense = mask.dense
    if dense is None or dense.shape[3] != 1 or k_len < 2:
        return mask
    return replace(mask, dense=dense.expand(-1, -1, -1, k_len))


def _moved(mask: Mask, shift: Tensor) -> Mask:
    """The mask with the level of each row taken out of its float part."""
    if mask.key_bias is not None:
        return replace(mask, key_bias=_held(mask.key_bias.to(shift.dtype) - shift[:, 0]))
    dense = mask.dense.to(shift.dtype) - shift.unsqueeze(-1)  # type: ignore[union-attr]
    return replace(mask, dense=_held(dense) if dense.shape[2] == 1 else dense)


def _held(bias: Tensor) -> Tensor:
    """One row for all queries, not moved as far as some of them need: its finite numbers within what kernels scale."""
    if bias.dtype == torch.float64:
        return bias
    return torch.where(bias.isinf(), bias, bias.clamp(-HIGHEST, HIGHEST))


def _to_user(dbias: Tensor, mask: Mask) -> Tensor:
    """The gradient of the moved mask as that of the user's, which may have had fewer rows, heads or samples."""
    user = mask.bias
    assert user is not None
    if dbias.dim() == 4:
        four = user if user.dim() == 4 else user[:, None, None, :]
        dbias = dbias.sum_to_size(four.shape)
    return dbias.reshape(user.shape).to(user.dtype)
