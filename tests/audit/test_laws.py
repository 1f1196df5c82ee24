"""The laws, on a plain pair that is right and on ways to get them wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringtrue.audit.cases import CASES, case
from ringtrue.audit.inputs import Case, build
from ringtrue.audit.judge import judged
from ringtrue.audit.laws import Growth, chunk_law, merged, ring_law, whole
from ringtrue.audit.truth import bias_of, softmax, sum_groups, sum_to_bias, visible
from ringtrue.contract import Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from ringtrue.merge import merge

ALL_MASKS = frozenset({"dense_bool", "dense_float", "key_keep", "key_bias"})


def forward(q, k, v, mask: Mask, rng: None, options: Options) -> ForwardOut:  # type: ignore[no-untyped-def]
    """Plain maths in float32 (float64)."""
    weights, lse, values, *_ = steps(q, k, v, mask, options)
    return ForwardOut((weights @ values).transpose(1, 2).to(q.dtype), lse)


def backward(  # type: ignore[no-untyped-def]
    grad_out, grad_lse, q, k, v, mask: Mask, out, lse, rng: None, saved: tuple[()], options: Options, wanted: Wanted
) -> Grads:
    _, own, values, queries, keys, scores = steps(q, k, v, mask, options)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    g = grad_out.to(own.dtype).transpose(1, 2)
    delta = (g * out.to(own.dtype).transpose(1, 2)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.unsqueeze(-1)
    grad_scores = weights * (g @ values.mT - delta)
    dq = (options.scale * grad_scores @ keys).transpose(1, 2).to(q.dtype)
    dk, dv = (
        sum_groups(x, k.shape[2]).transpose(1, 2).to(q.dtype)
        for x in (options.scale * grad_scores.mT @ queries, weights.mT @ g)
    )
    dbias = sum_to_bias(grad_scores, mask).to(mask.bias.dtype) if wanted.bias and mask.bias is not None else None
    return Grads(dq, dk, dv, dbias)


def steps(q, k, v, mask: Mask, options: Options):  # type: ignore[no-untyped-def]
    queries, keys, values = (x.to(accumulate_dtype(x.dtype)).transpose(1, 2) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    raw = options.scale * queries @ keys.mT
    seen, bias = visible(mask, raw.shape, raw.device), bias_of(mask, raw)
    weights, lse = softmax(raw + bias, seen)
    return weights, lse, values, queries, keys, (raw + bias).masked_fill(~seen, -torch.inf)


PLAIN = OpPair("plain", forward, backward, Claims(frozenset(), ALL_MASKS, causal="offset", dbias=True, dlse=True))
SPLIT = [c for c in CASES if c.splits and not c.softcap]
CUTS = {"none": (), "middle": (9,), "uneven": (1, 2, 11), "empty-parts": (0, 5, 5)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SPLIT, ids=lambda c: c.id)
def test_a_right_pair_keeps_the_chunk_law(case: Case, dtype: torch.dtype) -> None:
    inputs = build(replace(case, dtype=dtype))
    for result in (whole(PLAIN, inputs), chunk_law(PLAIN, inputs, [case.k_len // 3, case.k_len // 2])):
        assert not [str(v) for v in judged(result, inputs) if not v.ok]


@pytest.mark.parametrize("cuts", CUTS.values(), ids=list(CUTS))
@pytest.mark.parametrize(
    "name", ["float-hqk", "float-q", "bias", "bool-blind", "causal-bias", "all-of-them", "grad-lse-causal-gqa-bias"]
)
def test_any_cuts_will_do(name: str, cuts: tuple[int, ...]) -> None:
    inputs = build(replace(case(name), dtype=torch.float64))
    assert not [str(v) for v in judged(chunk_law(PLAIN, inputs, cuts), inputs) if not v.ok]


def test_cuts_must_ascend_within_the_keys() -> None:
    for cuts in ((7, 3), (17,), (-1,)):
        with pytest.raises(ValueError, match="ascend"):
            chunk_law(PLAIN, build(case("length-16")), cuts)


def test_one_part_is_the_whole_call() -> None:
    inputs = build(case("causal-bias"))
    for a, b in zip(chunk_law(PLAIN, inputs, []), whole(PLAIN, inputs), strict=True):
        torch.testing.assert_close(a, b)


def own_lse(*args) -> Grads:  # type: ignore[no-untyped-def]
    """Backward from the part's own out and lse."""
    grad_out, grad_lse, q, k, v, mask, _, _, rng, saved, options, wanted = args
    own = forward(q, k, v, mask, rng, options)
    return backward(grad_out, grad_lse, q, k, v, mask, own.out, own.lse, rng, saved, options, wanted)


def test_a_pair_that_ignores_the_global_lse_breaks_it_and_only_it() -> None:
    pair = replace(PLAIN, backward=own_lse)
    inputs = build(case("length-16"))
    assert all(v.ok for v in judged(whole(pair, inputs), inputs))
    found = judged(chunk_law(pair, inputs, [7]), inputs)
    assert [v.quantity for v in found if not v.ok] == ["dq", "dk", "dv"]


def test_gradients_that_were_not_wanted_stay_away() -> None:
    inputs = build(case("bias"), dbias=False)
    assert chunk_law(PLAIN, inputs, [4]).dbias is None


def test_a_pair_that_reads_no_inputs_is_given_none() -> None:
    """It keeps what it needs in `saved`."""

    def keeping(q, k, v, mask, rng, options):  # type: ignore[no-untyped-def]
        result = forward(q, k, v, mask, rng, options)
        return result._replace(saved=(q, k, v, result.out, result.lse))

    def from_saved(grad_out, grad_lse, q, k, v, mask, out, lse, rng, saved, options, wanted):  # type: ignore[no-untyped-def]
        assert (q, k, v, out, lse) == (None,) * 5
        q, k, v, out, lse = saved
        return backward(grad_out, grad_lse, q, k, v, mask, out, lse, rng, (), options, wanted)

    pair = replace(PLAIN, forward=keeping, backward=from_saved, reads_inputs=False)
    inputs = build(case("gqa"))
    assert all(v.ok for v in judged(whole(pair, inputs), inputs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_two_ways_to_merge_agree(dtype: torch.dtype) -> None:
    """The law's own merge against the library's, with rows that see nothing in one part, and in all."""
    draw = torch.Generator().manual_seed(0)
    outs = [torch.randn((2, 5, 3, 4), generator=draw).to(dtype) for _ in range(4)]
    lses = [10 * torch.randn((2, 3, 5), generator=draw).to(accumulate_dtype(dtype)) for _ in range(4)]
    for i, lse in enumerate(lses):
        lse[:, :, 0] = -torch.inf
        lse[:, i % 3, 1:3] = -torch.inf
    outs = [
        o.masked_fill((lse == -torch.inf).transpose(1, 2).unsqueeze(-1), 0.0) for o, lse in zip(outs, lses, strict=True)
    ]
    total = None
    for out, lse in zip(outs, lses, strict=True):
        total = merge(total, out, lse)
    assert total is not None
    for mine, theirs in zip(merged(outs, lses), total, strict=True):
        torch.testing.assert_close(mine, theirs)


def ratios(one: float, two: float, sixteen: float, arithmetic: str = "16-bit") -> list[Growth]:
    errors = [[dict.fromkeys(("out", "dq", "dk", "dv"), e * s) for s in (1, 2, 3)] for e in (one, two, sixteen)]
    return ring_law(*errors, arithmetic)  # type: ignore[arg-type]


def test_ring_law_limits() -> None:
    assert all(g.ok for g in ratios(1.0, 1.25, 1.34))
    assert len(ratios(1.0, 1.25, 1.34)) == 12
    broken = {(1.0, 1.3, 1.36): (16, 1), (1.0, 1.1, 1.22): (16, 2), (1.2, 1.75, 1.5): (2, 1)}
    for errors, ranks in broken.items():
        assert {g.ranks for g in ratios(*errors) if not g.ok} == {ranks}
    assert all(g.ok for g in ratios(1.0, 1.5, 1.59, "float32"))
    assert {g.ranks for g in ratios(1.0, 1.5, 1.61, "float32") if not g.ok} == {(16, 1)}


def test_ring_law_takes_the_worst_seed_of_each_quantity() -> None:
    flat = [dict.fromkeys(("out", "dq", "dk", "dv"), 1.0) for _ in range(6)]
    bad = [dict(e) for e in flat]
    bad[4]["dk"] = 2.0
    broken = [g for g in ring_law(flat, flat, bad, "16-bit") if not g.ok]
    assert [(g.quantity, g.ranks, g.ratio) for g in broken] == [("dk", (16, 1), 2.0), ("dk", (16, 2), 2.0)]
    assert str(broken[0]) == "dk   16 ranks / 1: 2.000 >  1.35"
