"""`edge(pair)`: everything that no two kernels agree on, so that a pair stays a schema and a call.

Lowering the mask to what the pair takes, splitting an offset-causal call, key heads, head-dim padding, a last dim whose
stride is not 1, empty calls, rows that see nothing, rows at a huge level (level.py). What `edge` returns claims all of
that, whatever the pair claims.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from . import kept
from .contract import Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from .level import level
from .masks import dense_bias, live_rows
from .merge import merge

Block = tuple[slice, slice]


def edge(pair: OpPair) -> OpPair:
    """The pair with the layout rule, every mask kind and every size of section "Semantics" honoured around it."""
    claims = widened(pair.claims)
    shapes = partial(_forward, replace(pair, forward=pair.shapes))
    around = replace(
        pair, forward=partial(_forward, pair), backward=partial(_backward, pair), claims=claims, shapes=shapes
    )
    return level(around)


def _forward(pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
    if _empty(q, k):
        return ForwardOut(*_nothing(q, v))
    mask = _reached(mask, k.shape[1])
    blocks = _blocks(mask, q.shape[1], k.shape[1], pair.claims)
    if _whole(blocks, q, k):
        return _forward_block(pair, q, k, v, mask, rng, options)
    out, lse = _nothing(q, v, accumulate_dtype(q.dtype))
    saved = []
    for rows, cols in blocks:
        part = _forward_block(pair, q[:, rows], k[:, cols], v[:, cols], mask.at(rows, cols), rng, options)
        out[:, rows], lse[:, :, rows] = merge((out[:, rows], lse[:, :, rows]), part.out, part.lse)
        saved.append(part.saved)
    return ForwardOut(out.to(q.dtype), lse, None, kept.join(saved))


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
    rng: object,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    if _empty(q, k):
        like = (q, k, v, mask.bias)
        return Grads(*(torch.zeros_like(x) if w and x is not None else None for x, w in zip(like, wanted, strict=True)))
    mask = _reached(mask, k.shape[1])
    blocks = _blocks(mask, q.shape[1], k.shape[1], pair.claims)
    if _whole(blocks, q, k):
        return _backward_block(pair, grad_out, grad_lse, q, k, v, mask, out, lse, rng, saved, options, wanted)
    sums = [
        torch.zeros(x.shape, dtype=accumulate_dtype(x.dtype), device=x.device) if w else None
        for x, w in zip((q, k, v), wanted[:3], strict=True)
    ]
    bias = mask.bias if wanted.bias else None
    d_bias = None if bias is None else torch.zeros(bias.shape, dtype=accumulate_dtype(bias.dtype), device=bias.device)
    for (rows, cols), own in zip(blocks, kept.part(saved, len(blocks)), strict=True):
        part = _backward_block(
            pair, grad_out[:, rows], None if grad_lse is None else grad_lse[:, :, rows],
            q[:, rows], k[:, cols], v[:, cols], mask.at(rows, cols),
            out[:, rows], lse[:, :, rows], rng, own, options, wanted,
        )  # fmt: skip
        for total, grad, where in zip(sums, part[:3], (rows, cols, cols), strict=True):
            if total is not None and grad is not None:
                total[:, where] += grad
        if d_bias is not None and part.dbias is not None:
            _bias_part(d_bias, rows, cols).add_(part.dbias)
    dq, dk, dv = (None if s is None else s.to(q.dtype) for s in sums)
    return Grads(dq, dk, dv, None if d_bias is None or bias is None else d_bias.to(bias.dtype))


def _bias_part(d_bias: Tensor, rows: slice, cols: slice) -> Tensor:
    """The part of a float mask's gradient, dense or per key, that belongs to a block: a view."""
    mask = Mask(dense=d_bias) if d_bias.dim() == 4 else Mask(key_bias=d_bias)
    part = mask.at(rows, cols).bias
    assert part is not None
    return part


def widened(claims: Claims) -> Claims:
    """What a pair with these claims can do once the edge is around it."""
    masks = claims.masks
    if "dense_float" in masks:
        masks = frozenset({"dense_bool", "dense_float", "key_keep", "key_bias"})
    causal = claims.causal if claims.causal == "none" else "offset"
    bias_dtype: Literal["input", "any"] = "input" if claims.bias_dtype == "input" else "any"
    return replace(
        claims, masks=masks, bias_dtype=bias_dtype, causal=causal, head_dim_multiple=1, gqa=True, value_dim=True,
        key_tile=None, any_scale=True, any_strides=True,
        stride_multiple=1,
    )  # fmt: skip


def _empty(q: Tensor, k: Tensor) -> bool:
    return q.shape[0] == 0 or q.shape[1] == 0 or q.shape[2] == 0 or k.shape[1] == 0


def _nothing(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """What queries get that see no key: out 0, lse -inf."""
    batch, q_len, heads, _ = q.shape
    out = torch.zeros(batch, q_len, heads, v.shape[-1], dtype=dtype or q.dtype, device=q.device)
    lse = torch.full((batch, heads, q_len), float("-inf"), dtype=accumulate_dtype(q.dtype), device=q.device)
    return out, lse


def _reached(mask: Mask, k_len: int) -> Mask:
    """The mask without a causal part that hides nothing: its first query already reaches the last key."""
    return mask if mask.causal is None or mask.causal < k_len - 1 else replace(mask, causal=None)


def _blocks(mask: Mask, q_len: int, k_len: int, claims: Claims) -> list[Block]:
    """Rectangles (rows, cols), each either wholly visible or causal as the pair has it, that cover all visible."""
    blocks = _causal_blocks(mask.causal, slice(0, q_len), slice(0, k_len), claims)
    tile = claims.key_tile
    if tile is None or all((cols.stop - cols.start) % (2 * tile) != tile for _, cols in blocks):
        return blocks
    parts = []
    for rows, cols in blocks:
        cut = cols.stop - tile * 5 // 8 if (cols.stop - cols.start) % (2 * tile) == tile else cols.stop
        for part in (slice(cols.start, cut), slice(cut, cols.stop)):
            if part.start < part.stop:
                parts += _causal_blocks(mask.at(rows, part).causal, rows, part, claims)
    return parts


def _causal_blocks(offset: int | None, rows: slice, cols: slice, claims: Claims) -> list[Block]:
    """The blocks of a rectangle whose query i sees keys j <= i + offset, both counted from its corner."""
    q_len, k_len = rows.stop - rows.start, cols.stop - cols.start
    if offset is None or claims.causal == "offset":
        return [(rows, cols)]
    first = max(-offset, 0)  # queries before it see nothing
    if first >= q_len:
        return []
    offset = max(offset, 0)
    rows = slice(rows.start + first, rows.stop)
    if claims.causal == "bottom_right":  # the last query of a block must reach just its last key
        last = rows.start + min(q_len - first, k_len - offset)
        whole = [(slice(last, rows.stop), cols)] if last < rows.stop else []
        return [(slice(rows.start, last), slice(cols.start, cols.start + last - rows.start + offset)), *whole]
    seen_by_all = [(rows, slice(cols.start, cols.start + offset))] if offset else []
    return [*seen_by_all, (rows, slice(cols.start + offset, cols.stop))]


def _whole(blocks: list[Block], q: Tensor, k: Tensor) -> bool:
    return blocks == [(slice(0, q.shape[1]), slice(0, k.shape[1]))]


def _forward_block(
    pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options
) -> ForwardOut:
    live = live_rows(mask, q.shape[1], k.shape[1], q.device)
    lowered = _lower(mask, k.shape[1], q.dtype, pair.claims)
    q, options, _ = _positive(pair.claims, q, options)
    result = pair.forward(*_fit(pair.claims, q, k, v), lowered, rng, options)
    out, lse = result.out[..., : v.shape[-1]], result.lse
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
    rng: object,
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
    signed_q, options, sign = _positive(claims, q, options)
    wide_q, wide_k, wide_v = _fit(claims, signed_q, k, v)
    wide_grad, wide_out = (_inner(claims, _pad(x, wide_v.shape[-1])) for x in (grad_out, out))
    lowered = _lower(mask, k.shape[1], q.dtype, claims)
    grads = pair.backward(
        wide_grad, grad_lse, wide_q, wide_k, wide_v, lowered, wide_out, lse, rng, saved, options, wanted
    )
    dq, dk, dv = (_unfit(g, x) for g, x in zip(grads[:3], (q, k, v), strict=True))
    return Grads(dq if dq is None or sign == 1 else sign * dq, dk, dv, _unlower(grads.dbias, mask))


def _positive(claims: Claims, q: Tensor, options: Options) -> tuple[Tensor, Options, int]:
    """q and options with the scale's sign moved into q, where the kernel needs it; and that sign (-1, 0 or 1)."""
    scale = options.scale
    sign = (scale > 0) - (scale < 0)
    if claims.any_scale or sign == 1:
        return q, options, 1
    return sign * q, replace(options, scale=abs(scale) or 1.0), sign


def _fit(claims: Claims, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as the kernel takes them: one key head per query head, widths it knows, last dim contiguous."""
    if not claims.gqa and k.shape[2] != q.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    multiple = claims.head_dim_multiple
    width, value_width = (-(-x.shape[-1] // multiple) * multiple for x in (q, v))
    if not claims.value_dim:
        width = value_width = max(width, value_width)
    return _inner(claims, _pad(q, width)), _inner(claims, _pad(k, width)), _inner(claims, _pad(v, value_width))


def _unfit(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """Undo `_fit` for a gradient: cut the padding, sum over the query heads of a group in float32."""
    if grad is None:
        return None
    grad = grad[..., : like.shape[-1]]
    if grad.shape[2] != like.shape[2]:
        grad = grad.unflatten(2, (like.shape[2], -1)).sum(3, dtype=accumulate_dtype(grad.dtype))
    return grad.to(like.dtype)


def _unlower(d_bias: Tensor | None, mask: Mask) -> Tensor | None:
    """Undo `_lower` for the gradient of a float mask: sum over the dims that the user's mask does not have."""
    bias = mask.bias
    if d_bias is None or bias is None or d_bias.shape == bias.shape:
        return d_bias
    d_bias = d_bias.to(accumulate_dtype(d_bias.dtype))
    return (d_bias.sum((1, 2)) if bias.dim() == 2 else d_bias.sum_to_size(bias.shape)).to(bias.dtype)


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def _inner(claims: Claims, x: Tensor) -> Tensor:
    """x where the kernel can read it: itself, or a copy."""
    if claims.any_strides:
        return x
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.clone(memory_format=torch.contiguous_format) if _misplaced(x, claims.stride_multiple) else x


def _misplaced(x: Tensor, multiple: int) -> bool:
    """Whether x, or some row of it, starts between two multiples of `multiple` elements."""
    return multiple > 1 and any(
        start % multiple for start in (x.storage_offset(), *(x.stride(i) for i in range(3) if x.shape[i] > 1))
    )


def _lower(mask: Mask, k_len: int, dtype: torch.dtype, claims: Claims) -> Mask:
    """The mask in a form the pair takes: as it is, or all but its causal part as one additive bias."""
    wanted = {"accumulate": accumulate_dtype(dtype), "input": dtype}.get(claims.bias_dtype)
    takes_bias = mask.bias is None or wanted is None or mask.bias.dtype == wanted
    takes_shape = mask.dense is None or mask.dense.shape[-1] == k_len or claims.any_strides
    if not (mask.kinds <= claims.masks and takes_bias and takes_shape):
        bias = dense_bias(mask, wanted or accumulate_dtype(dtype))
        if bias is not None and bias.shape[-1] != k_len:  # kernels read past a key dim of 1
            bias = bias.expand(*bias.shape[:-1], k_len).contiguous()
        mask = Mask(dense=bias, causal=mask.causal)
    dense, multiple = mask.dense, claims.stride_multiple
    if dense is None or dense.dtype == torch.bool or multiple == 1:
        return mask
    if dense.stride(-1) == 1 and not _misplaced(dense, multiple):
        return mask
    row = -(-k_len // multiple) * multiple
    return replace(mask, dense=dense.new_empty(*dense.shape[:-1], row)[..., :k_len].copy_(dense))
