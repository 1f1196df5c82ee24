"""From a question to a verdict: every word of the list, each for its own reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ringtrue.audit import examine as examining
from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import (
    CLAIMED_BUT_REFUSED,
    CRASH,
    NOT_RUN,
    NOTHING_RAN_CODE,
    OUT_OF_TIME,
    PASS,
    RAN_UNCLAIMED,
    REFUSED,
    RIGHT_CODE,
    USAGE_CODE,
    WRONG,
    WRONG_CODE,
    Outcome,
    Report,
    exit_code,
)
from ringtrue.audit.subject import Call, Plain, Says

ALL = Says(frozenset({"float32", "bfloat16"}), frozenset({"bool"}), "any", gqa=True, blind=True, dropout=True)


def eager(call: Call) -> Tensor:
    """A right one, for anything with a bool mask."""
    k, v = (x.transpose(1, 2).repeat_interleave(call.group, 1) for x in (call.key, call.value))
    scores = call.query.transpose(1, 2) @ k.mT * call.scale
    mask = call.dense(places=True)
    if mask is not None:
        dead = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask, -torch.inf).masked_fill(dead, 0.0)
        weights = scores.softmax(-1).masked_fill(dead, 0.0)
    else:
        weights = scores.softmax(-1)
    if call.dropout_p:
        torch.manual_seed(int(call.rng[0]))  # type: ignore[index]
        weights = torch.dropout(weights, call.dropout_p, True)
    return (weights @ v).transpose(1, 2)


RIGHT = Plain("right", eager, ALL)


def verdict(subject: Plain, name: str, law: str = "call") -> str:
    return examine(subject, Check(case(name), law)).verdict


@pytest.mark.parametrize("name", ["length-33", "causal-wide", "bool-blind", "gqa", "dropout", "heads-outermost"])
def test_a_right_one_passes(name: str) -> None:
    outcome = examine(RIGHT, Check(case(name)))
    assert outcome.verdict == PASS, outcome
    assert 0 < outcome.strain <= 1
    assert {v.quantity for v in outcome.quantities} == {"out", "dq", "dk", "dv"}


def test_a_wrong_one_is_wrong_with_its_numbers_and_maps() -> None:
    outcome = examine(replace(RIGHT, attend=lambda c: eager(c) * 1.01), Check(case("length-33")))
    assert outcome.verdict == WRONG
    assert not any(v.ok for v in outcome.quantities)
    assert {m.quantity for m in outcome.maps} == {"out", "dq", "dk", "dv"}


def test_what_is_not_claimed_may_be_refused() -> None:
    def refuses(call: Call) -> Tensor:
        if call.mask.dense is not None:
            raise NotImplementedError("no masks here")
        return eager(call)

    modest = Plain("modest", refuses, replace(ALL, masks=frozenset()))
    assert verdict(modest, "bool-qk") == REFUSED
    assert verdict(Plain("boaster", refuses, ALL), "bool-qk") == CLAIMED_BUT_REFUSED
    assert "no masks here" in examine(modest, Check(case("bool-qk"))).reason


def test_an_argument_that_is_dropped_without_a_word() -> None:
    def drops(call: Call) -> Tensor:
        return eager(replace(call, mask=replace(call.mask, dense=None)))

    assert verdict(Plain("drops", drops, replace(ALL, masks=frozenset())), "bool-qk") == RAN_UNCLAIMED
    assert verdict(Plain("drops", drops, ALL), "bool-qk") == WRONG


def test_dropout_that_drops_nothing_is_wrong() -> None:
    outcome = examine(replace(RIGHT, attend=lambda c: eager(replace(c, dropout_p=0.0))), Check(case("dropout")))
    assert outcome.verdict == WRONG
    assert [v.quantity for v in outcome.quantities] == ["dropout"]


def test_a_gradient_that_belongs_to_another_mask_is_wrong() -> None:
    class Replayed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weights: Tensor, p: float) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.p = p
            return torch.dropout(weights, p, True)

        @staticmethod
        def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
            return torch.dropout(grad, ctx.p, True), None

    def attend(call: Call) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
        torch.manual_seed(int(call.rng[0]))  # type: ignore[index]
        return (Replayed.apply((q @ k.mT * call.scale).softmax(-1), call.dropout_p) @ v).transpose(1, 2)

    outcome = examine(replace(RIGHT, attend=attend), Check(case("dropout")))
    assert outcome.verdict == WRONG
    assert {v.quantity for v in outcome.quantities if not v.ok} == {"dq", "dk"}  # dv is of the mask that was drawn


def test_a_process_that_is_lost_is_a_crash() -> None:
    def dies(call: Call) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert verdict(Plain("dies", dies, ALL), "length-33") == CRASH


def test_what_cannot_run_says_why() -> None:
    gone = examine(Plain("gone", eager, ALL, missing="it is not installed"), Check(case("length-33")))
    assert (gone.verdict, gone.reason) == (NOT_RUN, "it is not installed")
    chunk = examine(RIGHT, Check(case("length-33"), "chunk"))
    assert (chunk.verdict, chunk.reason) == (NOT_RUN, "it has no op pair")


def test_more_than_is_claimed_and_right_is_a_pass_that_says_so() -> None:
    outcome = examine(Plain("modest", eager, replace(ALL, gqa=False)), Check(case("gqa")))
    assert outcome.verdict == PASS
    assert "beyond its claims" in outcome.reason


def test_sixteen_bit_results_off_by_chance_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set of numbers beyond its bound by little, two that are right: a pass that says so. Two beyond it: wrong."""
    answers: list[float] = []

    def attend(call: Call) -> Tensor:
        return eager(replace(call, query=call.query.float(), key=call.key.float(), value=call.value.float())).to(
            call.query.dtype
        ) * (1 + answers.pop(0))

    check = Check(replace(case("length-33"), dtype=torch.bfloat16))
    subject = Plain("near", attend, ALL)
    monkeypatch.setattr(examining, "CHANCE", 10.0)
    answers[:] = [0.02, 0.0, 0.0]
    assert examine(subject, check).verdict == PASS
    answers[:] = [0.02, 0.0, 0.02]
    assert examine(subject, check).verdict == WRONG
    monkeypatch.setattr(examining, "CHANCE", 1.0)
    answers[:] = [0.02]
    assert examine(subject, check).verdict == WRONG


def test_exit_codes() -> None:
    def of(*verdicts: str) -> int:
        return exit_code([Outcome("s", "c", v) for v in verdicts])

    assert of(PASS, REFUSED, NOT_RUN) == RIGHT_CODE
    assert {of(PASS, bad) for bad in (WRONG, CRASH, RAN_UNCLAIMED, CLAIMED_BUT_REFUSED)} == {WRONG_CODE}
    assert of(REFUSED, NOT_RUN) == of() == NOTHING_RAN_CODE


def test_an_explanation_that_fails_hides_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "diagnose", lambda *_, **__: 1 / 0)
    outcome = examine(replace(RIGHT, attend=lambda c: eager(c) * 1.01), Check(case("length-33")))
    assert outcome.verdict == WRONG
    assert "ZeroDivisionError" in outcome.reason


def forgetful(call: Call) -> Tensor:
    """Sees every key, and hides that in the mask it was handed."""
    if call.mask.dense is not None:
        call.mask.dense.fill_(True)
    return eager(call)


def doubled(call: Call) -> Tensor:
    call.query.data.mul_(2)
    return eager(call)


@pytest.mark.parametrize(
    ("attend", "name", "given"), [(forgetful, "bool-bqk", "mask"), (doubled, "length-33", "query")]
)
def test_a_call_that_changes_what_it_was_handed_is_wrong(
    attend: Callable[[Call], Tensor], name: str, given: str
) -> None:
    outcome = examine(Plain("changing", attend, ALL), Check(case(name)))
    assert outcome.verdict == WRONG
    assert [(v.quantity, v.problem) for v in outcome.quantities] == [(given, "was changed in place")]


def test_an_error_text_that_no_file_can_hold_is_escaped() -> None:
    def refuses(call: Call) -> Tensor:
        raise ValueError("half a pair: \ud800")

    reason = examine(Plain("refusing", refuses, ALL), Check(case("length-5"))).reason
    assert reason == "ValueError: half a pair: \\ud800"
    assert reason.encode("utf-8")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
        (lambda: torch.set_grad_enabled(False), "grad mode"),
        (lambda: torch.use_deterministic_algorithms(True), "the deterministic switch"),
    ],
)
def test_a_process_left_in_another_state_is_wrong_and_put_back(change: Callable[[], object], told: str) -> None:
    def attend(call: Call) -> Tensor:
        out = eager(call)
        change()
        return out

    only = Check(replace(case("length-33"), wants=""))
    outcome = examine(replace(RIGHT, attend=attend), only)
    assert outcome.verdict == WRONG
    assert [v.problem for v in outcome.quantities if not v.ok] == [f"left {told} changed"]
    assert examine(RIGHT, only).verdict == PASS


def test_what_is_no_attention_is_told_in_words() -> None:
    assert "gave a list" in examine(replace(RIGHT, attend=lambda c: [1]), Check(case("length-33"))).reason  # type: ignore[arg-type]
    detached = examine(replace(RIGHT, attend=lambda c: eager(c).detach()), Check(case("length-33")))
    assert (detached.verdict, {v.problem for v in detached.quantities if not v.ok}) == (WRONG, {"missing"})
    other = examine(replace(RIGHT, attend=lambda c: eager(c).transpose(1, 2)), Check(case("length-33")))
    assert other.verdict == WRONG
    assert "must be" in other.quantities[0].problem


def test_what_was_ended_or_only_the_truth_is_not_green() -> None:
    of_it, truth = Outcome("s", "c", PASS), Outcome("truth", "truth/c/float64", PASS)
    late = Outcome("s", "d", NOT_RUN, OUT_OF_TIME)
    assert exit_code([of_it, truth]) == RIGHT_CODE
    assert exit_code([of_it, late]) == exit_code([truth, Outcome("s", "c", REFUSED)]) == NOTHING_RAN_CODE
    assert exit_code([Outcome("s", "c", WRONG), late]) == WRONG_CODE
    assert exit_code([Outcome("truth", "truth/c/float64", WRONG)]) == WRONG_CODE
    assert Report((of_it, late)).headline == "unfinished: 1 checks did not begin; 1 ran, and are right"
    assert Report((truth, late)).headline == "nothing ran, so nothing is known"
    assert Report((of_it,), problems=("stale",)).exit_code == USAGE_CODE


def test_other_numbers_that_raise_are_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [0.02]

    def attend(call: Call) -> Tensor:
        return eager(call) * (1 + answers.pop())  # raises when it is asked again

    monkeypatch.setattr(examining, "CHANCE", 100.0)
    check = Check(replace(case("length-33"), dtype=torch.bfloat16))
    assert examine(Plain("once", attend, ALL), check).verdict == WRONG
