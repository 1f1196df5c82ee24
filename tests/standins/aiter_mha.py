"""`aiter.ops.mha`: the public function, and the one that its autograd node calls in backward.

As there: (B, S, H, D), lse (B, H, Sq), causal bottom-right, backward writes into dq, dk and dv.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _eager


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, ...] = (-1, -1, 0), bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
    deterministic: bool = True, return_lse: bool = False, return_attn_probs: bool = False, how_v3_bf16_cvt: int = 1,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
) -> Any:  # fmt: skip
    unused = (bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv)
    _require(all(x is None for x in unused) and not return_attn_probs and not dropout_p, "not part of this stand-in")
    _require(window_size[:2] == (-1, -1), "not part of this stand-in")
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _eager.forward(q, k, v, scale, causal)
    return (out.contiguous(), lse.contiguous()) if return_lse else out.contiguous()


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, bias: Tensor | None, alibi_slopes: Tensor | None,
    deterministic: bool, rng_state: Tensor | None = None, is_v3_atomic_fp32: bool | None = True,
    how_v3_bf16_cvt: int | None = 1,
) -> Tensor:  # fmt: skip
    _require(all(x is None for x in (dbias, bias, alibi_slopes)) and not dropout_p, "not part of this stand-in")
    _require((window_size_left, window_size_right) == (-1, -1), "not part of this stand-in")
    _check(q, k, v, dout, out)
    _require(dout.stride() == out.stride(), "Expected dout_seq_stride == out_seq_stride to be true")
    _require(softmax_lse.is_contiguous() and softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1]), "lse")
    grads = _eager.backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal)
    for buffer, grad in zip((dq, dk, dv), grads[:3], strict=True):
        _require(buffer is not None and buffer.is_contiguous(), "buffers are allocated by the caller")
        buffer.copy_(grad)  # type: ignore[union-attr]
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def _check(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> None:
    every = (q, k, v, *others)
    _require(q.dtype in (torch.bfloat16, torch.float16) and all(x.dtype == q.dtype for x in every), "dtype")
    _require(all(x.stride(-1) == 1 for x in every), "last stride")
    dims = {x.shape[-1] for x in every}
    _require(len(dims) == 1 and max(dims) <= 256 and max(dims) % 8 == 0, f"head dims {dims}")
    _require(q.shape[2] % k.shape[2] == 0, "heads")


def _require(fits: bool, text: str) -> None:
    if not fits:
        raise RuntimeError(text)
