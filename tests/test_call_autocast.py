"""Autocast: what torch's own attention casts is cast here, gradients come back in the dtypes that went in."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

import ringtrue as rt
import ringtrue.autograd
import ringtrue.call
from calls import EVERY_BACKEND, HERE, WIDEST, claims_of, like, qkv, refused, unreachable
from calls import one_thread as one_thread
from ringtrue.call import normalise

NARROW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("to", NARROW)
@pytest.mark.parametrize("q_dtype", WIDEST)
@pytest.mark.parametrize("v_dtype", WIDEST)
def test_the_dtype_is_torchs_or_an_error_as_there(to: torch.dtype, q_dtype: torch.dtype, v_dtype: torch.dtype) -> None:
    q, k, v = qkv()
    tensors = (q.to(q_dtype), k.to(q_dtype), v.to(v_dtype))
    with torch.autocast("cpu", dtype=to):
        try:
            theirs = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors)).dtype
        except RuntimeError:
            with refused(rt.ArgumentError, "differ in dtype", "torch.float64"):
                rt.attention(*tensors, backend=unreachable())
        else:
            assert rt.attention(*tensors).dtype == theirs


def as_by_hand(backend: str, to: torch.dtype, mask_dtype: torch.dtype) -> bool:
    """Whether it is the call with cast inputs, bit for bit, although backward runs under autocast too."""
    q, k, v = qkv(6, 5, grad=True)
    v = v.detach().to(to).requires_grad_()  # each is cast for itself, and so is the mask
    mask: Any = torch.randn(6, 5).to(mask_dtype) if mask_dtype != torch.bool else torch.rand(6, 5) < 0.7
    grads = claims_of(backend).dbias and mask_dtype != torch.bool
    asked = [q, k, v, *([mask.requires_grad_()] if grads else [])]
    with torch.autocast("cpu", dtype=to):
        out, lse = rt.attention(q, k, v, mask, return_lse=True, backend=backend)
        got = torch.autograd.grad(out, asked, like(out))
    cast = mask if mask_dtype in (torch.bool, torch.float64) else mask.to(to)
    out_by_hand, lse_by_hand = rt.attention(q.to(to), k.to(to), v, cast, return_lse=True, backend=backend)
    by_hand = torch.autograd.grad(out_by_hand, asked, like(out_by_hand))
    assert [g.dtype for g in got] == [x.dtype for x in asked]
    if (out.dtype, lse.dtype) != (to, torch.float32):
        return False
    pairs = zip((out, lse, *got), (out_by_hand, lse_by_hand, *by_hand), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@EVERY_BACKEND
@pytest.mark.parametrize("to", NARROW)
@pytest.mark.parametrize("mask_dtype", [*WIDEST, torch.bool])
def test_it_is_the_call_with_cast_inputs(backend: str, to: torch.dtype, mask_dtype: torch.dtype) -> None:
    assert as_by_hand(backend, to, mask_dtype)


@EVERY_BACKEND
def test_autocast_ignored_is_found(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: inputs are left as they are."""
    monkeypatch.setattr(ringtrue.call, "autocast_dtype", lambda device: None)
    with contextlib.suppress(rt.ArgumentError):  # the three then differ in dtype
        assert not as_by_hand(backend, torch.bfloat16, torch.float32)
    q = qkv()[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rt.attention(q, q, q, backend=backend).dtype == torch.float32


def test_autocast_left_on_for_the_pair_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: matrix products inside of a pair are cast once more."""
    monkeypatch.setattr(ringtrue.autograd, "as_it_is", lambda x: contextlib.nullcontext())
    assert not all(as_by_hand(b.name, torch.bfloat16, torch.float32) for b in HERE)


def test_keys_masks_are_cast_and_their_lowest_number_does_not_forbid() -> None:
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor([[lowest, 0.0, -math.inf, 1.0, 2.0]] * 2)
    with torch.autocast("cpu", dtype=torch.float16):
        for given in (rt.KeyBias(bias), bias[:1, None, None]):
            found = normalise(*qkv(6, 5), attn_mask=given).mask.bias
            assert found is not None
            assert found.dtype == torch.float16
            assert found.flatten()[:5].tolist() == [torch.finfo(torch.float16).min, 0.0, -math.inf, 1.0, 2.0]
        wide = normalise(*qkv(6, 5, dtype=torch.float64), attn_mask=bias[:1, None, None]).mask.dense
        assert wide is not None
        assert wide.dtype == torch.float32  # beside float64 inputs, which are not cast, nor is their mask


@EVERY_BACKEND
def test_nothing_is_cast_where_it_is_off(backend: str) -> None:
    tensors = qkv()
    expected = rt.attention(*tensors, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(rt.attention(*tensors, backend=backend), expected)
        with refused(rt.ArgumentError, "differ in dtype", "torch.float32, torch.bfloat16, torch.float16"):
            rt.attention(tensors[0], tensors[1].bfloat16(), tensors[2].half(), backend=backend)
    for dtype in WIDEST:  # float64 is left as it is
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = rt.attention(*(x.to(dtype) for x in tensors), backend=backend)
        assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)


@pytest.mark.parametrize("backend", [b.name for b in HERE if b.pairs["cpu"].claims.double_backward])
def test_a_second_derivative_under_autocast(backend: str) -> None:
    tensors = qkv(5, dtype=torch.float32, grad=True)
    found = []
    for on in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            out = rt.attention(*(x if on else x.bfloat16() for x in tensors), backend=backend)
            (dq,) = torch.autograd.grad(out, tensors[0], like(out), create_graph=True)
        found.append(torch.autograd.grad(dq.square().sum(), tensors[1])[0])
    assert torch.equal(*found)
