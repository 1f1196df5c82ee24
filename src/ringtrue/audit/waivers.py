"""Known faults that an audit may pass over: a TOML file in which each has its reason and a link.

    [[waive]]
    subject = "torch/*"                       # patterns of fnmatch, in the words of a report
    check = "call/causal-bottom-right*"
    reason = "fixed in the next release"
    link = "https://…"

A waiver holds while what it names is wrong. One that has nothing left to waive is an error, so that the file shrinks.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from .checks import GROUPS, checks
from .ids import parse
from .outcome import BAD, NOT_RUN, WAIVED, Outcome

KEYS = ("subject", "check", "reason", "link")
_HEADER = re.compile(r"\s*\[\[\s*waive\s*\]\]")


@dataclass(frozen=True)
class Waiver:
    """One entry. `place` says where it stands: "waivers.toml, line 3"."""

    subject: str
    check: str
    reason: str
    link: str
    place: str = ""

    def matches(self, outcome: Outcome) -> bool:
        return fnmatchcase(outcome.subject, self.subject) and fnmatchcase(outcome.check, self.check)

    def __str__(self) -> str:
        return f"{self.place}: {self.subject} {self.check}"


def read(path: Path | str) -> list[Waiver]:
    """The waivers of a file. ValueError where it is not TOML, or an entry lacks one of its four parts: every problem,
    with its line."""
    path = Path(path)
    text = path.read_text("utf-8")
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: {error}") from error
    entries = found.pop("waive", [])
    if found or not isinstance(entries, list):
        wrong = ", ".join(found) or "waive"
        raise ValueError(f"{path.name} holds [[waive]] entries and nothing else: {wrong}")
    places = _places(path.name, text, len(entries))
    problems = [f"{place}: {p}" for entry, place in zip(entries, places, strict=True) for p in _problems(entry)]
    if problems:
        raise ValueError("\n".join(problems))
    return [Waiver(**entry, place=place) for entry, place in zip(entries, places, strict=True)]


def apply(outcomes: Iterable[Outcome], waivers: Sequence[Waiver]) -> tuple[list[Outcome], list[str]]:
    """The outcomes, what is wrong and matches a waiver as "waived" with its reason; and what is wrong with the waivers.

    An error: its check is none that there is, or all that ran of what it names is right by now. None: nothing of what
    it names was run (another subject, group or dtype).
    """
    outcomes = list(outcomes)
    errors = [text for waiver in waivers if (text := _stale(waiver, outcomes))]
    return [waived(outcome, waivers) for outcome in outcomes], errors


def waived(outcome: Outcome, waivers: Sequence[Waiver]) -> Outcome:
    """One outcome, as `apply` gives it back."""
    waiver = next((w for w in waivers if outcome.bad and w.matches(outcome)), None)
    if waiver is None:
        return outcome
    was = f"{outcome.verdict}: {outcome.reason}" if outcome.reason else outcome.verdict
    return replace(outcome, verdict=WAIVED, reason=f"{waiver.reason} ({waiver.link}); {was}")


def _stale(waiver: Waiver, outcomes: Sequence[Outcome]) -> str:
    matched = [o.verdict for o in outcomes if waiver.matches(o) and o.verdict != NOT_RUN]
    if not matched and not _known(waiver.check):
        return f"{waiver}: there is no such check"
    if matched and not BAD & set(matched):
        verdicts = ", ".join(f"{matched.count(v)} {v}" for v in dict.fromkeys(matched))
        return f"{waiver}: nothing of this is wrong any more ({verdicts}); delete the entry"
    return ""


def _known(pattern: str) -> bool:
    """Whether some check, of any group and dtype, has such an id."""
    try:
        parse(pattern)
    except ValueError:
        ids = chain.from_iterable(checks(group, chunks=True) for group in GROUPS)
        return any(fnmatchcase(check.id, pattern) for check in ids)
    return True


def _places(name: str, text: str, count: int) -> list[str]:
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    if len(lines) != count:  # entries written in another way
        return [f"{name}, entry {number}" for number in range(1, count + 1)]
    return [f"{name}, line {number}" for number in lines]


def _problems(entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return [f"an entry is a table with {', '.join(KEYS)}: {entry!r}"]
    unknown = [f"unknown key {key!r}: an entry has {', '.join(KEYS)}" for key in entry if key not in KEYS]
    missing = [f"it has no {key}" for key in KEYS if not isinstance(entry.get(key), str) or not entry[key].strip()]
    link = entry.get("link")
    bad = isinstance(link, str) and link.strip() and not re.match(r"https?://\S+$", link)
    return [*unknown, *missing, *([f"link is not an address: {link!r}"] if bad else [])]
