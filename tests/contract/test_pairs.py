"""Every registered pair is right on every case its claims allow, in one call and in parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from contract.subjects import EVERY_SUBJECT, SUBJECTS, Subject, cases_for, inputs_for, parameters, verdicts
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case
from ringtrue.contract import Wanted


def every_case(*, in_parts: bool) -> list[object]:
    found = []
    for subject in SUBJECTS:
        if in_parts and not subject.pair.claims.backward_from_lse:
            continue
        for c in cases_for(subject, in_parts=in_parts):
            plain = parameters(subject)
            name = f"{subject}-{str(c.dtype).removeprefix('torch.')}-{c.id}"
            found.append(pytest.param(subject, c, id=name, marks=plain.marks))
    return found


@pytest.mark.parametrize(("subject", "case"), every_case(in_parts=False))
def test_a_call_is_right(subject: Subject, case: Case) -> None:
    found = verdicts(subject.pair, case, subject.device)
    assert all(v.ok for v in found), "\n".join(map(str, found))


@pytest.mark.parametrize(("subject", "case"), every_case(in_parts=True))
def test_the_chunk_law_holds(subject: Subject, case: Case) -> None:
    found = verdicts(subject.pair, case, subject.device, in_parts=True)
    assert all(v.ok for v in found), "\n".join(map(str, found))


@EVERY_SUBJECT
def test_the_claims_leave_cases_to_judge(subject: Subject) -> None:
    """A pair that claims too little would pass everything by being asked nothing."""
    dtypes = {c.dtype for c in cases_for(subject)}
    assert dtypes == subject.pair.claims.dtypes
    assert len(cases_for(subject, (min(dtypes, key=str),))) > 20


@EVERY_SUBJECT
@pytest.mark.parametrize("wanted", [Wanted(*w) for w in product((False, True), repeat=3) if any(w)], ids=str)
def test_only_what_is_wanted_comes_back(subject: Subject, wanted: Wanted) -> None:
    pair, x = subject.pair, inputs_for(subject.pair, smallest(subject), subject.device)
    result = pair.forward(x.q, x.k, x.v, x.mask, None, x.options)
    grads = pair.backward(
        x.grad_out, None, x.q, x.k, x.v, x.mask, result.out, result.lse, result.rng, result.saved, x.options, wanted
    )
    assert [g is not None for g in grads] == list(wanted)


@EVERY_SUBJECT
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
