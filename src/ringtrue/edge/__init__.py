"""`edge(pair)`: everything that no two kernels agree on, so that a pair stays a schema and a call.

Lowering the mask to what the pair takes, splitting an offset-causal call, windows and segments (as a bias, for a block
of rows at a time), key heads, head-dim padding, a last dim whose stride is not 1, empty calls, rows that see nothing,
rows at a huge level (level.py), the gradient of lse. What `edge` returns claims all of that, whatever the pair claims.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from .. import kept
from ..contract import Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype, shapes_only
from ..level import keys_at_top, level
from ..masks import live_rows, part_of_bias
from ..merge import Merged
from .blocks import blocks_of, reached, whole
from .fit import as_is, fit, inner, lower, pad, positive, rows_at_once, unfit, unlower
from .through_lse import plus, through_lse


def edge(pair: OpPair) -> OpPair:
    """The pair with the layout rule, every mask kind and every size of section "Semantics" honoured around it."""
    claims = widened(pair.claims)
    shapes = pair.shapes  # a kernel that keeps nothing is not asked block by block: their number may be a symbol
    if shapes is not shapes_only:
        shapes = partial(_forward, replace(pair, forward=shapes))
    around = replace(
        pair, forward=partial(_forward, pair), backward=partial(_backward, pair), claims=claims, shapes=shapes
    )
    return level(around)


def widened(claims: Claims) -> Claims:
    """What a pair with these claims can do once the edge is around it."""
    masks, alone = claims.masks, claims.alone
    if "dense_float" in masks:
        masks = frozenset({"dense_bool", "dense_float", "key_keep", "key_bias", "segments", "window"})
        alone = frozenset()
    causal = claims.causal if claims.causal == "none" else "offset"
    most = claims.max_head_dim if claims.head_dims is None else max(claims.head_dims)
    bias_dtype: Literal["input", "any"] = "input" if claims.bias_dtype == "input" else "any"
    return replace(
        claims, masks=masks, alone=alone, bias_dtype=bias_dtype, causal=causal, max_head_dim=most,
        head_dims=None, head_dim_multiple=1, gqa=True, value_dim=True,
        key_tile=None, dropout_tile=None, any_scale=True, any_strides=True, stride_multiple=1,
        dlse=claims.backward and (claims.dlse or claims.backward_from_lse),
    )  # fmt: skip


def _forward(
    pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options
) -> ForwardOut:
    if as_is(pair.claims, mask, options, q, k, v):
        return pair.forward(q, k, v, mask, rng, options)
    if _empty(q, k):
        return ForwardOut(*_nothing(q, v), rng)
    mask = reached(mask, q.shape[1], k.shape[1])
    blocks = blocks_of(mask, q.shape[1], k.shape[1], pair.claims, rows_at_once(pair.claims, options, q, k))
    if whole(blocks, q, k):
        return _forward_block(pair, q, k, v, mask, rng, options)
    merged, saved = Merged(q, v.shape[-1], flat=mask.bias is not None), []
    for number, (rows, cols) in enumerate(blocks):
        own = mask.at(rows, cols)
        part = _forward_block(pair, q[:, rows], k[:, cols], v[:, cols], own, _state(rng, number), options)
        merged.add(rows, part.out, part.lse, keys_at_top(own, rows.stop - rows.start, cols.stop - cols.start, q.dtype))
        saved.append(part.saved)
    return ForwardOut(*merged.result(), rng, kept.join(saved))


def _backward(
    pair: OpPair,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    rng: Tensor | None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    if grad_lse is None and as_is(pair.claims, mask, options, q, k, v, grad_out, out):
        return pair.backward(grad_out, None, q, k, v, mask, out, lse, rng, saved, options, wanted)
    if _empty(q, k):
        like = (q, k, v, mask.bias)
        return Grads(*(torch.zeros_like(x) if w and x is not None else None for x, w in zip(like, wanted, strict=True)))
    mask = reached(mask, q.shape[1], k.shape[1])
    blocks = blocks_of(mask, q.shape[1], k.shape[1], pair.claims, rows_at_once(pair.claims, options, q, k))
    if whole(blocks, q, k):
        return _backward_block(pair, grad_out, grad_lse, q, k, v, mask, out, lse, rng, saved, options, wanted)
    bias = mask.bias if wanted.bias else None
    sums = _zeros(q, k, v, bias, wanted)
    for number, ((rows, cols), own) in enumerate(zip(blocks, kept.part(saved, len(blocks)), strict=True)):
        part = _backward_block(
            pair, grad_out[:, rows], None if grad_lse is None else grad_lse[:, :, rows],
            q[:, rows], k[:, cols], v[:, cols], mask.at(rows, cols),
            out[:, rows], lse[:, :, rows], _state(rng, number), own, options, wanted,
        )  # fmt: skip
        for total, grad, where in zip(sums[:3], part[:3], (rows, cols, cols), strict=True):
            if total is not None and grad is not None:
                total[:, where] += grad
        if sums.dbias is not None and part.dbias is not None:
            part_of_bias(sums.dbias, rows, cols).add_(part.dbias)
    like = (q, k, v, bias)
    return Grads(*(None if s is None or x is None else s.to(x.dtype) for s, x in zip(sums, like, strict=True)))


def _zeros(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wanted: Wanted) -> Grads:
    """Where the blocks' gradients are added up, in float32 (float64 for float64)."""
    return Grads(
        *(
            torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) if w and x is not None else None
            for x, w in zip((q, k, v, bias), wanted, strict=True)
        )
    )


def _state(rng: Tensor | None, number: int) -> Tensor | None:
    """The random state of one block: blocks draw their own masks, the same in both directions."""
    return rng if rng is None or number == 0 else rng + torch.tensor([0, number], device=rng.device)


def _empty(q: Tensor, k: Tensor) -> bool:
    return q.shape[0] == 0 or q.shape[1] == 0 or q.shape[2] == 0 or k.shape[1] == 0


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What queries get that see no key: out 0, lse -inf."""
    batch, q_len, heads, _ = q.shape
    out = torch.zeros(batch, q_len, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full((batch, heads, q_len), float("-inf"), dtype=accumulate_dtype(q.dtype), device=q.device)
    return out, lse


def _forward_block(
    pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options
) -> ForwardOut:
    live = live_rows(mask, q.shape[1], k.shape[1], q.device)
    lowered = lower(mask, q, k, pair.claims)
    q, options, _ = positive(pair.claims, q, options)
    result = pair.forward(*fit(pair.claims, q, k, v), lowered, rng, options)
    out, lse = result.out, result.lse
    if out.shape[-1] != v.shape[-1]:
        out = out[..., : v.shape[-1]]
    if live is not None:
        out = out.masked_fill(~live.transpose(1, 2).unsqueeze(-1), 0.0)
        lse = lse.masked_fill(~live, float("-inf"))
    return ForwardOut(out, lse, result.rng, result.saved)


def _backward_block(
    pair: OpPair,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    rng: Tensor | None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    claims = pair.claims
    live = live_rows(mask, q.shape[1], k.shape[1], q.device)
    if live is not None:  # +inf makes every weight of such a row exp(-inf) = 0; -inf would make NaN
        lse = lse.masked_fill(~live, float("inf"))
        # out and lse are constants there, so an upstream inf or NaN must not reach dk and dv as 0 * inf
        grad_out = grad_out.masked_fill(~live.transpose(1, 2).unsqueeze(-1), 0.0)
        grad_lse = None if grad_lse is None else grad_lse.masked_fill(~live, 0.0)
    signed_q, options, sign = positive(claims, q, options)
    wide_q, wide_k, wide_v = fit(claims, signed_q, k, v)
    wide_grad, wide_out = (inner(claims, pad(x, wide_v.shape[-1])) for x in (grad_out, out))
    lowered = lower(mask, q, k, claims)
    direct = grad_lse if claims.dlse else None
    grads = pair.backward(
        wide_grad, direct, wide_q, wide_k, wide_v, lowered, wide_out, lse, rng, saved, options, wanted
    )
    if grad_lse is not None and not claims.dlse:
        grads = plus(grads, through_lse(pair, grad_lse, signed_q, k, v, lowered, lse, saved, options, wanted))
    dq, dk, dv = (unfit(g, x) for g, x in zip(grads[:3], (q, k, v), strict=True))
    return Grads(dq if dq is None or sign == 1 else sign * dq, dk, dv, unlower(grads.dbias, mask))
