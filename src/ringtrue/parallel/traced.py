"""What ranks of which some run compiled code must agree on besides: who comes to backward, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch._guards import TracingContext

from ..errors import DisagreementError, message


@torch.compiler.assume_constant_result
def here() -> tuple[str, int]:
    """Where in the code that torch compiles now a call is: the outermost function, and how many calls came before."""
    trace = TracingContext.get()
    _calls[trace] = _calls.get(trace, -1) + 1
    outermost = trace.extract_stack()[0]
    return f"{outermost.name} ({Path(outermost.filename).name})", _calls[trace]


_calls: WeakKeyDictionary[TracingContext, int] = WeakKeyDictionary()  # the last call of each graph in the making


def check(places: Sequence[object], wants: Sequence[bool], what: str, call: object = "") -> None:
    """places  per rank where in compiled code the call is, (outermost function, number), or None for an eager one
    wants   whether the rank wants a gradient

    From headers, so that all ranks raise DisagreementError.
    """
    each = list(zip(places, wants, strict=True))
    if any(wants) and any(place is not None and not want for place, want in each):
        said = [f"rank {r}: {_kind(p)}, {'a' if want else 'no'} gradient" for r, (p, want) in enumerate(each)]
        _fail(
            "gradients are wanted, but compiled code without any has no backward for its peers",
            "in compiled code a gradient on every rank, or on none",
            "; ".join(said),
            "require a gradient of an input on every rank",
            what,
            call,
        )
    numbers: dict[str, dict[int, list[int]]] = {}
    for rank, place in enumerate(places):
        if place is not None:
            root, number = cast("tuple[str, int]", place)
            numbers.setdefault(root, {}).setdefault(number, []).append(rank)
    for root, found in numbers.items():
        if len(found) > 1:
            said = [f"rank {rank}: call {number}" for number, ranks in found.items() for rank in ranks]
            _fail(
                f"torch.compile ordered the calls of {root} in another way on another rank",
                "one order on all ranks",
                "; ".join(sorted(said)),
                "make each call depend on the one before, or run this part without torch.compile",
                what,
                call,
            )


def _kind(place: object) -> str:
    return "eager" if place is None else "compiled"


def _fail(problem: str, limit: str, value: str, remedy: str, what: str, call: object) -> None:
    problem = f"ranks disagree about this {what}: {problem}"
    raise DisagreementError(message(problem, call=call, limit=limit, value=value, remedy=remedy))
