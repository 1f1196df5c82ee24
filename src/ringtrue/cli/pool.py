"""The parent's side of a pool of worker processes: start them once, hand out tasks, never hang, leave none behind."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from .worker import Died, Done, Failed, News, Order, Ready, serve

GRACE = 5.0  # seconds that the other ranks get to say what they know, once one has failed


class WorkerError(RuntimeError):
    """A worker failed, died or fell silent; the text has its traceback."""


@dataclass(frozen=True)
class Task:
    """fn(job, *args) on `ranks` workers, which share a process group when there are several.

    fn  "module:function"; the parent need not have imported it
    """

    name: str
    fn: str
    args: tuple[Any, ...]
    ranks: int = 1


class Pool:
    """`size` spawned processes that have imported the module `warm` when `ready` returns.

    timeout  seconds of silence, of all workers, after which the pool gives up
    device   "cpu", or "cuda": worker i has GPU i, modulo how many there are
    """

    def __init__(self, size: int, warm: str, device: str, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.folder = Path(tempfile.mkdtemp(prefix="ringtrue-"))
        threads = max(1, (os.cpu_count() or 1) // size)
        spawn = multiprocessing.get_context("spawn")
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._groups = 0
        try:
            for index in range(size):
                ours, theirs = spawn.Pipe()
                place = f"cuda:{index % torch.cuda.device_count()}" if device == "cuda" else "cpu"
                process = spawn.Process(target=serve, args=(theirs, warm, place, threads), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Wait until every worker has started; `on_ready` is called once a worker. Raises WorkerError."""
        self._collect(dict.fromkeys(range(self.size), "start"), Ready, lambda name, value: on_ready())

    def run(
        self, tasks: Sequence[Task], on_news: Callable[[str, Any], None] = lambda name, value: None
    ) -> list[list[Any]]:
        """Each task's results in rank order. As many tasks run side by side as there are workers.

        on_news(task name, value) is called for what a task's first rank reports. Raises WorkerError; the pool is then
        closed.
        """
        results: list[list[Any]] = []
        waiting = list(tasks)
        while waiting:
            batch, free = [], self.size
            while waiting and waiting[0].ranks <= free:
                batch.append(waiting.pop(0))
                free -= batch[-1].ranks
            if not batch:
                raise ValueError(f"task {waiting[0].name} needs {waiting[0].ranks} workers, the pool has {self.size}")
            results += self._side_by_side(batch, on_news)
        return results

    def kill(self) -> None:
        """End all workers from another thread than the one that waits for them, which is told that they died."""
        for process, _ in self._workers:
            process.kill()

    def close(self) -> None:
        """End all workers, whatever they do, and remove the folder."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join(10)
        self._workers = []
        for path in self.folder.glob("*"):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _side_by_side(self, tasks: list[Task], on_news: Callable[[str, Any], None]) -> list[list[Any]]:
        names: dict[int, str] = {}
        for task in tasks:
            self._groups += 1
            rendezvous = str(self.folder / f"group{self._groups}")
            for rank in range(task.ranks):
                order = Order(task.fn, task.args, rank, task.ranks, str(self.folder), rendezvous, self.timeout / 2)
                self._workers[len(names)][1].send(order)
                names[len(names)] = task.name
        done = iter(self._collect(names, Done, on_news))
        return [[next(done).value for _ in range(task.ranks)] for task in tasks]

    def _collect(self, names: dict[int, str], end: type, on_news: Callable[[str, Any], None]) -> list[Any]:
        """The last message of each of these workers, in their order."""
        last: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = monotonic() + self.timeout
        while missing := {self._workers[i][1]: i for i in names if i not in last and i not in failures}:
            ready = wait(list(missing), max(0.0, deadline - monotonic()))
            if not ready:
                break
            for pipe in ready:
                index = missing[pipe]  # type: ignore[index]
                message = self._receive(index)
                if isinstance(message, Failed | Died):
                    failures[index] = message.text
                    continue
                if isinstance(message, end):
                    last[index] = message
                if isinstance(message, News | Ready):
                    on_news(names[index], getattr(message, "value", None))
            deadline = monotonic() + (GRACE if failures else self.timeout)
        if failures or missing:
            silent = [i for i in names if i not in last and i not in failures]
            self.close()
            raise WorkerError(_story(names, failures, silent, self.timeout))
        return [last[index] for index in names]

    def _receive(self, index: int) -> object:
        process, pipe = self._workers[index]
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process.join(5)
            return Died(f"the process ended, exit code {process.exitcode}")


def _story(names: dict[int, str], failures: dict[int, str], silent: list[int], timeout: float) -> str:
    """What went wrong: every different traceback once, with the workers that had it."""
    by_text: dict[str, list[int]] = {}
    for index, text in failures.items():
        by_text.setdefault(text, []).append(index)
    parts = [
        f"{names[which[0]]}: failed in worker {', '.join(map(str, which))}\n{text}" for text, which in by_text.items()
    ]
    if silent:
        seconds = f" for {timeout:g} s" if not failures else ""
        parts.append(f"{names[silent[0]]}: no news from worker {', '.join(map(str, silent))}{seconds}")
    return "\n".join(parts)
