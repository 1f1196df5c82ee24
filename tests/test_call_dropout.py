"""Dropout: drawn outside of the pair from torch's generator, carried to backward, and the same when recomputed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ringtrue as rt
from calls import HERE, assert_close, like, qkv
from calls import one_thread as one_thread
from ringtrue import masks
from ringtrue.audit.drawn import drawn_mask
from ringtrue.audit.inputs import Inputs
from ringtrue.audit.judge import judged
from ringtrue.audit.laws import whole
from ringtrue.call import random_state
from ringtrue.contract import Mask, OpPair, Options, Wanted, accumulate_dtype
from ringtrue.edge import edge

DROPS = [b for b in HERE if b.pairs["cpu"].claims.dropout]
EVERY_DROPPING = pytest.mark.parametrize("backend", DROPS, ids=lambda b: b.name)


def run(backend: Any, *tensors: torch.Tensor, p: float = 0.3, **arguments: Any) -> Any:
    return rt.attention(*tensors, dropout_p=p, backend=backend.name, **arguments)


@EVERY_DROPPING
def test_the_seed_decides(backend: Any) -> None:
    tensors = qkv(grad=True)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = run(backend, *tensors)
        found.append((out, *torch.autograd.grad(out, tensors, like(out))))
    again = run(backend, *tensors)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert not torch.equal(again, found[2][0])


@EVERY_DROPPING
def test_backward_moves_no_generator_and_p_zero_draws_nothing(backend: Any) -> None:
    tensors = qkv(grad=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run(backend, *tensors, p=0.0).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    out = run(backend, *tensors)
    drawn = torch.get_rng_state()
    assert not torch.equal(drawn, before)
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_state_is_a_seed_and_no_offset() -> None:
    torch.manual_seed(5)
    first, second = random_state(), random_state()
    assert (first.dtype, first.shape, first.device.type) == (torch.int64, (2,), "cpu")
    assert first[0] != second[0]
    assert first[1] == second[1] == 0
    torch.manual_seed(5)
    assert torch.equal(random_state(), first)


@EVERY_DROPPING
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_when_a_checkpoint_recomputes(backend: Any, reentrant: bool) -> None:
    tensors = qkv(grad=True)
    found = []
    for kept in (False, True):
        torch.manual_seed(4)
        x = [t * 1.0 for t in tensors]
        arguments = {"use_reentrant": reentrant}
        out = checkpoint(run, backend, *x, **arguments) if kept else run(backend, *x)
        torch.rand(7)  # something else draws between forward and backward
        for t in tensors:
            t.grad = None
        out.backward(like(out))  # a reentrant checkpoint knows only this form
        found.append((out, *(t.grad.clone() for t in tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def inputs(wide: int = 12, p: float = 0.3, mask: Mask | None = None, dtype: torch.dtype = torch.float32) -> Inputs:
    q, k, v = qkv(9, wide, heads=4, kv_heads=2, value_dim=5, dtype=dtype)
    upstream = like(torch.empty(2, 9, 4, 5, dtype=dtype))
    options = Options(1 / math.sqrt(8), dropout_p=p, return_lse=True)
    wanted = Wanted(True, True, True, mask is not None and mask.bias is not None)
    return Inputs(q, k, v, mask or Mask(), options, upstream, wanted=wanted, rng=torch.tensor([11, 0]))


@EVERY_DROPPING
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_mask_drops_its_share_and_keeps_the_sum(backend: Any, p: float) -> None:
    x = inputs(200, p)
    drawn = drawn_mask(edge(backend.pairs["cpu"]), x)
    assert set(drawn.unique().tolist()) == {0.0, 1.0 / (1.0 - p)}
    kept = (drawn > 0).double()
    spread = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean() - (1 - p)) < 4 * spread
    for dim in range(4):  # no dim along which all is drawn alike
        one, other = kept.select(dim, 0), kept.select(dim, 1)
        assert (one != other).double().mean() > p * (1 - p)


@EVERY_DROPPING
def test_lse_knows_nothing_of_it(backend: Any) -> None:
    tensors = qkv(dtype=torch.float64, grad=True)
    (_, with_it), (_, without) = (run(backend, *tensors, p=p, return_lse=True) for p in (0.5, 0.0))
    assert torch.equal(with_it, without)
    for a, b in zip(*(torch.autograd.grad(lse, tensors[:2], like(lse)) for lse in (with_it, without)), strict=True):
        assert_close(a, b)


def poorer(backend: Any, **claims: Any) -> OpPair:
    """The pair as if it took less, so that its edge does more: a lowered mask, two calls for lse."""
    pair = backend.pairs["cpu"]
    return edge(replace(pair, claims=replace(pair.claims, **claims)))


HIDDEN = torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(2)) < 0.3
ROWS = torch.ones(2, 1, 9, 12).masked_fill(HIDDEN, -math.inf)
MASKS = {
    "none": Mask(),
    "a window": Mask(causal=3, since=-2),
    "causal in two blocks": Mask(causal=4),
    "rows": Mask(ROWS),
    "rows and a window": Mask(ROWS, causal=6, since=-5),
}


@EVERY_DROPPING
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rich", [True, False], ids=["as it is", "poorer"])
def test_the_gradient_belongs_to_the_mask_that_was_drawn(backend: Any, name: str, rich: bool) -> None:
    """Also where the edge makes several calls of one: each block draws its own, the same in both directions."""
    poor = {} if rich else {"masks": frozenset({"dense_float"}), "causal": "top_left", "dlse": False, "gqa": False}
    pair = poorer(backend, **poor)
    for dtype in (torch.float64, torch.bfloat16):
        x = inputs(mask=MASKS[name], dtype=dtype)
        x = replace(x, grad_lse=like(torch.empty(2, 4, 9, dtype=accumulate_dtype(dtype))))
        with mock.patch.object(masks, "BLOCK", 4):
            x = replace(x, dropout=drawn_mask(pair, x))
            verdicts = judged(whole(pair, x), x)
        assert all(v.ok for v in verdicts), "\n".join(map(str, verdicts))


@EVERY_DROPPING
def test_blocks_do_not_repeat_each_other(backend: Any) -> None:
    pair = poorer(backend, masks=frozenset({"dense_float"}))
    x = inputs(12, 0.5, Mask(since=-100, q_segments=torch.zeros(2, 9).int(), k_segments=torch.zeros(2, 12).int()))
    with mock.patch.object(masks, "BLOCK", 3):
        drawn = drawn_mask(pair, x)
    parts = drawn.split(3, 2)
    assert not any(torch.equal(a, b) for a, b in ((parts[0], parts[1]), (parts[1], parts[2]), (parts[0], parts[2])))
