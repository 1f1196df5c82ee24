"""A stand-in for flash_attn's Python interface, made of written-out attention; and libraries imported on top of it.

Only what other libraries call: the private forward and backward, for batches and for packed sequences, and the public
function. As in flash_attn 2.8: lse is (B, H, Sq), or (H, total) of packed sequences; causal and windows are aligned to
the bottom right; backward writes into the dq, dk and dv it is handed, and draws another dropout where it is given no
state.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import _stand_in as written_out

VERSION = "2.8.3"
ABOUT = "written-out attention stands in for flash_attn's kernels"


def missing() -> bool:
    """Whether flash_attn is not installed."""
    return importlib.util.find_spec("flash_attn") is None


@cache
def imported(package: str, without: tuple[str, ...] = ()) -> ModuleType:
    """A copy of a library that was imported with the stand-in in the place of flash_attn; nobody else sees either.

    without  modules of the library that are left out, for they need something else
    """
    ours = {"flash_attn": _module("flash_attn"), "flash_attn.flash_attn_interface": _module("flash_attn_interface")}
    ours |= {name: _Empty(name) for name in without}
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if _within(name, package, "flash_attn")}
    sys.modules.update(ours)
    try:
        return importlib.import_module(package)
    finally:
        for name in [name for name in sys.modules if _within(name, package, "flash_attn")]:
            del sys.modules[name]
        sys.modules.update(kept)


class _Empty(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> None:
        return None


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _module(name: str) -> ModuleType:
    made = ModuleType(name)
    functions = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
    vars(made).update({f.__name__: f for f in functions}, __version__=VERSION, flash_attn_func=flash_attn_func)
    return made


def _asked(
    q: Tensor, k: Tensor, dropout_p: float, softmax_scale: float, causal: bool, left: int, right: int, softcap: float,
    seed: int,
) -> written_out.Asked:  # fmt: skip
    ahead = k.shape[1] - q.shape[1]
    until = ahead if causal else None if right < 0 else ahead + right
    return written_out.Asked(
        softmax_scale, since=None if left < 0 else ahead - left, until=until, dropout_p=dropout_p, seed=seed,
        softcap=softcap,
    )  # fmt: skip


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    state = torch.randint(1 << 31, (1,)) if dropout_p else torch.zeros(1, dtype=torch.int64)
    window = (window_size_left, window_size_right)
    asked = _asked(q, k, dropout_p, softmax_scale, causal, *window, softcap or 0.0, int(state))
    query, key, value = _heads_first(q, k, v)
    out, lse = written_out.forward(query, key, value, asked)
    return out.transpose(1, 2).contiguous(), lse, q.new_empty(0), state


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    state = torch.randint(1 << 31, (1,)) if rng_state is None else rng_state
    window = (window_size_left, window_size_right)
    asked = _asked(q, k, dropout_p, softmax_scale, causal, *window, softcap or 0.0, int(state))
    grad_out, query, key, value, ends = _heads_first(dout, q, k, v, out)
    grads = written_out.backward(grad_out, query, key, value, ends, softmax_lse, asked)
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad.transpose(1, 2))
    return q.new_empty(0)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    parts = []
    for rows, columns in _sequences(cu_seqlens_q, cu_seqlens_k):
        sequence = (q[None, rows], k[None, columns], v[None, columns])
        parts.append(
            _flash_attn_forward(
                *sequence, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
            )
        )
    out, lse = torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts], 1)
    return out, lse, *parts[0][2:]


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    for rows, columns in _sequences(cu_seqlens_q, cu_seqlens_k):
        _flash_attn_backward(
            dout[None, rows], q[None, rows], k[None, columns], v[None, columns], out[None, rows],
            softmax_lse[None, :, rows], dq[None, rows], dk[None, columns], dv[None, columns], dropout_p, softmax_scale,
            causal, window_size_left, window_size_right, softcap, rng_state=rng_state,
        )  # fmt: skip
    return q.new_empty(0)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    ends = [x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    spans = [[slice(a, b) for a, b in pairwise(x)] for x in ends]
    return list(zip(*spans, strict=True))


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out, lse, _, state = _flash_attn_forward(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, state = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        tensors = (dout, q, k, v, out, lse, dq, dk, dv)
        _flash_attn_backward(*tensors, **ctx.options, rng_state=state)
        return dq, dk, dv, None


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """flash_attn's public function, differentiable."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = {
        "dropout_p": dropout_p, "softmax_scale": scale, "causal": causal, "window_size_left": window_size[0],
        "window_size_right": window_size[1], "softcap": softcap or 0.0,
    }  # fmt: skip
    return _Flash.apply(q, k, v, options)
