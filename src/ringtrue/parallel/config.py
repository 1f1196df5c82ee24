"""How a context is laid out over ranks: plain values, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal

from ..errors import ArgumentError, message


@dataclass(frozen=True)
class ContextParallelConfig:
    """Degrees and rules of a context.

    ulysses_degree  ranks that exchange heads for tokens (DeepSpeed-Ulysses, arXiv:2309.14509); neighbours in rank order
    ring_degree     ranks that pass keys and values around (Ring Attention, arXiv:2310.01889)
    mesh            DeviceMesh with dims "ring" and "ulysses" (a slice of a larger one is fine) or one dim "cp"; None =
                    the whole default process group; or a rank of the in-process twin
    load_balance    "none": contiguous shards, of any length; "head_tail": of 2R chunks, R the ring degree, ring rank r
                    holds chunks r and 2R-1-r, cut contiguously among its Ulysses ranks, so that a causal ring keeps all
                    ranks as busy. Only the shards of `cp.shard` fit then
    lengths         "exchange": one small header per call carries every rank's lengths; "equal": every rank holds as
                    many tokens as this one, nothing is exchanged
    timeout         seconds after which a missing peer is an error

    Raises ArgumentError for a degree below 1 or an unknown word.
    """

    ulysses_degree: int = 1
    ring_degree: int = 1
    mesh: object | None = None
    load_balance: Literal["none", "head_tail"] = "none"
    lengths: Literal["exchange", "equal"] = "exchange"
    timeout: float = 120.0

    def __post_init__(self) -> None:
        for name in ("ulysses_degree", "ring_degree"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                self._fail(f"{name} is not a positive whole number", "1, 2, 3, ...", value)
        if self.load_balance not in ("none", "head_tail"):
            self._fail("unknown load_balance", '"none" or "head_tail"', self.load_balance)
        if self.lengths not in ("exchange", "equal"):
            self._fail("unknown lengths", '"exchange" or "equal"', self.lengths)
        if not isinstance(self.timeout, Real) or not 0 < self.timeout < float("inf"):
            self._fail("timeout is not positive and finite", "seconds > 0", self.timeout)

    @property
    def size(self) -> int:
        """Ranks in the context."""
        return self.ulysses_degree * self.ring_degree

    def _fail(self, problem: str, limit: str, value: object) -> None:
        raise ArgumentError(message(f"ContextParallelConfig: {problem}", limit=limit, value=repr(value)))
