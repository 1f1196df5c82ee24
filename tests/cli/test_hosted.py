"""Ranks that share a device: each collective gives what gloo's own gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from ringtrue.cli import hosted
from ringtrue.cli.pool import Pool, Task
from ringtrue.cli.worker import Job


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, "ringtrue.cli.hosted", "cpu", timeout=60) as made:
        made.ready()
        yield made


def collectives(job: Job) -> list[Any]:
    """Over a second default group, of the backend under test: the task's own is put aside meanwhile."""
    dist.destroy_process_group()
    hosted.register()
    found = []
    for backend in (hosted.NAME, "gloo"):
        path = os.path.join(job.folder, f"inner-{backend}")
        dist.init_process_group(backend, init_method=f"file://{path}", rank=job.rank, world_size=job.world)
        found.append(_each(job.rank))
        dist.destroy_process_group()
    return found


def _each(rank: int) -> list[list[float]]:
    x, group = torch.arange(4.0) + 10 * rank, dist.group.WORLD
    summed, told, got = x.clone(), x.clone(), torch.empty_like(x)
    dist.all_reduce(summed)
    dist.broadcast(told, 1)
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]):
        work.wait()
    dist.barrier()
    uneven = funcol.all_to_all_single(x, [3 - 2 * rank] * 2, [3, 1], group)
    functional = [
        funcol.all_to_all_single(x, None, None, group),
        funcol.all_gather_tensor(x, 0, group),
        funcol.permute_tensor(x, [1, 0], group),
    ]
    return [t.tolist() for t in (summed, told, *parts, got, uneven, *functional)]


def test_every_collective(pool: Pool) -> None:
    ((first, second),) = pool.run([Task("collectives", f"{__name__}:collectives", (), ranks=2)])
    for ours, gloos in (first, second):
        assert ours == gloos
    assert first[0][0] == [10.0, 12.0, 14.0, 16.0]
