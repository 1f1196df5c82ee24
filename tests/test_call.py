"""A validated call: one Mask, Options and Facts, and nothing that was passed copied or lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ringtrue as rt
from calls import one_thread as one_thread
from calls import qkv
from ringtrue.call import Call, normalise

Q, K, V = qkv(6, 5, heads=4)


def mask_of(call: Call, *kinds: str) -> Any:
    assert call.mask.kinds == set(kinds) == call.facts.mask_kinds
    return call.mask


@pytest.mark.parametrize("mask", [True, torch.ones(5), torch.ones(6, 1), torch.ones(4, 1, 5), torch.ones(2, 4, 6, 5)])
def test_dense_masks_become_four_dims_and_are_never_expanded(mask: object) -> None:
    mask = torch.as_tensor(mask)
    kind = "dense_bool" if mask.dtype == torch.bool else "dense_float"
    dense = mask_of(normalise(Q, K, V, attn_mask=mask), kind).dense
    assert dense.shape == (1,) * (4 - mask.dim()) + mask.shape
    assert dense.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
    wide = mask.expand(2, 4, 6, 5)
    again = normalise(Q, K, V, attn_mask=wide).mask.dense
    assert again is not None
    assert again.shape == dense.shape


def test_an_expanded_mask_that_wants_its_gradient_keeps_a_place_for_each() -> None:
    mask = torch.zeros(1, 1, 6, 5).expand(2, 4, 6, 5).requires_grad_()
    assert normalise(Q, K, V, attn_mask=mask).mask.dense is mask
    with torch.no_grad():
        assert normalise(Q, K, V, attn_mask=mask).mask.dense.shape == (1, 1, 6, 5)  # type: ignore[union-attr]


def test_causal_parts_are_an_offset() -> None:
    assert normalise(Q, K, V).mask.causal is None
    assert normalise(Q, K, V, is_causal=True).mask.causal == 0
    assert normalise(Q, K, V, attn_mask=rt.Causal("bottom_right")).mask.causal == 5 - 6
    both = normalise(Q, K, V, attn_mask=rt.Causal("bottom_right"), is_causal=True)
    assert both.mask.causal == min(0, 5 - 6)
    assert both.alignments == {"top_left", "bottom_right"}


def test_windows_are_two_offsets() -> None:
    def ends(mask: Any) -> tuple[Any, ...]:
        call = normalise(Q, K, V, attn_mask=mask)
        return call.mask.since, call.mask.causal, call.window

    assert ends(rt.Window(2, 1)) == (-2, 1, (-2, 1))
    assert ends(rt.Window(-2, 3)) == (2, 3, (2, 3))
    assert ends(rt.Window(None, 1) & rt.Window(3)) == (-3, 1, (-3, 1))
    assert ends(rt.Window(2, 4) & rt.Window(3, 1)) == (-2, 1, (-2, 1))
    assert ends(rt.Window(2, 4) & rt.Causal()) == (-2, 0, (-2, 4))
    assert ends(rt.Window(2, -1) & rt.Causal("bottom_right")) == (-2, -1, (-2, -1))
    assert ends(rt.Window()) == (None, None, (None, None))
    assert ends(rt.Window(10**30, 10**30)) == (-6, 5, (-(10**30), 10**30))  # no kernel meets numbers of that size
    assert ends(rt.Window(-(10**30), 10**31))[:2] == (5, 5)


def test_segments_are_two_rows_of_ids() -> None:
    ids, other = torch.zeros(2, 6, dtype=torch.int32), torch.zeros(2, 5)
    mask = mask_of(normalise(Q, K, V, attn_mask=rt.Segments(ids, other.long())), "segments")
    assert mask.q_segments is ids
    assert mask.k_segments.dtype == torch.int64
    mask = mask_of(normalise(Q, Q, Q, attn_mask=rt.Segments(ids) & rt.Causal() & rt.Window(3)), "segments", "window")
    assert mask.q_segments is mask.k_segments is ids


def test_what_is_joined_applies_together() -> None:
    keep, rows = torch.rand(2, 5) < 0.5, torch.rand(6, 5) < 0.5
    other, bias = torch.rand(2, 1, 1, 5) < 0.5, torch.randn(4, 6, 5)
    joined = normalise(Q, K, V, attn_mask=rt.KeyPadding(keep) & rows & other & rt.KeyPadding(~keep), is_causal=True)
    mask = mask_of(joined, "dense_bool", "key_keep")
    assert torch.equal(mask.dense, rows & other)
    assert not mask.key_keep.any()
    for parts in (rt.Dense(rows) & bias, rt.Dense(bias) & rows):
        dense = mask_of(normalise(Q, K, V, attn_mask=parts), "dense_float").dense
        assert torch.equal(dense, bias.masked_fill(~rows, -math.inf)[None])


def test_a_wider_float_mask_is_narrowed_without_making_its_lowest_number_forbid() -> None:
    lowest, narrow = torch.finfo(torch.float64).min, torch.finfo(torch.float32).min
    mask = torch.tensor([[0.5, lowest, -math.inf, -1e300, 2.0]], dtype=torch.float64)
    dense = normalise(Q, K, V, attn_mask=mask).mask.dense
    assert dense is not None
    assert dense.dtype == torch.float32
    assert dense[0, 0, 0].tolist() == [0.5, narrow, -math.inf, narrow, 2.0]
    wide = normalise(*qkv(6, 5, dtype=torch.float64), attn_mask=mask).mask.dense
    assert wide is not None
    assert torch.equal(wide[0, 0], mask)


def test_facts_say_what_a_backend_may_look_at() -> None:
    q, k, v = qkv(6, 5, heads=4, kv_heads=2, value_dim=3, grad="qv")
    bias = torch.zeros(5, requires_grad=True)
    arguments: Any = {"attn_mask": bias, "is_causal": True, "enable_gqa": True, "return_lse": True, "layout": "bshd"}
    facts = normalise(q, k, v, **arguments, backend_options={"b": 1, "a": 2}).facts
    assert (facts.batch, facts.q_len, facts.k_len, facts.heads, facts.kv_heads) == (2, 6, 5, 4, 2)
    assert (facts.head_dim, facts.value_dim, facts.causal, facts.needs_lse) == (8, 3, 0, True)
    assert facts.wanted == (True, False, True, True)
    assert facts.options == (("a", 2), ("b", 1))
    swapped = normalise(*(x.transpose(1, 2) for x in (q, k, v)), **{**arguments, "layout": "bhsd"})
    assert (swapped.facts.q_len, swapped.facts.heads, swapped.q.stride()) == (6, 4, q.stride())
    with torch.no_grad():
        assert not normalise(q, k, v, **arguments).facts.training


def test_deterministic_follows_torch_unless_told() -> None:
    assert not normalise(Q, K, V).options.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert normalise(Q, K, V).options.deterministic
        assert not normalise(Q, K, V, deterministic=False).options.deterministic
    finally:
        torch.use_deterministic_algorithms(False)
