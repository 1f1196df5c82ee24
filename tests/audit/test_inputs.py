"""The cases are what the design asks for, and the same numbers everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringtrue.audit.cases import CASES, MORE, case
from ringtrue.audit.inputs import STORAGE, VALUES, Case, Inputs, build
from ringtrue.audit.judge import truth_of
from ringtrue.audit.patterns import DENSE, KEYS, SEGMENTS

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
FULL = [c for c in CASES if 0 not in c.shape]


def tensors(inputs: Inputs) -> list[torch.Tensor]:
    mask = inputs.mask
    found = (inputs.q, inputs.k, inputs.v, inputs.grad_out, mask.dense, mask.key_keep, mask.key_bias, inputs.grad_lse)
    return [x for x in found if x is not None]


def test_ids_are_unique() -> None:
    assert len({c.id for c in CASES}) == len(CASES)
    assert case("causal") is next(c for c in CASES if c.id == "causal")


@EVERY
def test_shapes_and_dtypes(case: Case) -> None:
    x = build(replace(case, dtype=torch.bfloat16))
    kv_heads, value_dim = case.kv_heads or case.heads, case.value_dim or case.head_dim
    assert x.q.shape == (case.batch, case.q_len, case.heads, case.head_dim)
    assert x.k.shape == (case.batch, case.k_len, kv_heads, case.head_dim)
    assert x.v.shape == (case.batch, case.k_len, kv_heads, value_dim)
    assert x.grad_out.shape == (case.batch, case.q_len, case.heads, value_dim)
    assert {t.dtype for t in (x.q, x.k, x.v, x.grad_out)} == {torch.bfloat16}
    if x.mask.dense is not None:
        full = (*case.shape,)
        assert all(n in (1, size) for n, size in zip(x.mask.dense.shape, full, strict=True))
        assert all(s > 0 for n, s in zip(x.mask.dense.shape, x.mask.dense.stride(), strict=True) if n > 1)
    assert x.mask.causal == case.causal
    assert x.wanted.bias == (x.mask.bias is not None)


@EVERY
def test_the_same_numbers_in_every_dtype_and_order(case: Case) -> None:
    """Rounding is all that may differ."""
    wide = build(replace(case, dtype=torch.float32))
    build(CASES[0])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        again = build(replace(case, dtype=dtype))
        for name in ("q", "k", "v", "grad_out"):
            assert torch.equal(getattr(again, name), getattr(wide, name).to(dtype))
        assert all(t.isfinite().all() for t in (again.q, again.k, again.v, again.grad_out))


@pytest.mark.parametrize("case", FULL, ids=lambda c: c.id)
def test_upstream_gradients_are_random_and_values_vary(case: Case) -> None:
    x = build(case)
    assert x.grad_out.unique().numel() > x.grad_out.numel() / max(case.batch, 1) / 2
    assert case.k_len == 1 or (x.v[:, :1] != x.v[:, 1:]).all()


def test_the_cases_cover_what_the_design_asks_for() -> None:
    squares = [c for c in FULL if c.q_len == c.k_len and c.batch >= 2]
    assert any(c.heads == c.q_len for c in squares)
    assert any(c.heads != c.q_len for c in squares)
    assert {1, 5, 16, 33, 129} <= {c.q_len for c in squares}
    assert all(c.batch >= 2 for c in FULL)
    assert {c.storage for c in CASES} == set(STORAGE)
    assert {c.values for c in (*CASES, *MORE)} == set(VALUES)
    patterns = {p.partition(":")[0].removesuffix("_input") for c in CASES for p in c.mask.split("+") if p}
    assert patterns == set(DENSE) | set(KEYS) | set(SEGMENTS)
    offsets = [(c.causal, c.k_len - c.q_len) for c in FULL if c.causal is not None]
    assert any(o < 0 for o, _ in offsets)
    assert any(o == bottom_right != 0 for o, bottom_right in offsets)
    assert any(o > max(0, bottom_right) for o, bottom_right in offsets)
    assert any(c.kv_heads and c.kv_heads < c.heads for c in FULL)
    assert {0.0, -0.3} <= {c.scale for c in FULL}
    assert {(c.batch == 0, c.q_len == 0, c.k_len == 0) for c in CASES} >= {
        (True, False, False),
        (False, True, False),
        (False, False, True),
    }


@pytest.mark.parametrize("storage", [s for s in STORAGE if s != "expanded"])
def test_storage_changes_no_number(storage: str) -> None:
    plain = Case("stored", 8, 8, heads=2)
    a, b = build(plain), build(replace(plain, storage=storage))
    assert all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("q", "k", "v", "grad_out"))


def test_storage_is_what_its_name_says() -> None:
    base = Case("stored", 8, 8, heads=2)
    x = {name: build(replace(base, storage=name)) for name in STORAGE}
    outer = x["heads_outermost"]
    assert all(t.transpose(1, 2).is_contiguous() and not t.is_contiguous() for t in (outer.q, outer.k, outer.grad_out))
    fused = x["fused"]
    assert len({t.untyped_storage().data_ptr() for t in (fused.q, fused.k, fused.v)}) == 1
    assert [t.storage_offset() for t in (fused.q, fused.k, fused.v)] == [0, 32, 64]
    assert fused.grad_out.stride(0) == 2 * 8 * 2 * 16
    expanded = x["expanded"]
    assert (expanded.q.stride(0), expanded.k.stride(2), expanded.v.stride(2), expanded.grad_out.stride(0)) == (0,) * 4
    odd = x["misaligned"]
    assert all(t.storage_offset() == 1 and t.stride(2) == 17 for t in (odd.q, odd.k, odd.v, odd.grad_out))
    inner = x["inner_strided"]
    assert all(t.stride(-1) != 1 for t in (inner.q, inner.k, inner.v, inner.grad_out))


def test_peaked_rows_have_little_entropy_and_heavy_tails_are_heavy() -> None:
    base = Case("values", 64, 64, dtype=torch.float64)
    entropy, tail = {}, {}
    for name in VALUES:
        x = build(replace(base, values=name))
        weights = truth_of(x).weights
        entropy[name] = float(-(weights * weights.clamp_min(1e-300).log()).sum(-1).mean())
        tail[name] = float((x.v**4).mean() / (x.v**2).mean() ** 2)
    assert entropy["peaked"] < 0.25 * entropy["gaussian"]
    assert tail["heavy"] > 3 * tail["gaussian"]


@pytest.mark.parametrize("name", ["some", "strided", "single", "blind"])
def test_boolean_patterns(name: str) -> None:
    keep = build(Case("pattern", 13, 18, mask=f"{name}:bqk")).mask.dense
    assert keep is not None
    live = keep.sum(-1)
    blind = torch.zeros(13, dtype=torch.bool)
    blind[1::3] = name == "blind"
    assert ((live == 0) == blind).all()
    assert not keep.all()
    if name == "single":
        assert (live == 1).all()
    assert keep.is_contiguous() == (name != "strided")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", ["float_lowest_input:bqk", "float_lowest_rows_input:bqk", "bias_lowest_input"])
def test_lowest_numbers_are_finite_and_the_dtypes_own(pattern: str, dtype: torch.dtype) -> None:
    bias = build(Case("lowest", 13, 18, mask=pattern, dtype=dtype)).mask.bias
    assert bias is not None
    assert bias.dtype == dtype
    assert bias.min() == torch.finfo(dtype).min
    live = (bias == 0).any(-1)
    assert live.all() != ("rows" in pattern)


def test_float_masks_are_float32_unless_they_follow_the_inputs() -> None:
    for pattern, dtype in (("float:qk", torch.float32), ("float_input:qk", torch.float16), ("bias", torch.float32)):
        bias = build(Case("bias", 5, 6, mask=pattern, dtype=torch.float16)).mask.bias
        assert bias is not None
        assert bias.dtype == dtype


def test_ragged_keys_are_leading_and_never_empty() -> None:
    keep = build(Case("ragged", 5, 21, mask="keep_ragged", batch=3)).mask.key_keep
    assert keep is not None
    lengths = keep.sum(1).tolist()
    assert len(set(lengths)) == 3
    assert min(lengths) >= 1
    assert all(row[:n].all() for row, n in zip(keep, lengths, strict=True))


def test_the_gradient_of_a_mask_can_be_left_out() -> None:
    assert not build(case("bias"), dbias=False).wanted.bias
    assert build(case("bias")).wanted.bias
