"""Windows that a pair takes as they are: cropped so that flash-attn's way of counting them can say them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from ringtrue.contract import Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted
from ringtrue.edge import edge
from standins import _eager


def _window(mask: Mask, q_len: int, k_len: int) -> dict[str, object]:
    """As a flash-attn backend hands it on: neither end may be negative, for -1 means no limit."""
    diagonal = k_len - q_len
    if mask.since is None:
        assert mask.causal in (None, diagonal)
        return {"causal": mask.causal is not None}
    left, right = diagonal - mask.since, None if mask.causal is None else mask.causal - diagonal
    assert left >= 0
    assert right is None or right >= 0
    assert mask.since <= 0  # cuDNN counts from the first query and key, where neither may be negative either
    assert mask.causal is None or mask.causal >= 0
    return {"window": (min(left, k_len), k_len if right is None else min(right, k_len))}  # as flash-attn 2 has it


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options) -> ForwardOut:
    return ForwardOut(*_eager.forward(q, k, v, options.scale, **_window(mask, q.shape[1], k.shape[1])))  # type: ignore[arg-type]


def _backward(
    grad_out: Tensor, grad_lse: None, q: Tensor, k: Tensor, v: Tensor, mask: Mask, out: Tensor, lse: Tensor,
    rng: None, saved: tuple[Tensor, ...], options: Options, wanted: Wanted,
) -> Grads:  # fmt: skip
    ends = _window(mask, q.shape[1], k.shape[1])
    return Grads(*_eager.backward(grad_out, q, k, v, out, lse, options.scale, **ends)[:3])  # type: ignore[arg-type]


CLAIMS = Claims(frozenset({torch.float32}), frozenset({"window"}), causal="bottom_right", gqa=True)
PAIR = OpPair("windowed", _forward, _backward, CLAIMS)
ENDS = [(0, 0), (2, 1), (None, 0), (3, None), (None, -2), (-2, 4), (4, -3), (50, 50), (-6, 9), (9, -8), (1, -5)]


@pytest.mark.parametrize(("q_len", "k_len"), [(7, 7), (4, 9), (9, 4), (1, 6), (6, 1), (16, 5)])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_a_window_is_right_wherever_it_lies(q_len: int, k_len: int, ends: tuple[int | None, int | None]) -> None:
    torch.manual_seed(0)
    left, right = ends
    mask = Mask(causal=right, since=None if left is None else -left)
    q, k, v, g = (torch.randn(2, n, 2, 8) for n in (q_len, k_len, k_len, q_len))
    given = [run(edge(PAIR), q, k, v, g, mask), run(rt.op_pair("native_math"), q, k, v, g, mask)]
    for found, right_one in zip(*given, strict=True):
        torch.testing.assert_close(found, right_one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("q_len", "k_len"), [(12, 12), (4, 12), (15, 4), (12, 13)])
@pytest.mark.parametrize("ends", [*ENDS, (6, 0), (9, 0), (10, 3)], ids=str)
def test_keys_in_two_parts_are_each_in_sight(q_len: int, k_len: int, ends: tuple[int | None, int | None]) -> None:
    """A pair that cannot take an odd multiple of 4 keys: some rows see one part alone."""
    torch.manual_seed(0)
    left, right = ends
    mask = Mask(causal=right, since=None if left is None else -left)
    q, k, v, g = (torch.randn(2, n, 2, 8) for n in (q_len, k_len, k_len, q_len))
    tiled = edge(replace(PAIR, claims=replace(CLAIMS, key_tile=4)))
    given = [run(tiled, q, k, v, g, mask), run(rt.op_pair("native_math"), q, k, v, g, mask)]
    for found, right_one in zip(*given, strict=True):
        torch.testing.assert_close(found, right_one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beside", [{}, {"causal": 0}, {"since": -2}, {"dense": torch.zeros(1, 1, 8, 8)}], ids=str)
def test_a_mask_that_a_pair_takes_alone_becomes_a_bias_beside_others(beside: dict[str, Any]) -> None:
    seen: list[Mask] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *rest: object) -> ForwardOut:
        seen.append(mask)
        return _forward(q, k, v, Mask(causal=mask.causal, since=mask.since), None, Options(0.3))

    claims = replace(CLAIMS, masks=frozenset({"dense_float", "key_keep", "window"}), alone=frozenset({"key_keep"}))
    keep = torch.tensor([True] * 7 + [False])
    x = torch.randn(2, 8, 2, 8)
    edge(OpPair("watched", watched, _backward, claims)).forward(
        x, x, x, Mask(key_keep=keep.expand(2, 8), **beside), None, Options(0.3)
    )
    assert (seen[0].key_keep is None) == bool(beside)
    assert (seen[0].dense is not None) == bool(beside)


def run(pair: OpPair, q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    options = Options(0.3)
    out, lse, rng, saved = pair.forward(q, k, v, mask, None, options)
    grads = pair.backward(g, None, q, k, v, mask, out, lse, rng, saved, options, Wanted(True, True, True))
    return out, lse, *(x for x in grads if x is not None)


def test_only_what_is_in_sight_reaches_the_pair() -> None:
    seen: list[tuple[int, int]] = []

    def watched(q: Tensor, k: Tensor, *rest: object) -> ForwardOut:
        seen.append((q.shape[1], k.shape[1]))
        return _forward(q, k, *rest)  # type: ignore[arg-type]

    pair = OpPair("watched", watched, _backward, CLAIMS)
    run_forward = partial(edge(pair).forward, *(torch.randn(1, 8, 2, 8) for _ in range(3)))
    run_forward(Mask(causal=-3, since=-4), None, Options(0.3))
    run_forward(Mask(causal=9, since=5), None, Options(0.3))
    run_forward(Mask(causal=1, since=2), None, Options(0.3))  # no query sees a key: nothing runs
    assert seen == [(5, 5), (3, 3)]
