"""A call that does not fit together is refused before any kernel, with the call, limit, value and remedy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ringtrue as rt
from calls import one_thread as one_thread
from calls import qkv, refused, unreachable
from ringtrue.call import normalise

Q, K, V = qkv(6, 5, heads=4)
SAME = "q=float32[2, 6, 4, 8], k=float32[2, 5, 4, 8], v=float32[2, 5, 4, 8]"


def some(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, device=device).to(dtype)


UNFIT: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, object], tuple[object, ...]]] = {
    "dtypes": ((Q, K.half(), V.double()), {}, ("differ in dtype", "torch.float32, torch.float16, torch.float64")),
    "integers": ((Q.int(), K.int(), V.int()), {}, ("dtype is not supported", "torch.bfloat16", "torch.int32")),
    "float8": (tuple(x.to(torch.float8_e4m3fn) for x in (Q, K, V)), {}, ("not supported", "torch.float8_e4m3fn")),
    "devices": ((Q, K.to("meta"), V), {}, ("different devices", "cpu, meta, cpu")),
    "batch": ((Q, K[:1], V[:1]), {}, ("differ in batch", "one batch size", "2, 1, 1")),
    "batch of value": ((Q, K, V[:1]), {}, ("differ in batch", "2, 2, 1")),
    "key and value length": ((Q, K, V[:, :4]), {}, ("key and value differ in length", "key 5, value 4")),
    "head dims": ((Q, K[..., :4], V), {}, ("query and key differ in head dim", "query 8, key 4")),
    "no head dim": ((Q[..., :0], K[..., :0], V), {}, ("head dim is 0", "at least 1")),
    "no value dim": ((Q, K, V[..., :0]), {}, ("head dim is 0", "value 0")),
    "key and value heads": ((Q, K[:, :, :2], V), {"enable_gqa": True}, ("differ in heads", "key 2, value 4")),
    "grouped heads without the flag": (
        (Q, K[:, :, :2], V[:, :, :2]), {}, ("enable_gqa is False", "query heads 4, key heads 2", "enable_gqa=True"),
    ),
    "heads that do not divide": (
        (Q, K[:, :, :3], V[:, :, :3]), {"enable_gqa": True}, ("not a multiple", "divide", "4 and 3", "enable_gqa=True"),
    ),
    "more key heads": ((Q[:, :, :2], K, V), {"enable_gqa": True}, ("not a multiple", "2 and 4")),
    "no key heads": ((Q, K[:, :, :0], V[:, :, :0]), {"enable_gqa": True}, ("not a multiple", "4 and 0")),
    "three dims": ((Q[0], K, V), {}, ("query has 3 dims", "(B, S, H, D)", "(6, 4, 8)", "split heads")),
    "sparse": ((Q, K.to_sparse(), V), {}, ("key is not a plain strided tensor", "sparse")),
    "layout": ((Q, K, V), {"layout": "sbhd"}, ("unknown layout", '"bshd" or "bhsd"', "'sbhd'")),
    "no layout": ((Q, K, V), {"layout": None}, ("unknown layout", "None")),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_tensors_that_do_not_fit_together(name: str) -> None:
    tensors, arguments, parts = UNFIT[name]
    with refused(rt.ArgumentError, "call:   attention(q=", "value:", *parts, unchanged=tensors):
        rt.attention(*tensors, **arguments, backend=unreachable())  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, [[1.0]], np.ones((2, 6, 4, 8), dtype=np.float32), 1.0])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_a_tensor(place: int, wrong: object) -> None:
    tensors: list[Any] = [Q, K, V]
    tensors[place] = wrong
    name = ("query", "key", "value")[place]
    with refused(rt.ArgumentError, f"{name} is not a tensor", "torch.Tensor", type(wrong).__name__):
        rt.attention(*tensors, backend=unreachable())


def test_nested_tensors() -> None:
    with pytest.warns(UserWarning, match="prototype"):
        nested = torch.nested.nested_tensor([torch.ones(3, 4, 8), torch.ones(5, 4, 8)])
    with refused(rt.ArgumentError, "query is not a plain strided tensor", "pad it, and mask the padding"):
        rt.attention(nested, K, V, backend=unreachable())
    with refused(rt.ArgumentError, "attn_mask is not a plain strided tensor"):
        rt.attention(Q, K, V, nested, backend=unreachable())


MASKS: dict[str, tuple[object, tuple[object, ...]]] = {
    "keys per sample": (some(2, 5, dtype=torch.bool), ("mask (2, 5)", "KeyPadding(mask) with a bool (2, 5) tensor")),
    "keys per sample, one dim more": (some(2, 1, 5), ("mask (2, 1, 5)", "KeyPadding(mask) with a bool (2, 5) tensor")),
    "rows and keys swapped": (some(5, 6), ("mask (5, 6)", "a 2-D mask is (Sq, Sk)", "KeyPadding(bool (B, Sk))")),
    "another batch": (some(3, 1, 6, 5), ("mask (3, 1, 6, 5)",)),
    "key heads": (some(2, 2, 6, 5), ("mask (2, 2, 6, 5)",)),
    "five dims": (some(1, 1, 1, 6, 5), ("mask (1, 1, 1, 6, 5)",)),
    "empty": (some(6, 0), ("mask (6, 0)",)),
    "in a set": (rt.Causal() & some(2, 5), ("mask (2, 5)", "Causal(alignment='top_left') & float32[2, 5]")),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_does_not_broadcast_shows_both_shapes(name: str) -> None:
    mask, parts = MASKS[name]
    with refused(rt.ArgumentError, "does not broadcast", "(B, H, Sq, Sk) = (2, 4, 6, 5), right-aligned", *parts, SAME):
        rt.attention(Q, K, V, mask, backend=unreachable())


BIAS = rt.KeyBias(some(2, 5))
IDS = some(2, 6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("mask", "parts"),
    [
        (some(6, 5, dtype=torch.int32), ("neither bool nor float", "torch.int32", "mask.bool()")),
        (some(6, 5, dtype=torch.uint8), ("neither bool nor float", "torch.uint8", "mask.bool()")),
        (some(6, 5, dtype=torch.complex64), ("neither bool nor float", "torch.complex64")),
        (some(6, 5).to_sparse(), ("not a plain strided tensor", "mask.to_dense()")),
        (some(6, 5, device="meta"), ("attn_mask is on another device", "cpu", "meta")),
        (rt.KeyPadding(some(2, 6, dtype=torch.bool)), ("KeyPadding does not fit the keys", "(2, 5)", "(2, 6)")),
        (rt.KeyPadding(some(1, 5, dtype=torch.bool)), ("KeyPadding does not fit the keys", "(2, 5)", "(1, 5)")),
        (rt.KeyBias(some(2, 4)), ("KeyBias does not fit the keys", "(2, 5)", "(2, 4)")),
        (rt.KeyBias(some(2, 5, device="meta")), ("KeyBias is on another device", "cpu", "meta")),
        (rt.Segments(IDS), ("Segments (k_ids=None means q_ids) does not fit the keys", "(2, 5)", "(2, 6)")),
        (rt.Segments(IDS[:, :5]), ("Segments does not fit the queries", "(2, 6)", "(2, 5)")),
        (rt.Segments(IDS[:1], IDS[:1, :5]), ("Segments does not fit the queries", "(2, 6)", "(1, 6)")),
        (rt.Segments(IDS, IDS[:, :5].to("meta")), ("Segments is on another device", "cpu", "meta")),
        (
            rt.Segments(IDS.to(torch.uint16), IDS[:, :5]),
            ("Segments: torch cannot compare", "one dtype", "torch.uint16, torch.int32", "cast"),
        ),
        (
            rt.Segments(IDS, IDS[:, :5]) & rt.Segments(IDS, IDS[:, :5]),
            ("two Segments", "at most one", "one id for each"),
        ),
        (BIAS & BIAS, ("two float masks", "KeyBias & KeyBias", "add them yourself")),
        (BIAS & some(6, 5), ("two float masks", "a float tensor & KeyBias", "add them yourself")),
        (rt.Dense(some(6, 5)) & some(6, 5), ("two float masks", "float tensor & float tensor", "add them yourself")),
    ],
)
def test_masks_of_the_wrong_kind(mask: object, parts: tuple[str, ...]) -> None:
    with refused(rt.ArgumentError, *parts, f"call:   attention({SAME}, attn_mask="):
        rt.attention(Q, K, V, mask, backend=unreachable())


NUMBERS: list[tuple[str, object, str]] = [
    *(("scale", x, "a float, or None") for x in (math.nan, math.inf, "1", True, 1j, torch.tensor(0.5), [1.0], 10**400)),
    *(("dropout_p", x, "0 <= dropout_p < 1") for x in (-0.1, 1.0, 1.5, math.nan, True, None, "0", torch.tensor(0.1))),
    *(("softcap", x, "0 (off) or positive") for x in (-1.0, math.inf, math.nan, None, True, torch.tensor(30.0))),
    *(("is_causal", x, "True or False") for x in (None, 1, "yes", torch.ones(6, 5, dtype=torch.bool))),
    *(("enable_gqa", x, "True or False") for x in (None, 1)),
    *(("return_lse", x, "True or False") for x in (None, 1)),
    *(("deterministic", x, "True or False") for x in (1, "warn")),
    *(("backend_options", x, "dict of option name") for x in ([("a", 1)], "a", {1: 2, "a": 3})),
    *(("backend_options", {"a": x}, "a: a name, number or flag") for x in ([1], {1: 2}, {3})),
]


@pytest.mark.parametrize(("name", "value", "limit"), NUMBERS)
def test_numbers_and_flags_are_what_they_say(name: str, value: object, limit: str) -> None:
    with refused(rt.ArgumentError, f"{name} is not", limit, "call:", "value:"):
        rt.attention(Q, K, V, **{name: value}, backend=unreachable())  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.25, 1, np.float32(0.25), np.float64(0.25), np.int64(1), 0, 0.0, -0.0, -0.5])
def test_plain_numbers_of_any_make_are_a_scale(scale: float) -> None:
    options = normalise(Q, K, V, scale=scale).options
    assert options.scale == float(scale)
    assert type(options.scale) is float


@pytest.mark.parametrize(("shape", "hint"), [((2, 3, 9, 8), True), ((2, 9, 3, 8), False), ((2, 9, 9, 8), False)])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_more_heads_than_tokens_may_mean_the_other_layout(shape: tuple[int, ...], hint: bool, layout: str) -> None:
    q = torch.ones(shape)
    for wrong, kind in (
        ({"scale": math.nan}, rt.ArgumentError),
        ({"attn_mask": torch.ones(7, 7)}, rt.ArgumentError),
        ({"dropout_p": 0.5}, rt.UnsupportedError),
        ({"backend_options": {"speed": 1}}, rt.UnsupportedError),
    ):
        with pytest.raises(kind) as caught:
            rt.attention(q, q, q, layout=layout, backend=unreachable(dropout=False), **wrong)  # type: ignore[arg-type]
        assert ("heads 9 > length 3: did you pass bhsd?" in str(caught.value)) == (hint and layout == "bshd")


def test_the_hint_is_no_error_of_its_own() -> None:
    q = torch.randn(1, 2, 9, 4)
    assert rt.attention(q, q, q).shape == q.shape
