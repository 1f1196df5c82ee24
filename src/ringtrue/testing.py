"""An audit inside of a test suite: one check, one test. It needs no pytest itself, and works in unittest too.

from ringtrue.testing import audit_of, checks_for

test_my_attention = audit_of("mypkg.attn:attention", layout="bhsd")

@pytest.mark.parametrize("check", checks_for("mypkg.attn:attention", only="call/causal*"))
def test_causal(check):
    check.assert_right()
"""

from __future__ import annotations

import shlex
import unittest
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .audit.checks import DTYPES, GROUPS, Check, planned
from .audit.examine import examine
from .audit.outcome import QUIET, Outcome
from .audit.subject import Says, Subject
from .subjects import claims_file, found

__all__ = ["Question", "WrongError", "audit_of", "checks_for"]


class WrongError(AssertionError):
    """A check came out wrong; the text holds every quantity, the likely fault and how to replay it."""


@dataclass(frozen=True)
class Question:
    """One check of one subject on one device. `replay`: the command line that asks the same."""

    subject: Subject
    check: Check
    device: str = "cpu"
    replay: str = ""

    @property
    def id(self) -> str:
        return self.check.id

    @property
    def __name__(self) -> str:
        """What pytest calls a parameter of this value."""
        return self.id

    def outcome(self) -> Outcome:
        """The verdict. On one thread, for the tensors are tiny; a warning of the subject is no refusal."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                outcome = examine(self.subject, self.check, self.device)
        finally:
            torch.set_num_threads(threads)
        return replace(outcome, replay=outcome.replay or self.replay)

    def assert_right(self) -> None:
        """WrongError where the subject is wrong, unittest.SkipTest where it refuses what it does not claim."""
        __tracebackhide__ = True
        outcome = self.outcome()
        if outcome.bad:
            raise WrongError(told(outcome))
        if outcome.verdict in QUIET:
            raise unittest.SkipTest(f"{outcome.verdict}: {outcome.reason}")


def told(outcome: Outcome) -> str:
    """An outcome as text: verdict, every quantity with its error and bound, the likely fault, how to replay it."""
    head = f"{outcome.subject} {outcome.check}: {outcome.verdict}"
    lines = [f"{head}: {outcome.reason}" if outcome.reason else head, *(f"  {v}" for v in outcome.quantities)]
    lines += [
        f"  {label}: {text}" for label, text in (("likely", outcome.diagnosis), ("replay", outcome.replay)) if text
    ]
    return "\n".join(lines)


def checks_for(
    subject: str | Subject,
    *,
    group: str = "smoke",
    only: str = "*",
    dtypes: Sequence[str] = tuple(DTYPES),
    device: str = "cpu",
    layout: str = "bshd",
    claims: Says | Path | str | None = None,
    seed: int = 0,
) -> list[Question]:
    """The checks that an audit would put a subject to, in its order. ValueError for a name or a claim that is none.

    subject  "package.module:function", a family as `ringtrue audit` knows it ("torch/flash"), or a Subject
    group    "smoke" or "full"; several processes ("parallel") need `ringtrue audit`
    only     a pattern for ids, such as "call/causal*"
    dtypes   of "float32", "bfloat16", "float16", "float64"; all that the subject claims, and a refusal of each other
    layout   of package.module:function: "bshd", "bhsd" or "packed"
    claims   what it says it can do: a claims file, or `Says`; read from the function's signature otherwise
    seed     other numbers for the same cases
    """
    if group not in GROUPS or group == "parallel":
        raise ValueError(f"group is smoke or full: {group!r}")
    says = claims if isinstance(claims, Says) or claims is None else claims_file.read(claims)
    subjects = found(subject, device, layout=layout, claims=says) if isinstance(subject, str) else [subject]
    options = {
        "--layout": "" if layout == "bshd" else layout,
        "--claims": str(claims) if isinstance(claims, str | Path) else "",
        "--device": "" if device == "cpu" else device,
        "--seed": str(seed or ""),
    }
    rest = [word for option, value in options.items() if value for word in (option, value)]
    return [
        Question(one, check, device, shlex.join(["ringtrue", "audit", one.name, "--case", check.id, *rest]))
        for one in subjects
        for check in planned(one, group, dtypes=dtypes, only=only, seed=seed)
    ]


def audit_of(subject: str | Subject, **options: object) -> Callable[[Question], None]:
    """A pytest test function of all checks, one parameter each; the options are those of `checks_for`."""
    import pytest  # only who writes tests for pytest gets here

    questions = checks_for(subject, **options)  # type: ignore[arg-type]
    several = len({q.subject.name for q in questions}) > 1
    names = [f"{q.subject.name}/{q.id}" if several else q.id for q in questions]

    @pytest.mark.parametrize("check", questions, ids=names)
    def test_audit(check: Question) -> None:
        __tracebackhide__ = True
        check.assert_right()

    return test_audit
