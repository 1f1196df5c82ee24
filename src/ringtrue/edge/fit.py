"""q, k, v and the mask of one block in a form that a pair takes, and its gradients in the form of what came in."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ..contract import Claims, Mask, Options, accumulate_dtype
from ..masks import dense_bias, whole_bias
from .blocks import must_be_written_out


def as_is(claims: Claims, mask: Mask, options: Options, q: Tensor, k: Tensor, v: Tensor, *outer: Tensor) -> bool:
    """Whether a call is without a mask or causal, not empty, and such as the pair takes it, as most calls are."""
    batch, q_len, heads, dim = q.shape
    _, k_len, kv_heads, value_dim = v.shape
    if not (batch and q_len and heads and k_len):
        return False
    if not (mask.hides_nothing or _own_causal(claims, mask, q_len, k_len)):
        return False
    if (heads != kv_heads and not claims.gqa) or (dim != value_dim and not claims.value_dim):
        return False
    multiple, tile = claims.head_dim_multiple, claims.key_tile
    if multiple > 1 and (dim % multiple or value_dim % multiple):
        return False
    if claims.head_dims is not None and not {dim, value_dim} <= claims.head_dims:
        return False
    if (tile is not None and k_len % (2 * tile) == tile) or (options.scale <= 0 and not claims.any_scale):
        return False
    rows = rows_at_once(claims, options, q, k)
    if rows is not None and q_len > rows:
        return False
    for x in () if claims.any_strides else (q, k, v, *outer):
        if x.stride(3) != 1 or (claims.stride_multiple > 1 and _misplaced(x, claims.stride_multiple)):
            return False
    return True


def _own_causal(claims: Claims, mask: Mask, q_len: int, k_len: int) -> bool:
    """Whether a mask is a causal limit of the pair's own, which hides something and leaves every query a key."""
    causal = mask.causal
    if causal is None or not 0 <= causal < k_len - 1 or mask.since is not None or mask.kinds:
        return False
    return _takes_ends(mask, q_len, k_len, claims)


def rows_at_once(claims: Claims, options: Options, q: Tensor, k: Tensor) -> int | None:
    """How many queries one call of the pair may have, or None: a pair may draw only so many numbers for dropout."""
    if claims.dropout_tile is None or not options.dropout_p:
        return None
    return max(claims.dropout_tile // max(q.shape[0] * q.shape[2] * k.shape[1], 1), 1)


def fit(claims: Claims, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as the kernel takes them: one key head per query head, widths it knows, last dim contiguous."""
    if not claims.gqa and k.shape[2] != q.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    width, value_width = (_width(claims, x.shape[-1]) for x in (q, v))
    if not claims.value_dim:
        width = value_width = max(width, value_width)
    return inner(claims, pad(q, width)), inner(claims, pad(k, width)), inner(claims, pad(v, value_width))


def _width(claims: Claims, dim: int) -> int:
    """The head dim that the kernel takes for one of `dim`."""
    if claims.head_dims is not None:
        return min(d for d in claims.head_dims if d >= dim)
    return -(-dim // claims.head_dim_multiple) * claims.head_dim_multiple


def unfit(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """Undo `fit` for a gradient: cut the padding, sum over the query heads of a group in float32."""
    if grad is None:
        return None
    if grad.shape[-1] != like.shape[-1]:
        grad = grad[..., : like.shape[-1]]
    if grad.shape[2] != like.shape[2]:
        grad = grad.unflatten(2, (like.shape[2], -1)).sum(3, dtype=accumulate_dtype(grad.dtype))
    return grad if grad.dtype == like.dtype else grad.to(like.dtype)


def positive(claims: Claims, q: Tensor, options: Options) -> tuple[Tensor, Options, int]:
    """q and options with the scale's sign moved into q, where the kernel needs it; and that sign (-1, 0 or 1)."""
    scale = options.scale
    sign = (scale > 0) - (scale < 0)
    if claims.any_scale or sign == 1:
        return q, options, 1
    return sign * q, replace(options, scale=abs(scale) or 1.0), sign


def lower(mask: Mask, q: Tensor, k: Tensor, claims: Claims) -> Mask:
    """The mask in a form the pair takes: as it is, or its tensors as one additive bias, or all of it as one."""
    if mask.hides_nothing:
        return mask
    k_len, dtype = k.shape[1], q.dtype
    wanted = {"accumulate": accumulate_dtype(dtype), "input": dtype}.get(claims.bias_dtype)
    takes_bias = mask.bias is None or wanted is None or mask.bias.dtype == wanted
    takes_shape = mask.dense is None or mask.dense.shape[-1] == k_len or claims.any_strides
    written_out = not _takes_ends(mask, q.shape[1], k_len, claims)
    apart = not mask.kinds & claims.alone or (mask.causal is None and mask.since is None and mask.dense is None)
    if written_out or not (mask.kinds <= claims.masks and takes_bias and takes_shape and apart):
        to = wanted or accumulate_dtype(dtype)
        bias = whole_bias(mask, to, q.shape[1], k_len, q.device) if written_out else dense_bias(mask, to)
        if bias is not None and bias.shape[-1] != k_len:  # kernels read past a key dim of 1
            bias = bias.expand(*bias.shape[:-1], k_len).contiguous()
        mask = Mask(dense=bias) if written_out else replace(mask, dense=bias, key_keep=None, key_bias=None)
    dense, multiple = mask.dense, claims.stride_multiple
    if dense is None or dense.dtype == torch.bool or multiple == 1:
        return mask
    if dense.stride(-1) == 1 and not _misplaced(dense, multiple):
        return mask
    row = -(-k_len // multiple) * multiple
    return replace(mask, dense=dense.new_empty(*dense.shape[:-1], row)[..., :k_len].copy_(dense))


def _takes_ends(mask: Mask, q_len: int, k_len: int, claims: Claims) -> bool:
    """Whether the pair takes the segments, the window and the causal offset of a block; else they are written out."""
    if must_be_written_out(mask, claims):
        return False
    if mask.since is not None:
        return True
    if mask.causal is None or claims.causal == "offset":
        return True
    taken = {"ahead": max(mask.causal, 0), "top_left": 0, "bottom_right": k_len - q_len}
    return mask.causal == taken.get(claims.causal)


def unlower(d_bias: Tensor | None, mask: Mask) -> Tensor | None:
    """Undo `lower` for the gradient of a float mask: sum over the dims that the user's mask does not have."""
    bias = mask.bias
    if d_bias is None or bias is None:
        return None
    if d_bias.shape == bias.shape:
        return d_bias.to(bias.dtype)
    d_bias = d_bias.to(accumulate_dtype(d_bias.dtype))
    return (d_bias.sum((1, 2)) if bias.dim() == 2 else d_bias.sum_to_size(bias.shape)).to(bias.dtype)


def pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def inner(claims: Claims, x: Tensor) -> Tensor:
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
