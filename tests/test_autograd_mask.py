"""Gradients through lse and of a float mask: right where a backend claims them, a named refusal elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from calls import EVERY_BACKEND, HERE, assert_close, claims_of, eager, like, qkv, refused
from calls import one_thread as one_thread
from ringtrue.edge import widened

GIVES_LSE = [b.name for b in HERE if widened(b.pairs["cpu"].claims).dlse]
GIVES_BIAS = [b.name for b in HERE if b.pairs["cpu"].claims.dbias]
KEEP = torch.tensor([[True, False, True, True, False], [True, True, True, False, True]])
ROWS = (torch.arange(30) % 7 > 1).view(6, 5)
HIDDEN_KEYS = torch.zeros(2, 1, 1, 5).masked_fill(~KEEP[:, None, None], -math.inf)
HIDDEN_ROWS = torch.zeros(6, 5).masked_fill(~ROWS, -math.inf)


@pytest.mark.parametrize("backend", GIVES_LSE)
@pytest.mark.parametrize("dead", [False, True])
def test_the_gradient_of_lse(backend: str, dead: bool) -> None:
    tensors = qkv(6, 5, dtype=torch.float64, grad=True)
    keep = torch.rand(6, 5, generator=torch.Generator().manual_seed(3)) < 0.6
    keep[2] = not dead
    for both in (True, False):
        out, lse = rt.attention(*tensors, keep, backend=backend, return_lse=True)
        true_out, true_lse = eager(*tensors, keep)
        ours, true = ([out, lse], [true_out, true_lse]) if both else ([lse], [true_lse])
        upstream = [like(x) for x in ours]
        got = torch.autograd.grad(ours, tensors, upstream, allow_unused=True)
        expected = torch.autograd.grad(true, tensors, upstream, allow_unused=True)
        assert_close(got[0], expected[0])
        assert_close(got[1], expected[1])
        assert_close(got[2], expected[2] if both else torch.zeros_like(tensors[2]))


@pytest.mark.parametrize("backend", GIVES_LSE)
def test_what_a_merge_sends_back_to_rows_that_see_nothing(backend: str) -> None:
    """logaddexp of two -inf has the gradient NaN; the lse of such a row is a constant."""
    tensors = qkv(4, 5, dtype=torch.float64, grad=True)
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[0] = False
    out, lse = rt.attention(*tensors, rt.KeyPadding(keep), backend=backend, return_lse=True)
    both = torch.logaddexp(lse, lse)
    grads = torch.autograd.grad((out, both), tensors, (like(out), torch.ones_like(both)))
    assert all(g.isfinite().all() and (g[0] == 0).all() for g in grads)


def test_a_gradient_of_lse_that_is_not_there_is_an_error_in_backward() -> None:
    """Such a pair needs its own forward's out and lse, so that no second call can give it."""
    own = HERE[0].pairs["cpu"]
    pair = replace(own, name="own lse", claims=replace(own.claims, dlse=False, backward_from_lse=False))
    tensors = qkv(grad=True)
    out, lse = rt.attention(*tensors, backend=pair, return_lse=True)
    torch.autograd.grad(out, tensors, like(out), retain_graph=True)  # an lse that is only looked at is no problem
    with refused(rt.GradientError, "'own lse'", "no gradient through lse", "dlse", "lse.detach()"):
        (out.sum() + lse.sum()).backward()
    assert tensors[0].grad is None


SIZES = [(torch.float32, x, None) for x in (1e-30, 1.0, 1e30)] + [(torch.bfloat16, x, None) for x in (1e-30, 1.0, 1e30)]
# float16 cannot hold 1e5, but what becomes of it once the scale has its part
SIZES += [(torch.float16, 1.0, None), (torch.float16, 1e5, 1e-2)]


@EVERY_BACKEND
@pytest.mark.parametrize(("dtype", "size", "scale"), SIZES)
def test_a_gradient_of_lse_may_be_of_any_size(
    backend: str, dtype: torch.dtype, size: float, scale: float | None
) -> None:
    q, k, v = qkv(6, 5, dtype=dtype, grad=True)
    lse = rt.attention(q, k, v, scale=scale, backend=backend, return_lse=True)[1]
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    true = eager(*exact, v.double(), scale=scale)[1]
    upstream = like(lse)
    got = torch.autograd.grad(lse, (q, k), size * upstream)
    for a, b in zip(got, torch.autograd.grad(true, exact, size * upstream.double()), strict=True):
        assert a.dtype == dtype
        largest = b.abs().max()
        assert_close((a.double() / largest).to(dtype), b / largest)


MASKS = {
    "(Sq, Sk)": (6, 5), "(H, 1, Sk)": (4, 1, 5), "(B, 1, 1, Sk)": (2, 1, 1, 5), "(B, H, Sq, 1)": (2, 4, 6, 1), "()": (),
    "(B, 1, Sq, Sk)": (2, 1, 6, 5), "(1, H, Sq, Sk)": (1, 4, 6, 5), "(B, H, 1, Sk)": (2, 4, 1, 5),
    "whole": (2, 4, 6, 5),
}  # fmt: skip


@pytest.mark.parametrize("backend", GIVES_BIAS)
@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_a_float_mask_is_summed_over_what_it_was_broadcast_along(
    backend: str, shape: str, dtype: torch.dtype
) -> None:
    tensors = qkv(6, 5, kv_heads=2, dtype=torch.float64, grad="k")
    mask = torch.randn(MASKS[shape], generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    out = rt.attention(*tensors, mask, is_causal=True, enable_gqa=True, backend=backend)
    true = eager(*tensors, mask.double(), causal=0)[0]
    (got,), (expected,) = (torch.autograd.grad(x, mask, like(true)) for x in (out, true))
    assert got.shape == mask.shape
    assert_close(got, expected)


LEAVES: dict[str, tuple[Tensor, Callable[[Tensor], object], Callable[[Tensor], Tensor]]] = {
    "per key": (like(torch.empty(2, 5)), rt.KeyBias, lambda x: x[:, None, None]),
    "with a bool": (like(torch.empty(6, 5)), lambda x: rt.Dense(x) & ROWS, lambda x: x.masked_fill(~ROWS, -math.inf)),
    "with padding": (like(torch.empty(6, 5)), lambda x: x & rt.KeyPadding(KEEP), lambda x: x + HIDDEN_KEYS),
    "per key with a bool": (
        like(torch.empty(2, 5)),
        lambda x: ROWS & rt.KeyBias(x),
        lambda x: x[:, None, None] + HIDDEN_ROWS,
    ),
    "expanded from a leaf": (like(torch.empty(1, 5)), lambda x: (2 * x).expand(2, 4, 6, 5), lambda x: 2 * x),
    "an expanded leaf": (like(torch.empty(5)).expand(2, 4, 6, 5), lambda x: x, lambda x: x),
}


@pytest.mark.parametrize("backend", GIVES_BIAS)
@pytest.mark.parametrize("form", LEAVES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_of_a_float_mask_in_every_form(backend: str, form: str, causal: bool) -> None:
    values, user, plain = LEAVES[form]
    leaf = values.detach().requires_grad_()
    tensors = qkv(6, 5, dtype=torch.float64)
    out = rt.attention(*tensors, user(leaf), is_causal=causal, backend=backend)
    true = eager(*tensors, plain(leaf), causal=0 if causal else None)[0]
    assert_close(torch.autograd.grad(out, leaf, like(true))[0], torch.autograd.grad(true, leaf, like(true))[0])


@EVERY_BACKEND
def test_a_float_mask_that_requires_grad_is_refused_where_there_is_no_gradient_of_it(backend: str) -> None:
    tensors = qkv()
    mask = torch.zeros(6, 6, requires_grad=True)
    if not claims_of(backend).dbias:
        with refused(
            rt.UnsupportedError, repr(backend), "[no-dbias]", "native_math", "mask.detach()", unchanged=(mask,)
        ):
            rt.attention(*tensors, mask, backend=backend)
    expected = rt.attention(*tensors, backend=backend)
    assert torch.equal(rt.attention(*tensors, mask.detach(), backend=backend), expected)
    with torch.no_grad():
        assert torch.equal(rt.attention(*tensors, mask, backend=backend), expected)
    assert rt.explain(*tensors, attn_mask=mask).backend in GIVES_BIAS


def test_auto_does_not_depend_on_grad_mode() -> None:
    """A reentrant checkpoint's first pass has grad mode off; its recompute must take the same backend."""
    q = torch.randn(1, 4, 2, 8)
    bias = torch.zeros(4, 4, requires_grad=True)
    chosen = rt.explain(q, q, q, bias).backend
    with torch.no_grad():
        assert rt.explain(q, q, q, bias).backend == chosen
