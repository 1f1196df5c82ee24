"""flash-attn 3 (flash_attn_interface): the arguments of the two functions that a pair calls, and what they refuse.

As there: dense (B, S, H, D) with lse (B, H, Sq), or packed (total, H, D) with lse (H, total); -inf where a query sees
nothing; backward writes into the dq, dk and dv that it is handed, and only what is in a sequence; a window's end that
hides nothing is none. What is not computed here is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from standins import _eager


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _refuse(_flash_attn_forward, dict(locals()), (*ENDS, "q", "k", "v", "causal"))
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    ends = (causal, window_size_left, window_size_right)
    nothing = q.new_empty(0)
    if cu_seqlens_q is None:
        own, window = _resolved(q.shape[1], k.shape[1], *ends)
        out, lse = _eager.forward(q, k, v, scale, own, window, softcap)
        return out.contiguous(), _as_there(lse).contiguous(), nothing, nothing
    out, lse = q.new_full(q.shape, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float32)
    for rows, cols in _spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        one = [x.unsqueeze(0) for x in (q[rows], k[cols], v[cols])]
        own, window = _resolved(one[0].shape[1], one[1].shape[1], *ends)
        part = _eager.forward(*one, scale, own, window, softcap)
        out[rows], lse[:, rows] = part[0][0], _as_there(part[1][0])
    return out, lse, nothing, nothing


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    _refuse(_flash_attn_backward, dict(locals()), (*ENDS, *TENSORS, "is_causal", "deterministic"))
    _check(q, k, v, dout, out)
    _require(not deterministic or q.shape[-1] <= 192, "Deterministic backward not supported for hdim 256.")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    ends = (is_causal, window_size_left, window_size_right)
    lse = softmax_lse.masked_fill(softmax_lse == -torch.inf, 0.0)  # as its preprocessing does
    assert dq is not None
    assert dk is not None
    assert dv is not None
    if cu_seqlens_q is None:
        _require(softmax_lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1]), "lse")
        own, window = _resolved(q.shape[1], k.shape[1], *ends)
        grads = _eager.backward(dout, q, k, v, out, lse, scale, own, window, softcap)[:3]
        for buffer, grad in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(grad)
        return q.new_empty(0)
    _require(softmax_lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0]), "lse")
    for buffer in (dq, dk, dv):
        buffer.fill_(torch.nan)
    for rows, cols in _spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        one = [x.unsqueeze(0) for x in (dout[rows], q[rows], k[cols], v[cols], out[rows], lse[:, rows])]
        own, window = _resolved(one[1].shape[1], one[2].shape[1], *ends)
        part = _eager.backward(*one, scale, own, window, softcap)
        dq[rows], dk[cols], dv[cols] = (x[0] for x in part[:3])
    return q.new_empty(0)


TENSORS = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
ENDS = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "window_size_left",
    "window_size_right", "softcap",
)  # fmt: skip


def _as_there(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def _resolved(q_len: int, k_len: int, causal: bool, left: int, right: int) -> tuple[bool, _eager.Window]:
    left = -1 if left >= k_len - 1 else left
    right = -1 if right >= q_len - 1 else right
    return causal and not (q_len == 1 and left == right == -1), (left, right)


def _spans(
    cu_q: Tensor | None, cu_k: Tensor | None, max_q: int | None, max_k: int | None
) -> list[tuple[slice, slice]]:  # fmt: skip
    assert cu_q is not None
    assert cu_k is not None
    assert max_q is not None
    assert max_k is not None
    _require(cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.is_contiguous() and cu_k.is_contiguous(), "cu_seqlens")
    _require(cu_q.shape == cu_k.shape, "batch_size must be equal to batch_size_k")
    rows, cols = ([slice(a, b) for a, b in pairwise(cu.tolist())] for cu in (cu_q, cu_k))
    longest = [max(s.stop - s.start for s in spans) for spans in (rows, cols)]
    _require(longest[0] <= max_q and longest[1] <= max_k, "max_seqlen")
    return list(zip(rows, cols, strict=True))


def _check(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> None:
    _require(q.dtype in (torch.bfloat16, torch.float16), "FlashAttention only support fp16 and bf16 data type")
    _require(all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (q, k, v, *others)), "dtype or last stride")
    strides = [s for x in (q, k, v, *others) for s, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1]
    _require(all(s % 8 == 0 for s in strides), "rows are not aligned")
    dims = {x.shape[-1] for x in (q, k, v, *others)}
    _require(len(dims) == 1 and max(dims) <= 256 and max(dims) % 8 == 0, f"head dims {dims}")
    _require(q.shape[-2] % k.shape[-2] == 0 and k.shape[:-1] == v.shape[:-1], "heads")


def _require(fits: bool, text: str) -> None:
    if not fits:
        raise RuntimeError(text)


def _refuse(function: Callable[..., object], given: dict[str, object], computed: tuple[str, ...]) -> None:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    for name, value in given.items():
        if name not in computed and value is not defaults[name] and value != defaults[name]:
            raise NotImplementedError(f"{name} is not computed here")
