"""ringtrue as a subject: what it claims it does, through both of its faces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ringtrue as rt
from ringtrue.audit.asked import call_of
from ringtrue.audit.cases import CASES, case
from ringtrue.audit.checks import Check, checks
from ringtrue.audit.examine import examine
from ringtrue.audit.inputs import build
from ringtrue.audit.subject import Subject
from ringtrue.subjects import found

SUBJECTS = found("ours", "cpu")


def test_every_backend_is_there_twice() -> None:
    here = [s.name for s in rt.backends() if s.device == "cpu"]
    assert [s.name for s in SUBJECTS] == [f"ours/{name}{end}" for name in here for end in ("", "/pair")]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
def test_smoke_is_green(subject: Subject) -> None:
    """Every tenth check here; `ringtrue audit ours` runs them all."""
    outcomes = [examine(subject, c) for c in checks("smoke", chunks=subject.pair is not None)[::10]]
    assert not [o for o in outcomes if o.bad]
    assert sum(o.verdict == "pass" for o in outcomes) > 20


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s.pair is None], ids=lambda s: s.name)
def test_claims_are_those_that_the_call_itself_is_held_to(subject: Subject) -> None:
    """Said in the audit's words, and what explain says of the same call."""
    backend = subject.name.partition("/")[2]
    for each in CASES:
        call = call_of(build(each))
        if not all(call.query.shape) or not call.key.shape[1]:
            continue
        q, k, v = (x.detach().requires_grad_() for x in (call.query, call.key, call.value))
        from ringtrue.subjects.ours import mask_of

        told = rt.explain(
            q, k, v, mask_of(call), backend=backend, dropout_p=call.dropout_p, softcap=call.softcap,
            enable_gqa=True, return_lse=True,
        )  # fmt: skip
        asked = "bias" not in call.wanted
        if asked:
            assert (told.backend is None) == bool(subject.against(call)), (each.id, subject.against(call))


def test_the_source_of_a_call_computes_it() -> None:
    subject = next(s for s in SUBJECTS if s.name == "ours/native_math")
    for name in ("length-33", "scale-one", "gqa", "softcap"):
        call = call_of(build(case(name)))
        space = {"query": call.query, "key": call.key, "value": call.value}
        exec(subject.source(call), space)
        assert torch.equal(space["out"], subject.run(call).out)  # type: ignore[arg-type]


def test_a_pair_refuses_what_it_does_not_claim() -> None:
    pair = next(s for s in SUBJECTS if s.name == "ours/native_flash/pair")
    outcome = examine(pair, Check(case("softcap")))
    assert outcome.verdict == "refused as claimed"


def test_a_mask_that_goes_without_causal_is_not_claimed_beside_it() -> None:
    from ringtrue.subjects.ours import Pair, says_of

    taken = frozenset({"key_keep", "window"})
    pair = rt.op_pair("native_math")
    pair = replace(pair, claims=replace(pair.claims, masks=taken, alone=frozenset({"key_keep"})))
    subject = Pair("ours/alone/pair", says_of(pair.claims), "", "", pair)
    call = call_of(build(case("keep")))
    assert subject.against(call) == ""
    assert "key_keep beside causal" in subject.against(replace(call, mask=replace(call.mask, causal=0)))
    assert "key_keep beside causal" in subject.against(replace(call, mask=replace(call.mask, since=-2)))
