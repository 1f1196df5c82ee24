"""What a worker process of an audit does: find the subject by its name, examine checks, tell each outcome at once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any

import torch

from ...audit.checks import Check
from ...audit.examine import examine
from ...audit.outcome import CRASH, NOT_RUN, Outcome
from ...audit.shrink import shrink
from ...audit.subject import Call, Quantities, Says, Subject
from ...subjects import found
from ..worker import Job


@dataclass(frozen=True)
class Ask:
    """How to find a subject again in another process."""

    name: str
    device: str
    layout: str = "bshd"
    claims: Says | None = None

    def subject(self) -> Subject:
        """The one subject of that name."""
        chosen = found(self.name, self.device, layout=self.layout, claims=self.claims)
        return next((s for s in chosen if s.name == self.name), chosen[0])


def examine_all(job: Job, ask: Ask, checks: Sequence[Check], until: float) -> int:
    """Each check in this order, as news, until one leaves the process of no use: what ends it is the one after that.

    until  time.time() after which no other check begins
    """
    warnings.simplefilter("ignore")  # why torch passes over a kernel is said once a kernel and helps nobody here
    torch.set_num_threads(1)  # the tensors are tiny, and the other cores have audits of their own
    subject = ask.subject()
    for number, check in enumerate(checks, 1):
        outcome = examine(subject, check, ask.device)
        job.report(outcome)
        if outcome.verdict == CRASH or time() > until:
            return number
    return len(checks)


def shrink_one(job: Job, ask: Ask, check: Check) -> Outcome:
    """The outcome of the smallest check that is wrong as this one is."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    subject = ask.subject()
    try:
        small = shrink(subject, check, ask.device)
    except ValueError as error:  # right when it is asked again
        return Outcome(ask.name, check.id, NOT_RUN, str(error))
    outcome = examine(subject, small, ask.device)
    return replace(outcome, reason=f"shrunk from {check.id}. {outcome.reason}".strip())


def examine_in_ranks(job: Job, ask: Ask, check: Check) -> Outcome:
    """One check whose call is cut over the processes of this task: every rank comes to an outcome of the same sums."""
    torch.set_num_threads(1)
    return examine(Summed(ask.subject(), job), check, job.device)


class PeerError(RuntimeError):
    """Another rank could not answer."""


class Summed:
    """A subject whose ranks' parts are added up, so that what is examined is the answer for the whole call."""

    def __init__(self, subject: Subject, job: Job) -> None:
        self._subject, self._job = subject, job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subject, name)

    def run(self, call: Call) -> Quantities:
        """The sum of all ranks' answers; where one raises, all do."""
        failure: Exception | None = None
        part = Quantities(None)
        try:
            part = self._subject.run(call)
        except Exception as error:
            failure = error
        failed = torch.full((1,), float(failure is not None), device=self._job.device)
        there = torch.tensor([float(x is not None) for x in part], device=self._job.device)
        if self._job.total(failed).item():
            raise failure or PeerError("another rank could not answer")
        everywhere = self._job.total(there).tolist()
        sums = []
        for name, x, ranks in zip(part._fields, part, everywhere, strict=True):
            if ranks not in (0, self._job.world):
                raise PeerError(f"{name} is missing on {self._job.world - ranks:.0f} of {self._job.world} ranks")
            sums.append(None if x is None else self._sum(x))
        return Quantities(*sums)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """In float32 at least: parts are whole-sized, mostly zeros, and rounding them once more would be our fault."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous()
        return self._job.total(wide).to(x.dtype)


def alone(job: Job, ask: Ask, check: Check, number: int) -> bool:
    """Whether one call of an order is right when nothing ran before it in its process."""
    return not examine(ask.subject(), replace(check, law=f"alone-{number}"), ask.device).bad
