"""Written-out attention where an op pair calls a CUDA kernel by name: on a CPU, the code around it can be judged.

The CUDA kernels' ways are kept. lse is (B, H, S) from flash and (B, H, S, 1) from cuDNN, or nothing where it was not
asked for; sizes that do not fit together are refused. So is an lse that is not there, of which cuDNN makes memory that
nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...audit.subject import Says
from .. import _stand_in as written_out

aten = torch.ops.aten
STANDS_IN = {
    "_native_flash": "written-out attention stands in for aten::_scaled_dot_product_flash_attention",
    "_native_cudnn": "written-out attention stands in for aten::_scaled_dot_product_cudnn_attention",
}


def within_stand_in(says: Says) -> Says:
    """What is claimed with it: every dtype; no bool mask, for what cuDNN makes of one is its own."""
    dtypes = frozenset({"float32", "float64", "bfloat16", "float16"})
    return replace(says, dtypes=dtypes, masks=says.masks & {"float", "key_float"}, head_dims=(1 << 30, 1))


def beyond(bias: Tensor | None) -> str:
    """Why the stand-in takes no such mask; empty where it does."""
    if bias is None:
        return ""
    if bias.dtype == torch.bool:
        return "a bool attn_bias: what cuDNN makes of one is its own"
    top = bias.amax(-1)
    lost = bool(((top < -1e30) & top.isfinite()).any())
    return "rows wholly at a hugely negative bias, which the stand-in rounds away" if lost else ""


@contextmanager
def standing_in(backend: str) -> Iterator[None]:
    """Within it, the CUDA kernel of that backend is written-out attention; nothing changes for an empty name."""
    if backend:
        with _InPlaceOfCuda():
            yield
    else:
        yield


class _InPlaceOfCuda(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _KERNELS.get(func, func)(*args, **(kwargs or {}))


def _asked(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None,
    bias: Tensor | None, seed: int,
) -> written_out.Asked:  # fmt: skip
    """What is asked of the kernel. RuntimeError for sizes that no kernel takes."""
    if query.shape[:2] != key.shape[:2] or key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3]:
        sizes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise RuntimeError(f"query, key and value do not fit together as (B, H, S, D): {sizes}")
    if problem := beyond(bias):
        raise NotImplementedError(problem)
    until = 0 if is_causal else None
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return written_out.Asked(scale, bias, until=until, dropout_p=dropout_p, seed=seed)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None, attn_bias: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    seed = torch.randint(1 << 31, ()) if dropout_p else torch.zeros((), dtype=torch.int64)
    asked = _asked(query, key, value, dropout_p, is_causal, scale, attn_bias, int(seed))
    out, lse = written_out.forward(query, key, value, asked)
    none = torch.empty(0)
    return out, lse, none, none, query.shape[2], key.shape[2], seed, none, none


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor | None,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None, attn_bias: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    asked = _asked(query, key, value, dropout_p, is_causal, scale, attn_bias, int(philox_seed))
    if logsumexp is None:
        raise RuntimeError("the backward kernel was given no lse: on CUDA the gradients would be memory nobody wrote")
    return written_out.backward(grad_out, query, key, value, out, logsumexp, asked)


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse, *rest = _flash(query, key, value, dropout_p, is_causal, scale=scale, attn_bias=attn_bias)
    return out, lse.unsqueeze(-1) if compute_log_sumexp else None, *rest


def _cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor | None,
    philox_seed: Tensor, philox_offset: Tensor, attn_bias: Tensor | None, cum_seq_q: Tensor, cum_seq_k: Tensor,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    lse = None if logsumexp is None else logsumexp.squeeze(-1)
    return _flash_backward(
        grad_out, query, key, value, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        philox_seed, philox_offset, scale=scale, attn_bias=attn_bias,
    )  # fmt: skip


_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
}
