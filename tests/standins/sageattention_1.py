"""sageattention 1.0.6 (sageattention.core): the arguments of `sageattn`, and what it refuses.

As there: no lse, names it does not know are dropped (return_lse), the mean of the keys is subtracted in the caller's
own tensor, and the keys that are missing in the last block of 64 count as keys with a score of 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _int8


def sageattn(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    sm_scale: float | None = None, smooth_k: bool = True, **kwargs: Any,
) -> Tensor:  # fmt: skip
    assert tensor_layout == "NHD", "not part of this stand-in"
    assert q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    assert q.dtype == k.dtype == v.dtype, "All tensors must have the same dtype."
    assert q.shape[-1] in (64, 96, 128), "headdim should be in [64, 96, 128]."
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Last dim of qkv must be contiguous."
    assert not is_causal or q.shape[1] == k.shape[1], "qo_len and kv_len must be equal for causal attention"
    if smooth_k:
        k -= k.mean(dim=1, keepdim=True)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    return _int8.attention(q, k, v, scale, is_causal, counted=-k.shape[1] % 64)[0]


def sageattn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool = False, sm_scale: float | None = None, smooth_k: bool = True, **kwargs: Any,
) -> Tensor:  # fmt: skip
    assert not is_causal, "not part of this stand-in"
    assert q.shape[-1] in (64, 128), "varlen only support head_dim [64, 128]."
    if smooth_k:
        k -= k.mean(dim=0, keepdim=True)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    return _int8.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale)
