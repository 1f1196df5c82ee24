"""SageAttention 2.2.0 (sageattention.core): the arguments of `sageattn` and of what it calls, and what they refuse.

As there: `sageattn` drops names it does not know (smooth_k), keys lose their mean over the sequence, and lse gets back
what that took, in the inputs' dtype and not for grouped heads; natural logarithm. Causal counts from the first key. The
Triton kernel counts the keys that are missing in its last block of 64. `sageattn` computes what it would on Hopper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import _int8


def sageattn(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    sm_scale: float | None = None, return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    return sageattn_qk_int8_pv_fp8_cuda_sm90(
        q, k, v, tensor_layout=tensor_layout, is_causal=is_causal, sm_scale=sm_scale, return_lse=return_lse,
        pv_accum_dtype="fp32+fp32",
    )  # fmt: skip


def sageattn_qk_int8_pv_fp16_triton(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", quantization_backend: str = "triton",
    is_causal: bool = False, sm_scale: float | None = None, smooth_k: bool = True, return_lse: bool = False,
    **kwargs: Any,
) -> Any:  # fmt: skip
    assert not is_causal or q.shape[1] == k.shape[1], "qo_len and kv_len must be equal for causal attention"
    return _computed(
        q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse, (128, 64), counted=-k.shape[1] % 64
    )


def sageattn_qk_int8_pv_fp16_cuda(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    qk_quant_gran: str = "per_thread", sm_scale: float | None = None, pv_accum_dtype: str = "fp32",
    smooth_k: bool = True, smooth_v: bool = False, return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    return _computed(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse, (32, 64))


def sageattn_qk_int8_pv_fp8_cuda(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    qk_quant_gran: str = "per_thread", sm_scale: float | None = None, pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True, smooth_v: bool = False, return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    return _computed(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse, (32, 64), floats8=True)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    qk_quant_gran: str = "per_thread", sm_scale: float | None = None, pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True, return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    return _computed(q, k, v, tensor_layout, is_causal, sm_scale, smooth_k, return_lse, (16, 128), floats8=True)


def _computed(
    q: Tensor, k: Tensor, v: Tensor, layout: str, causal: bool, scale: float | None, smooth_k: bool, return_lse: bool,
    blocks: tuple[int, int], floats8: bool = False, counted: int = 0,
) -> Any:  # fmt: skip
    assert layout == "NHD", "not part of this stand-in"
    assert q.dtype in (torch.float16, torch.bfloat16), (
        "Input tensors must be in dtype of torch.float16 or torch.bfloat16"
    )
    assert q.dtype == k.dtype == v.dtype, "All tensors must have the same dtype."
    dim = q.shape[-1]
    if dim > 128:
        raise ValueError(f"Unsupported head_dim: {dim}")
    q, k, v = (functional.pad(x, (0, (64 if dim <= 64 else 128) - dim)) for x in (q, k, v))
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Last dim of qkv must be contiguous."
    scale = dim**-0.5 if scale is None else scale
    correction = None
    if smooth_k:
        mean = k.mean(1, keepdim=True)
        if return_lse:
            correction = torch.matmul(q.transpose(1, 2), mean.transpose(1, 2).transpose(2, 3)).squeeze(-1).float()
        k = k - mean
    out, lse = _int8.attention(q, k, v, scale, causal, blocks, floats8, counted)
    lse = lse / _int8.LOG2_E + (0.0 if correction is None else correction * scale)
    return (out[..., :dim], lse) if return_lse else out[..., :dim]


def sageattn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, sm_scale: float | None = None, smooth_k: bool = True, **kwargs: Any,
) -> Tensor:  # fmt: skip
    assert not is_causal, "not part of this stand-in"
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[-1] in (64, 128), "not part of this stand-in"
    if smooth_k:
        k = k - k.mean(dim=0, keepdim=True)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    return _int8.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale)
