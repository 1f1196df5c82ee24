"""The judgement is worth what it finds: each fault of the past and each mutant fails, on every pair, in every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from contract.subjects import DTYPES, PLANTED, Bridge, Subject, cases_for, parameters, verdicts
from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.inputs import Case
from ringtrue.audit.judge import Verdict
from ringtrue.cli.audit.selftest import BACKEND
from ringtrue.contract import Claims
from ringtrue.errors import GradientError
from ringtrue.plants import FEATURES, OF_PAIRS, PLANTS, Plant, ran

# those that the self-test's own test plants into this pair, in this dtype
ELSEWHERE = ("eager", BACKEND, "cpu", torch.float32)


def shows(fault: Plant, claims: Claims) -> bool:
    """Whether a pair with these claims can have the fault at all."""
    return claims.backward and claims.lse and fault.needs(claims)


def every_fault() -> Iterator[object]:
    for subject in PLANTED:
        for name, fault in OF_PAIRS.items():
            dtypes = [d for d in DTYPES if d in subject.pair.claims.dtypes & fault.dtypes]
            for bridge, dtype in (*(("eager", d) for d in dtypes), ("compiled", min(dtypes, key=str, default=None))):
                there = (bridge, subject.pair.name, subject.device, dtype)
                if dtype and there != ELSEWHERE and shows(fault, subject.pair.claims):
                    plain = parameters(subject)
                    label = f"{bridge}-{subject}-{str(dtype).removeprefix('torch.')}-{name}"
                    yield pytest.param(subject, dtype, fault, bridge, id=label, marks=plain.marks)


@pytest.mark.parametrize(("subject", "dtype", "fault", "bridge"), list(every_fault()))
def test_a_fault_is_found(subject: Subject, dtype: torch.dtype, fault: Plant, bridge: Bridge) -> None:
    for tried, in_parts in _cases(subject, dtype, fault.why):
        try:
            found = verdicts(fault.on(subject.pair), tried, subject.device, in_parts=in_parts, bridge=bridge)
        except GradientError:  # an operator refuses a gradient that is not of its input's shape and dtype
            assert bridge == "compiled"
            return
        if not all(v.ok for v in found):
            right = verdicts(subject.pair, tried, subject.device, in_parts=in_parts, bridge=bridge)
            assert all(v.ok for v in right), f"{tried.id}: the pair fails without the fault too\n" + _text(right)
            return
    pytest.fail("passes every case")


@pytest.mark.parametrize("subject", [parameters(s) for s in PLANTED])
@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_plant_changed_is_wrong_by_far(subject: Subject, plant: str) -> None:
    """A historical fault is no matter of rounding: some case is off by more than a hundred times what is allowed."""
    if not shows(OF_PAIRS[plant], subject.pair.claims):
        pytest.skip(f"{subject} does not claim what {plant} needs to show")
    planted = PLANTS[plant](subject.pair)
    dtype = min(subject.pair.claims.dtypes, key=str)
    worst = 0.0
    for tried, in_parts in _cases(subject, dtype):
        found = verdicts(planted, tried, subject.device, in_parts=in_parts)
        worst = max(worst, *(v.strain for v in found))
        if worst > 100:
            break
    assert worst > 100
    assert ran(planted) > 0


@pytest.mark.parametrize("subject", [parameters(s) for s in PLANTED])
@pytest.mark.parametrize("name", ["lse-in-bf16-returned", "lse-in-bf16-in-backward"])
def test_a_coarse_lse_is_found_among_ordinary_numbers(subject: Subject, name: str) -> None:
    """Gaussian, at most 64 keys, no mask: in every dtype, and not only where something makes it worse."""
    for dtype in subject.pair.claims.dtypes:
        ordinary = replace(case("length-33"), dtype=dtype)
        found = verdicts(OF_PAIRS[name].on(subject.pair), ordinary, subject.device)
        assert not all(v.ok for v in found), dtype


def _cases(subject: Subject, dtype: torch.dtype, why: str = "ordinary numbers") -> Iterator[tuple[Case, bool]]:
    """Those with what `why` asks, then those that split: a pair shows faults in parts that one call hides."""
    order = [
        (each, in_parts)
        for in_parts in (True, False)
        if subject.pair.claims.backward_from_lse or not in_parts
        for each in cases_for(subject, (dtype,), in_parts=in_parts)
    ]
    yield from sorted(order, key=lambda each: not FEATURES[why](Check(each[0], "chunk" if each[1] else "call")))


def _text(found: list[Verdict]) -> str:
    return "\n".join(map(str, found))
