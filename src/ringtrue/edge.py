"""`edge(pair)`: everything that no two kernels agree on, so that a pair stays a schema and a call.

Lowering the mask to what the pair takes, splitting an offset-causal call, windows and segments (as a bias, for a block
of rows at a time), key heads, head-dim padding, a last dim whose stride is not 1, empty calls, rows that see nothing,
rows at a huge level (level.py), the gradient of lse. What `edge` returns claims all of that, whatever the pair claims.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from . import kept
from .contract import Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from .level import level
from .masks import dense_bias, live_rows, row_blocks, whole_bias
from .merge import merge

Block = tuple[slice, slice]


def edge(pair: OpPair) -> OpPair:
    """The pair with the layout rule, every mask kind and every size of section "Semantics" honoured around it."""
    claims = widened(pair.claims)
    return level(replace(pair, forward=partial(_forward, pair), backward=partial(_backward, pair), claims=claims))


def _forward(
    pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options
) -> ForwardOut:
    if _empty(q, k):
        return ForwardOut(*_nothing(q, v), rng)
    mask = _reached(mask, q.shape[1], k.shape[1])
    blocks = _blocks(mask, q.shape[1], k.shape[1], pair.claims)
    if _whole(blocks, q, k):
        return _forward_block(pair, q, k, v, mask, rng, options)
    out, lse = _nothing(q, v, accumulate_dtype(q.dtype))
    saved = []
    for number, (rows, cols) in enumerate(blocks):
        state = _state(rng, number)
        part = _forward_block(pair, q[:, rows], k[:, cols], v[:, cols], mask.at(rows, cols), state, options)
        out[:, rows], lse[:, :, rows] = merge((out[:, rows], lse[:, :, rows]), part.out, part.lse)
        saved.append(part.saved)
    return ForwardOut(out.to(q.dtype), lse, rng, kept.join(saved))


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
    if _empty(q, k):
        like = (q, k, v, mask.bias)
        return Grads(*(torch.zeros_like(x) if w and x is not None else None for x, w in zip(like, wanted, strict=True)))
    mask = _reached(mask, q.shape[1], k.shape[1])
    blocks = _blocks(mask, q.shape[1], k.shape[1], pair.claims)
    if _whole(blocks, q, k):
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
            _bias_part(sums.dbias, rows, cols).add_(part.dbias)
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
    return rng if rng is None or number == 0 else rng + torch.tensor([0, number])


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
        masks = frozenset({"dense_bool", "dense_float", "key_keep", "key_bias", "segments", "window"})
    causal = claims.causal if claims.causal == "none" else "offset"
    return replace(
        claims, masks=masks, bias_dtype="any", bias_multiple=1, causal=causal, head_dim_multiple=1, gqa=True,
        value_dim=True, any_strides=True, dlse=claims.dlse or claims.backward_from_lse,
    )  # fmt: skip


def _empty(q: Tensor, k: Tensor) -> bool:
    return q.shape[0] == 0 or q.shape[1] == 0 or q.shape[2] == 0 or k.shape[1] == 0


def _nothing(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """What queries get that see no key: out 0, lse -inf."""
    batch, q_len, heads, _ = q.shape
    out = torch.zeros(batch, q_len, heads, v.shape[-1], dtype=dtype or q.dtype, device=q.device)
    lse = torch.full((batch, heads, q_len), float("-inf"), dtype=accumulate_dtype(q.dtype), device=q.device)
    return out, lse


def _reached(mask: Mask, q_len: int, k_len: int) -> Mask:
    """The mask without the ends that hide nothing: the first query reaches the last key, the last one the first key."""
    causal = None if mask.causal is None or mask.causal >= k_len - 1 else mask.causal
    since = None if mask.since is None or mask.since <= 1 - q_len else mask.since
    return mask if (causal, since) == (mask.causal, mask.since) else replace(mask, causal=causal, since=since)


def _blocks(mask: Mask, q_len: int, k_len: int, claims: Claims) -> list[Block]:
    """Rectangles (rows, cols) that cover all visible: each as the pair takes it, or rows to be written out."""
    offset = mask.causal
    if (mask.kinds - claims.masks) & _WRITTEN_OUT:
        return _written_out(mask, q_len, k_len)
    if offset is None or claims.causal == "offset":
        return [(slice(0, q_len), slice(0, k_len))]
    first = max(-offset, 0)  # queries before it see nothing
    if first >= q_len:
        return []
    offset = max(offset, 0)
    if claims.causal == "bottom_right":  # the last query of a block must reach just its last key
        last = min(q_len, first + k_len - offset)
        whole = [(slice(last, q_len), slice(0, k_len))] if last < q_len else []
        return [(slice(first, last), slice(0, last - first + offset)), *whole]
    seen_by_all = [(slice(first, q_len), slice(0, offset))] if offset else []
    return [*seen_by_all, (slice(first, q_len), slice(offset, k_len))]


_WRITTEN_OUT = frozenset({"segments", "window"})


def _written_out(mask: Mask, q_len: int, k_len: int) -> list[Block]:
    """Blocks of rows, each with the keys that a window or a causal limit leaves it."""
    blocks = []
    for rows in row_blocks(q_len):
        first = 0 if mask.since is None else max(rows.start + mask.since, 0)
        last = k_len if mask.causal is None else min(rows.stop + mask.causal, k_len)
        if first < last:
            blocks.append((rows, slice(first, last)))
    return blocks


def _whole(blocks: list[Block], q: Tensor, k: Tensor) -> bool:
    return blocks == [(slice(0, q.shape[1]), slice(0, k.shape[1]))]


def _forward_block(
    pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options
) -> ForwardOut:
    live = live_rows(mask, q.shape[1], k.shape[1], q.device)
    lowered = _lower(mask, q, k, pair.claims)
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
    wide_q, wide_k, wide_v = _fit(claims, q, k, v)
    wide_grad, wide_out = (_inner(claims, _pad(x, wide_v.shape[-1])) for x in (grad_out, out))
    lowered = _lower(mask, q, k, claims)
    direct = grad_lse if claims.dlse else None
    grads = pair.backward(
        wide_grad, direct, wide_q, wide_k, wide_v, lowered, wide_out, lse, rng, saved, options, wanted
    )
    if grad_lse is not None and not claims.dlse:
        grads = _plus(grads, _through_lse(pair, grad_lse, q, k, v, lowered, lse, saved, options, wanted))
    dq, dk, dv = (_unfit(g, x) for g, x in zip(grads[:3], (q, k, v), strict=True))
    return Grads(dq, dk, dv, _unlower(grads.dbias, mask))


def _through_lse(
    pair: OpPair,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lowered: Mask,
    lse: Tensor,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """What a gradient g of lse adds, by one more call of the pair's own backward, as the kernel gives it (dv: nothing).

    dS = P (dP - rowsum(grad_out out)) becomes P g with v = 0, grad_out the first unit vector and out = -g in its
    column; in 16 bits g goes as its high and low part, over two columns, scaled by a power of two into their range.
    lse knows nothing of dropout, nor does this call.
    """
    claims, columns, exponent = pair.claims, [grad_lse], None
    if q.dtype != grad_lse.dtype:
        exponent = torch.frexp(grad_lse.abs().amax()).exponent
        scaled = torch.ldexp(grad_lse, -exponent)
        high = scaled.to(q.dtype)
        columns = [high, (scaled - high.to(scaled.dtype)).to(q.dtype)]
    nothing = v.new_zeros(*v.shape[:3], max(v.shape[3], len(columns)))
    wide_q, wide_k, wide_v = _fit(claims, q, k, nothing)
    out = _pad(-torch.stack(columns, -1).transpose(1, 2), wide_v.shape[-1]).contiguous()
    unit = out.new_zeros(out.shape[-1]).index_fill(0, torch.arange(len(columns), device=out.device), 1.0)
    unit = unit.expand(out.shape).contiguous()
    options, wanted = replace(options, dropout_p=0.0), wanted._replace(v=False)
    grads = pair.backward(unit, None, wide_q, wide_k, wide_v, lowered, out, lse, None, saved, options, wanted)
    if exponent is None:
        return grads
    return Grads(*(None if g is None else torch.ldexp(g.to(lse.dtype), exponent) for g in grads))


def _plus(a: Grads, b: Grads) -> Grads:
    """Both in float32 (float64 for float64), as wide as `a`; rounded once more by whoever hands them out."""
    return Grads(
        *(
            x if x is None or y is None else x.to(accumulate_dtype(x.dtype)) + y[..., : x.shape[-1]]
            for x, y in zip(a, b, strict=True)
        )
    )


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
    if d_bias is None or bias is None:
        return None
    if d_bias.shape == bias.shape:
        return d_bias.to(bias.dtype)
    d_bias = d_bias.to(accumulate_dtype(d_bias.dtype))
    return (d_bias.sum((1, 2)) if bias.dim() == 2 else d_bias.sum_to_size(bias.shape)).to(bias.dtype)


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def _inner(claims: Claims, x: Tensor) -> Tensor:
    return x if claims.any_strides or x.stride(-1) == 1 else x.contiguous()


def _lower(mask: Mask, q: Tensor, k: Tensor, claims: Claims) -> Mask:
    """The mask in a form the pair takes: as it is, or its tensors as one additive bias, or all of it as one."""
    k_len, dtype = k.shape[1], q.dtype
    wanted = {"accumulate": accumulate_dtype(dtype), "input": dtype}.get(claims.bias_dtype)
    takes_bias = mask.bias is None or wanted is None or mask.bias.dtype == wanted
    takes_shape = mask.dense is None or mask.dense.shape[-1] == k_len or claims.any_strides
    written_out = not _takes_ends(mask, q.shape[1], k_len, claims)
    if written_out or not (mask.kinds <= claims.masks and takes_bias and takes_shape):
        to = wanted or accumulate_dtype(dtype)
        bias = whole_bias(mask, to, q.shape[1], k_len, q.device) if written_out else dense_bias(mask, to)
        if bias is not None and bias.shape[-1] != k_len:  # kernels read past a key dim of 1
            bias = bias.expand(*bias.shape[:-1], k_len).contiguous()
        mask = Mask(dense=bias) if written_out else replace(mask, dense=bias, key_keep=None, key_bias=None)
    if mask.dense is None or mask.dense.dtype == torch.bool or claims.bias_multiple == 1:
        return mask
    return replace(mask, dense=_aligned(mask.dense, claims.bias_multiple))


def _takes_ends(mask: Mask, q_len: int, k_len: int, claims: Claims) -> bool:
    """Whether the pair takes the segments, the window and the causal offset of a block; else they are written out."""
    if (mask.kinds - claims.masks) & _WRITTEN_OUT:
        return False
    own = {"offset": mask.causal, "top_left": 0, "bottom_right": k_len - q_len, "none": None}[claims.causal]
    return mask.causal is None or mask.causal == own


def _aligned(bias: Tensor, multiple: int) -> Tensor:
    """A float mask whose rows start at multiples of `multiple` elements: itself, or a copy in wider storage."""
    starts = (bias.storage_offset(), *(bias.stride(axis) for axis in range(3) if bias.shape[axis] > 1))
    if bias.stride(-1) == 1 and not any(start % multiple for start in starts):
        return bias
    wide = bias.new_empty(*bias.shape[:-1], -(-bias.shape[-1] // multiple) * multiple)[..., : bias.shape[-1]]
    return wide.copy_(bias)
