"""Derivatives of gradients: right where a backend claims them, in float64, for everything a call may hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from calls import HERE, assert_close, eager, like, qkv
from calls import one_thread as one_thread

TWICE = [b.name for b in HERE if b.pairs["cpu"].claims.double_backward]
KEEP = torch.tensor([[True, False, True], [True, True, True]])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale and softcap": {"scale": -0.7, "softcap": 1.5},
    "padding": {"attn_mask": rt.KeyPadding(KEEP)},
    "blind rows": {"attn_mask": rt.Causal("bottom_right") & rt.KeyPadding(KEEP)},
    "window and segments": {"attn_mask": rt.Window(1, 1) & rt.Segments(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]),
                                                                         torch.tensor([[0, 1, 1], [1, 1, 0]]))},
    "dropout": {"dropout_p": 0.4},
}  # fmt: skip


@pytest.mark.parametrize("backend", TWICE)
@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_has_a_gradient(backend: str, name: str) -> None:
    tensors = qkv(4, 3, heads=2, kv_heads=1, dim=2, value_dim=3, dtype=torch.float64, grad=True)
    seen = eager(*tensors, torch.ones(4, 3, dtype=torch.bool), causal=-1 if name == "blind rows" else None)[1]

    def run(*x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        out, lse = rt.attention(*x, **CALLS[name], enable_gqa=True, return_lse=True, backend=backend)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert seen.shape == (2, 2, 4)
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


FORMS: dict[str, tuple[tuple[int, ...], Any, float]] = {
    "rows": ((4, 3), lambda x: x, 0.0),
    "heads, with causal": ((2, 1, 3), lambda x: rt.Causal() & x, 0.0),
    "keys, with padding": ((2, 3), lambda x: rt.KeyBias(x) & rt.KeyPadding(KEEP), 0.0),
    "rows, with a window": ((4, 3), lambda x: rt.Window(1, 1) & x, 0.0),
    "at a huge level": ((2, 1, 4, 3), lambda x: x, -3000.0),
}


@pytest.mark.parametrize("backend", TWICE)
@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_a_float_mask_has_one_too(backend: str, form: str) -> None:
    shape, make, level = FORMS[form]
    tensors = qkv(4, 3, heads=2, dim=2, dtype=torch.float64, grad="qk")
    bias = like(torch.empty(shape, dtype=torch.float64)).requires_grad_()

    def run(q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = rt.attention(q, k, tensors[2], make(bias + level), return_lse=True, backend=backend)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    given = (*tensors[:2], bias)
    assert torch.autograd.gradcheck(run, given, atol=1e-4, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("backend", TWICE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_penalty_in_a_narrow_dtype(backend: str, dtype: torch.dtype) -> None:
    tensors = qkv(8, 6, dtype=dtype, grad=True)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    found = []
    for out, x in ((rt.attention(*tensors, backend=backend), tensors), (eager(*exact)[0], exact)):
        grads = torch.autograd.grad(out, x, like(out), create_graph=True)
        found.append(torch.autograd.grad(sum(g.double().square().sum() for g in grads), x))
    for got, true in zip(*found, strict=True):
        assert_close(got, true.to(dtype))
