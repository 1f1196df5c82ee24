"""What users pass as attn_mask: how parts join, what is refused at once, and which rows see nothing."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringtrue as rt
import ringtrue.masks
from calls import assert_close, eager, qkv, refused
from calls import one_thread as one_thread
from ringtrue.contract import Mask
from ringtrue.masks import MaskSet, allowed, dense_bias, live_rows, parts_of, whole_bias

CPU = torch.device("cpu")
KEEP = torch.tensor([[True, True, False], [True, False, True]])
ROWS = torch.ones(2, 3, dtype=torch.bool)
IDS = torch.tensor([[0, 0, 1], [2, 2, 2]])


@pytest.mark.parametrize("rows", [ROWS, torch.randn(2, 3)])
def test_parts_join_from_either_side_in_the_order_written(rows: Tensor) -> None:
    causal, padding = rt.Causal(), rt.KeyPadding(KEEP)
    assert parts_of(causal & padding) == (causal, padding)
    assert [type(p) for p in parts_of(rows & causal)] == [rt.Dense, rt.Causal]
    left, right = parts_of(causal & rows), parts_of(rows & causal)
    assert left[0] is causal is right[1]
    assert left[1].mask is right[0].mask is rows  # type: ignore[attr-defined]
    flat = parts_of((causal & padding) & (rows & rt.Causal("bottom_right")))
    assert [type(p) for p in flat] == [rt.Causal, rt.KeyPadding, rt.Dense, rt.Causal]
    assert parts_of(causal & None) == (causal,)
    assert parts_of(None) == ()


@pytest.mark.parametrize("other", [True, 0, [[True]], np.ones((2, 3), dtype=bool), "causal", rt.Causal])
def test_anything_else_is_refused_by_its_type(other: object) -> None:
    with refused(rt.ArgumentError, "neither a tensor nor a mask object", type(other).__name__, "KeyPadding"):
        _ = rt.Causal() & other
    q = torch.zeros(2, 2, 1, 4)
    with refused(rt.ArgumentError, "neither a tensor nor a mask object", type(other).__name__, unchanged=(q,)):
        rt.attention(q, torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, 4), other)


@pytest.mark.parametrize("alignment", ["", "left", "TOP_LEFT", None, 1])
def test_causal_knows_two_alignments(alignment: object) -> None:
    with refused(rt.ArgumentError, "Causal", '"top_left" or "bottom_right"', repr(alignment)):
        rt.Causal(alignment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "given", "seen"),
    [
        (rt.KeyPadding, torch.ones(2, 3), "(2, 3) torch.float32"),
        (rt.KeyPadding, torch.ones(2, 3, dtype=torch.long), "torch.int64"),
        (rt.KeyPadding, torch.ones(3, dtype=torch.bool), "(3,)"),
        (rt.KeyPadding, torch.ones(2, 1, 1, 3, dtype=torch.bool), "(2, 1, 1, 3)"),
        (rt.KeyPadding, [[True]], "list"),
        (rt.KeyBias, torch.ones(2, 3, dtype=torch.bool), "torch.bool"),
        (rt.KeyBias, torch.ones(2, 3, dtype=torch.long), "torch.int64"),
        (rt.KeyBias, torch.ones(2, 1, 3), "(2, 1, 3)"),
        (rt.KeyBias, None, "NoneType"),
        (rt.Segments, torch.ones(2, 3), "(2, 3) torch.float32"),
        (rt.Segments, torch.ones(2, 3, dtype=torch.bool), "torch.bool"),
        (rt.Segments, torch.ones(3, dtype=torch.long), "(3,)"),
        (rt.Segments, [[0]], "list"),
    ],
)
def test_key_masks_are_one_row_per_sample(make: Callable[..., object], given: object, seen: str) -> None:
    with refused(rt.ArgumentError, make.__name__, "(B, S", seen):  # type: ignore[attr-defined]
        make(given)


@pytest.mark.parametrize("ends", [(-1, 0), (0, -1), (-3, 2), (1.0, None), (None, True), ("1", 2), (torch.tensor(1), 1)])
def test_a_window_has_two_ends_and_something_between(ends: tuple[object, object]) -> None:
    with refused(rt.ArgumentError, "Window", "left + right >= 0", f"left={ends[0]!r}"):
        rt.Window(*ends)  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", [[], [0], [1, 4], [0, 3, 2, 4], [0, 3, -1]])
@pytest.mark.parametrize("length", [None, 4])
def test_documents_end_one_after_the_other(ends: list[int], length: int | None) -> None:
    with refused(rt.ArgumentError, "from_cu_seqlens", "ascending"):
        rt.Segments.from_cu_seqlens(torch.tensor(ends, dtype=torch.int32), length)


def test_documents_from_where_they_end() -> None:
    ends = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    for length in (None, 6):
        segments = rt.Segments.from_cu_seqlens(ends, length)
        assert segments.q_ids.tolist() == [[1, 1, 3, 3, 3, 4]]
        assert segments.k_ids is None
    with refused(rt.ArgumentError, "from_cu_seqlens", "7]"):
        rt.Segments.from_cu_seqlens(ends, 7)
    for wrong in (ends.float(), ends[None], [0, 6]):
        with refused(rt.ArgumentError, "from_cu_seqlens", "integer (documents + 1,)"):
            rt.Segments.from_cu_seqlens(wrong)  # type: ignore[arg-type]


def test_masks_are_values() -> None:
    assert rt.Causal() == rt.Causal("top_left") != rt.Causal("bottom_right")
    assert len({rt.Causal(), rt.Causal()}) == 1
    assert rt.Window(1, 2) == rt.Window(1, 2) != rt.Window(2, 1)
    for mask, name in (
        (rt.Causal(), "alignment"),
        (rt.Window(1), "left"),
        (rt.Segments(IDS), "q_ids"),
        (rt.KeyPadding(KEEP), "keep"),
        (rt.Dense(ROWS), "mask"),
    ):
        with pytest.raises(AttributeError):
            setattr(mask, name, None)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_masks_can_be_copied_and_sent(again: Callable[[object], object]) -> None:
    mask = again(rt.Causal("bottom_right") & rt.KeyPadding(KEEP) & torch.ones(2, 3))
    assert isinstance(mask, MaskSet)
    causal, padding, dense = mask.parts
    assert causal == rt.Causal("bottom_right")
    assert torch.equal(padding.keep, KEEP)  # type: ignore[attr-defined]
    assert torch.equal(dense.mask, torch.ones(2, 3))  # type: ignore[attr-defined]


def test_a_mask_as_text_shows_no_content() -> None:
    """Printing a tensor copies it from the device, and every call is described."""
    mask = rt.Causal() & rt.KeyPadding(KEEP) & rt.KeyBias(torch.ones(2, 3)) & torch.ones(4, 3)
    text = "Causal(alignment='top_left') & KeyPadding(bool[2, 3]) & KeyBias(float32[2, 3]) & float32[4, 3]"
    assert repr(mask) == text
    more = rt.Window(3) & rt.Segments(IDS) & rt.Segments(IDS, IDS.int())
    assert repr(more) == "Window(left=3, right=None) & Segments(int64[2, 3]) & Segments(int64[2, 3], int32[2, 3])"


Axes = tuple[int, int, int]


def masks(
    q_len: int, k_len: int, seed: int, causal: int | None, since: int | None, parts: set[str], axes: Axes
) -> Mask:
    draw = torch.Generator().manual_seed(seed)
    shape = (2 if axes[0] else 1, 3 if axes[1] else 1, q_len if axes[2] else 1, k_len)
    bools = torch.rand(shape, generator=draw) < 0.3
    floats = torch.randn(shape, generator=draw).masked_fill(torch.rand(shape, generator=draw) < 0.7, -math.inf)
    keep = torch.rand(2, k_len, generator=draw) < 0.5
    ids = [torch.randint(4, (2, n), generator=draw) for n in (q_len, k_len)]
    return Mask(
        bools if "bool" in parts else floats if "float" in parts else None,
        keep if "keep" in parts else None,
        torch.randn(2, k_len, generator=draw).masked_fill(~keep, -math.inf) if "bias" in parts else None,
        *(ids if "segments" in parts else ()),
        causal=causal,
        since=since,
    )


ANY_MASK = st.builds(
    masks,
    q_len=st.integers(1, 6),
    k_len=st.integers(1, 6),
    seed=st.integers(0, 999),
    causal=st.none() | st.integers(-7, 7),
    since=st.none() | st.integers(-7, 7),
    parts=st.sets(st.sampled_from(["bool", "float", "keep", "bias", "segments"])),
    axes=st.tuples(*[st.integers(0, 1)] * 3),
)


def sizes(mask: Mask, q_len: int = 6, k_len: int = 6) -> tuple[int, int]:
    if mask.q_segments is not None and mask.k_segments is not None:
        return mask.q_segments.shape[1], mask.k_segments.shape[1]
    part = next((x for x in (mask.dense, mask.key_keep, mask.key_bias) if x is not None), None)
    rows = q_len if mask.dense is None or mask.dense.shape[2] == 1 else mask.dense.shape[2]
    return rows, k_len if part is None else part.shape[-1]


@settings(derandomize=True, max_examples=250, deadline=None)
@given(ANY_MASK, st.sampled_from([2, 1024]))
def test_live_rows_are_those_with_a_key(mask: Mask, block: int) -> None:
    q_len, k_len = sizes(mask)
    where = allowed(mask, q_len, k_len, CPU)
    with mock.patch.object(ringtrue.masks, "BLOCK", block):
        live = live_rows(mask, q_len, k_len, CPU)
    whole = torch.ones(2, 3, q_len, k_len, dtype=torch.bool) if where is None else where.expand(2, 3, q_len, k_len)
    found = torch.ones(2, 3, q_len, dtype=torch.bool) if live is None else live.expand(2, 3, q_len)
    assert torch.equal(found, whole.any(-1))


@pytest.mark.parametrize("kind", ["key_keep", "key_bias", "dense"])
def test_live_rows_make_nothing_of_the_size_of_all_scores(kind: str) -> None:
    """10^11 scores: they would not fit."""
    length = 300_000
    keys = torch.zeros(1, length).index_fill(1, torch.tensor([7]), 1.0).log()  # only key 7 may be attended to
    part = {"key_keep": keys == 0, "key_bias": keys, "dense": keys[:, None, None]}[kind]
    live = live_rows(Mask(**{kind: part}, causal=-2), length, length, CPU)
    assert live is not None
    assert live.expand(1, 1, length)[0, 0].sum() == length - 9
    live = live_rows(Mask(**{kind: part}, causal=3, since=-5), length, length, CPU)
    assert live is not None
    assert live.expand(1, 1, length)[0, 0].nonzero().flatten().tolist() == list(range(4, 13))


def test_live_rows_of_segments_are_not_compared_with_all_keys() -> None:
    length = 300_000
    ids = torch.arange(length).remainder(1000).unsqueeze(0)
    live = live_rows(Mask(key_keep=ids != 3, q_segments=ids, k_segments=ids.flip(1)), length, length, CPU)
    assert live is not None
    assert live.sum() == length - 300  # the keys of one id are not kept


@settings(derandomize=True, max_examples=60, deadline=None)
@given(ANY_MASK, st.tuples(*[st.integers(0, 6)] * 4))
def test_a_part_of_a_mask_is_the_mask_of_that_part(mask: Mask, cuts: tuple[int, int, int, int]) -> None:
    q_len, k_len = sizes(mask)
    a, b = sorted(min(c, q_len) for c in cuts[:2])
    c, d = sorted(min(c, k_len) for c in cuts[2:])
    part = mask.at(slice(a, b), slice(c, d))
    whole = allowed(mask, q_len, k_len, CPU)
    some = allowed(part, b - a, d - c, CPU)
    expected = torch.ones(2, 3, q_len, k_len) if whole is None else whole.expand(2, 3, q_len, k_len).float()
    got = torch.ones(2, 3, b - a, d - c) if some is None else some.expand(2, 3, b - a, d - c).float()
    assert torch.equal(got, expected[:, :, a:b, c:d])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(ANY_MASK)
def test_one_bias_says_all_that_is_not_a_place(mask: Mask) -> None:
    q_len, k_len = sizes(mask)
    every = allowed(mask, q_len, k_len, CPU)
    whole = whole_bias(mask, torch.float64, q_len, k_len, CPU).expand(2, 3, q_len, k_len)
    assert torch.equal(whole != -math.inf, torch.ones(whole.shape) > 0 if every is None else every.expand(whole.shape))
    bias = dense_bias(mask, torch.float64)
    where = allowed(Mask(mask.dense, mask.key_keep, mask.key_bias), q_len, k_len, CPU)
    if bias is None or where is None:
        assert bias is where is None
        return
    assert bias.dtype == torch.float64
    assert torch.equal((bias != -math.inf).expand(2, 3, q_len, k_len), where.expand(2, 3, q_len, k_len))


def test_bias_and_keep_add_up_to_the_same_attention() -> None:
    q, k, v = qkv(4, 3, heads=1, dtype=torch.float64)
    bias = torch.randn(2, 3)
    mask = Mask(ROWS[None, None, :1], KEEP, bias)
    combined = dense_bias(mask, torch.float64)
    expected = bias.double().masked_fill(~KEEP, -math.inf)[:, None, None]
    assert combined is not None
    assert_close(eager(q, k, v, combined)[0], eager(q, k, v, expected)[0])
