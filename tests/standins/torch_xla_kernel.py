"""`torch_xla.experimental.custom_kernel` of 2.9.0: its two operators of attention, and the lengths that they take.

As there: (B, H, S, D); forward pads keys beyond 512 with zeros that it does not hide, gives the row maximum m and the
sum l above it only where a gradient is wanted, and counts causal from the top left; a hidden score has 0.7 of the
lowest float32 added; backward refuses lengths that its blocks do not divide, and asks for dq.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HIDDEN = -0.7 * torch.finfo(torch.float32).max
LANES = 128


def requires_jax(func: Callable[..., Any]) -> Callable[..., Any]:
    return func


def fa_custom_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, q_segment_ids: Tensor, kv_segment_ids: Tensor, sm_scale: float,
    ab: Tensor | None, partition_spec: str, mesh: str, ctx_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    _check(q, k, v, ab, partition_spec, mesh, ctx_grad)
    full = (q.clone(), k.clone(), v.clone())
    block = min(512, k.shape[2])
    k, v = (functional.pad(x, (0, 0, 0, -x.shape[2] % block)) for x in (k, v))
    scores = _scores(q, k, sm_scale, causal, q_segment_ids, kv_segment_ids)
    top = scores.amax(-1)
    weights = (scores - top.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    out = ((weights / total.unsqueeze(-1)) @ v.float()).to(v.dtype)
    kept = (total, top) if any(ctx_grad[:3]) else (None, None)
    return out, *full, *kept, None


def fa_custom_backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, l: Tensor, m: Tensor,  # noqa: E741
    q_segment_ids: Tensor | None, kv_segment_ids: Tensor | None, ab: Tensor | None, causal: bool, sm_scale: float,
    partition_spec: str, mesh: str, q_full_shape: list[int], kv_full_shape: list[int],
    ab_full_shape: list[int] | None, ctx_grad: list[bool],
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    _check(q, k, v, ab, partition_spec, mesh, ctx_grad)
    _require(ctx_grad[0], "local variable 'args' referenced before assignment")
    for name, length, blocks in (("q", q.shape[2], (512, 1024)), ("kv", k.shape[2], (256, 512))):
        for block in (min(size, length) for size in blocks):
            _require(length % block == 0 and block % LANES == 0, f"{name}_seq_len={length} is not divided by {block}")
    _require(grad_output.shape == o.shape == q.shape and grad_output.dtype == q.dtype, "grad_output or o")
    _require(l.shape == m.shape == q.shape[:3] and l.dtype == m.dtype == torch.float32, "l or m")
    every = (grad_output, q, k, v, o, l, m)
    _require(all(x.is_contiguous() for x in every), "not contiguous")
    scores = _scores(q, k, sm_scale, causal, q_segment_ids, kv_segment_ids)
    weights = (scores - m.unsqueeze(-1)).exp() / l.unsqueeze(-1)
    grad = grad_output.float()
    delta = (o.float() * grad).sum(-1, keepdim=True)
    d_scores = (grad @ v.float().transpose(2, 3) - delta) * weights * sm_scale
    dq, dk = d_scores @ k.float(), d_scores.transpose(2, 3) @ q.float()
    dv = weights.transpose(2, 3) @ grad
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _scores(
    q: Tensor, k: Tensor, scale: float, causal: bool, q_ids: Tensor | None, kv_ids: Tensor | None
) -> Tensor:  # fmt: skip
    scores = q.float() @ k.float().transpose(2, 3) * scale
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(0 if causal else k.shape[2])
    if q_ids is not None and kv_ids is not None:
        _require(q_ids.shape == (q.shape[0], q.shape[2]), "Q segment ids shape mismatch")
        _require(kv_ids.shape == (k.shape[0], k.shape[2]), "KV segment ids shape mismatch")
        _require(q_ids.dtype == kv_ids.dtype == torch.int32, "segment ids are int32 here")
        seen = seen & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    return scores + torch.zeros(seen.shape).masked_fill(~seen, HIDDEN)


def _check(q: Tensor, k: Tensor, v: Tensor, ab: object, partition: str, mesh: str, ctx_grad: list[bool]) -> None:
    _require(ab is None and partition == mesh == "None" and len(ctx_grad) == 10, "not part of this stand-in")
    _require(q.dtype == k.dtype == v.dtype == torch.bfloat16, "dtype")
    _require(k.shape == v.shape and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3], "shapes")
    _require(q.shape[3] < LANES or q.shape[3] % LANES == 0, "head_dim should be a multiple of 128 if larger")
    _require(math.prod(q.shape) > 0, "empty")


def _require(fits: bool, text: str) -> None:
    if not fits:
        raise ValueError(text)
