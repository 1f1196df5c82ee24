"""Every registered pair is right on every case its claims allow, in one call and in parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from calls import SLOW
from contract.subjects import (
    DTYPES,
    EVERY_SUBJECT,
    EVERY_THAT_TRAINS,
    SUBJECTS,
    Bridge,
    Subject,
    cases_for,
    inputs_for,
    parameters,
    verdicts,
)
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case
from ringtrue.contract import Wanted

# operators hand on what they are given: one dtype, which every pair takes, shows it
DTYPES_OF = {"eager": DTYPES, "compiled": (torch.bfloat16,)}


def every_case(*, in_parts: bool) -> list[object]:
    found = []
    for bridge, dtypes in DTYPES_OF.items():
        for subject in SUBJECTS:
            if (subject.standin or subject.pair.name in SLOW) and bridge == "compiled":  # the operators are the same
                continue
            if in_parts and not subject.pair.claims.backward_from_lse:
                continue
            once = subject.standin or (in_parts and subject.pair.name in SLOW)
            for c in cases_for(subject, (torch.bfloat16,) if once else dtypes, in_parts=in_parts):
                plain = parameters(subject)
                name = f"{bridge}-{subject}-{str(c.dtype).removeprefix('torch.')}-{c.id}"
                found.append(pytest.param(subject, c, bridge, id=name, marks=plain.marks))
    return found


@pytest.mark.parametrize(("subject", "case", "bridge"), every_case(in_parts=False))
def test_a_call_is_right(subject: Subject, case: Case, bridge: Bridge) -> None:
    found = verdicts(subject.pair, case, subject.device, bridge=bridge)
    assert all(v.ok for v in found), "\n".join(map(str, found))


@pytest.mark.parametrize(("subject", "case", "bridge"), every_case(in_parts=True))
def test_the_chunk_law_holds(subject: Subject, case: Case, bridge: Bridge) -> None:
    found = verdicts(subject.pair, case, subject.device, in_parts=True, bridge=bridge)
    assert all(v.ok for v in found), "\n".join(map(str, found))


@EVERY_SUBJECT
def test_shapes_tell_what_forward_gives(subject: Subject) -> None:
    """What a fake kernel promises to torch: shapes and dtypes of every result, also of what is kept for backward."""
    for c in cases_for(subject):
        x = inputs_for(subject.pair, c, subject.device)
        arguments = (x.q, x.k, x.v, x.mask, x.rng, x.options)
        told, given = subject.pair.shapes(*arguments), subject.pair.forward(*arguments)
        for a, b in zip((told.out, told.lse, *told.saved), (given.out, given.lse, *given.saved), strict=True):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), c.id


@EVERY_SUBJECT
def test_the_claims_leave_cases_to_judge(subject: Subject) -> None:
    """A pair that claims too little would pass everything by being asked nothing."""
    dtypes = {c.dtype for c in cases_for(subject)}
    assert dtypes == subject.pair.claims.dtypes
    assert len(cases_for(subject, (min(dtypes, key=str),))) > 20


@EVERY_THAT_TRAINS
@pytest.mark.parametrize("wanted", [Wanted(*w) for w in product((False, True), repeat=3) if any(w)], ids=str)
def test_only_what_is_wanted_comes_back(subject: Subject, wanted: Wanted) -> None:
    pair, x = subject.pair, inputs_for(subject.pair, smallest(subject), subject.device)
    result = pair.forward(x.q, x.k, x.v, x.mask, None, x.options)
    grads = pair.backward(
        x.grad_out, None, x.q, x.k, x.v, x.mask, result.out, result.lse, result.rng, result.saved, x.options, wanted
    )
    assert [g is not None for g in grads] == list(wanted)


@EVERY_THAT_TRAINS
@pytest.mark.parametrize("storage", ["plain", "heads_outermost", "inner_strided"])
def test_arguments_are_left_as_they_are(subject: Subject, storage: str) -> None:
    pair = subject.pair
    x = inputs_for(pair, replace(smallest(subject), storage=storage), subject.device)
    result = pair.forward(x.q, x.k, x.v, x.mask, None, x.options)
    given = (x.grad_out, x.q, x.k, x.v, result.out, result.lse, *result.saved)
    before = [t.clone() for t in given]
    pair.backward(
        x.grad_out, None, x.q, x.k, x.v, x.mask, result.out, result.lse, result.rng, result.saved, x.options, x.wanted
    )
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def smallest(subject: Subject) -> Case:
    return replace(case("length-16"), dtype=min(subject.pair.claims.dtypes, key=str))
