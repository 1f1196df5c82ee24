"""The checks of an audit: a case under a law, in a dtype, with a stable readable id; and the groups that people run.

ID = LAW/CASE/DTYPE, e.g. call/causal-wide/bfloat16        with --seed 3: the same cases, other numbers
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from .cases import CASES, MORE, PARALLEL, case
from .inputs import Case
from .order import named_orders
from .subject import Ranks, Subject

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
GROUPS = ("smoke", "full", "parallel")
TRUTH = tuple(  # what the truth is checked on by differences; rows at -3e38 hold no score for a difference to see
    c for c in CASES if c.batch * c.heads * c.q_len * c.k_len < 20_000 and "lowest_rows" not in c.mask
)
# laws that ask more than one call of a subject: on which cases. What each says is in laws.py, symmetries.py, repeats.py
LAWS: dict[str, tuple[str, ...]] = {
    "heads": ("length-33", "gqa", "bool-hqk", "float-hqk"),
    "samples": ("length-33", "keep-ragged", "bool-bqk"),
    "linear": ("length-33", "causal", "gqa"),
    "token": ("length-33", "bool-qk", "keep-ragged", "causal", "window", "segments", "gqa"),
    "twice": ("length-129", "gqa", "dropout"),
    "growth": ("length-33",),
    "poison": ("length-33", "one-key", "causal-wide", "keep-blind", "gqa", "grad-lse"),
}


@dataclass(frozen=True)
class Check:
    """One thing to find out. `case` holds the dtype and the seed; `ranks` says over how many processes."""

    case: Case
    law: str = "call"
    ranks: Ranks = Ranks()

    @property
    def id(self) -> str:
        return f"{self.law}/{self.case.id}/{str(self.case.dtype).removeprefix('torch.')}"


def checks(
    group: str = "smoke",
    *,
    dtypes: Iterable[str] = tuple(DTYPES),
    only: str = "*",
    seed: int = 0,
    chunks: bool = False,
) -> list[Check]:
    """The checks of a group in the order they run, those whose id matches the pattern `only`.

    dtypes  which of "float32", "bfloat16", "float16", "float64"
    chunks  the subject has an op pair: its chunk law too
    """
    if group not in GROUPS:
        raise ValueError(f"group is one of {', '.join(GROUPS)}: {group!r}")
    _all_known(dtypes)
    makers = {"smoke": _smoke, "full": _full, "parallel": _parallel}
    found = (
        replace(check, case=replace(check.case, dtype=DTYPES[dtype], seed=seed))
        for dtype in dtypes
        for check in makers[group](dtype, chunks)
    )
    return [check for check in found if fnmatchcase(check.id, only)]


def _all_known(dtypes: Iterable[str]) -> None:
    if unknown := [d for d in dtypes if d not in DTYPES]:
        raise ValueError(f"dtypes are {', '.join(DTYPES)}: {unknown}")


def _smoke(dtype: str, chunks: bool) -> Iterator[Check]:
    """Every small case in two dtypes, each law once: under a minute for all of a library on two cores."""
    if dtype in ("float32", "bfloat16"):
        yield from (Check(c) for c in CASES)
        yield from (Check(case(names[0]), law) for law, names in LAWS.items())
        if chunks:
            yield from (Check(c, "chunk") for c in CASES[::4] if c.splits)
        yield from (Check(_order(name), "order") for name in list(named_orders(DTYPES[dtype], chunks))[::4])


def _full(dtype: str, chunks: bool) -> Iterator[Check]:
    """Everything on one process."""
    yield from (Check(c) for c in (*CASES, *MORE))
    yield from (Check(case(name), law) for law, names in LAWS.items() for name in names)
    if chunks:
        yield from (Check(c, "chunk") for c in CASES if c.splits)
    if dtype != "float64":
        yield from (Check(_order(name), "order") for name in named_orders(DTYPES[dtype], chunks))


def _parallel(dtype: str, chunks: bool) -> Iterator[Check]:
    cases = {"float32": PARALLEL, "bfloat16": PARALLEL, "float16": PARALLEL[:2]}.get(dtype, ())
    yield from (Check(c, "ranks", Ranks(*ranks)) for c, ranks in cases)


def planned(
    subject: Subject, group: str = "smoke", *, dtypes: Iterable[str] = tuple(DTYPES), only: str = "*", seed: int = 0
) -> list[Check]:
    """What a subject is put to: all of a group in the dtypes that it claims, one plain call in each other."""
    dtypes = tuple(dtypes)
    _all_known(dtypes)
    claimed = [d for d in DTYPES if d in dtypes and d in subject.says.dtypes]
    own = checks(group, dtypes=claimed, only=only, seed=seed, chunks=subject.pair is not None)
    if subject.unavailable():  # once says it
        return own[:1]
    if group == "parallel":  # one refusal says it for a subject that claims nothing of the kind
        return own if subject.says.ranks else own[:1]
    plain = replace(case("length-33"), seed=seed)
    others = (Check(replace(plain, dtype=kind)) for d, kind in DTYPES.items() if d in dtypes and d not in claimed)
    return [*own, *(check for check in others if fnmatchcase(check.id, only))]


def of_the_truth(only: str = "*", seed: int = 0) -> list[Check]:
    """The checks of the truth itself."""
    found = (Check(replace(c, dtype=torch.float64, seed=seed), "truth") for c in TRUTH)
    return [check for check in found if fnmatchcase(check.id, only)]


def _order(name: str) -> Case:
    return Case(name, 16, 16, heads=4, head_dim=64)
