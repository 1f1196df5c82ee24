"""What an audit will do: which subjects, and the checks that each is put to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...audit.checks import DTYPES, Check, of_the_truth
from ...audit.checks import planned as audit_plan
from ...audit.ids import parse
from ...audit.subject import Says, Subject
from ...subjects import TRUTH, found
from .lanes import Work
from .tasks import Ask


@dataclass(frozen=True)
class Choice:
    """What was asked for on the command line.

    cases   ids; given, they take the place of the group
    dtypes  empty: all
    """

    group: str = "smoke"
    cases: tuple[str, ...] = ()
    only: str = "*"
    seed: int = 0
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Subjects with their checks, and the truth's own first."""

    work: tuple[Work, ...]
    subjects: dict[str, Subject]

    @property
    def total(self) -> int:
        return sum(len(one.checks) for one in self.work)


def planned(
    names: Sequence[str], device: str, choice: Choice, *, layout: str = "bshd", claims: Says | None = None
) -> Plan:
    """The plan. ValueError where a name means nothing or an id is none: its text says what there is."""
    subjects = {s.name: s for name in names for s in found(name, device, layout=layout, claims=claims)}
    work = [Work(Ask(name, device, layout, claims), tuple(of(s, choice))) for name, s in subjects.items()]
    own = () if choice.cases or choice.group == "parallel" else tuple(of_the_truth(choice.only, choice.seed))
    if own:
        subjects = {TRUTH.name: TRUTH, **subjects}
        work.insert(0, Work(Ask(TRUTH.name, "cpu"), own))
    return Plan(tuple(work), subjects)


def of(subject: Subject, choice: Choice) -> list[Check]:
    """What a subject is put to."""
    if choice.cases:
        return [parse(text, seed=choice.seed) for text in choice.cases]
    dtypes = choice.dtypes or tuple(DTYPES)
    return audit_plan(subject, choice.group, dtypes=dtypes, only=choice.only, seed=choice.seed)
