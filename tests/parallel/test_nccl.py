"""The same draws over NCCL, one process a GPU, with every backend that has a kernel there."""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from draws import Draw, Result, draw, play, verdicts

import ringtrue as rt

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two CUDA devices"),
]
DRAWS = 200


def problems(world: int, backend: str) -> list[Draw]:
    """Draws on `world` ranks that a backend's claims allow, in float32 (where it can) and bfloat16."""
    claims = next(s.claims for s in rt.backends() if (s.name, s.device) == (backend, "cuda"))
    dtypes = [name for name in ("float32", "bfloat16") if getattr(torch, name) in claims.dtypes]
    limits = {"worlds": [world], "backends": [backend], "dtypes": dtypes, "claims": claims}
    return [draw(seed, **limits) for seed in range(DRAWS)]


def worker(rank: int, world: int, folder: str, backends: list[str]) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for backend in backends:
        results = [tuple(play(None, problem, device=f"cuda:{rank}")) for problem in problems(world, backend)]
        torch.save(results, f"{folder}/{backend}-{rank}.pt")
    dist.destroy_process_group()


def test_every_mode_equals_the_truth_over_nccl() -> None:
    world = 4 if torch.cuda.device_count() >= 4 else 2
    backends = [s.name for s in rt.backends() if s.device == "cuda" and s.unavailable is None]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (world, folder, backends), nprocs=world)
        for backend in backends:
            per_rank = [torch.load(Path(folder) / f"{backend}-{rank}.pt") for rank in range(world)]
            for problem, *results in zip(problems(world, backend), *per_rank, strict=True):
                failed = [str(v) for v in verdicts([Result(*r) for r in results], problem) if not v.ok]
                assert not failed, (backend, str(problem), failed)
