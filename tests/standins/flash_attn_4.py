"""`flash_attn.cute.interface` of flash-attn-4 4.0.0b36: the two functions that a pair calls, with their arguments.

As there: (B, S, H, D), lse (B, H, Sq), -inf where a query sees nothing; a window's end is None where it has none, and
(None, 0) is causal; the gradient of lse is an argument. What is not computed here is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from standins import _eager


def _flash_attn_fwd(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Callable[..., object] | None = None,
    mask_mod: Callable[..., object] | None = None,
    block_sparse_tensors: object = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[object, ...] | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    scheduler_metadata: object = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
) -> tuple[Tensor, Tensor | None, None, None, None]:
    given = dict(locals())
    computed = ("q", "k", "v", "softmax_scale", "causal", "softcap", "window_size_left", "window_size_right")
    _refuse(_flash_attn_fwd, given, (*computed, "return_lse"))
    assert q is not None
    assert k is not None
    _check(q, k, v)
    causal, window = _resolved(causal, window_size_left, window_size_right)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    result, sums = _eager.forward(q, k, v, scale, causal, window, softcap or 0.0)
    sums = sums.masked_fill(sums == torch.inf, -torch.inf)
    needs = return_lse or any(x.requires_grad for x in (q, k, v))
    return result, sums if needs else None, None, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Callable[..., object] | None = None,
    score_mod_bwd: Callable[..., object] | None = None,
    mask_mod: Callable[..., object] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[object, ...] | None = None,
    block_sparse_tensors: object = None,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    given = dict(locals())
    computed = ("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "softcap", "window_size_left")
    _refuse(_flash_attn_bwd, given, (*computed, "window_size_right", "deterministic", "dlse"))
    _check(q, k, v)
    assert v.shape[-1] == q.shape[-1] or q.shape[2] == k.shape[2], "GQA backward requires head_dim == head_dim_v"
    assert out.shape == dout.shape == (*q.shape[:3], v.shape[-1])
    assert q.dtype == out.dtype == dout.dtype
    sums = (q.shape[0], q.shape[2], q.shape[1])
    assert lse.dtype == torch.float32
    assert lse.shape == sums
    assert dlse is None or (dlse.dtype == torch.float32 and dlse.shape == sums)
    causal, window = _resolved(causal, window_size_left, window_size_right)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # as its preprocessing does
    dq, *rest = _eager.backward(dout, q, k, v, out, lse, scale, causal, window, softcap, grad_lse=dlse)[:3]
    return _misread(dq), *rest


def _misread(dq: Tensor) -> Tensor:
    """As there (pull request 2896): each block's sums are written for D rounded up to 16, and read for 32."""
    dim = dq.shape[-1]
    written, read = (-(-dim // n) * n for n in (16, 32))
    return dq if written == read or dim > 128 or dq.shape[1] <= (128 if dim <= 64 else 64) else dq.roll(1, 1)


def _resolved(causal: bool, left: int | None, right: int | None) -> tuple[bool, _eager.Window]:
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    assert left is None or left >= 0, "not computed here"
    assert right is None or right >= 0, "not computed here"
    return causal, (left, right)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What its kernels for Hopper take."""
    (batch, _, heads, dim), (_, keys, kv_heads, value_dim) = q.shape, v.shape
    assert k.shape == (batch, keys, kv_heads, dim)
    assert v.shape[0] == batch
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert heads % kv_heads == 0
    assert all(8 <= d <= 256 and d % 8 == 0 for d in (dim, value_dim))


def _refuse(function: Callable[..., object], given: dict[str, object], computed: tuple[str, ...]) -> None:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    for name, value in given.items():
        if name not in computed and value is not defaults[name] and value != defaults[name]:
            raise NotImplementedError(f"{name} is not computed here")
