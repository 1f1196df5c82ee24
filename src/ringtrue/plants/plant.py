"""A fault that can be planted, as data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from ..contract import Claims, OpPair

EVERY = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
NOT_BFLOAT16 = EVERY - {torch.bfloat16}
SIXTEEN = frozenset({torch.bfloat16, torch.float16})


def anything(claims: Claims) -> bool:
    return True


def takes(*kinds: str) -> Callable[[Claims], bool]:
    """Whether a pair takes masks of any of these kinds."""
    return lambda claims: not claims.masks.isdisjoint(kinds)


@dataclass(frozen=True)
class Plant:
    """A fault, what must catch it, and what must be said of it.

    what       in one line
    why        the word (features.py) for what a check must have to catch it
    make       OpPair -> OpPair, for a fault of a call or of a memory
    patch      a block in which the library has the fault, for one between ranks
    needs      what a pair must claim for the fault to show
    dtypes     of inputs for which it is a fault
    diagnosis  what its diagnosis must contain; empty where numbers alone cannot tell
    source     where it was met, if it is known
    """

    what: str
    why: str
    make: Callable[[OpPair], OpPair] | None = None
    patch: Callable[[], AbstractContextManager[object]] | None = None
    needs: Callable[[Claims], bool] = anything
    dtypes: frozenset[torch.dtype] = EVERY
    diagnosis: str = ""
    source: str = ""

    def on(self, pair: OpPair) -> OpPair:
        """The pair with the fault in it."""
        if self.make is None:
            raise TypeError("a fault between ranks goes into the library, not into a pair: use `patch`")
        return self.make(pair)
