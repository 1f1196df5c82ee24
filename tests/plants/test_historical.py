"""The historical faults do what they say, only where they can, and count it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Inputs, build
from ringtrue.audit.laws import chunk_law, whole
from ringtrue.contract import Claims, ForwardOut, Grads, Mask, OpPair, Options, Wanted
from ringtrue.plants import PLANTS, BackwardCall, ForwardCall, Planted, changed, ran, transposed_again

WANTED = Wanted(True, True, True)


class Spy:
    """A pair that writes down what reaches it."""

    def __init__(self) -> None:
        self.calls: list[ForwardCall | BackwardCall] = []
        self.pair = OpPair("spy", self.forward, self.backward, Claims(frozenset({torch.float32})))

    def forward(self, *args: object) -> ForwardOut:
        call = ForwardCall(*args)  # type: ignore[arg-type]
        self.calls.append(call)
        q, v = call.q, call.v
        return ForwardOut(q.new_ones(*q.shape[:3], v.shape[3]), q.new_ones(q.shape[0], q.shape[2], q.shape[1]))

    def backward(self, *args: object) -> Grads:
        call = BackwardCall(*args)  # type: ignore[arg-type]
        self.calls.append(call)
        return Grads(call.q, call.k, call.v)


def step(pair: OpPair, x: Inputs, keys: slice, out: torch.Tensor) -> Grads:
    """One backward step of a ring; grad_out and lse are copies, as an edge that masks them makes."""
    lse = torch.ones(x.q.shape[0], x.q.shape[2], x.q.shape[1])
    return pair.backward(
        x.grad_out.clone(), None, x.q, x.k[:, keys], x.v[:, keys], x.mask, out, lse, None, (), x.options, WANTED
    )


@pytest.mark.parametrize("name", PLANTS)
def test_names_claims_and_a_count_of_zero(name: str) -> None:
    pair = PLANTS[name](Spy().pair)
    assert isinstance(pair, Planted)
    assert pair.name == f"spy+{name}"
    assert pair.claims.dtypes == {torch.float32}
    assert ran(pair) == 0
    assert ran(Spy().pair) == 0


@pytest.mark.parametrize("name", ["length-16", "gqa", "heads-equal-length", "cross-longer-keys"])
def test_keys_and_values_transposed_once_more(name: str) -> None:
    """The forward stays right; backward gets (B, H, S, D) memory under a (B, S, H, D) shape, whatever the sizes."""
    spy, x = Spy(), build(case(name))
    pair = PLANTS["kv-transposed-twice"](spy.pair)
    whole(pair, x)
    first, second = spy.calls
    assert torch.equal(first.k, x.k)
    assert torch.equal(second.q, x.q)
    assert torch.equal(second.k.reshape(-1), x.k.transpose(1, 2).reshape(-1))
    assert torch.equal(second.v, transposed_again(x.v))
    assert second.k.shape == x.k.shape
    assert ran(pair) == 1


def test_one_head_has_nothing_to_transpose() -> None:
    pair = PLANTS["kv-transposed-twice"](Spy().pair)
    whole(pair, build(case("three-samples-one-head")))
    assert ran(pair) == 0


def test_an_lse_that_nobody_wrote() -> None:
    spy, x = Spy(), build(case("length-16"))
    pair = PLANTS["lse-missing"](spy.pair)
    whole(pair, x)
    assert (spy.calls[1].lse == 0).all()  # type: ignore[union-attr]
    assert ran(pair) == 1


def test_a_boolean_mask_is_added() -> None:
    spy = Spy()
    pair = PLANTS["mask-as-bias"](spy.pair)
    assert pair.claims.masks == {"dense_bool", "key_keep"}
    dense, keep = build(case("bool-bqk")), build(case("keep"))
    both, beside = build(case("bool-keep")), build(case("bias-keep-causal"))
    for x in (dense, keep, both, beside):
        whole(pair, x)
    masks = [call.mask for call in spy.calls]
    assert torch.equal(masks[0].dense, dense.mask.dense.float())
    assert torch.equal(masks[1].dense, dense.mask.dense.float())
    assert masks[2].key_keep is None
    assert torch.equal(masks[2].key_bias, keep.mask.key_keep.float())
    assert masks[4].kinds == {"dense_float", "key_bias"}
    assert torch.equal(masks[6].key_bias, beside.mask.key_bias + beside.mask.key_keep.float())
    assert masks[6].causal == -1
    assert ran(pair) == 8


@pytest.mark.parametrize("name", ["length-16", "bool-all", "float-hqk", "bias", "causal"])
def test_a_mask_that_hides_nothing_by_bools_is_left_alone(name: str) -> None:
    spy, x = Spy(), build(case(name))
    pair = PLANTS["mask-as-bias"](spy.pair)
    whole(pair, x)
    assert all(call.mask is x.mask for call in spy.calls)
    assert ran(pair) == 0


def test_stale_keys_are_those_of_the_first_step() -> None:
    spy, x = Spy(), build(case("length-16"))
    pair = PLANTS["stale-kv"](spy.pair)
    chunk_law(pair, x, [6, 11])
    seen = [call for call in spy.calls if isinstance(call, BackwardCall)]
    assert torch.equal(seen[0].k, x.k[:, :6])
    assert torch.equal(seen[1].k, x.k[:, :5])  # the first step's, cut to a shorter shard
    assert torch.equal(seen[2].v, x.v[:, :5])
    assert ran(pair) == 2


def test_a_longer_shard_keeps_its_own_rest() -> None:
    spy, x = Spy(), build(case("length-16"))
    pair = PLANTS["stale-kv"](spy.pair)
    chunk_law(pair, x, [4])
    last = spy.calls[-1]
    assert torch.equal(last.k, torch.cat([x.k[:, :4], x.k[:, 8:]], 1))


def test_every_backward_pass_starts_afresh() -> None:
    """Also when the memory of the last pass could be handed out again."""
    spy, x = Spy(), build(case("length-16"))
    pair = PLANTS["stale-kv"](spy.pair)
    for start in range(0, 16, 4):
        spy.calls.clear()  # nothing but the plant may hold on to this pass's memory
        grads = step(pair, x, slice(start, start + 4), torch.ones_like(x.grad_out))
        assert torch.equal(grads.dk, x.k[:, start : start + 4])
    assert ran(pair) == 0


def test_views_and_copies_on_the_way_belong_to_the_same_pass() -> None:
    """A schedule may hand on some of the rows."""
    spy, x = Spy(), build(case("length-16"))
    pair = PLANTS["stale-kv"](spy.pair)
    out = torch.ones_like(x.grad_out)
    for keys in (slice(0, 4), slice(4, 8)):
        half = replace(x, q=x.q[:, 8:], grad_out=x.grad_out[:, 8:])
        grads = step(pair, half, keys, out[:, 8:])
        assert torch.equal(grads.dk, x.k[:, :4])
    assert ran(pair) == 1


def test_threads_remember_apart() -> None:
    """The ranks of an in-process ring are threads that share one pair."""
    x, found, barrier = build(case("length-16")), {}, threading.Barrier(4)
    pair = PLANTS["stale-kv"](Spy().pair)
    out = torch.ones_like(x.grad_out)

    def rank(r: int) -> None:
        found[r] = []
        for hop in range(4):
            barrier.wait()
            start = 4 * ((r - hop) % 4)
            found[r].append(step(pair, x, slice(start, start + 4), out).dk)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(dk, x.k[:, 4 * r : 4 * r + 4]) for r in range(4) for dk in found[r])
    assert ran(pair) == 12


def test_a_rank_without_queries_remembers_nothing() -> None:
    x = build(case("empty-queries"))
    pair = PLANTS["stale-kv"](Spy().pair)
    for keys in (slice(0, 3), slice(3, 7)):
        assert torch.equal(step(pair, x, keys, torch.ones_like(x.grad_out)).dk, x.k[:, keys])
    assert ran(pair) == 0


def test_a_pair_that_is_given_nothing_in_backward_is_left_alone() -> None:
    spy = Spy()
    pair = PLANTS["lse-missing"](replace(spy.pair, reads_inputs=False))
    args = (torch.ones(1), None, None, None, None, Mask(), None, None, None, (), Options(1.0), WANTED)
    pair.backward(*args)
    assert ran(pair) == 0


def test_names_may_be_used_for_arguments() -> None:
    spy, x = Spy(), build(case("length-5"))
    pair = changed(spy.pair, "nothing")
    pair.forward(q=x.q, k=x.k, v=x.v, mask=x.mask, rng=None, options=x.options)
    assert torch.equal(spy.calls[0].q, x.q)
    assert ran(pair) == 0
