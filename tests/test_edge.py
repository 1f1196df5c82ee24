"""`edge` lets any kernel, however little it takes, answer every mask, size and storage; a picky one checks it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringtrue as rt
from calls import EVERYTHING, HERE, assert_close, eager, like, qkv
from calls import one_thread as one_thread
from ringtrue import masks
from ringtrue.contract import Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted
from ringtrue.edge import edge, widened
from ringtrue.masks import allowed

POOREST = replace(
    EVERYTHING,
    masks=frozenset({"dense_float"}),
    bias_dtype="input",
    causal="top_left",
    gqa=False,
    value_dim=False,
    any_strides=False,
    dlse=False,
)
KERNELS = {
    "poorest": POOREST,
    "keys apart": replace(POOREST, masks=frozenset({"dense_float", "key_keep", "key_bias"}), bias_dtype="accumulate"),
    "bools too": replace(POOREST, masks=frozenset({"dense_float", "dense_bool"}), gqa=True, bias_dtype="any"),
    "bottom right, in eights": replace(POOREST, causal="bottom_right", head_dim_multiple=8, stride_multiple=8),
    "in tiles": replace(POOREST, key_tile=2),
    "ahead, in tiles": replace(POOREST, causal="ahead", key_tile=2),
    "any causal": replace(POOREST, causal="offset", value_dim=True),
    "windows too": replace(POOREST, masks=frozenset({"dense_float", "window"}), causal="offset", dlse=True),
    "segments too": replace(POOREST, masks=frozenset({"dense_float", "segments"}), dlse=True),
    "everything": EVERYTHING,
}


def comply(claims: Claims, mask: Mask, q: Tensor, k: Tensor, v: Tensor, *outer: Tensor) -> None:
    """A kernel that is handed what it never claimed is wrong or dies; this one says so."""
    assert min(q.shape) > 0
    assert k.shape[1] > 0
    assert claims.gqa or q.shape[2] == k.shape[2] == v.shape[2]
    assert claims.value_dim or q.shape[3] == v.shape[3]
    assert claims.any_strides or all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (q, k, v, *outer))
    assert mask.kinds <= claims.masks
    own = {"top_left": 0, "bottom_right": k.shape[1] - q.shape[1], "ahead": max(mask.causal or 0, 0)}
    assert mask.causal is None or mask.causal == own.get(claims.causal, mask.causal)
    assert claims.key_tile is None or k.shape[1] % (2 * claims.key_tile) != claims.key_tile
    assert not any(x.shape[3] % claims.head_dim_multiple for x in (q, k, v, *outer))
    wanted = {"input": q.dtype, "accumulate": torch.float64 if q.dtype == torch.float64 else torch.float32}
    assert mask.bias is None or mask.bias.dtype == wanted.get(claims.bias_dtype, mask.bias.dtype)
    assert mask.dense is None or claims.any_strides or mask.dense.shape[-1] == k.shape[1]
    if mask.dense is not None and mask.dense.dtype != torch.bool:
        outer = (*outer, mask.dense)
    for x in (q, k, v, *outer):
        starts = (x.storage_offset(), *(x.stride(i) for i in range(3) if x.shape[i] > 1))
        assert not any(start % claims.stride_multiple for start in starts)


def scores(q: Tensor, k: Tensor, mask: Mask, scale: float) -> Tensor:
    result = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    for bias in (mask.dense, None if mask.key_bias is None else mask.key_bias[:, None, None]):
        if bias is not None and bias.dtype != torch.bool:
            result = result + bias
    seen = allowed(mask, q.shape[1], k.shape[1], q.device)
    return result if seen is None else result.masked_fill(~seen, -math.inf)


def picky(claims: Claims) -> OpPair:
    """A right kernel with these claims, and as careless about rows that see nothing as kernels are: NaN, lse 0."""

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
        comply(claims, mask, q, k, v)
        s = scores(q, k, mask, options.scale)
        lse = s.logsumexp(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v.repeat_interleave(q.shape[2] // v.shape[2], 2))
        return ForwardOut(out, lse.masked_fill(lse == -math.inf, 0.0), None, (torch.tensor(float(k.shape[1])),))

    def backward(
        g: Tensor, g_lse: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, out: Tensor, lse: Tensor, *rest: Any
    ) -> Grads:
        _, (length,), options, wanted = rest
        comply(claims, mask, q, k, v, g, out)
        assert claims.dlse or g_lse is None
        assert length == k.shape[1]  # what was saved by this part of the keys, not by another
        weights = (scores(q, k, mask, options.scale) - lse.unsqueeze(-1)).exp()
        delta = torch.einsum("bqhd,bqhd->bhq", g, out) - (0 if g_lse is None else g_lse)
        wide_k, wide_v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        d_scores = weights * (torch.einsum("bqhd,bkhd->bhqk", g, wide_v) - delta.unsqueeze(-1))
        dq = torch.einsum("bhqk,bkhd->bqhd", d_scores, wide_k) * options.scale
        dk = torch.einsum("bhqk,bqhd->bkhd", d_scores, q) * options.scale
        dv = torch.einsum("bhqk,bqhd->bkhd", weights, g)
        dk, dv = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
        bias = mask.bias
        d_bias = None if bias is None else d_scores.sum((1, 2)) if bias.dim() == 2 else d_scores.sum_to_size(bias.shape)
        return Grads(*(x if w else None for x, w in zip((dq, dk, dv, d_bias), wanted, strict=True)))

    return OpPair("picky", forward, backward, claims)


STORAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "heads outermost": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second number": lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0],
    "backwards in memory": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "expanded": lambda x: x[:1, :, :, :1].expand(x.shape),
}


@st.composite
def a_call(draw: Any) -> tuple[tuple[Tensor, ...], Mask, Wanted]:
    q_len, k_len, value_dim, grouped = (draw(st.integers(1, n)) for n in (6, 6, 9, 2))
    tensors = qkv(q_len, k_len, 4, 4 // grouped, 5, value_dim, dtype=torch.float64, seed=draw(st.integers(0, 99)))
    tensors = tuple(STORAGE[draw(st.sampled_from([*STORAGE]))](x) for x in (*tensors, like(eager(*tensors)[0])))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shape = [size if draw(st.booleans()) else 1 for size in (2, 4, q_len, k_len)]
    dense = torch.rand(shape, generator=random) < 0.6
    bias = torch.randn(2, k_len, generator=random, dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    kind = draw(st.sampled_from(["", "bool", "float"]))
    if kind == "float":
        dense = torch.randn(shape, generator=random).masked_fill(~dense, -math.inf)
    segmented = draw(st.booleans())
    mask = Mask(
        dense if kind else None,
        torch.rand(2, k_len, generator=random) < 0.6 if draw(st.booleans()) else None,
        bias if kind != "float" and draw(st.booleans()) else None,
        *(torch.randint(3, (2, n), generator=random) if segmented else None for n in (q_len, k_len)),
        causal=draw(st.none() | st.integers(-8, 8)),
        since=draw(st.none() | st.integers(-8, 8)),
    )
    return tensors, mask, Wanted(*(draw(st.booleans()) for _ in "qkv"), mask.bias is not None)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(derandomize=True, max_examples=60, deadline=None)
@given(call=a_call(), block=st.sampled_from([2, 3, 1024]))
def test_any_call_on_any_kernel(kernel: str, call: tuple[tuple[Tensor, ...], Mask, Wanted], block: int) -> None:
    with mock.patch.object(masks, "BLOCK", block):  # rows of a window or of segments that are written out at a time
        check(kernel, *call)


def check(kernel: str, tensors: tuple[Tensor, ...], mask: Mask, wanted: Wanted) -> None:
    q, k, v, g = tensors
    pair, options = edge(picky(KERNELS[kernel])), Options(scale=-0.4)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    bias = None if mask.bias is None else mask.bias.detach().double().requires_grad_()
    plain = torch.zeros(2, 1, 1, 1) if bias is None else bias[:, None, None] if bias.dim() == 2 else bias
    for part in (mask.dense, None if mask.key_keep is None else mask.key_keep[:, None, None]):
        if part is not None and part.dtype == torch.bool:
            plain = plain.masked_fill(~part, -math.inf)
    places = allowed(replace(mask, dense=None, key_keep=None, key_bias=None), q.shape[1], k.shape[1], q.device)
    plain = plain if places is None else plain.masked_fill(~places, -math.inf)
    out, lse = eager(*leaves, plain, mask.causal, scale=-0.4)
    g_lse = like(lse)
    asked = [*leaves, *([] if bias is None else [bias])]
    live = lse != -math.inf
    expected = torch.autograd.grad((out, lse[live]), asked, (g, g_lse[live]), allow_unused=True)
    result = pair.forward(q, k, v, mask, None, options)
    assert_close(result.out, out)
    assert_close(result.lse, lse)
    given = (g, g_lse, q, k, v, mask, result.out, result.lse, result.rng, result.saved, options, wanted)
    grads = pair.backward(*given)
    assert [x is not None for x in grads] == list(wanted)
    for got, true, like_what in zip(grads, (*expected, None)[:4], (q, k, v, mask.bias), strict=True):
        if got is not None and like_what is not None:
            assert got.shape == like_what.shape
            assert_close(got, torch.zeros_like(got) if true is None else true)


def test_what_edge_claims_is_what_any_kernel_gets() -> None:
    every = replace(EVERYTHING, bias_dtype=POOREST.bias_dtype)  # what a mask would be rounded to stays to be judged
    assert widened(POOREST) == edge(picky(POOREST)).claims == every
    assert not widened(replace(POOREST, backward_from_lse=False)).dlse
    nothing = widened(replace(POOREST, masks=frozenset(), causal="none", backward=False))
    assert (nothing.masks, nothing.causal, nothing.backward) == (frozenset(), "none", False)
    assert widened(nothing) == nothing


@pytest.mark.parametrize("backend", HERE, ids=lambda b: b.name)
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "edge"])
def test_both_functions_leave_their_arguments_alone_and_answer_twice_alike(backend: Any, wrapped: bool) -> None:
    bare = backend.pairs["cpu"]
    pair = edge(bare) if wrapped else bare
    q, k, v = qkv(6, 5)
    dense = torch.randn(2, 4, 6, 5).masked_fill(torch.rand(2, 4, 6, 5) < 0.3, -math.inf)
    dense[..., 0] = 0.0
    mask = Mask(dense, causal=2 if wrapped else None)
    options, wanted = Options(0.3), Wanted(True, True, True)
    first = pair.forward(q, k, v, mask, None, options)
    rest = (mask, first.out, first.lse, first.rng, first.saved, options, wanted)
    args = (like(first.out), None, q, k, v, *rest)
    tensors = [q, k, v, dense, args[0], first.out, first.lse, *first.saved]
    before = [x.clone() for x in tensors]
    grads = pair.backward(*args)
    again, grads_again = pair.forward(q, k, v, mask, None, options), pair.backward(*args)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip((*first[:2], *grads[:3]), (*again[:2], *grads_again[:3]), strict=True))


@pytest.mark.parametrize("backend", HERE, ids=lambda b: b.name)
@pytest.mark.parametrize("level", [-1e4, -1e6, -1e9, 1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("form", ["rows", "keys"])
def test_a_query_whose_biases_are_all_huge_is_an_ordinary_query(backend: Any, level: float, form: str) -> None:
    """Beside an lse of -1e9, float32 has no bits left for the logarithm of the sum that backward needs."""
    q, k, v = qkv(6, 5, grad=True)
    bias = torch.zeros(6, 5).index_fill(0, torch.tensor([1, 4]), level)
    bias[4, 2:] = 0.0
    mask = bias if form == "rows" else rt.KeyBias(torch.stack([torch.full((5,), level), bias[4]]))
    plain = bias if form == "rows" else mask.bias[:, None, None]  # type: ignore[union-attr]
    out = rt.attention(q, k, v, mask, backend=backend.name)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    true = eager(*exact, plain.double())[0]
    assert_close(out, true)
    grads = torch.autograd.grad(out, (q, k, v), like(out))
    for got, expected in zip(grads, torch.autograd.grad(true, exact, like(true)), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize(("causal", "q_len", "k_len"), [("top_left", 6, 9), ("bottom_right", 6, 9), ("offset", 9, 9)])
def test_a_causal_call_of_the_kernels_own_form_reaches_it_with_nothing_in_between(
    causal: Any, q_len: int, k_len: int
) -> None:
    """No tensor is made beside the kernel's own, where most calls of language models spend their time."""
    seen: list[Any] = []

    def forward(*args: Any) -> ForwardOut:
        seen.append(args)
        q, *_ = args
        return ForwardOut(torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1]))

    def backward(*args: Any) -> Grads:
        seen.append(args)
        return Grads(None, None, None)

    claims = Claims(frozenset({torch.float32}), causal=causal)
    pair = edge(OpPair("own", forward, backward, claims))
    q, k, v = (torch.randn(2, n, 3, 8) for n in (q_len, k_len, k_len))
    mask = Mask(causal={"top_left": 0, "bottom_right": k_len - q_len, "offset": 2}[causal])
    with (
        mock.patch.object(masks, "allowed", side_effect=AssertionError),
        mock.patch.object(torch, "arange", side_effect=AssertionError),
    ):
        out, lse, *_ = pair.forward(q, k, v, mask, None, Options(1.0))
        pair.backward(out, None, q, k, v, mask, out, lse, None, (), Options(1.0), Wanted(True, True, True))
    assert all(a is b for a, b in zip(seen[0], (q, k, v, mask), strict=False))
    assert all(a is b for a, b in zip(seen[1], (out, None, q, k, v, mask, out, lse), strict=False))
