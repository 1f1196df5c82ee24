"""A wrong case becomes the smallest one that is wrong in the same way, and replays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.ids import parse
from ringtrue.audit.shrink import STEPS, shrink, way
from ringtrue.audit.subject import Call, Plain, Says

SAYS = Says(
    masks=frozenset({"bool", "float", "key_bool", "key_float"}), causal="any", window=True, gqa=True, value_dim=True
)


def subject(fault: Callable[[Call, Tensor], Tensor], places: bool = True) -> Plain:
    """Eager attention whose scores go through `fault` before the mask."""

    def attend(call: Call) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
        key, value = (x.repeat_interleave(call.group, 1) for x in (key, value))
        scores = fault(call, query @ key.mT * call.scale)
        mask = call.dense(places=places)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    return Plain("mine", attend, SAYS)


def causal_dropped() -> Plain:
    return subject(lambda call, scores: scores, places=False)


def long_rows_wrong(call: Call, scores: Tensor) -> Tensor:
    return scores * 1.5 if scores.shape[-1] > 6 else scores


def heads_as_tokens(call: Call, scores: Tensor) -> Tensor:
    return scores * 1.5 if scores.shape[1] == scores.shape[2] > 1 else scores


def grouped_wrong(call: Call, scores: Tensor) -> Tensor:
    return scores.roll(1, 1) if call.group > 1 else scores


def scale_dropped(call: Call, scores: Tensor) -> Tensor:
    return scores / call.scale / math.sqrt(call.query.shape[3]) if call.scale else scores


def sliced_wrong(call: Call, scores: Tensor) -> Tensor:
    return scores if call.query.is_contiguous() else scores * 1.5


SMALL = "batch=1,heads=1,head_dim=1,wants="
FAULTS: dict[str, tuple[Plain, str, str]] = {
    "causal": (causal_dropped(), "causal-wide", f"q_len=1,k_len=2,causal=0,{SMALL}"),
    "window": (causal_dropped(), "window-past", f"q_len=2,k_len=1,since=0,{SMALL}"),
    "long rows": (subject(long_rows_wrong), "causal-bias", f"q_len=1,k_len=7,{SMALL}"),
    "heads": (
        subject(heads_as_tokens), "heads-equal-length", "q_len=2,k_len=2,batch=1,heads=2,head_dim=1,wants=",
    ),
    "groups": (subject(grouped_wrong), "gqa", "q_len=1,k_len=2,batch=1,heads=2,kv_heads=1,head_dim=1,wants="),
    "scale": (subject(scale_dropped), "scale-one", "q_len=1,k_len=2,scale=1.0,batch=1,heads=1,head_dim=2,wants="),
    "storage": (
        subject(sliced_wrong), "inner-strided",
        "q_len=1,k_len=2,storage=inner_strided,batch=1,heads=1,head_dim=2,wants=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_smallest_that_is_wrong(name: str) -> None:
    wrong, case, smallest = FAULTS[name]
    check = parse(f"call/{case}/bfloat16")
    found = shrink(wrong, check)
    assert found.id == f"call/@{smallest}/float32"
    assert way(examine(wrong, parse(found.id))) == way(examine(wrong, check))


def test_a_gradient_alone() -> None:
    """The wrong quantity stays the same one: dk is halved, so out and dq are right in the smallest case too."""

    class Halved(Plain):
        def run(self, call: Call):  # type: ignore[no-untyped-def]
            right = super().run(call)
            return right if right.dk is None else right._replace(dk=right.dk / 2)

    wrong = Halved("mine", subject(lambda call, scores: scores).attend, SAYS)
    found = shrink(wrong, parse("call/bool-bqk/float16"))
    assert found.id == "call/@q_len=1,k_len=2,batch=1,heads=1,head_dim=1,wants=k/float32"
    assert way(examine(wrong, found)) == ("wrong", "dk")


def test_a_refusal_of_another_kind_is_another_way() -> None:
    def refuses(call: Call, scores: Tensor) -> Tensor:
        if call.query.shape[1] < 4:
            raise TypeError("too short")
        raise ValueError("no")

    found = shrink(subject(refuses), parse("call/causal-tall/float32"))
    assert found.case.q_len == 4
    assert way(examine(subject(refuses), found)) == ("claimed but refused", "ValueError")


def test_a_right_case_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match=r"call/length-5/float32 is not wrong \(pass\)"):
        shrink(subject(lambda call, scores: scores), parse("call/length-5/float32"))


def test_tries_are_bounded_and_their_order_is_fixed() -> None:
    def asked(tries: int) -> list[str]:
        ids: list[str] = []

        def fails(check: Check) -> bool:
            ids.append(check.id)
            return "causal" in check.id

        shrink(causal_dropped(), parse("call/causal-positive/bfloat16"), fails=fails, tries=tries)
        return ids

    assert len(asked(7)) == 7
    assert asked(400) == asked(400)
    assert len(set(asked(400))) == len(asked(400)) < 400


def test_ranks_go_when_one_process_fails_too() -> None:
    check = parse("ranks/both-2-2-balanced-keep/bfloat16")
    assert shrink(causal_dropped(), check, fails=lambda c: True).id == f"call/@q_len=1,k_len=1,{SMALL}/float32"
    ring = shrink(causal_dropped(), check, fails=lambda c: c.ranks.ring > 1)
    assert ring.id == f"ranks/@q_len=1,k_len=1,{SMALL},ring=2/float32"
    assert parse(ring.id) == ring


def test_an_order_keeps_its_sizes() -> None:
    check = parse("order/q-outermost-first/bfloat16")
    assert shrink(causal_dropped(), check, fails=lambda c: True) == replace(
        check, case=replace(check.case, dtype=torch.float32)
    )
    alone = parse("order/float32-first/bfloat16")  # there is none of that name in float32
    assert shrink(causal_dropped(), alone, fails=lambda c: True) == alone


def test_every_step_lowers_something_for_good() -> None:
    """No step gives back what it was given: a hook that always says yes comes to an end far below the bound."""
    for text in (
        "call/all-of-them/bfloat16",
        "ranks/ring-4-empty-shard/bfloat16",
        "call/segments-window-float/float16",
    ):
        check, turns = parse(text), 0
        for _ in range(300):
            smaller = next((s for steps in STEPS for s in steps(check) if s.id != check.id), None)
            if smaller is None:
                break
            check, turns = smaller, turns + 1
        assert turns < 60
