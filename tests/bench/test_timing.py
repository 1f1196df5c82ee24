"""The clock: everybody's turn comes equally often, and figures are what they are called. No time is asserted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ringtrue.bench import timing
from ringtrue.bench.timing import Times, extra_peak, in_turn


def test_a_clock_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that a call moves on by its own length, the figures are exact."""
    now = [0.0]
    ran: list[str] = []

    def work(name: str, seconds: float) -> timing.Work:
        def call() -> None:
            ran.append(name)
            now[0] += seconds

        return call

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    found = in_turn({"a": work("a", 0.25), "b": work("b", 0.5)}, "cpu", repetitions=4, least_s=0.5)
    assert found["a"] == Times((0.25,) * 4, calls=2)
    assert found["b"] == Times((0.5,) * 4, calls=2)
    assert found["b"].over(found["a"]) == 2.0
    measured = "".join(ran[2 * timing.WARM_UP + 2 :])
    assert measured == "aabb" + "bbaa" + "bbaa" + "aabb"


def test_ranks_count_by_what_they_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that finds itself four times as fast as the slowest makes as many calls as that one would."""
    now = [0.0]
    inside: list[str] = []

    def call() -> None:
        inside.append("call")
        now[0] += 0.25

    @contextmanager
    def around() -> Iterator[None]:
        inside.append("in")
        now[0] += 100.0  # not measured
        yield
        inside.append("out")

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    agreed = lambda seconds: 4 * seconds
    found = in_turn({"a": call}, "cpu", 1, least_s=2.0, agreed=agreed, around={"a": around}, warm_up=1)
    assert found["a"] == Times((1.0,), calls=2)
    assert inside == ["in", "call", "out"] * 2 + ["in", "call", "call", "out"]


def test_median_spread_and_ratio() -> None:
    times = Times((1.0, 2.0, 3.0, 4.0, 100.0), calls=1)
    assert times.median == 3.0
    assert times.spread == pytest.approx((61.6 - 1.4) / 3)
    assert Times((2.0,), calls=1).spread == 0.0
    # drift that both share cancels, though the medians of the two are the same
    assert Times((1.0, 2.0, 4.0), calls=1).over(Times((2.0, 4.0, 1.0), calls=1)) == 0.5


def test_memory_of_a_cpu_is_not_measured() -> None:
    assert extra_peak(lambda: pytest.fail("it ran"), "cpu") is None
