"""What an audit will do: which subjects, and the checks that each is put to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ...audit.checks import DTYPES, Check, checks, of_the_truth
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
    if not choice.cases and choice.group != "parallel":
        subjects = {TRUTH.name: TRUTH, **subjects}
        work.insert(0, Work(Ask(TRUTH.name, "cpu"), tuple(of_the_truth(choice.only, choice.seed))))
    return Plan(tuple(work), subjects)


def of(subject: Subject, choice: Choice) -> list[Check]:
    """What a subject is put to: all of a group in the dtypes that it claims, one plain call in each other."""
    if choice.cases:
        return [parse(text, seed=choice.seed) for text in choice.cases]
    asked = [d for d in DTYPES if d in (choice.dtypes or DTYPES)]
    claimed = [d for d in asked if d in subject.says.dtypes]
    own = checks(choice.group, dtypes=claimed, only=choice.only, seed=choice.seed, chunks=subject.pair is not None)
    if subject.unavailable():  # once says it
        return own[:1]
    if choice.group == "parallel":  # one refusal says it for a subject that claims nothing of the kind
        return own if subject.says.ranks else own[:1]
    others = checks("smoke", dtypes=["float32"], only="call/length-33/*", seed=choice.seed)
    others = [replace(c, case=replace(c.case, dtype=DTYPES[d])) for c in others for d in asked if d not in claimed]
    return [*own, *(c for c in others if fnmatchcase(c.id, choice.only))]
