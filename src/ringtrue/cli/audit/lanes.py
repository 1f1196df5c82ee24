"""Runs checks in processes of their own, a few side by side: what ends a process is an outcome, not the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Lock
from time import time
from typing import Any

from ...audit.checks import Check
from ...audit.order import differing
from ...audit.outcome import BAD, CRASH, INTERRUPTED, NOT_RUN, OUT_OF_TIME, Outcome, writable
from ..pool import Pool, Task, WorkerError
from .tasks import Ask

TASKS = "ringtrue.cli.audit.tasks"
START = 120.0  # seconds
BATCH = 40  # checks that a lane takes at a time: enough to hide the exchange, few enough to end together
PEERS = ("PeerError", "CommunicationError", "DistBackendError", "gloo", "Timed out", "timed out", "Connection")


@dataclass(frozen=True)
class Work:
    """Checks of one subject, in the order they run."""

    ask: Ask
    checks: tuple[Check, ...]


OnOutcome = Callable[[Outcome], None]


class Clock:
    """When to stop: time.time() after which no check begins, and why. Ctrl-C moves it to now and ends what runs."""

    def __init__(self, limit: float | None) -> None:
        self.until = float("inf") if limit is None else time() + limit
        self.why = OUT_OF_TIME
        self._pools: list[Pool] = []

    @property
    def over(self) -> bool:
        return time() > self.until

    @property
    def interrupted(self) -> bool:
        return self.why == INTERRUPTED

    def started(self, size: int, device: str, timeout: float) -> Pool:
        """A pool that Ctrl-C ends. Its processes are given longer to start than a check to run: imports take time."""
        pool = Pool(size, TASKS, device, max(timeout, START))
        self._pools.append(pool)
        pool.ready()
        pool.timeout = timeout
        return pool

    def stop(self) -> None:
        self.until, self.why = 0.0, INTERRUPTED
        for pool in self._pools:
            pool.kill()


def audited(
    work: Sequence[Work], jobs: int, timeout: float, on_outcome: OnOutcome, limit: float | None = None
) -> list[Outcome]:
    """The outcome of every check, in the order of `work`. `on_outcome` is told each as it comes, from any thread.

    What has not ended at Ctrl-C, or not begun when the time is over, is "not run"; nothing that is known is lost.

    jobs      processes side by side; a check that is cut over ranks takes as many of its own, one check at a time
    timeout   seconds without a word after which a process counts as hanging; the check it was at is a crash
    """
    told: dict[tuple[str, str], Outcome] = {}
    lock, clock = Lock(), Clock(limit)

    def tell(outcome: Outcome) -> None:
        with lock:
            told[outcome.subject, outcome.check] = outcome
            on_outcome(outcome)

    queue: SimpleQueue[Work] = SimpleQueue()
    cut: list[tuple[Ask, Check]] = []
    for one in work:
        single = [c for c in one.checks if c.ranks.size == 1]
        for start in range(0, len(single), BATCH):
            queue.put(Work(one.ask, tuple(single[start : start + BATCH])))
        cut += [(one.ask, c) for c in one.checks if c.ranks.size > 1]
    try:
        if not queue.empty():
            _side_by_side(queue, jobs, timeout, tell, clock)
        for size in sorted({check.ranks.size for _, check in cut}):
            _in_ranks(size, [(a, c) for a, c in cut if c.ranks.size == size], timeout, tell, clock)
    except KeyboardInterrupt:
        clock.stop()

    def of(ask: Ask, check: Check) -> Outcome:
        return told.get((ask.name, check.id)) or Outcome(ask.name, check.id, NOT_RUN, clock.why)

    return [of(w.ask, c) for w in work for c in w.checks]


def _side_by_side(queue: SimpleQueue[Work], jobs: int, timeout: float, tell: OnOutcome, clock: Clock) -> None:
    with ThreadPoolExecutor(jobs) as lanes:
        started = [lanes.submit(_lane, queue, timeout, tell, clock) for _ in range(jobs)]
        try:
            for done in started:
                done.result()
        except KeyboardInterrupt:
            clock.stop()  # before the threads are waited for


def _lane(queue: SimpleQueue[Work], timeout: float, tell: OnOutcome, clock: Clock) -> None:
    """One process at a time, replaced when it dies."""
    pool: Pool | None = None
    try:
        for work in _taken(queue):
            left = list(work.checks)
            while left and not clock.over:
                try:
                    pool = pool or clock.started(1, work.ask.device, timeout)
                except WorkerError as error:
                    _none_started(work.ask, left, error, tell, clock)
                    break
                left, alive = _batch(pool, Work(work.ask, tuple(left)), timeout, tell, clock)
                if not alive:
                    pool.close()
                    pool = None
    finally:
        if pool is not None:
            pool.close()


def _taken(queue: SimpleQueue[Work]) -> Iterator[Work]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return


def _none_started(ask: Ask, checks: list[Check], error: WorkerError, tell: OnOutcome, clock: Clock) -> None:
    for check in () if clock.interrupted else checks:
        tell(Outcome(ask.name, check.id, NOT_RUN, f"no process for it: {_last_line(str(error))}"))


def _batch(pool: Pool, work: Work, timeout: float, tell: OnOutcome, clock: Clock) -> tuple[list[Check], bool]:
    """Run checks until one ends the process: those that are left, and whether the process is still of use."""
    got: list[Outcome] = []

    def news(name: str, value: Any) -> None:
        got.append(value)
        check = work.checks[len(got) - 1]
        if value.verdict in BAD and check.law == "order":
            value = _against_alone(value, work.ask, check, timeout, clock)
        tell(value)

    try:
        pool.run([Task(work.ask.name, f"{TASKS}:examine_all", (work.ask, work.checks, clock.until))], news)
    except WorkerError as error:
        if len(got) < len(work.checks) and not clock.interrupted:
            tell(_crash(work.ask, work.checks[len(got)], error))
        return list(work.checks[len(got) + 1 :]), False
    return list(work.checks[len(got) :]), got[-1].verdict != CRASH


def _crash(ask: Ask, check: Check, error: WorkerError) -> Outcome:
    """What a process that is gone left behind: its exit code, or the last line of its traceback."""
    return Outcome(ask.name, check.id, CRASH, _last_line(str(error)))


def _last_line(story: str) -> str:
    lines = [line.strip() for line in story.splitlines() if line.strip()]
    return writable(lines[-1]) if lines else "no word of why"


def _against_alone(outcome: Outcome, ask: Ask, check: Check, timeout: float, clock: Clock) -> Outcome:
    """The wrong call of an order once more, in a process where nothing ran before it."""
    place = re.match(r"call (\d) of", outcome.reason)
    if place is None or place[1] == "1":
        return outcome
    number = int(place[1]) - 1
    try:
        with clock.started(1, ask.device, timeout) as pool:
            ((right,),) = pool.run([Task("alone", f"{TASKS}:alone", (ask, check, number))])
    except WorkerError:
        return outcome
    if not right:
        return replace(outcome, diagnosis=outcome.diagnosis or "wrong alone in a fresh process too")
    what = differing(check.case.id)
    return replace(
        outcome,
        diagnosis=f"it depends on an earlier call: right alone in a fresh process, wrong after a call of the same sizes"
        f" that differs in {what}. Something is kept between calls under a key that leaves {what} out",
    )


def shrunken(checks: Sequence[tuple[Ask, Check]], timeout: float) -> list[Outcome]:
    """Each wrong check made smaller, in a process of its own kind; one that dies on the way is left as it was.

    Ctrl-C ends it: what is small by then is kept.
    """
    found: list[Outcome] = []

    def one(pool: Pool, ask: Ask, check: Check) -> None:
        ((outcome,),) = pool.run([Task(check.id, f"{TASKS}:shrink_one", (ask, check))])
        found.append(outcome)

    with suppress(KeyboardInterrupt):
        _one_by_one(1, checks, timeout, one, lambda ask, check, error: None, Clock(None))
    return found


def _in_ranks(size: int, checks: Sequence[tuple[Ask, Check]], timeout: float, tell: OnOutcome, clock: Clock) -> None:
    """Checks whose call is cut over `size` processes, one after the other."""

    def one(pool: Pool, ask: Ask, check: Check) -> None:
        (outcomes,) = pool.run([Task(check.id, f"{TASKS}:examine_in_ranks", (ask, check), size)])
        tell(_of_ranks(outcomes))

    _one_by_one(size, checks, timeout, one, lambda ask, check, error: tell(_crash(ask, check, error)), clock)


def _one_by_one(
    size: int,
    checks: Sequence[tuple[Ask, Check]],
    timeout: float,
    one: Callable[[Pool, Ask, Check], None],
    died: Callable[[Ask, Check, WorkerError], None],
    clock: Clock,
) -> None:
    """Each check in a pool of `size` processes, which is replaced when it dies."""
    pool: Pool | None = None
    try:
        for ask, check in checks:
            if clock.over:
                return
            try:
                pool = pool or clock.started(size, ask.device, timeout)
                one(pool, ask, check)
            except WorkerError as error:
                died(ask, check, error)
                if pool is not None:
                    pool.close()
                pool = None
    finally:
        if pool is not None:
            pool.close()


def _of_ranks(outcomes: list[Outcome]) -> Outcome:
    """The ranks judge the same sums; where they differ, one failed and the others heard of it: the first cause."""
    causes = [o for o in outcomes if not any(word in o.reason for word in PEERS)]
    return (causes or outcomes)[0]
