"""Padded keys and segments as sequences one after another: against masks written out, and broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from calls import assert_close, like, qkv
from contract.subjects import verdicts
from ringtrue.audit.cases import case
from ringtrue.backends import _packed, flash, native_math
from ringtrue.backends._packed import Packing, kept_shapes, packing
from ringtrue.contract import Mask, OpPair, Options, Wanted
from ringtrue.edge import edge
from ringtrue.errors import UnsupportedError
from standins import flash_attn_2

PAIR = flash.make_varlen_pair("flash_varlen", lambda: flash_attn_2)
WANTED = Wanted(True, True, True)
FAR = 2**62


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


Q_IDS, K_IDS = ids([2, -1, 2, 7, FAR], [0, 0, 0, 5, 0]), ids([-1, FAR, 3, 2, 2, -FAR, -1], [4, 4, 4, 4, 4, 4, 4])
K_SORTED = ids([0, 1, 1, 1, 2, 2, 2], [3, 3, 4, 4, 5, 5, 6])
HOLES = torch.tensor([[1, 1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 0, 1, 0]]).bool()
MASKS = {
    "holes": Mask(key_keep=HOLES),
    "a sample without keys": Mask(key_keep=HOLES & torch.tensor([[True], [False]])),
    "no keys at all": Mask(key_keep=torch.zeros(2, 7, dtype=torch.bool)),
    "ids in any order, of int32 and int64": Mask(q_segments=Q_IDS, k_segments=K_IDS),
    "ids and holes": Mask(key_keep=HOLES, q_segments=Q_IDS % 3, k_segments=(K_IDS % 3).int()),
    "one id": Mask(q_segments=Q_IDS * 0, k_segments=K_IDS * 0),
    "every query its own id": Mask(q_segments=ids([4, 3, 2, 1, 0], [0, 1, 2, 3, 4]), k_segments=K_IDS % 5),
    "sorted ids": Mask(q_segments=ids([0, 0, 1, 1, 2], [3, 3, 3, 4, 5]), k_segments=K_SORTED),
    "sorted ids, the last of no query": Mask(q_segments=ids([0, 0, 1, 1, 2], [3, 3, 3, 3, 3]), k_segments=K_SORTED),
    "nothing": Mask(),
}


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return qkv(5, 7, heads=4, kv_heads=2, dtype=torch.bfloat16)


def results(pair: OpPair, mask: Mask, options: Options, saved: bool = True) -> list[Tensor | None]:
    """out, lse and gradients; `saved=False`: backward is handed nothing of forward's, as from another process."""
    q, k, v = tensors()
    found = edge(pair).forward(q, k, v, mask, None, options)
    grads = edge(pair).backward(
        like(found.out), like(found.lse).float(), q, k, v, mask, found.out, found.lse, None,
        found.saved if saved else (), options, WANTED,
    )  # fmt: skip
    return [found.out, found.lse, *grads[:3]]


@pytest.mark.parametrize("saved", [True, False], ids=["kept", "found again"])
@pytest.mark.parametrize("mask", MASKS)
def test_what_a_mask_written_out_gives(mask: str, saved: bool) -> None:
    options = Options(0.4, softcap=3.0)
    expected = results(native_math.BACKEND.pairs["cpu"], MASKS[mask], options)
    for mine, other in zip(results(PAIR, MASKS[mask], options, saved), expected, strict=True):
        assert other is not None
        assert_close(mine, other if mine is None else other.to(mine.dtype))


@pytest.mark.parametrize("mask", MASKS)
def test_no_sequence_lacks_queries_and_all_are_told_of(mask: str) -> None:
    """cu_seqlens as kernels take them: int32, ascending, and the longest sequence is as long as was said."""
    q, k, _ = tensors()
    found, kept = packing(MASKS[mask], q, k)
    q_lens, k_lens = found.q_ends.diff(), found.k_ends.diff()
    assert found.q_ends.dtype == found.k_ends.dtype == torch.int32
    assert found.q_ends.is_contiguous()
    assert int(q_lens.min()) > 0
    assert int(k_lens.min()) >= 0
    assert (int(q_lens.sum()), int(q_lens.max())) == (10, found.q_most)
    assert int(k_lens.sum()) <= 14
    assert int(k_lens.max()) <= found.k_most
    told = kept_shapes(MASKS[mask], q, k)
    assert [(x.shape, x.dtype, x.device) for x in told] == [(x.shape, x.dtype, x.device) for x in kept]


def test_tokens_that_are_in_order_stay_where_they_are() -> None:
    q, k, _ = tensors()
    whole = ids([0, 0, 1, 1, 2], [3, 3, 3, 4, 5])
    found, _ = packing(Mask(q_segments=whole, k_segments=K_SORTED.clamp(max=5)), q, k)
    assert (found.q_order, found.k_order, found.leaves_keys) == (None, None, False)
    found, _ = packing(MASKS["sorted ids, the last of no query"], q, k)
    assert (found.q_order, found.k_order, found.leaves_keys) == (None, None, True)
    found, _ = packing(MASKS["ids in any order, of int32 and int64"], q, k)
    assert found.q_order is not None
    assert found.k_order is not None


def test_backward_waits_for_nothing_that_forward_found() -> None:
    q, k, _ = tensors()
    mask = MASKS["ids and holes"]
    _, kept = packing(mask, q, k)
    with mock.patch.object(_packed, "_by_ids", side_effect=AssertionError("found twice")):
        packing(mask, q, k, kept)


def test_keys_alone_are_padded_without_waiting() -> None:
    """No number is read back: on tensors without numbers it works as well."""
    mask = Mask(key_keep=HOLES.to("meta"))
    q = torch.empty(2, 5, 4, 8, device="meta")
    _packed._padded(mask, q)


def test_segments_in_a_captured_graph_are_refused() -> None:
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
    on_gpu = mock.patch.object(Tensor, "is_cuda", new_callable=mock.PropertyMock, return_value=True)
    with capturing, on_gpu, pytest.raises(UnsupportedError, match="captured"):
        _packed._by_ids(MASKS["ids and holes"])


@pytest.mark.parametrize(
    ("mask", "number"), [("nothing", 2), ("holes", 2), ("ids in any order, of int32 and int64", 6)]
)
def test_more_sequences_than_a_grid_has_are_refused(mask: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = tensors()
    monkeypatch.setattr(_packed, "MOST_SEQUENCES", number)
    packing(MASKS[mask], q, k)
    monkeypatch.setattr(_packed, "MOST_SEQUENCES", number - 1)
    with pytest.raises(UnsupportedError, match=rf"value: +{number}\n"):
        packing(MASKS[mask], q, k)


def test_dropout_of_packed_sequences_is_the_same_in_both_directions() -> None:
    """With the mask that was drawn (seen through v = 1 in one channel a key), dv is what that mask says."""
    q, k, v = tensors()
    v = torch.eye(8, dtype=torch.bfloat16)[:7].expand(2, 2, 7, 8).transpose(1, 2).contiguous()
    mask, options, state = MASKS["ids and holes"], Options(0.4, dropout_p=0.4), torch.tensor([5, 1])
    found = edge(PAIR).forward(q, k, v, mask, state, options)
    ones = torch.ones_like(found.out)
    grads = edge(PAIR).backward(
        ones, None, q, k, v, mask, found.out, found.lse, found.rng, found.saved, options, WANTED
    )  # fmt: skip
    weights = found.out[..., :7].float().unflatten(2, (2, 2)).sum((1, 3)).transpose(1, 2)  # (B, Sk, Hk)
    assert grads.dv is not None
    assert_close(grads.dv[..., 0], weights.to(torch.bfloat16))
    assert float(found.out.float().sum(-1).max()) > 1.05  # some weights were dropped, so others are larger


@pytest.mark.parametrize("name", ["keep-ragged", "segments-apart", "gqa"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_what_is_kept_goes_through_a_compiled_operator(name: str, in_parts: bool) -> None:
    """The other pairs keep nothing, or tensors of one device."""
    found = verdicts(edge(PAIR), replace(case(name), dtype=torch.bfloat16), "cpu", in_parts=in_parts, bridge="compiled")
    assert all(v.ok for v in found), "\n".join(map(str, found))


Method = Callable[..., Any]
packed_sums, packed_keys_back = Packing.sums, Packing.keys_back


def shifted(self: Packing) -> tuple[Tensor, Tensor, int, int]:
    ends = self.k_ends.clone()
    ends[1:-1] = (ends[1:-1] - 1).clamp(min=0)
    return self.q_ends, ends, self.q_most, self.k_most + 1


MUTANTS: dict[str, tuple[str, str, Method]] = {
    "out stays packed": ("segments-apart", "queries_back", lambda self, x, b: x.unflatten(0, (b, -1))),
    "lse stays packed": (
        "segments-apart", "sums_back", lambda self, x, b: x.unflatten(1, (b, -1)).transpose(0, 1),
    ),
    "lse is not packed again": ("segments-apart", "sums", lambda self, x: x.transpose(0, 1).flatten(1).contiguous()),
    "keys stay as they were": ("segments-apart", "keys", lambda self, x: x.flatten(0, 1)),
    "gradients of keys stay packed": (
        "keep-ragged", "keys_back", lambda self, x, b: x.nan_to_num(0.0).unflatten(0, (b, -1)),
    ),
    "what no kernel wrote": (
        "keep-ragged", "keys_back", lambda self, x, b: _packed._back(x, self.k_order, 0).unflatten(0, (b, -1)),
    ),
    "sequences shifted by one": ("segments-apart", "kernel_arguments", property(shifted)),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_finds_a_broken_packing(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, method, broken = MUTANTS[mutant]
    tried = replace(case(name), dtype=torch.bfloat16)
    assert all(v.ok for v in verdicts(edge(PAIR), tried, "cpu"))
    monkeypatch.setattr(Packing, method, broken)
    assert not all(v.ok for v in verdicts(edge(PAIR), tried, "cpu"))


def test_the_contract_finds_padding_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _packed._padded
    monkeypatch.setattr(
        _packed, "_padded", lambda mask, q: whole(replace(mask, key_keep=mask.key_keep | True), q)
    )  # fmt: skip
    assert not all(v.ok for v in verdicts(edge(PAIR), replace(case("keep-ragged"), dtype=torch.bfloat16), "cpu"))
