"""Wall time between device synchronisations, of several callables in turn; peak memory of one call.

Callables that are compared take turns, in a changing order, within one run: clocks, caches and other load drift more
between runs than what is to be seen. A measurement is many calls between two synchronisations, so that what the host
does for a call hides behind the device's work as it does in training, and shows where the device is the faster one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

WARM_UP = 3
Work = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds a call, one number a repetition, in the order they were measured; `calls` is how many a repetition."""

    seconds: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The middle 80 percent of the repetitions, as a fraction of the median."""
        if len(self.seconds) < 2:
            return 0.0
        cuts = statistics.quantiles(self.seconds, n=10, method="inclusive")
        return (cuts[-1] - cuts[0]) / self.median

    def over(self, other: Times) -> float:
        """The median of this / other, each within one repetition, so that what drifts meanwhile cancels."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def in_turn(
    work: Mapping[str, Work],
    device: str,
    repetitions: int,
    least_s: float = 0.02,
    agreed: Callable[[float], float] = lambda seconds: seconds,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
    warm_up: int = WARM_UP,
) -> dict[str, Times]:
    """Measure each callable `repetitions` times, in turn, so many calls at a time that the fastest takes `least_s`.

    agreed  what every measured time is replaced by: across ranks, the longest of all, which they then count calls by
    around  by name, what is entered before a callable's clock starts, and left after it
    """

    def seconds_of(name: str, calls: int) -> float:
        with around[name]() if around and name in around else nullcontext():
            return agreed(_seconds(work[name], calls, device))

    for name in work:
        seconds_of(name, warm_up)
    fastest = min(seconds_of(name, 1) for name in work)
    calls = max(1, round(least_s / max(fastest, 1e-9)))
    found: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for repetition in range(repetitions):
        start = repetition // 2 % len(names)  # another one begins each time, and each follows either neighbour
        for name in (names[start:] + names[:start])[:: -1 if repetition % 2 else 1]:
            found[name].append(seconds_of(name, calls) / calls)
    return {name: Times(tuple(seconds), calls) for name, seconds in found.items()}


def extra_peak(work: Work, device: str) -> int | None:
    """Bytes that one call adds to what is allocated, at its peak, results included; None where it is not measured."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def _seconds(work: Work, calls: int, device: str) -> float:
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
