"""One pool of real gloo processes for all multi-process tests: starting a process costs seconds, a task milliseconds.

    results = pool.run(fn, world, *args, timeout=60)      # fn(rank, world, *args), results in rank order

`fn` is a top-level function of an importable module. Every task has a process group of exactly its ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Failure:
    """An exception on one rank, as text."""

    type_name: str
    text: str
    traceback: str


class RemoteError(AssertionError):
    """A task failed on some ranks; `failures` is {rank: Failure}."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures
        parts = [f"---- rank {rank} ----\n{failure.traceback}" for rank, failure in failures.items()]
        super().__init__(f"{len(failures)} rank(s) failed\n" + "\n".join(parts))


class PoolTimeoutError(AssertionError):
    """A task did not end in time; the text shows where each of its processes was."""


class Pool:
    """`size` spawned processes, started with the first task and kept until `close`."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection, Path]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ringtrue-pool-")
        self._store: dist.TCPStore | None = None
        self._tasks = 0

    def run(self, fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60, check: bool = True) -> list[Any]:
        """fn(rank, world, *args) on ranks 0 to world - 1; the results in rank order.

        check=True raises RemoteError if any rank raised or died, check=False gives a Failure in its place. A task that
        is not over after `timeout` seconds raises PoolTimeoutError. Processes that died are replaced.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world {world} does not fit a pool of {self.size}")
        self._start()
        self._tasks += 1
        task = pickle.dumps((fn, args))
        workers = self._workers[:world]
        for rank, (_, pipe, _) in enumerate(workers):
            pipe.send((self._tasks, rank, world, timeout, sys.path, task))
        results = self._collect(workers, monotonic() + timeout)
        failures = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
        if failures and check:
            raise RemoteError(failures)
        return results

    def close(self) -> None:
        for _, pipe, _ in self._workers:
            with suppress(OSError):
                pipe.send(None)
        for process, _, _ in self._workers:
            process.join(5)
        self._end(self._workers)
        self._workers = []
        self._store = None
        self._folder.cleanup()

    def _start(self) -> None:
        if self._store is None:
            # the parent hosts the store: no port to guess, and none that a dead rank could take along
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        started = []
        for index in range(len(self._workers), self.size):
            ours, theirs = spawn.Pipe()
            dump = Path(self._folder.name) / f"{index}-{self._tasks}.txt"
            process = spawn.Process(target=_serve, args=(theirs, self._store.port, str(dump)), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours, dump))
        for _, pipe, _ in started:
            assert pipe.poll(120), "a process of the pool did not start"
            pipe.recv()
        self._workers += started

    def _collect(self, workers: list[tuple[Any, Connection, Path]], deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        dead = []
        while missing := {pipe: rank for rank, (_, pipe, _) in enumerate(workers) if rank not in results}:
            ready = wait(list(missing), max(0.0, deadline - monotonic()))
            if not ready:
                raise PoolTimeoutError(self._autopsy(workers, missing.values()))
            for pipe in ready:
                worker = workers[missing[pipe]]
                try:
                    results[missing[pipe]] = pickle.loads(pipe.recv())
                except (EOFError, ConnectionError):  # the others are waited for: they say what became of them
                    code = worker[0].join(5) or worker[0].exitcode
                    results[missing[pipe]] = Failure("exit", str(code), f"exit code {code}")
                    dead.append(worker)
        self._end(dead)
        self._workers = [worker for worker in self._workers if worker not in dead]
        return [results[rank] for rank in range(len(workers))]

    def _autopsy(self, workers: list[tuple[Any, Connection, Path]], missing: Any) -> str:
        text = [f"ranks {sorted(missing)} are not done"]
        for rank, (process, _, dump) in enumerate(workers):
            with suppress(OSError):
                os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes the stacks of all threads
            until = monotonic() + 2
            while monotonic() < until and not dump.read_text().rstrip().endswith("in <module>"):
                sleep(0.05)
            text.append(f"---- rank {rank}, {'alive' if process.is_alive() else 'dead'} ----\n{dump.read_text()}")
        self._end(self._workers)
        self._workers = []
        return "\n".join(text)

    def _end(self, workers: list[tuple[Any, Connection, Path]]) -> None:
        for process, pipe, _ in workers:
            process.kill()
            process.join(5)
            pipe.close()


def _serve(pipe: Connection, port: int, dump: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name may not resolve in a container
    torch.set_num_threads(1)
    with open(dump, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        pipe.send("ready")
        while (task := pipe.recv()) is not None:
            pipe.send(_perform(store, *task))


def _perform(
    store: dist.Store, number: int, rank: int, world: int, timeout: float, path: list[str], task: bytes
) -> bytes:
    sys.path[:] = path
    failed = False
    try:
        fn, args = pickle.loads(task)
        rendezvous = dist.PrefixStore(f"task{number}", store)
        # the parent's own deadline comes first: it shows where every process was
        dist.init_process_group(
            "gloo", store=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=timeout + 30)
        )
        result = pickle.dumps(fn(rank, world, *args))
    except BaseException as error:  # every way to fail is a result of this rank
        result = pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc()))
        failed = True
    if dist.is_initialized():
        dist.destroy_process_group()
    if failed:  # groups that live on in a cycle would keep peers waiting for this rank
        gc.collect()
    return result
