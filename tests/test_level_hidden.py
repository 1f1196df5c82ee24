"""Rows at a huge level beside other masks: what hides a key decides which keys are at the top of a query."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ringtrue as rt
from calls import EVERY_BACKEND, HERE, assert_close, eager, like, one_thread, qkv
from ringtrue.contract import Mask, Options
from ringtrue.edge import edge

LOWEST = torch.finfo(torch.float32).min
TOKENS = 6
KEEP = torch.tensor([[True, False, True, True, False, True], [True, False, False, False, False, True]])
ROWS = torch.tensor([[True] + [(3 * i + j) % 5 > 1 for j in range(1, TOKENS)] for i in range(TOKENS)])[None, None]
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
KEPT = KEEP[:, None, None]

# name: the float mask as (b, h, q, k), what it is joined with, what that leaves visible
CASES = {
    "one mask of rows for two samples": (torch.full((1, 1, TOKENS, TOKENS), LOWEST), rt.KeyPadding(KEEP), KEPT),
    "one row for two samples": (torch.full((1, 1, 1, TOKENS), LOWEST), rt.KeyPadding(KEEP), KEPT),
    "one column": (torch.full((1, 1, TOKENS, 1), LOWEST), rt.KeyPadding(KEEP), KEPT),
    "a bias per key and a bool mask": (torch.full((2, 1, 1, TOKENS), LOWEST), rt.Dense(ROWS), ROWS),
    "a huge bias per key and a bool mask": (torch.full((2, 1, 1, TOKENS), -1e6), rt.Dense(ROWS), ROWS),
    "a hidden key far above": (torch.tensor([0.0, 1e6, 0, 0, 0, 0]).view(1, 1, 1, -1), rt.KeyPadding(KEEP), KEPT),
    "left padding": (torch.tensor([LOWEST] * 3 + [0.0] * 3).expand(2, TOKENS)[:, None, None], rt.Causal(), CAUSAL),
    "a later key far above": (torch.tensor([0.0] * 5 + [1e6]).expand(2, TOKENS)[:, None, None], rt.Causal(), CAUSAL),
}

# an lse of 1e6 in base 2 has no bits left for what the weights are made of: level.py's "not mended", a step earlier
COARSE = {("a later key far above", "flex")}

__all__ = ["one_thread"]


@EVERY_BACKEND
@pytest.mark.parametrize("name", CASES)
def test_out_and_gradients_are_right(name: str, backend: str) -> None:
    if (name, backend) in COARSE:
        pytest.skip("its lse counts in base 2")
    bias, other, visible = CASES[name]
    batch = max(bias.shape[0], visible.shape[0])
    q, k, v = qkv(TOKENS, heads=2, dim=4, batch=batch, grad=True)
    per_key = bias.shape[0] == batch and bias.shape[2] == 1
    float_mask = rt.KeyBias(bias[:, 0, 0]) if per_key else rt.Dense(bias)
    out = rt.attention(q, k, v, float_mask & other, backend=backend)
    grad_out = like(out)
    got = torch.autograd.grad(out, (q, k, v), grad_out)

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    seen = bias.double().expand(batch, 1, TOKENS, TOKENS).masked_fill(~visible, -math.inf)
    expected, _ = eager(*wide, seen)  # float64 keeps scores beside 1e6; beside the lowest number they count alike
    for x, y in zip((out, *got), (expected, *torch.autograd.grad(expected, wide, grad_out.double())), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_mask_has_its_shape() -> None:
    """The mask that a kernel sees has a row per query and sample; the user's has one row a sample."""
    q, k, v = qkv(TOKENS, heads=2, dim=4)
    bias = torch.linspace(-1, 1, 2 * TOKENS).view(2, TOKENS).requires_grad_()
    out = rt.attention(q, k, v, rt.KeyBias(bias) & rt.Dense(ROWS), backend="native_math")
    (got,) = torch.autograd.grad(out, bias, like(out))
    copy = bias.detach().clone().requires_grad_()
    expected, _ = eager(q, k, v, copy[:, None, None].masked_fill(~ROWS, -math.inf))
    torch.testing.assert_close(got, torch.autograd.grad(expected, copy, like(expected))[0])

    dense = torch.randn(1, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(5), requires_grad=True)
    out = rt.attention(q, k, v, rt.Dense(dense) & rt.KeyPadding(KEEP), backend="native_math")
    (got,) = torch.autograd.grad(out, dense, like(out))
    copy = dense.detach().clone().requires_grad_()
    expected, _ = eager(q, k, v, copy.masked_fill(~KEPT, -math.inf))
    torch.testing.assert_close(got, torch.autograd.grad(expected, copy, like(expected))[0])


@EVERY_BACKEND
def test_one_column_over_no_key(backend: str) -> None:
    q, k, v = qkv(3, 0)
    mask = rt.Dense(torch.zeros(1, 1, 1, 1)) & rt.KeyPadding(torch.ones(2, 0, dtype=torch.bool))
    assert not rt.attention(q, k, v, mask, backend=backend).any()


@pytest.mark.parametrize("backend", [*(b.name for b in HERE), "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["rows, bottom right", "left padding, bottom right", "left padding, window"])
def test_a_flat_row_whose_keys_come_in_several_blocks_is_the_mean_of_all(
    backend: str, dtype: torch.dtype, kind: str
) -> None:
    """A causal offset, a window or a kernel's tile cuts the keys, and equal lse cannot say how many each part has."""
    q, k, v = qkv(5, 9, 2, 2, 8, 8, dtype=dtype)
    bias = torch.zeros(5, 9)
    if kind.startswith("rows"):
        bias[:2] = LOWEST
        mask = rt.Causal("bottom_right") & bias
    else:
        bias = torch.zeros(2, 9)
        bias[:, :6] = LOWEST
        mask = (rt.Window(20, 1) if "window" in kind else rt.Causal("bottom_right")) & rt.KeyBias(bias)
    visible = torch.ones(5, 9).tril(1 if "window" in kind else 4).bool()
    row = bias[:, None, None] if bias.shape[0] == 2 else bias
    leaves, wide = ([x.detach().to(d).requires_grad_() for x in (q, k, v)] for d in (dtype, torch.float64))
    scores = torch.einsum("bqhd,bkhd->bhqk", wide[0], wide[1]) / 8**0.5 + row.double()
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), wide[2])
    out, lse = rt.attention(*leaves, mask, backend=backend, return_lse=True)
    assert_close(out, expected)
    assert torch.allclose(lse.double(), scores.masked_fill(~visible, -torch.inf).logsumexp(-1), rtol=1e-5, atol=1e-2)
    g = like(expected)
    for a, b in zip(torch.autograd.grad(out, leaves, g.to(dtype)), torch.autograd.grad(expected, wide, g), strict=True):
        assert_close(a, b)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor had that any operation made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor) and x._base is None:
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return made


@pytest.mark.parametrize("beside", [rt.Window(100, 0), rt.Segments(torch.arange(4096)[None] // 1000)], ids=str)
def test_no_mask_of_all_queries_and_keys_is_made(beside: Any) -> None:
    """Beside a bias per key, which tells the same of every query."""
    q, k, v = (x.requires_grad_() for x in qkv(4096, heads=1, dim=8, batch=1))
    bias = torch.randn(1, 4096)
    with Largest() as seen:
        rt.attention(q, k, v, rt.KeyBias(bias) & beside, backend="native_flash").sum().backward()
    assert 4096 <= seen.numbers < 4096 * 4096 / 2


@EVERY_BACKEND
@pytest.mark.parametrize("shape", [(1, 1, 3, 1), (1, 1, 1, 1), (1, 1, 3, 0)])
def test_no_keys_at_all(backend: str, shape: tuple[int, ...]) -> None:
    """One column stands for however many keys there are, none too."""
    q, k, v = (torch.randn(1, n, 1, 4) for n in (3, 0, 0))
    for beside in (rt.Segments(torch.zeros(1, 3).long(), torch.zeros(1, 0).long()), rt.Window(1, 0), rt.Causal()):
        out = rt.attention(q, k, v, rt.Dense(torch.zeros(shape)) & beside, backend=backend)
        assert torch.equal(out, torch.zeros(1, 3, 1, 4))


def test_the_same_on_a_kernel_that_takes_keys_in_tiles() -> None:
    q, k, v = (x.double() for x in qkv(5, 6, 2, 2, 8, 8))
    plain = next(b for b in HERE if b.name == "native_math").pairs["cpu"]
    pair = edge(replace(plain, claims=replace(plain.claims, key_tile=2)))
    bias = torch.zeros(1, 1, 5, 6, dtype=torch.float64)
    bias[:, :, 1] = -1e30
    result = pair.forward(q, k, v, Mask(dense=bias), None, Options(0.3))
    assert torch.allclose(result.out[:, 1], v.mean(1), atol=1e-9)
