"""The orders of the order law: each on sizes of its own, every call judged but torch's."""

from __future__ import annotations

import torch

from ringtrue.audit.order import Step, differing, named_order, named_orders, orders, run
from ringtrue.contract import Claims, ForwardOut, Grads, OpPair

LITTLE = Claims(frozenset({torch.float32}))
MUCH = Claims(
    frozenset({torch.float32, torch.bfloat16}), frozenset({"dense_bool", "window"}), causal="offset", dropout=True
)


def names(claims: Claims) -> set[str]:
    return {step.name for order in orders(claims, torch.float32) for step in order}


def test_every_order_has_sizes_of_its_own() -> None:
    found = list(orders(MUCH, torch.float32))
    lengths = [{step.inputs.q.shape[1] for step in order} for order in found]
    assert all(len(each) == 1 for each in lengths)
    assert len(set.union(*lengths)) == len(found)


def test_a_pair_is_asked_what_it_claims() -> None:
    little, much = names(LITTLE), names(MUCH)
    assert {"a call", "grad_out_outermost", "grad_out_misaligned", "out_outermost", "torch: a call"} <= little
    assert much - little == {"bfloat16", "mask dense_bool", "mask causal", "mask window", "dropout 3", "dropout 4"}


def test_both_orders_and_both_layouts_of_torchs_own() -> None:
    last = [[step.name for step in order if step.plain] for order in orders(LITTLE, torch.float32)][-2:]
    assert last == [["torch: a call", "torch: grad_out outermost"], ["torch: grad_out outermost", "torch: a call"]]
    firsts = [order[0].name for order in orders(LITTLE, torch.float32)]
    assert firsts.count("a call") == len(firsts) // 2 - 1


def test_other_strides_are_the_same_numbers() -> None:
    for order in orders(LITTLE, torch.float32):
        own = next(step for step in order if step.name == "a call")
        for step in order:
            if step.name.endswith(("outermost", "misaligned")):
                assert torch.equal(step.inputs.grad_out, own.inputs.grad_out)
                assert torch.equal(step.stored(step.inputs.q), own.inputs.q)


def test_every_call_but_torchs_is_judged() -> None:
    wrong = OpPair(
        "zeros",
        lambda q, k, v, *_: ForwardOut(torch.zeros_like(v), q.new_zeros(q.shape[0], q.shape[2], q.shape[1])),
        lambda g, gl, q, k, v, *_: Grads(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)),
        LITTLE,
    )
    order: list[Step] = list(orders(LITTLE, torch.float32))[-1]
    found = run(wrong, order)
    assert [name for name, _ in found] == ["a call", "grad_out outermost"]
    assert not any(v.ok for _, verdicts in found for v in verdicts)


def test_every_named_order_says_in_what_its_calls_differ() -> None:
    found = {name: differing(name) for name in named_orders(torch.bfloat16)}
    assert found["grad_out-outermost-second"] == "the strides of grad_out"
    assert found["float32-first"] == "the dtype"
    assert set(found.values()) == {
        *(f"the strides of {x}" for x in ("q", "k", "v", "grad_out", "out", "its tensors")),
        *(f"the {x}" for x in ("dtype", "scale", "softcap", "mask", "random state")),
    }
    sizes = [named_order(name, torch.bfloat16, "cpu")[0].inputs.q.shape for name in found]
    assert len(set(sizes)) == len(sizes)
