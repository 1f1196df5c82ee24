"""The public call, on every backend of this machine: eager attention and its gradients, whatever is passed."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringtrue as rt
from calls import (
    EVERY_BACKEND,
    HERE,
    assert_close,
    backend_of,
    claims_of,
    eager,
    like,
    qkv,
    reached,
    refused,
    unreachable,
    widest,
)
from calls import one_thread as one_thread
from ringtrue import api
from ringtrue.backends import REGISTRY
from ringtrue.contract import Backend, OpPair


@st.composite
def arguments(draw: Any) -> tuple[dict[str, int], Any, Tensor, int | None, float | None]:
    """Sizes; what a user passes as attn_mask; the same as one bias; the causal offset; the scale."""
    sizes = {
        "q_len": draw(st.integers(1, 9)),
        "k_len": draw(st.integers(1, 9)),
        "dim": draw(st.sampled_from([1, 5, 8])),
    }
    sizes |= {"kv_heads": draw(st.sampled_from([1, 2, 4])), "value_dim": draw(st.sampled_from([3, 8]))}
    full = (2, 4, sizes["q_len"], sizes["k_len"])
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    parts: list[Any] = []
    plain, causal = torch.zeros(full, dtype=torch.float64), None
    for kind in draw(st.lists(st.sampled_from(["rows", "padding", "causal", "bottom", "float", "bias"]), unique=True)):
        shape = tuple(size if draw(st.booleans()) else 1 for size in full)[draw(st.integers(0, 3)) :]
        seen, keys = torch.rand(shape, generator=random) < 0.7, torch.rand(full[0], full[3], generator=random) < 0.7
        floats = {"float": torch.randn(shape, generator=random), "bias": torch.randn(keys.shape, generator=random)}
        if kind == "rows":
            parts, plain = [*parts, rt.Dense(seen)], plain.masked_fill(~seen, -math.inf)
        elif kind == "padding":
            parts, plain = [*parts, rt.KeyPadding(keys)], plain.masked_fill(~keys[:, None, None], -math.inf)
        elif kind in ("causal", "bottom"):
            parts.append(rt.Causal("top_left" if kind == "causal" else "bottom_right"))
            offset = 0 if kind == "causal" else full[3] - full[2]
            causal = offset if causal is None else min(causal, offset)
        elif not any("float" in repr(part) for part in parts):
            floats["float"].masked_fill_(~seen, -math.inf)
            parts.append(rt.Dense(floats["float"]) if kind == "float" else rt.KeyBias(floats["bias"]))
            plain = plain + (floats["float"] if kind == "float" else floats["bias"][:, None, None])
    mask: Any = None
    for part in parts:
        mask = part if mask is None else mask & part
    return sizes, mask, plain, causal, draw(st.sampled_from([None, 0.0, -0.7, 1.3]))


@EVERY_BACKEND
@settings(derandomize=True, max_examples=60, deadline=None)
@given(call=arguments())
def test_any_call_is_eager_attention(backend: str, call: tuple[Any, ...]) -> None:
    sizes, mask, plain, causal, scale = call
    tensors = qkv(**sizes, dtype=widest(backend), grad=True)
    out, lse = rt.attention(*tensors, mask, scale=scale, enable_gqa=True, return_lse=True, backend=backend)
    true_out, true_lse = eager(*tensors, plain, causal, scale)
    assert_close(out, true_out)
    assert_close(lse, true_lse)
    got, expected = (torch.autograd.grad(x, tensors, like(true_out)) for x in (out, true_out))
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_comes_back(backend: str, dtype: torch.dtype) -> None:
    if dtype not in claims_of(backend).dtypes:
        with refused(rt.UnsupportedError, "[dtype]", dtype):
            rt.attention(*qkv(dtype=dtype), backend=backend)
        return
    q, k, v = qkv(6, 5, value_dim=3, dtype=dtype, grad=True)
    out, lse = rt.attention(q, k, v, backend=backend, return_lse=True)
    assert (out.shape, out.dtype) == ((2, 6, 4, 3), dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float64 if dtype == torch.float64 else torch.float32)
    alone = rt.attention(q, k, v, backend=backend)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, out)
    grads = torch.autograd.grad(out, (q, k, v), like(out))
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, dtype) for x in (q, k, v)]


@EVERY_BACKEND
def test_nothing_that_was_passed_is_changed(backend: str) -> None:
    tensors = qkv(6, 5, grad=True)
    bias, keep = torch.randn(6, 5), torch.rand(2, 5) < 0.6
    given = [*(x.detach() for x in tensors), bias, keep]
    before = [x.clone() for x in given]
    state = torch.get_rng_state()
    out = rt.attention(*tensors, rt.Dense(bias) & rt.KeyPadding(keep) & rt.Causal("bottom_right"), backend=backend)
    out.backward(upstream := like(out))
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert torch.equal(upstream, like(out))
    assert torch.equal(torch.get_rng_state(), state)


@EVERY_BACKEND
def test_the_other_layout_is_strides_only(backend: str) -> None:
    tensors = qkv(6, 5, kv_heads=2, dtype=widest(backend), grad=True)
    swapped = [x.transpose(1, 2) for x in tensors]
    out, lse = rt.attention(*swapped, layout="bhsd", enable_gqa=True, return_lse=True, backend=backend)
    expected, expected_lse = rt.attention(*tensors, enable_gqa=True, return_lse=True, backend=backend)
    assert torch.equal(out, expected.transpose(1, 2))
    assert out.stride() == expected.transpose(1, 2).stride()
    assert torch.equal(lse, expected_lse)
    packed = [x.detach().contiguous().requires_grad_() for x in swapped]
    out = rt.attention(*packed, layout="bhsd", enable_gqa=True, backend=backend)
    got = torch.autograd.grad(out, packed, like(expected).transpose(1, 2))
    for a, b in zip(got, torch.autograd.grad(expected, tensors, like(expected)), strict=True):
        assert_close(a, b.transpose(1, 2))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_pair_is_handed_the_users_memory(layout: str) -> None:
    seen: list[Any] = []

    def forward(*args: Any) -> Any:
        seen.extend(args)
        return plain.forward(*args)

    plain = next(b.pairs["cpu"] for b in HERE if b.pairs["cpu"].claims.any_strides)
    mask = torch.ones(6, 6, dtype=torch.bool)
    tensors = [x.transpose(1, 2) if layout == "bhsd" else x for x in qkv(6, 6, heads=3)]
    out = rt.attention(*tensors, mask, layout=layout, backend=OpPair("spy", forward, reached, plain.claims))  # type: ignore[arg-type]
    assert out.shape == tensors[0].shape
    assert [x.shape for x in seen[:3]] == [(2, 6, 3, 8)] * 3
    assert [x.data_ptr() for x in (*seen[:3], seen[3].dense)] == [x.data_ptr() for x in (*tensors, mask)]


@EVERY_BACKEND
def test_large_numbers(backend: str) -> None:
    """Scores of 10^5, beyond float16 (BR-38): finite and right. A NaN is passed on, in its own sample alone."""
    for dtype in claims_of(backend).dtypes:
        q, k, v = (x * y for x, y in zip(qkv(dtype=dtype, dim=64), (60, 60, 1), strict=True))
        out = rt.attention(q, k, v, backend=backend)
        assert_close(out, eager(q.double(), k.double(), v.double())[0])
        k[0, 2] = math.nan
        out = rt.attention(q, k, v, backend=backend)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()


def test_a_pair_of_ones_own_is_a_backend() -> None:
    q, k, v = qkv(kv_heads=2, value_dim=3)
    for backend in HERE:
        bare, whole = backend.pairs["cpu"], rt.op_pair(backend.name)
        expected = rt.attention(q, k, v, is_causal=True, enable_gqa=True, backend=backend.name)
        for pair in (bare, whole):
            assert torch.equal(rt.attention(q, k, v, is_causal=True, enable_gqa=True, backend=pair), expected)


def test_a_kind_of_device_that_is_not_here_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, asked = unreachable(), list[str]()
    elsewhere = Backend("other", "", {"npu": pair, "xla": pair, "cpu": pair}, lambda device: asked.append(device))
    monkeypatch.setattr(api, "REGISTRY", (elsewhere,))
    npu, xla, cpu = rt.backends()
    assert npu.unavailable is not None
    assert npu.unavailable.text == "this machine has no NPU device"
    assert (xla.unavailable, cpu.unavailable, asked) == (None, None, ["xla", "cpu"])
    assert (npu.verified, cpu.verified) == ("", "every test run")


def test_backends_lists_the_registry_with_claims_and_reasons() -> None:
    listed = [(s.name, s.device) for s in rt.backends()]
    assert listed == [(b.name, device) for b in REGISTRY for device in b.pairs]
    for support in rt.backends():
        assert support.summary
        assert support.claims == rt.op_pair(support.name, support.device).claims
        backend = next(b for b in REGISTRY if b.name == support.name)
        if support.device not in ("cpu", "xla") and not (support.device == "cuda" and torch.cuda.is_available()):
            assert support.unavailable is not None
            assert support.unavailable.code == "device"
        else:
            assert support.unavailable == backend.unavailable(support.device)


def test_op_pair() -> None:
    for backend in REGISTRY:
        assert rt.op_pair(f"_{backend.name}").name == rt.op_pair(backend.name).name == backend.name
        with refused(rt.ArgumentError, f"{backend.name} has no kernel for this device", *backend.pairs, "tpu"):
            rt.op_pair(backend.name, "tpu")
    for wrong in ("nobody", "auto", "", None, 3):
        with refused(rt.ArgumentError, "unknown op pair", repr(wrong), *(b.name for b in REGISTRY)):
            rt.op_pair(wrong)  # type: ignore[arg-type]


def test_explain_says_what_would_run_and_why_not_the_others() -> None:
    q, k, v = qkv()
    first, last = HERE[0].name, HERE[-1].name
    assert rt.explain(q, k, v).backend == first
    assert rt.explain(q, k, v, backend=last).backend == last
    with rt.attention_backend(last):
        assert rt.explain(q, k, v).backend == last
    nothing = rt.explain(q, k, v, backend_options={"speed": 1})
    assert nothing.backend is None
    assert all(why for why in nothing.reasons.values())
    assert f"\n  {first}: [unknown-option]" in str(nothing)
    poor = unreachable("poor", masks=frozenset())
    explained = rt.explain(q, k, v, attn_mask=torch.zeros(6, 6), backend=poor)
    assert explained.backend is None
    assert [r.code for r in explained.reasons["poor"]] == ["mask"]
    with refused(rt.ArgumentError, "unknown backend", "nobody"):
        rt.explain(q, k, v, backend="nobody")
    with refused(rt.ArgumentError, "differ in batch"):
        rt.explain(q, k[:1], v)


def test_explain_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rt.api, rt.select):
        monkeypatch.setattr(module, "REGISTRY", (backend_of(unreachable()),))
    monkeypatch.setattr(rt.order, "ROWS", (rt.order.Row("cpu", ("unreachable",), "", ""),))
    assert rt.explain(*qkv(grad=True)).backend == "unreachable"


def test_the_arguments_are_torchs_and_in_its_order() -> None:
    names = list(inspect.signature(rt.attention).parameters)
    assert names[:6] == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
    assert {"scale", "enable_gqa"} < set(names)


@pytest.mark.parametrize("parallel", ["cp", 1, True, rt.ContextParallel])
def test_what_is_no_context_is_refused(parallel: Any) -> None:
    with refused(rt.ArgumentError, "parallel is not a context", "attention(q=float32"):
        rt.attention(*qkv(), parallel=parallel, backend=unreachable())
