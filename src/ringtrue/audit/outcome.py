"""What came of one check of one subject, as plain data: reports, waivers and exit codes are made of these alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .judge import Verdict

PASS, WRONG = "pass", "wrong"
REFUSED, CLAIMED_BUT_REFUSED = "refused as claimed", "claimed but refused"
RAN_UNCLAIMED = "ran though not claimed"  # and is wrong: something was dropped without a word
CRASH, WAIVED, NOT_RUN = "crash", "waived", "not run"
VERDICTS = (PASS, WRONG, CLAIMED_BUT_REFUSED, RAN_UNCLAIMED, CRASH, REFUSED, WAIVED, NOT_RUN)
BAD = frozenset({WRONG, CLAIMED_BUT_REFUSED, RAN_UNCLAIMED, CRASH})
QUIET = frozenset({REFUSED, NOT_RUN})  # a report of nothing but these is not green
OUT_OF_TIME, INTERRUPTED = "out of time (--limit)", "interrupted"  # reasons of what is not run because it was ended
TRUTH = "truth"  # the name under which the audit's own reference is checked: it says nothing of a subject

RIGHT_CODE, WRONG_CODE, USAGE_CODE, NOTHING_RAN_CODE = 0, 1, 2, 3


@dataclass(frozen=True)
class HeatMap:
    """Where one quantity is off: largest error, as a share of what is allowed, per head (rows) and position (columns).

    Long sequences are cut into at most 64 stretches; `stretch` is how many positions a column stands for."""

    quantity: str
    values: tuple[tuple[float, ...], ...]
    stretch: int = 1


@dataclass(frozen=True)
class Outcome:
    """The verdict on one check.

    reason      why it was refused, not run or waived; the error's text; or what else there is to say of a pass
    quantities  every measured error and its bound, on a pass too
    diagnosis   the known fault whose numbers these are, in a sentence; empty where none fits
    replay      the command that runs this check alone;  snippet: a script that shows a wrong result without ringtrue
    """

    subject: str
    check: str
    verdict: str
    reason: str = ""
    quantities: tuple[Verdict, ...] = ()
    diagnosis: str = ""
    maps: tuple[HeatMap, ...] = ()
    seconds: float = 0.0
    replay: str = ""
    snippet: str = ""

    @property
    def bad(self) -> bool:
        return self.verdict in BAD

    @property
    def strain(self) -> float:
        """The worst error as a share of its bound."""
        return max((v.strain for v in self.quantities), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; floats that JSON has no word for (inf, nan) as text."""
        return _plain({**asdict(self), "strain": self.strain})

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Outcome:
        """The inverse of `to_dict`."""
        known = {k: v for k, v in found.items() if k != "strain"}
        known["quantities"] = tuple(Verdict(**{k: _number(v) for k, v in q.items()}) for q in found["quantities"])
        known["maps"] = tuple(
            HeatMap(m["quantity"], tuple(tuple(_number(x) for x in row) for row in m["values"]), m["stretch"])
            for m in found["maps"]
        )
        return cls(**known)


@dataclass(frozen=True)
class Report:
    """One audit: its outcomes and what a reader needs to judge them. problems: what is wrong with the waivers."""

    outcomes: tuple[Outcome, ...]
    environment: dict[str, str] = field(default_factory=dict)
    subjects: dict[str, str] = field(default_factory=dict)  # name -> about
    command: str = ""
    seconds: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """That of the process too: 2 where the waivers have problems, else `exit_code` of the outcomes."""
        return USAGE_CODE if self.problems else exit_code(self.outcomes)

    @property
    def unfinished(self) -> int:
        """How many checks did not begin because the audit was ended."""
        return sum(o.verdict == NOT_RUN and o.reason in (OUT_OF_TIME, INTERRUPTED) for o in self.outcomes)

    @property
    def headline(self) -> str:
        """All of it in a line, in the words of the exit code."""
        return f"stale waivers; {self._counted}" if self.problems else self._counted

    @property
    def _counted(self) -> str:
        """What is wrong is counted wherever it is; what ran, without the truth's own checks."""
        ran = [o for o in self.outcomes if o.verdict not in QUIET and o.subject != TRUTH]
        bad = [o for o in self.outcomes if o.bad]
        names = {o.subject for o in self.outcomes} - {TRUTH}
        if bad:
            wrong = len({o.subject for o in bad})
            return f"wrong: {len(bad)} of {len(ran)} checks that ran, in {wrong} of {len(names)} subjects"
        if not ran:
            return "nothing ran, so nothing is known"
        if self.unfinished:
            return f"unfinished: {self.unfinished} checks did not begin; {len(ran)} ran, and are right"
        waived = sum(o.verdict == WAIVED for o in ran)
        return f"right: all {len(ran)} checks that ran" + (f", {waived} of them waived" if waived else "")


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """0 right, 1 wrong, 3 where nothing of a subject ran, or not everything in time."""
    outcomes = list(outcomes)
    if any(o.bad for o in outcomes):
        return WRONG_CODE
    ran = any(o.verdict not in QUIET and o.subject != TRUTH for o in outcomes)
    return NOTHING_RAN_CODE if Report(tuple(outcomes)).unfinished or not ran else RIGHT_CODE


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if isinstance(x, float) and x - x != 0:
        return str(x)
    return x


def _number(x: Any) -> Any:
    return float(x) if x in ("inf", "-inf", "nan") else x


def writable(text: str, most: int = 300) -> str:
    """Another's text as any file can hold it: half a surrogate pair would end the report of everything else."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")[:most]
