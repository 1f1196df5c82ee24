"""Attention written out from the formula, in float32 (float64 for float64 inputs), on any device; the reference pair.

The only pair that gives every gradient there is: of the float mask, from a gradient of lse, and of a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Backend, Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from ..masks import allowed
from ._mixed import mixed


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
    """softmax(softcap(scale q k^T) + bias) v, rows that see nothing: out 0, lse -inf. Dropout falls on the weights."""
    scores, _ = _scores(q, k, mask, options)
    lse = scores.logsumexp(-1)
    weights = _dropped(_softmax(scores, lse), rng, options.dropout_p)
    return ForwardOut((weights @ _heads_first(v, q.shape[2])).transpose(1, 2).to(q.dtype), lse, rng)


def backward(
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
    """dS = P (dP - delta), delta = rowsum(grad_out out) - grad_lse (FlashAttention-2, arXiv:2307.08691).

    Differentiable by autograd itself, in all that it is given.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    scores, slope = _scores(q, k, mask, options)
    weights = _weights(scores, lse)
    g = _heads_first(grad_out, heads)
    delta = (g * _heads_first(out, heads)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.unsqueeze(-1)
    d_weights = _dropped(g @ _heads_first(v, heads).transpose(-1, -2), rng, options.dropout_p)
    d_scores = weights * (d_weights - delta)
    d_raw = d_scores if slope is None else d_scores * slope
    dq = dk = dv = dbias = None
    if wanted.q:
        dq = _back(options.scale * (d_raw @ _heads_first(k, heads)), heads, q)
    if wanted.k:
        dk = _back(options.scale * (d_raw.transpose(-1, -2) @ _heads_first(q, heads)), kv_heads, k)
    if wanted.v:
        dv = _back(_dropped(weights, rng, options.dropout_p).transpose(-1, -2) @ g, kv_heads, v)
    if wanted.bias and mask.bias is not None:
        dbias = _to_bias(d_scores, mask)
    return Grads(dq, dk, dv, dbias)


def _dropped(x: Tensor, rng: Tensor | None, p: float) -> Tensor:
    """(B, H, Sq, Sk) times the mask that a random state stands for: 0 with probability p, else 1 / (1 - p)."""
    if p == 0.0 or rng is None:
        return x
    generator = torch.Generator(x.device)
    generator.manual_seed(mixed(*rng.tolist()))  # torch's CPU generator looks at the low 32 bits alone
    drawn = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float32) >= p
    return x.masked_fill(~drawn, 0.0) / (1.0 - p)


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """(B, S, Hx, D) in any dtype -> (B, heads, S, D) in the computing dtype, key heads repeated for their group."""
    x = x.to(accumulate_dtype(x.dtype)).transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _back(grad: Tensor, heads: int, like: Tensor) -> Tensor:
    """(B, H, S, D) -> (B, S, heads, D) in `like`'s dtype, summed over the query heads that share a key head."""
    return grad.unflatten(1, (heads, -1)).sum(2).transpose(1, 2).to(like.dtype)


def _scores(q: Tensor, k: Tensor, mask: Mask, options: Options) -> tuple[Tensor, Tensor | None]:
    """softcap(scale q k^T) + bias, -inf where not allowed; and softcap's slope, None without one."""
    heads, cap, slope = q.shape[2], options.softcap, None
    scores = options.scale * (_heads_first(q, heads) @ _heads_first(k, heads).transpose(-1, -2))
    if cap:
        share = torch.tanh(scores / cap)
        scores, slope = cap * share, 1.0 - share * share
    if mask.dense is not None and mask.dense.dtype != torch.bool:
        scores = scores + mask.dense.to(scores.dtype)
    if mask.key_bias is not None:
        scores = scores + mask.key_bias.to(scores.dtype)[:, None, None, :]
    visible = allowed(mask, q.shape[1], k.shape[1], q.device)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf")), slope


def _softmax(scores: Tensor, lse: Tensor) -> Tensor:
    nothing = (lse == float("-inf")).unsqueeze(-1)
    return scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), for an lse that may come from more keys; 0 where nothing is seen."""
    return (scores - lse.unsqueeze(-1)).exp().masked_fill(scores == float("-inf"), 0.0)


def _to_bias(d_scores: Tensor, mask: Mask) -> Tensor:
    """Sum over the dims along which the float mask was broadcast."""
    if mask.dense is not None and mask.dense.dtype != torch.bool:
        dims = [i for i in range(4) if mask.dense.shape[i] == 1]
        return d_scores.sum(dims, keepdim=True).to(mask.dense.dtype) if dims else d_scores.to(mask.dense.dtype)
    return d_scores.sum((1, 2)).to(mask.key_bias.dtype)  # type: ignore[union-attr]


CLAIMS = Claims(
    dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
    masks=frozenset({"dense_bool", "dense_float", "key_keep", "key_bias", "segments", "window"}),
    bias_dtype="any",
    causal="offset",
    gqa=True,
    value_dim=True,
    any_strides=True,
    dropout=True,
    softcap=True,
    dbias=True,
    dlse=True,
    double_backward=True,
    arithmetic="float32",
)
PAIR = OpPair("native_math", forward, backward, CLAIMS)
BACKEND = Backend(
    "native_math",
    "readable maths in float32/64, on any device",
    {"cpu": PAIR, "cuda": PAIR},
    verified={"cuda": "docs/verified/2026-11-30-1xH200-issue4.md"},
)
