"""flash-attn 2.8.3 (flash_attn.flash_attn_interface): the arguments of its four functions, and what it refuses.

On the CPU written-out attention; on CUDA torch's own copy of the kernel, which has no softcap. As there, backward
writes into the dq, dk and dv that it is handed, lse of packed sequences is (H, total), an end of a window of Sk or
more, or none beside another, becomes Sk, and a single query drops `causal`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from . import _eager


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, dropout_p, softcap)
    _require(alibi_slopes is None and not return_softmax, "not part of this stand-in")
    causal, window = _ends(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    if q.is_cuda:
        return _torchs_forward(q, k, v, None, dropout_p, softmax_scale, causal, window, softcap)
    state = _drawn(dropout_p)
    keep = _kept(q, k, dropout_p, state)
    out, lse = _eager.forward(q, k, v, softmax_scale, causal, window, softcap, keep=keep)
    return out.contiguous(), lse.contiguous(), q.new_empty(0), state


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _check(q, k, v, dropout_p, softcap, dout, out)
    _require(softmax_lse.is_contiguous() and softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1]), "lse")
    _require(alibi_slopes is None, "not part of this stand-in")
    causal, window = _ends(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    if q.is_cuda:
        grads = _torchs_backward(
            dout, q, k, v, out, softmax_lse, None, dropout_p, softmax_scale, causal, window, softcap, rng_state
        )
    else:
        keep = _kept(q, k, dropout_p, rng_state)
        grads = _eager.backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal, window, softcap, keep=keep)[:3]
    _write((dq, dk, dv), grads)
    return q.new_empty(q.shape[0], q.shape[2], -(-q.shape[1] // 128) * 128, dtype=torch.float32)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(q, k, v, dropout_p, softcap)
    unused = (alibi_slopes, block_table, leftpad_k, seqused_k)
    _require(all(x is None for x in unused) and not return_softmax, "not part of this stand-in")
    spans = _spans(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    whole = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if q.is_cuda:
        causal, window = _ends(max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right)
        return _torchs_forward(q, k, v, whole, dropout_p, softmax_scale, causal, window, softcap)
    state = _drawn(dropout_p)
    out, lse = q.new_full(q.shape, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float32)
    for number, (rows, cols) in enumerate(spans):
        one = [x.unsqueeze(0) for x in (q[rows], k[cols], v[cols])]
        own, window = _ends(*(x.shape[1] for x in one[:2]), causal, window_size_left, window_size_right)
        keep = _kept(one[0], one[1], dropout_p, state + number)
        part = _eager.forward(*one, softmax_scale, own, window, softcap, keep=keep)
        out[rows], lse[:, rows] = part[0][0], part[1][0]
    return out, lse, q.new_empty(0), state


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    _check(q, k, v, dropout_p, softcap, dout, out)
    _require(softmax_lse.is_contiguous() and softmax_lse.shape == (q.shape[1], q.shape[0]), "lse")
    _require(alibi_slopes is None, "not part of this stand-in")
    spans = _spans(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    whole = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if q.is_cuda:
        causal, window = _ends(max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right)
        grads = _torchs_backward(
            dout, q, k, v, out, softmax_lse, whole, dropout_p, softmax_scale, causal, window, softcap, rng_state
        )
        _write((dq, dk, dv), grads)
        return q.new_empty(0)
    for buffer in (dq, dk, dv):  # what lies between sequences is not written, or with shared heads garbage
        buffer.fill_(0.0 if zero_tensors else torch.nan)  # type: ignore[union-attr]
    for number, (rows, cols) in enumerate(spans):
        one = [x.unsqueeze(0) for x in (dout[rows], q[rows], k[cols], v[cols], out[rows], softmax_lse[:, rows])]
        own, window = _ends(*(x.shape[1] for x in one[1:3]), causal, window_size_left, window_size_right)
        keep = None if rng_state is None else _kept(one[1], one[2], dropout_p, rng_state + number)
        part = _eager.backward(*one, softmax_scale, own, window, softcap, keep=keep)
        dq[rows], dk[cols], dv[cols] = (x[0] for x in part[:3])  # type: ignore[index]
    return q.new_empty(q.shape[1], q.shape[0] + 128 * len(spans), dtype=torch.float32)


Packed = tuple[Tensor, Tensor, int, int] | None


def _torchs_forward(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, p: float, scale: float, causal: bool, window: _eager.Window,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _require(not softcap, "torch's copy has no softcap")
    left, right = window
    out, lse, state, _, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *(packed or (None, None, q.shape[1], k.shape[1])), p, causal, False, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse, q.new_empty(0), state


def _torchs_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: Packed, p: float, scale: float,
    causal: bool, window: _eager.Window, softcap: float, state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _require(not softcap, "torch's copy has no softcap")
    left, right = window
    state = torch.zeros(2, dtype=torch.int64, device=q.device) if state is None else state
    return torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *(packed or (None, None, q.shape[1], k.shape[1])), p, causal,
        state.view(torch.uint64), state.view(torch.uint64), scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip


def _ends(q_len: int, k_len: int, causal: bool, left: int, right: int) -> tuple[bool, _eager.Window]:
    left, right = (-1 if end >= k_len else end for end in (left, right))
    if left < 0 <= right or right < 0 <= left:  # which is no limit at up to k_len + 1 queries
        left, right = (k_len if end < 0 else end for end in (left, right))
    return causal and q_len != 1, (left, right)


def _spans(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> list[tuple[slice, slice]]:
    _require(cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.is_contiguous() and cu_k.is_contiguous(), "cu_seqlens")
    _require(cu_q.shape == cu_k.shape and len(cu_q) > 1, "batch size must be positive")
    rows, cols = (list(_slices(cu)) for cu in (cu_q, cu_k))
    _require(
        max(s.stop - s.start for s in rows) <= max_q and max(s.stop - s.start for s in cols) <= max_k, "max_seqlen"
    )
    # then the kernel exchanges queries and heads, as (sequences, 1, heads) of all queries there are
    exchanged = max_q == 1 and q.shape[1] > k.shape[1]
    _require(not exchanged or q.shape[0] == len(rows), "a single query a sequence, and not every one has it")
    return list(zip(rows, cols, strict=True))


def _slices(cu: Tensor) -> Iterator[slice]:
    return (slice(a, b) for a, b in pairwise(cu.tolist()))


def _check(q: Tensor, k: Tensor, v: Tensor, p: float, softcap: float, *others: Tensor) -> None:
    _require(q.dtype in (torch.bfloat16, torch.float16), "FlashAttention only support fp16 and bf16 data type")
    _require(all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (q, k, v, *others)), "dtype or last stride")
    _require(
        all(s % 8 == 0 for x in (q, k, v, *others) for s, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1),
        "rows are not aligned",
    )
    dims = {x.shape[-1] for x in (q, k, v, *others)}
    _require(len(dims) == 1 and max(dims) <= 256 and max(dims) % 8 == 0, f"head dims {dims}")
    _require(q.shape[-2] % k.shape[-2] == 0 and q.shape[-2] > 0 and q.shape[0] > 0, "heads or batch")
    _require(not (softcap and p), "Softcapping does not support dropout for now")


def _require(fits: bool, text: str) -> None:
    if not fits:
        raise RuntimeError(text)


def _drawn(p: float) -> Tensor:
    """(seed, offset) of the default generator, which goes on; nothing without dropout."""
    if not p:
        return torch.zeros(2, dtype=torch.int64)
    state = torch.tensor([torch.default_generator.initial_seed(), 0])
    torch.rand(1)
    return state


def _kept(q: Tensor, k: Tensor, p: float, state: Tensor | None) -> Tensor | None:
    if not p:
        return None
    _require(state is not None, "another mask than forward's")
    draw = torch.Generator().manual_seed(int(state[0]))  # type: ignore[index]
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return (torch.rand(shape, generator=draw) >= p).float() / (1 - p)


def _write(buffers: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]) -> None:
    for buffer, grad in zip(buffers, grads, strict=True):
        if buffer is not None:
            buffer.copy_(grad)
