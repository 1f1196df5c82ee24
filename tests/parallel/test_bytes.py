"""Bytes per rank as the in-process communicator counts them, and what is never computed nor sent."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from counting import Counting

import ringtrue as rt
from ringtrue.parallel.twin import Rank, World

B, D = 2, 4


class Sent(NamedTuple):
    """What one rank sent in a forward, and in forward and backward; its calls of the pair."""

    forward: dict[str, int]
    both: dict[str, int]
    count: Counting


def sent(
    degrees: tuple[int, int],
    length: int,
    heads: int = 4,
    kv_heads: int = 4,
    dtype: torch.dtype = torch.float32,
    mask: object = None,
    wants: str = "qkv",
    lse: bool = False,
    call: dict[str, object] | None = None,
    **config: object,
) -> list[Sent]:
    """Per rank, the bytes per kind of group; every rank holds `length` tokens."""

    def body(mesh: Rank) -> Sent:
        cp = rt.ContextParallel(rt.ContextParallelConfig(*degrees, mesh=mesh, **config))  # type: ignore[arg-type]
        many = length * cp.size if (call or {}).get("kv_replicated") else length
        shapes = ((B, length, heads, D), (B, many, kv_heads, D), (B, many, kv_heads, D))
        q, k, v = (torch.randn(s, dtype=dtype).requires_grad_(n in wants) for s, n in zip(shapes, "qkv", strict=True))
        count = Counting()
        of_rank = mask(cp) if callable(mask) else mask
        got = rt.attention(
            q, k, v, of_rank, return_lse=lse, enable_gqa=True, backend=count.pair(),
            parallel=cp.call(**call) if call else cp,  # type: ignore[arg-type]
        )  # fmt: skip
        forward, ends = by_group(mesh), got if isinstance(got, tuple) else (got,)
        if wants:
            torch.autograd.backward(ends, [torch.randn_like(x) for x in ends])
        return Sent(forward, by_group(mesh), count)

    return World(degrees[0] * degrees[1]).run(body)


def by_group(mesh: Rank) -> dict[str, int]:
    """Bytes per kind of group, headers left out."""
    kinds = ("ulysses", "ring", "context")
    return {kind: sum(e.bytes for e in mesh.log if e.group.startswith(kind)) for kind in kinds}


def payload(bytes_of: dict[str, int]) -> int:
    return sum(bytes_of.values())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ulysses_moves_eight_tensors(size: int, dtype: torch.dtype) -> None:
    """q, k, v, out and their gradients, but for what stays; lse and its gradient where the caller asks for it."""
    shard = B * 6 * 4 * D * dtype.itemsize
    lse = B * 6 * 4 * 4
    for rank in sent((size, 1), 6, dtype=dtype):
        assert payload(rank.both) == 8 * shard * (size - 1) // size
    for rank in sent((size, 1), 6, dtype=dtype, lse=True):
        assert payload(rank.both) <= (8 * shard + 2 * lse) * (size - 1) // size


def test_ulysses_moves_key_heads_compact() -> None:
    """8 query heads read 2 key heads: those travel as 2, also where 4 ranks share them."""
    q, kv = B * 6 * 8 * D * 4, B * 6 * 2 * D * 4
    for rank in sent((2, 1), 6, heads=8, kv_heads=2):
        assert payload(rank.both) == (4 * q + 4 * kv) // 2
    one_head = kv // 2  # what each of three others needs of k, or of v
    for rank in sent((4, 1), 6, heads=8, kv_heads=2):
        assert payload(rank.both) <= 4 * q * 3 // 4 + 4 * 3 * one_head


def test_ulysses_moves_mask_rows_once() -> None:
    """A mask with rows travels in forward alone, one byte a place, and once for all heads where it has none."""
    rows = B * 6 * 24
    plain = payload(sent((4, 1), 6)[0].both)
    mask = lambda cp: torch.rand(B, 1, 6, 24) > 0.3
    for rank in sent((4, 1), 6, mask=mask):
        assert payload(rank.both) - plain <= rows * 3
    by_head = lambda cp: torch.rand(B, 4, 6, 24) > 0.3
    for rank in sent((4, 1), 6, mask=by_head):
        assert payload(rank.both) - plain <= 4 * rows * 3 // 4


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ring_passes_keys_on_twice_and_gradients_once(size: int, dtype: torch.dtype) -> None:
    """The last hop is not made; contributions have the inputs' dtype."""
    block = B * 6 * 2 * D * dtype.itemsize  # compact: 2 key heads
    for rank in sent((1, size), 6, kv_heads=2, dtype=dtype, lse=True):
        assert payload(rank.forward) == (size - 1) * 2 * block
        assert payload(rank.both) == 2 * (size - 1) * 2 * block + (size - 1) * 2 * block


def test_ring_sends_only_gradients_that_are_wanted() -> None:
    block = B * 6 * 4 * D * 4
    for wants, gradients in (("q", 0), ("k", 1), ("qv", 1), ("", None)):
        for rank in sent((1, 3), 6, wants=wants):
            travels = 2 if gradients is None else 4
            assert payload(rank.both) == 2 * block * travels + 2 * block * (gradients or 0)


def test_both() -> None:
    """Rings of 2 over pairs of Ulysses ranks: a ring's block has half the heads and twice the tokens."""
    shard = B * 6 * 4 * D * 4
    for rank in sent((2, 2), 6):
        assert rank.both["ulysses"] == 8 * shard // 2
        assert rank.both["ring"] == 2 * 2 * shard + 2 * shard


@pytest.mark.parametrize("degrees", [(4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("declared", [False, True])
def test_whole_keys_send_nothing(degrees: tuple[int, int], declared: bool) -> None:
    call = {"kv_replicated": True} | ({"q_lengths": (6,) * 4, "k_lengths": (24,) * 4} if declared else {})
    for rank in sent(degrees, 6, call=call, lse=True):
        assert payload(rank.both) == 0
        assert len(rank.count.forwards) == 1


@pytest.mark.parametrize("degrees", [(4, 1), (1, 4), (2, 2)])
def test_joint_tokens_travel_little(degrees: tuple[int, int]) -> None:
    """Text that every rank has needs no exchange of its own keys; its outputs and their gradient do."""
    with_text = [payload(r.both) for r in sent(degrees, 10, call={"joint_prefix": 4})]
    without = [payload(r.both) for r in sent(degrees, 10)]  # the same tokens, all of them this rank's own
    assert max(with_text) <= 1.5 * max(without)


def test_a_causal_ring_computes_and_sends_nothing_that_is_hidden() -> None:
    """Rank r looks at r + 1 blocks of keys, and owes r others a gradient."""
    block = 2 * B * 6 * 4 * D * 4
    for r, rank in enumerate(sent((1, 4), 6, mask=rt.Causal())):
        assert len(rank.count.forwards) == len(rank.count.backwards) == r + 1
        assert payload(rank.forward) <= 3 * block
        assert payload(rank.both) == 2 * payload(rank.forward) + r * block


def test_a_window_skips_blocks() -> None:
    """Each query sees itself and the six tokens before: this rank's block and the one before, if there is one."""
    block = 2 * B * 6 * 4 * D * 4
    for r, rank in enumerate(sent((1, 4), 6, mask=rt.Window(6, 0))):
        others = min(r, 1)
        assert len(rank.count.forwards) == len(rank.count.backwards) == 1 + others
        assert payload(rank.both) == 2 * payload(rank.forward) + others * block


def test_a_balanced_causal_ring_computes_only_what_is_seen() -> None:
    """8 chunks of 3 tokens, two a rank: half of all places and the diagonal, and no mask with rows is ever made."""
    ranks = sent((1, 4), 6, mask=rt.Causal(), load_balance="head_tail")
    calls = [seen for rank in ranks for seen in rank.count.forwards]
    assert not any(seen.dense for seen in calls)
    assert sum(seen.tiles(1) for seen in calls) == 4 * 24 * 25 // 2
    assert len(ranks[0].count.backwards) == len(ranks[0].count.forwards)
    for rank in ranks:
        assert all(seen.tiles(1) for seen in rank.count.forwards)
