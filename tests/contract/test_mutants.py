"""The judgement is worth what it finds: each fault of the past and each mutant fails, on every pair, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from contract.subjects import DTYPES, SUBJECTS, Bridge, Subject, cases_for, parameters, verdicts
from mutants.pairs import MUTANTS, Mutant
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case
from ringtrue.audit.judge import Verdict
from ringtrue.contract import Claims
from ringtrue.errors import GradientError
from ringtrue.plants import PLANTS, ran

FAULTS = {**{name: Mutant(make) for name, make in PLANTS.items()}, **MUTANTS}
# what a pair must claim before a fault with this word in its name can show
PRESUMES: dict[str, Callable[[Claims], bool]] = {
    "stale-kv": lambda claims: claims.backward_from_lse,
    "own-lse": lambda claims: claims.backward_from_lse,
    "mask": lambda claims: bool(claims.masks),
    "causal": lambda claims: claims.causal != "none",
    "blind": lambda claims: bool(claims.masks),
    "": lambda claims: claims.backward and claims.lse,
}


def shows(name: str, claims: Claims) -> bool:
    """Whether a pair with these claims can have the fault at all."""
    return all(claimed(claims) for word, claimed in PRESUMES.items() if word in name)


def every_fault() -> Iterator[object]:
    for subject in SUBJECTS:
        for name, fault in FAULTS.items():
            dtypes = [d for d in DTYPES if d in subject.pair.claims.dtypes & fault.dtypes]
            for bridge, dtype in (*(("eager", d) for d in dtypes), ("compiled", min(dtypes, key=str, default=None))):
                if dtype and fault.needs(subject.pair.claims) and shows(name, subject.pair.claims):
                    plain = parameters(subject)
                    label = f"{bridge}-{subject}-{str(dtype).removeprefix('torch.')}-{name}"
                    yield pytest.param(subject, dtype, fault, bridge, id=label, marks=plain.marks)


@pytest.mark.parametrize(("subject", "dtype", "fault", "bridge"), list(every_fault()))
def test_a_fault_is_found(subject: Subject, dtype: torch.dtype, fault: Mutant, bridge: Bridge) -> None:
    for tried, in_parts in _cases(subject, dtype, fault.where):
        try:
            found = verdicts(fault.make(subject.pair), tried, subject.device, in_parts=in_parts, bridge=bridge)
        except GradientError:  # an operator refuses a gradient that is not of its input's shape and dtype
            assert bridge == "compiled"
            return
        if not all(v.ok for v in found):
            right = verdicts(subject.pair, tried, subject.device, in_parts=in_parts, bridge=bridge)
            assert all(v.ok for v in right), f"{tried.id}: the pair fails without the fault too\n" + _text(right)
            return
    pytest.fail("passes every case")


@pytest.mark.parametrize("subject", [parameters(s) for s in SUBJECTS])
@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_plant_changed_is_wrong_by_far(subject: Subject, plant: str) -> None:
    """A historical fault is no matter of rounding: some case is off by more than a hundred times what is allowed."""
    if not shows(plant, subject.pair.claims):
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


@pytest.mark.parametrize("subject", [parameters(s) for s in SUBJECTS])
@pytest.mark.parametrize("name", ["lse-in-bf16-returned", "lse-in-bf16-in-backward"])
def test_a_coarse_lse_is_found_among_ordinary_numbers(subject: Subject, name: str) -> None:
    """Gaussian, at most 64 keys, no mask: in every dtype, and not only where something makes it worse."""
    for dtype in subject.pair.claims.dtypes:
        ordinary = replace(case("length-33"), dtype=dtype)
        found = verdicts(MUTANTS[name].make(subject.pair), ordinary, subject.device)
        assert not all(v.ok for v in found), dtype


def _cases(subject: Subject, dtype: torch.dtype, where: str = "") -> Iterator[tuple[Case, bool]]:
    """Those that split first: under the chunk law a pair shows faults that one call hides; then `where` in their id."""
    order = [
        (each, in_parts)
        for in_parts in (True, False)
        if subject.pair.claims.backward_from_lse or not in_parts
        for each in cases_for(subject, (dtype,), in_parts=in_parts)
    ]
    yield from sorted(order, key=lambda each: where not in each[0].id)


def _text(found: list[Verdict]) -> str:
    return "\n".join(map(str, found))
