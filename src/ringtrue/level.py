"""`level(pair)`: queries whose float mask lies wholly at a huge value, such as float32's lowest, are ordinary queries.

A constant added to all biases of one query changes lse but not attention; yet a float32 lse of -1e9 has no bits left
for the log of a sum, and weights that backward recomputes from it do not sum to 1. So such a row is moved to 0 before
the kernel sees it, and its lse back after. Beyond `FLAT` not even float64 keeps the scores by the bias: all keys at the
top count alike (out is the mean of their values), each recomputed weight is 1, and grad_out is divided by their number.
Rows at ordinary levels are left as they are, bit by bit. Not mended: a flat row whose keys lie in several ring steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype

HUGE = 1024.0  # below it, float32 keeps 1e-4 of a log; eager attention loses as much when it adds the bias
FLAT = 2.0**53


def level(pair: OpPair) -> OpPair:
    """The pair with huge rows of a float mask moved to 0 and back."""
    return replace(pair, forward=partial(_forward, pair), backward=partial(_backward, pair))


def _forward(pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
    if mask.bias is None or options.levelled:
        return pair.forward(q, k, v, mask, rng, options)
    options = replace(options, levelled=True)
    shift = row_levels(mask, q.shape[1], accumulate_dtype(q.dtype)).shift
    result = pair.forward(q, k, v, _moved(mask, shift), rng, options)
    saved = (shift, result.lse, *result.saved)
    return result._replace(lse=result.lse if result.lse.numel() == 0 else result.lse + shift, saved=saved)


def _backward(
    pair: OpPair,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    mask: Mask,
    out: Tensor | None,
    lse: Tensor | None,
    rng: object,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    if mask.bias is None or options.levelled:
        return pair.backward(grad_out, grad_lse, q, k, v, mask, out, lse, rng, saved, options, wanted)
    options = replace(options, levelled=True)
    shift, own, *inner = saved
    if lse is not None and lse.numel():
        # our own lse comes back as it was; one that came from more keys is moved
        lse = torch.where(lse == own + shift, own, lse - shift)
    at_top = row_levels(mask, grad_out.shape[1], shift.dtype).at_top
    grad_out = grad_out / at_top.transpose(1, 2).unsqueeze(-1).to(grad_out.dtype)
    moved = _moved(mask, shift)
    grads = pair.backward(grad_out, grad_lse, q, k, v, moved, out, lse, rng, tuple(inner), options, wanted)
    dbias = grads.dbias
    return grads if dbias is None else grads._replace(dbias=dbias.to(mask.bias.dtype))


class Levels(NamedTuple):
    """Per query, broadcastable to (B, H, Sq): how far to move its biases; the keys at the top of a flat row, or 1."""

    shift: Tensor
    at_top: Tensor


def row_levels(mask: Mask, q_len: int, dtype: torch.dtype) -> Levels:
    """Found from the float mask; nothing larger than the user's mask is made: a bias per key moves per sample."""
    user = mask.bias if mask.key_bias is None else mask.key_bias[:, None, None, :]
    bias = user.detach().to(dtype)  # type: ignore[union-attr]
    if bias.shape[3] == 0:  # no maximum of nothing
        return Levels(bias.new_zeros(bias.shape[:3]), bias.new_ones(bias.shape[:3]))
    keep = mask.key_keep
    if keep is not None and bias.shape[0] == keep.shape[0]:
        bias = bias.masked_fill(~keep[:, None, None, :], -torch.inf)
    whole = bias.amax(-1)
    top, at_top = whole, (bias == whole.unsqueeze(-1)).sum(-1)
    if mask.causal is not None:
        reach = (torch.arange(q_len, device=bias.device) + mask.causal).clamp(0, bias.shape[3] - 1)
        top = bias.cummax(-1).values.take_along_dim(reach[None, None, :, None], -1).squeeze(-1)
        equal = bias == (whole if bias.shape[2] == 1 else top).unsqueeze(-1)
        at_top = equal.cumsum(-1).take_along_dim(reach[None, None, :, None], -1).squeeze(-1)
    mover = top if bias.shape[2] > 1 else whole
    moves = (mover.abs() > HUGE) & (mover.abs() < FLAT)
    flat = (top.abs() >= FLAT) & top.isfinite() & (at_top > 0)
    return Levels(torch.where(moves, mover, 0.0), torch.where(flat, at_top, 1))


def _moved(mask: Mask, shift: Tensor) -> Mask:
    """The mask with the level of each row taken out of its float part."""
    if mask.key_bias is not None:
        return replace(mask, key_bias=mask.key_bias.to(shift.dtype) - shift[:, 0])
    return replace(mask, dense=mask.dense.to(shift.dtype) - shift.unsqueeze(-1))  # type: ignore[union-attr]
