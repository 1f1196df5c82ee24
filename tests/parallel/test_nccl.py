"""The same draws over NCCL, one process a GPU, with every backend that has a kernel there."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from draws import Draw, draw, joined, play

import ringtrue as rt
from ringtrue.audit.judge import judged

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two CUDA devices"),
]
DRAWS = 12


def problems(world: int) -> list[Draw]:
    """The first draws of every way to lay out `world` ranks, in float32 and bfloat16."""
    dtypes = (torch.float32, torch.bfloat16)
    drawn = [draw(seed, dtypes[seed % 2]) for seed in range(2000)]
    return [p for p in drawn if p.size == world][:DRAWS]


def on_cuda(problem: Draw) -> Draw:
    x, mask = problem.inputs, problem.inputs.mask
    tensors = {n: getattr(mask, n) for n in ("dense", "key_keep", "key_bias")}
    mask = replace(mask, **{n: None if t is None else t.cuda() for n, t in tensors.items()})
    moved = {n: getattr(x, n).cuda() for n in ("q", "k", "v", "grad_out")}
    return replace(problem, inputs=replace(x, mask=mask, **moved))


def worker(rank: int, world: int, folder: str, backends: list[str]) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for backend in backends:
        results = [[x.cpu() for x in play(None, on_cuda(problem), backend)] for problem in problems(world)]
        torch.save(results, f"{folder}/{backend}-{rank}.pt")
    dist.destroy_process_group()


def test_every_mode_equals_the_truth_over_nccl() -> None:
    world = 4 if torch.cuda.device_count() >= 4 else 2
    backends = [s.name for s in rt.backends() if s.device == "cuda" and s.unavailable is None]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (world, folder, backends), nprocs=world)
        for backend in backends:
            per_rank = [torch.load(Path(folder) / f"{backend}-{rank}.pt") for rank in range(world)]
            for problem, *results in zip(problems(world), *per_rank, strict=True):
                failed = [str(v) for v in judged(joined(results), problem.inputs) if not v.ok]
                assert not failed, (backend, str(problem), failed)
