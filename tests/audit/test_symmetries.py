"""Laws that need no truth: each finds its own fault, and none finds any in a right subject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from audit.test_examine import ALL, RIGHT, eager
from ringtrue.audit.cases import case
from ringtrue.audit.checks import LAWS, Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import PASS, WRONG
from ringtrue.audit.subject import Call, Plain

NAMES = [(law, name) for law, names in LAWS.items() for name in names]


@pytest.mark.parametrize(("law", "name"), NAMES)
def test_a_right_one_keeps_every_law(law: str, name: str) -> None:
    outcome = examine(RIGHT, Check(case(name), law))
    if outcome.verdict != PASS:  # what it does not claim
        assert outcome.verdict == "not run", outcome


def first_head(call: Call) -> Tensor:
    """Every head reads the first key head."""
    first = replace(call, key=call.key[:, :, :1].expand_as(call.key), value=call.value[:, :, :1].expand_as(call.value))
    return eager(first) + eager(call) * 0


def by_place(call: Call) -> Tensor:
    """Heads are weighted by their number."""
    return eager(call) * torch.arange(1, call.query.shape[2] + 1).view(1, 1, -1, 1)


def mixes_samples(call: Call) -> Tensor:
    """All samples read the first one's keys."""
    return eager(replace(call, key=call.key[:1].expand_as(call.key)))


def normalised(call: Call) -> Tensor:
    out = eager(call)
    return out / out.norm(dim=-1, keepdim=True)


def sees_everything(call: Call) -> Tensor:
    return eager(replace(call, mask=replace(call.mask, dense=None, key_keep=None, causal=None)))


def blind_to_the_middle(call: Call) -> Tensor:
    keys = call.key.shape[1]
    seen = (torch.arange(keys) != keys // 2).view(1, 1, 1, -1)
    return eager(replace(call, mask=replace(call.mask, dense=seen)))


@pytest.mark.parametrize(
    ("law", "name", "attend"),
    [
        ("heads", "length-33", by_place),
        ("samples", "length-33", mixes_samples),
        ("linear", "length-33", normalised),
        ("token", "bool-qk", sees_everything),
        ("token", "causal", sees_everything),
        ("token", "length-33", blind_to_the_middle),
    ],
)
def test_a_breach_is_found(law: str, name: str, attend: Callable[[Call], Tensor]) -> None:
    assert examine(Plain("wrong", attend, ALL), Check(case(name), law)).verdict == WRONG
