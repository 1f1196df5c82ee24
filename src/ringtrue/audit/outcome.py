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
    """One audit: its outcomes and what a reader needs to judge them."""

    outcomes: tuple[Outcome, ...]
    environment: dict[str, str] = field(default_factory=dict)
    subjects: dict[str, str] = field(default_factory=dict)  # name -> about
    command: str = ""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return exit_code(self.outcomes)


def exit_code(outcomes: Iterable[Outcome]) -> int:
    """0 right, 1 wrong, 3 nothing ran (2, usage, is the command line's)."""
    verdicts = {o.verdict for o in outcomes}
    if verdicts & BAD:
        return WRONG_CODE
    return RIGHT_CODE if verdicts - QUIET else NOTHING_RAN_CODE


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
