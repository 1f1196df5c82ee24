"""The bridge: gradients for exactly what asks for them, errors where there is none, and nothing kept alive."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from calls import EVERY_BACKEND, HERE, assert_close, eager, like, qkv, refused, widest
from calls import one_thread as one_thread
from ringtrue.autograd import run
from ringtrue.contract import ForwardOut, Mask, Options, Wanted

ONCE = [b.name for b in HERE if not b.pairs["cpu"].claims.double_backward]
SUBSETS = ["".join(n for n, w in zip("qkv", wants, strict=True) if w) for wants in product((True, False), repeat=3)]


def grads_of(out: Tensor, inputs: tuple[Tensor, ...], grad_out: Tensor | None = None) -> tuple[Tensor | None, ...]:
    asking = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(out, asking, like(out) if grad_out is None else grad_out))
    return tuple(next(found) if x.requires_grad else None for x in inputs)


@EVERY_BACKEND
@pytest.mark.parametrize("wants", SUBSETS)
def test_any_subset_of_the_inputs(backend: str, wants: str) -> None:
    tensors = qkv(6, 5, kv_heads=2, value_dim=3, dtype=widest(backend), grad=wants)
    out = rt.attention(*tensors, enable_gqa=True, backend=backend)
    assert out.requires_grad == bool(wants)
    if wants:
        out.backward(like(out))
        expected = grads_of(eager(*tensors)[0], tensors)
        for x, grad in zip(tensors, expected, strict=True):
            assert_close(x.grad, grad)
    assert [x.grad is not None for x in tensors] == [n in wants for n in "qkv"]


@EVERY_BACKEND
def test_no_graph_without_grad_mode_and_the_same_numbers(backend: str) -> None:
    tensors = qkv(grad=True)
    expected = rt.attention(*tensors, backend=backend, return_lse=True)
    assert all(x.grad_fn is not None for x in expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = rt.attention(*tensors, backend=backend, return_lse=True)
        for a, b in zip(got, expected, strict=True):
            assert a.grad_fn is None
            assert not a.requires_grad
            assert torch.equal(a, b)


@EVERY_BACKEND
def test_a_graph_can_be_used_twice(backend: str) -> None:
    tensors = qkv(5, 7, dtype=widest(backend), grad=True)
    out = rt.attention(*tensors, rt.KeyPadding(torch.rand(2, 7) < 0.6), backend=backend)
    first = torch.autograd.grad(out, tensors, like(out), retain_graph=True)
    second = torch.autograd.grad(out, tensors, like(out))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, tensors, like(out))


@EVERY_BACKEND
@pytest.mark.parametrize("changed", ["q", "k", "v", "mask", "out"])
def test_a_saved_tensor_changed_in_place_is_detected(backend: str, changed: str) -> None:
    q, k, v = (x * 1 for x in qkv(grad=True))
    mask = torch.zeros(6, 6)
    out = rt.attention(q, k, v, mask, backend=backend)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|being modified inplace"):
        {"q": q, "k": k, "v": v, "mask": mask, "out": out}[changed].mul_(2)
        out.sum().backward()


@EVERY_BACKEND
def test_nothing_outlives_the_graph(backend: str) -> None:
    tensors = qkv(grad=True)
    mask = torch.zeros(6, 6)
    out, lse = rt.attention(*tensors, mask, backend=backend, return_lse=True)
    node, kept = weakref.ref(out.grad_fn), weakref.ref(mask)
    gc.disable()  # by counting references alone: a cycle would wait for the collector, and hold memory until then
    try:
        out.sum().backward()
        del out, lse, mask
        assert node() is kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ONCE)
@pytest.mark.parametrize("wants", ["q", "k", "v", "kv", "qkv"])
def test_a_second_derivative_is_an_error_never_a_zero(backend: str, wants: str) -> None:
    tensors = qkv(grad=wants)
    asking = [x for x in tensors if x.requires_grad]
    out = rt.attention(*tensors, backend=backend)
    grads = torch.autograd.grad(out, asking, like(out), create_graph=True)
    plain = torch.autograd.grad(rt.attention(*tensors, backend=backend), asking, like(out))
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
    penalty = sum(g.square().sum() for g in grads)
    with refused(rt.GradientError, "double backward", repr(backend), 'backend="native_math"'):
        (penalty + out.sum()).backward()
    again = torch.autograd.grad(rt.attention(*tensors, backend=backend).sum(), asking, create_graph=True)
    with refused(rt.GradientError, "double backward"):
        torch.autograd.grad(again[0].sum(), asking[-1])


def test_a_second_derivative_by_the_upstream_gradient_is_an_error_too() -> None:
    q, k, v = qkv(grad="v")
    out = rt.attention(q, k, v, backend=ONCE[0])
    upstream = torch.ones_like(out).requires_grad_()
    (grad,) = torch.autograd.grad(out, v, upstream, create_graph=True)
    with refused(rt.GradientError, "double backward"):
        torch.autograd.grad(grad.sum(), upstream)


def test_a_pair_may_keep_all_that_its_backward_reads() -> None:
    """`reads_inputs=False`: the bridge keeps nothing of q, k, v, out and lse."""
    pair, seen = HERE[0].pairs["cpu"], []

    def forward(q: Any, k: Any, v: Any, *rest: Any) -> ForwardOut:
        out = pair.forward(q, k, v, *rest)
        return out._replace(saved=(q, k, v, out.out, out.lse))

    def backward(grad_out: Any, grad_lse: Any, *args: Any) -> Any:
        mask, rng, (q, k, v, out, lse) = args[3], args[6], args[7]
        seen.extend(args[:3] + args[4:6])
        return pair.backward(grad_out, grad_lse, q, k, v, mask, out, lse, rng, (), *args[8:])

    tensors = qkv(grad=True)
    keeping = replace(pair, forward=forward, backward=backward, reads_inputs=False)
    out, _ = run(keeping, *tensors, Mask(), Options(1 / math.sqrt(8)), Wanted(True, True, True))
    for got, expected in zip(grads_of(out, tensors), grads_of(rt.attention(*tensors), tensors), strict=True):
        assert_close(got, expected)
    assert seen == [None] * 5
