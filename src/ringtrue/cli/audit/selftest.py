"""`ringtrue audit --self-test`: plants every fault into what is right, and says which check caught it.

A fault of a call goes into an op pair, one between ranks into the library while its ranks run as threads. It counts as
caught where a check that has the feature which says why is wrong with the fault and right without it, and where the
diagnosis says what was planted, if numbers can tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.text import Text

import ringtrue as rt

from ... import plants
from ...audit.checks import Check, checks
from ...audit.examine import examine
from ...audit.outcome import PASS, RIGHT_CODE, WRONG_CODE, Outcome
from ...audit.subject import Call, Plain, Quantities, Subject
from ...subjects.ours import Pair, in_ranks, says_of
from ..output import say

BACKEND = "native_math"  # of all pairs it claims the most, so that every fault can be planted in it


@dataclass(frozen=True)
class Caught:
    """What became of one planted fault.

    check      the id of the check that caught it; empty where none did
    found      the worst quantity, its error and its bound in words, or why the call failed
    right      whether that check passes without the fault
    diagnosis  what was said;  expected: what it must contain
    """

    fault: str
    what: str
    why: str
    check: str = ""
    found: str = ""
    right: bool = False
    diagnosis: str = ""
    expected: str = ""
    seconds: float = 0.0

    @property
    def problem(self) -> str:
        """Why this does not count; empty where it does."""
        if not self.check:
            return f"no check with {self.why} is wrong"
        if not self.right:
            return f"{self.check} fails without the fault too"
        return "" if self.expected in self.diagnosis else f"the diagnosis does not say {self.expected!r}"


def self_test(console: Console, json_path: Path | None = None, only: str = "*") -> int:
    """Plant the faults whose names match `only`; 0 if all are caught, 1 if not."""
    names = [name for name in plants.REGISTRY if fnmatchcase(name, only)]
    start, threads = perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        found = [caught(name) for name in names]
    finally:
        torch.set_num_threads(threads)
    for one in found:
        say(console, _told(one))
    missed = [one for one in found if one.problem]
    for one in missed:
        say(console, f"{one.fault}: {one.problem} (said: {one.diagnosis!r})")
    say(console, f"{len(found) - len(missed)} of {len(found)} faults caught in {perf_counter() - start:.0f} s")
    if json_path is not None:
        told = [{**asdict(one), "problem": one.problem} for one in found]
        json_path.write_text(json.dumps({"faults": told}, indent=1) + "\n", "utf-8")
    return WRONG_CODE if missed or not found else RIGHT_CODE


def caught(name: str, backend: str = BACKEND, dtype: torch.dtype | None = None) -> Caught:
    """Plant one fault and look for it, with the checks that have its feature, until one is wrong."""
    plant, start = plants.REGISTRY[name], perf_counter()
    dtype = dtype or (torch.float32 if torch.float32 in plant.dtypes else torch.bfloat16)
    blank = Caught(name, plant.what, plant.why, expected=plant.diagnosis)
    right = _in_threads(backend) if plant.make is None else _of_pair(rt.op_pair(backend), backend)
    best: Caught | None = None
    for check in _tried(plant, str(dtype).removeprefix("torch.")):
        wrong = right if plant.make is None else _of_pair(plant.on(rt.op_pair(backend)), backend)
        with plant.patch() if plant.patch is not None else nullcontext():
            outcome = examine(wrong, check)
        if not outcome.bad:
            continue
        ok, told = examine(right, check).verdict == PASS, _worst(outcome)
        one = replace(
            blank, check=check.id, found=told, right=ok, diagnosis=outcome.diagnosis, seconds=perf_counter() - start
        )
        if not one.problem:
            return one
        best = best or one
    return best or replace(blank, seconds=perf_counter() - start)


def _tried(plant: plants.Plant, dtype: str, most: int = 12) -> Iterator[Check]:
    """At most a dozen checks with the fault's feature."""
    feature = plants.FEATURES[plant.why]
    yield from islice((check for check in _all_checks(dtype) if feature(check)), most)


@cache
def _all_checks(dtype: str) -> tuple[Check, ...]:
    everything = checks("full", dtypes=[dtype], chunks=True)
    usual = [c for c in everything if not c.case.id.startswith(("size-", "length-1", "length-5", "empty"))]
    return (*usual, *checks("parallel", dtypes=[dtype]))


def _of_pair(pair: rt.OpPair, backend: str) -> Subject:
    return Pair(f"ours/{pair.name}", says_of(pair.claims), "", "", pair)


def _in_threads(backend: str) -> Subject:
    """rt.attention under a ContextParallel whose ranks are threads of this process."""
    support = next(s for s in rt.backends() if s.name == backend and s.device == "cpu")
    return Threads(f"ours/{backend} in threads", lambda call: call.query, says_of(support.claims), about=backend)


class Threads(Plain):
    """A subject of several ranks without processes."""

    def run(self, call: Call) -> Quantities:
        parts = plants.in_process(call.ranks.size, lambda mesh: in_ranks(self.about, call, mesh))
        columns = zip(*parts, strict=True)
        return Quantities(*(None if c[0] is None else _sum(c) for c in columns))


def _sum(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Infinite on one rank alone: lse of rows that see nothing."""
    return torch.stack([p.double() for p in parts]).sum(0).to(parts[0].dtype)


def _worst(outcome: Outcome) -> str:
    wrong = [v for v in outcome.quantities if not v.ok]
    if not wrong:
        return outcome.reason
    worst = max(wrong, key=lambda v: v.strain)
    if worst.problem:
        return f"{worst.quantity}: {worst.problem}"
    return f"{worst.quantity}: {worst.strain:.3g} x its bound"


def _told(one: Caught) -> Text:
    """One fault in a line or two: what caught it and by how much, and what was said of it."""
    sign = Text("✗ ", "red") if one.problem else Text("✓ ", "green")
    line = Text.assemble(sign, (one.fault, "bold"), f"  {one.check or 'nothing'}  {one.found}")
    return line.append(f"\n    {one.diagnosis}", "yellow") if one.diagnosis else line


__all__ = ["Caught", "caught", "self_test"]
