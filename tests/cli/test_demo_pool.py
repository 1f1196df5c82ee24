"""The pool of worker processes: results in order, news, and nothing that fails silently or stays behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from ringtrue.cli.pool import Pool, Task, WorkerError
from ringtrue.cli.worker import Job


def total(job: Job, factor: int) -> tuple[int, int, float]:
    job.report("half")
    return job.rank, os.getpid(), job.total(torch.tensor([float(factor * (job.rank + 1))])).item()


def fail(job: Job, failing: int) -> None:
    if job.rank == failing:
        raise ValueError(f"rank {job.rank} cannot")
    job.total(torch.zeros(1))


def die(job: Job) -> None:
    os._exit(7)


def sleep(job: Job) -> None:
    time.sleep(60)


@pytest.fixture
def workers() -> Iterator[Pool]:
    with Pool(2, "math", "cpu", 120) as pool:
        pool.ready()
        yield pool


def ended(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_tasks_share_the_workers(workers: Pool) -> None:
    news: list[tuple[str, str]] = []
    tasks = [
        Task("a", f"{__name__}:total", (1,)),
        Task("b", f"{__name__}:total", (2,)),
        Task("c", f"{__name__}:total", (3,), 2),
    ]
    a, b, c = workers.run(tasks, lambda name, value: news.append((name, value)))
    assert [result[2] for result in (*a, *b, *c)] == [1.0, 2.0, 9.0, 9.0]
    assert a[0][1] != b[0][1]  # side by side
    assert [result[0] for result in c] == [0, 1]
    assert sorted(news) == [("a", "half"), ("b", "half"), ("c", "half")]
    assert workers.run([Task("d", f"{__name__}:total", (1,), 2)])[0][0][2] == 3.0  # a new group after an old one
    with pytest.raises(ValueError, match="needs 3 workers"):
        workers.run([Task("e", f"{__name__}:total", (1,), 3)])
    folder = workers.folder
    assert folder.exists()
    workers.close()
    assert not folder.exists()
    assert ended([result[1] for result in c])


def test_a_failure_brings_its_traceback(workers: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)bad: failed in worker 1.*in fail.*ValueError: rank 1 cannot"):
        workers.run([Task("bad", f"{__name__}:fail", (1,), 2)])
    assert time.monotonic() - start < 30


def test_a_death_is_told(workers: Pool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)dying: failed in worker 0.*exit code 7"):
        workers.run([Task("dying", f"{__name__}:die", ())])


def test_silence_has_an_end(workers: Pool) -> None:
    pids = [ranks[0][1] for ranks in workers.run([Task("a", f"{__name__}:total", (1,))])]
    workers.timeout = 1.0
    with pytest.raises(WorkerError, match=r"stuck: no news from worker 0 for 1 s"):
        workers.run([Task("stuck", f"{__name__}:sleep", ())])
    assert ended(pids)
