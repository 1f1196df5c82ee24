"""Laws about the same call again."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor

from audit.test_examine import ALL, RIGHT, eager
from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import PASS, WRONG
from ringtrue.audit.repeats import poisoned
from ringtrue.audit.subject import Call, Plain


def outcome(attend, law: str):  # type: ignore[no-untyped-def]
    return examine(Plain("s", attend, ALL), Check(case("length-33"), law))


def test_noise_is_found() -> None:
    turns = count(1)

    def noisy(call: Call) -> Tensor:
        return eager(call) * (1 + 1e-6 * next(turns))

    found = outcome(noisy, "twice")
    assert found.verdict == WRONG
    assert "differs from run to run" in found.quantities[0].problem


def test_the_same_bits_are_asked_for() -> None:
    turns = count(1)
    found = outcome(lambda call: eager(call) * (1 + (not call.deterministic) * 1e-6 * next(turns)), "twice")
    assert found.verdict == PASS


def test_tensors_that_are_kept_are_found() -> None:
    kept: list[Tensor] = []

    def keeps(call: Call) -> Tensor:
        out = eager(call)
        kept.append(out.detach())
        return out

    found = outcome(keeps, "growth")
    assert found.verdict == WRONG
    assert "still alive" in found.quantities[0].problem


def test_a_bounded_cache_is_no_growth() -> None:
    kept: list[Tensor] = []

    def keeps_one(call: Call) -> Tensor:
        kept[:] = [call.query.detach()]
        return eager(call)

    assert outcome(keeps_one, "growth").verdict == PASS


def test_a_result_that_nobody_wrote_is_found() -> None:
    class Unwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            made = torch.empty_like(grad)
            made[:, 1:] = grad[:, 1:]
            return made

    found = outcome(lambda call: Unwritten.apply(eager(call)), "poison")
    assert found.verdict == WRONG
    assert all("NaN" in v.problem for v in found.quantities if v.quantity in ("dq", "dk", "dv"))


def test_poison_leaves_torch_as_it_was() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError), poisoned(torch.device("cpu")):
        assert torch.empty(3).isnan().all()
        raise ZeroDivisionError
    after = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert before == after


def test_a_right_one_passes() -> None:
    assert {examine(RIGHT, Check(case("length-33"), law)).verdict for law in ("twice", "growth", "poison")} == {PASS}


def test_who_is_not_deterministic_is_judged_by_the_mask_it_drew() -> None:
    subject = Plain("s", eager, replace(ALL, deterministic=False))
    assert examine(subject, Check(case("dropout"), "twice")).verdict == PASS


def test_tensors_of_its_own_that_pile_up_are_found() -> None:
    kept: list[Tensor] = []

    def piles(call: Call) -> Tensor:
        kept.append(torch.empty(8))
        return eager(call)

    found = outcome(piles, "growth")
    assert found.verdict == WRONG
    assert "tensors more are alive" in found.quantities[0].problem
