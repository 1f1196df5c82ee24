"""A wrong case made as small as it still fails in the same way: greedy, one field after the other, no chance in it.

First all that a case has beside its sizes is taken away (ranks, mask, storage, values, options, what is wanted), then
the sizes go down. Every case that is tried has the text of its own fields as its id (ids.py), so what is left replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from .checks import Check
from .examine import examine
from .ids import described, problem
from .order import named_orders
from .outcome import CLAIMED_BUT_REFUSED, Outcome
from .subject import Ranks, Subject

TRIES = 400

Fails = Callable[[Check], bool]


def shrink(
    subject: Subject,
    check: Check,
    device: torch.device | str = "cpu",
    *,
    fails: Fails | None = None,
    tries: int = TRIES,
) -> Check:
    """The smallest check found that fails as `check` does; `check` itself where nothing can be taken from it.

    fails  says of a check whether it fails in the same way; for what cannot be seen from inside of this process
           (a crash, several ranks). Without it, `examine` here: the same verdict on the same first quantity.
           ValueError if `check` does not fail then
    tries  how many checks are run at most
    """
    if fails is None:
        first = examine(subject, check, device, explain=False)
        if not first.bad:
            raise ValueError(f"{check.id} is not wrong ({first.verdict}), so there is nothing to shrink")
        fails = lambda other: way(examine(subject, other, device, explain=False)) == way(first)
    seen: set[str] = {check.id}
    progress = True
    while progress:
        progress = False
        for steps in STEPS:
            smaller = _first(steps, check, fails, seen, tries)
            while smaller is not None:
                check, progress = smaller, True
                smaller = _first(steps, check, fails, seen, tries)
    return check


def way(outcome: Outcome) -> tuple[str, str]:
    """In which way a check fails: the verdict, and the first wrong quantity (or, of a refusal, the error's type)."""
    if outcome.verdict == CLAIMED_BUT_REFUSED:
        return outcome.verdict, outcome.reason.partition(":")[0]
    return outcome.verdict, next((v.quantity for v in outcome.quantities if not v.ok), "")


def _first(steps: Steps, check: Check, fails: Fails, seen: set[str], tries: int) -> Check | None:
    """The first of the smaller checks that fails as well."""
    for smaller in steps(check):
        known = smaller.id in seen or problem(smaller.case, smaller.ranks)
        if known or len(seen) > tries:
            continue
        seen.add(smaller.id)
        if fails(smaller):
            return smaller
    return None


# What may be taken from a check: each gives smaller ones, the boldest first. Every one lowers something for good.

Steps = Callable[[Check], Iterator[Check]]


def _with(check: Check, ranks: Ranks | None = None, **changes: Any) -> Check:
    ranks = check.ranks if ranks is None else ranks
    case = replace(check.case, **changes)
    law = "call" if check.law == "ranks" and ranks.size == 1 else check.law
    ranks = Ranks() if ranks.size == 1 else ranks
    name = case.id if law == "order" else described(case, ranks)
    return Check(replace(case, id=name), law, ranks)


def _ranks(check: Check) -> Iterator[Check]:
    """One process, one kind of exchange, one option less, two processes of a kind."""
    ranks = check.ranks
    if ranks.size == 1:
        return
    yield from (_with(check, fewer) for fewer in (Ranks(), Ranks(ulysses=ranks.size), Ranks(ring=ranks.size)))
    less: list[dict[str, Any]] = [
        {"ulysses": 1, "lengths": None}, {"ring": 1, "lengths": None}, {"lengths": None}, {"prefix": 0},
        {"balanced": False}, {"replicated": False},
        *({name: 2, "lengths": None} for name in ("ulysses", "ring") if getattr(ranks, name) > 2),
    ]  # fmt: skip
    yield from (_with(check, ranks._replace(**change)) for change in less)


def _mask(check: Check) -> Iterator[Check]:
    """Without it, without one of its parts, with a plainer part, with fewer axes."""
    parts = check.case.mask.split("+") if check.case.mask else []
    for index, part in enumerate(parts):
        rest = [*parts[:index], *parts[index + 1 :]]
        if index == 0:
            yield _with(check, mask="")
        yield _with(check, mask="+".join(rest))
        name, colon, axes = part.partition(":")
        plainer = [f"{kind}{colon}{axes}" for kind in (name.removesuffix("_input"), _plain_kind(name)) if kind != name]
        fewer = [f"{name}:{axes.replace(axis, '')}" for axis in axes if len(axes) > 1]
        for other in (*plainer, *fewer):
            yield _with(check, mask="+".join([*parts[:index], other, *parts[index + 1 :]]))


def _plain_kind(name: str) -> str:
    """some_blind -> some, keep_ragged -> keep …: the first word, the plainest of its kind."""
    return {"all": "some", "blind": "some", "single": "some", "strided": "some"}.get(name, name.partition("_")[0])


def _places(check: Check) -> Iterator[Check]:
    case = check.case
    yield from (_with(check, since=offset) for offset in _nearer(case.since))
    yield from (_with(check, causal=offset) for offset in _nearer(case.causal))


def _nearer(offset: int | None) -> list[int | None]:
    if offset is None:
        return []
    towards = [0, int(offset / 2), offset - (offset > 0) + (offset < 0)]
    return [None, *dict.fromkeys(x for x in towards if abs(x) < abs(offset))]


def _options(check: Check) -> Iterator[Check]:
    """Everything at its default, each at its own."""
    case = check.case
    plain: dict[str, Any] = {
        "storage": "plain", "values": "gaussian", "dropout": 0.0, "softcap": 0.0, "scale": None, "grad_lse": False,
        "splits": True,
    }  # fmt: skip
    yield _with(check, **plain)
    yield from (_with(check, **{name: value}) for name, value in plain.items() if getattr(case, name) != value)


def _wants(check: Check) -> Iterator[Check]:
    wants = check.case.wants
    if wants:
        yield _with(check, wants="")
    if len(wants) > 1:
        yield from (_with(check, wants=one) for one in wants)
        yield from (_with(check, wants=wants.replace(one, "")) for one in wants)


def _dtype(check: Check) -> Iterator[Check]:
    order = check.law == "order" and check.case.id not in named_orders(torch.float32)
    if check.case.dtype != torch.float32 and not order:
        yield _with(check, dtype=torch.float32)


def _batch(check: Check) -> Iterator[Check]:
    yield from (_with(check, batch=n) for n in _less(check.case.batch))


def _heads(check: Check) -> Iterator[Check]:
    """As many key heads as query heads, else fewer of both in the same groups, else smaller groups."""
    heads, kv_heads = check.case.heads, check.case.kv_heads or check.case.heads
    group = heads // kv_heads
    if check.case.kv_heads is not None:
        yield _with(check, kv_heads=None)
        yield from (_with(check, heads=group * n, kv_heads=n) for n in _less(kv_heads))
        yield from (_with(check, heads=kv_heads * n) for n in _less(group))
    else:
        yield from (_with(check, heads=n) for n in _less(heads))


def _lengths(check: Check) -> Iterator[Check]:
    q_len, k_len, heads = check.case.q_len, check.case.k_len, check.case.heads
    if heads == q_len and check.case.kv_heads is None:  # what goes wrong only where heads and tokens are as many
        yield from (_with(check, heads=n, q_len=n, k_len=n if k_len == q_len else k_len) for n in _less(q_len))
    if min(q_len, k_len) > 0 and q_len != k_len:
        yield _with(check, q_len=min(q_len, k_len), k_len=min(q_len, k_len))
    if q_len == k_len:
        yield from (_with(check, q_len=n, k_len=n) for n in _less(q_len))
    yield from (_with(check, q_len=n) for n in _less(q_len))
    yield from (_with(check, k_len=n) for n in _less(k_len))


def _dims(check: Check) -> Iterator[Check]:
    case = check.case
    if case.value_dim is not None:
        yield _with(check, value_dim=None)
        yield from (_with(check, value_dim=n) for n in _less(case.value_dim))
    yield from (_with(check, head_dim=n) for n in _less(case.head_dim))


def _less(size: int) -> list[int]:
    """1, 2, a quarter, a half, one less."""
    return sorted({n for n in (1, 2, size // 4, size // 2, size - 1) if 1 <= n < size})


def _none_of_an_order(steps: Steps) -> Steps:
    """The calls of an order have sizes of their own."""
    return lambda check: iter(()) if check.law == "order" else steps(check)


STEPS: tuple[Steps, ...] = (
    _dtype,
    *map(_none_of_an_order, (_ranks, _mask, _places, _options, _wants, _heads, _batch, _lengths, _dims)),
)
