"""The audit of pairs that quantise, and of one without lse: laws of the last bit hold by the rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ringtrue import plants
from ringtrue.audit.cases import PARALLEL, case
from ringtrue.audit.checks import LAWS, Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import PASS, WRONG
from ringtrue.audit.subject import Call, Plain, Quantities
from ringtrue.backends import sage
from ringtrue.contract import Mask, OpPair
from ringtrue.edge import edge
from ringtrue.subjects.ours import Pair, in_ranks, says_of
from standins import sageattention_1, sageattention_2

OLDER = sage.make_pair("sage", lambda: sageattention_1, claims=sage.RELEASE_1_CLAIMS)
NEWER = sage.make_pair("sage", lambda: sageattention_2)


def subject(pair: OpPair) -> Pair:
    whole = edge(pair)
    return Pair("ours/sage/pair", says_of(whole.claims), "", "", whole)


def check(name: str, law: str) -> Check:
    return Check(replace(case(name), dtype=torch.bfloat16), law)


def test_every_law_holds_or_is_not_claimed() -> None:
    verdicts = [examine(subject(OLDER), check(name, law)) for law, names in LAWS.items() for name in names]
    assert not [v for v in verdicts if v.verdict == WRONG]
    assert sum(v.verdict == PASS for v in verdicts) > 10


def test_no_parts_are_joined_without_an_lse() -> None:
    assert examine(subject(OLDER), check("length-33", "chunk")).verdict == "not run"
    assert examine(subject(NEWER), check("length-33", "chunk")).verdict == PASS


def leaks(q: Any, k: Any, v: Any, mask: Mask, *rest: Any) -> Any:
    return NEWER.forward(q, k, v, replace(mask, causal=None), *rest)


def sees_the_next(q: Any, k: Any, v: Any, mask: Mask, *rest: Any) -> Any:
    ahead = [torch.cat([x[:, 1:], x[:, -1:]], 1) for x in (k, v)]
    return NEWER.forward(q, *ahead, mask, *rest)


@pytest.mark.parametrize("forward", [leaks, sees_the_next])
def test_a_key_that_is_seen_where_it_must_not_be_is_found(forward: Any) -> None:
    assert examine(subject(replace(NEWER, forward=forward)), check("causal", "token")).verdict == WRONG
    assert examine(subject(NEWER), check("causal", "token")).verdict == PASS


class Threads(Plain):
    """rt.attention under contexts whose ranks are threads."""

    def run(self, call: Call) -> Quantities:
        pair, lse = PAIRS[self.about], self.says.lse
        parts = plants.in_process(call.ranks.size, lambda mesh: in_ranks(pair, call, mesh, lse))
        return Quantities(*(None if c[0] is None else sum(c[1:], c[0]) for c in zip(*parts, strict=True)))


PAIRS = {"release 1": OLDER, "release 2": NEWER}
TRIED = [
    (replace(c, dtype=torch.bfloat16), ranks)
    for c, ranks in PARALLEL
    if ranks.size == 2 and not (c.mask or c.dropout or c.grad_lse or "scale" in c.id or "equal" in c.id)
]


@pytest.mark.parametrize("name", PAIRS)
def test_between_ranks_what_is_claimed_is_right_and_the_rest_is_refused(name: str) -> None:
    tried = Threads("ours/sage", lambda call: call.query, says_of(edge(PAIRS[name]).claims), about=name)
    outcomes = {c.id: examine(tried, Check(c, "call", ranks=ranks)) for c, ranks in TRIED}
    wrong = {i: o for i, o in outcomes.items() if o.verdict not in (PASS, "not run", "refused as claimed")}
    assert not wrong
    right = {i for i, o in outcomes.items() if o.verdict == PASS}
    assert {"ulysses-2", "ulysses-2-gqa", "ulysses-2-causal", "ulysses-2-uneven"} <= right
    assert ("ring-2" in right) == (name == "release 2")
