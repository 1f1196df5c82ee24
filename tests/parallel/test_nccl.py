"""The same draws over NCCL, one process a GPU, with every backend that has a kernel there; compiled, checkpointed.

200 draws: `torchrun --nproc-per-node 2 tests/parallel/draws.py --device cuda --backend native_flash --dtype bfloat16`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from draws import Draw, Result, draw, play, verdicts
from torch.utils.checkpoint import checkpoint

import ringtrue as rt

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least two CUDA devices"),
]
DRAWS = 12


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


MODES = ((2, 1), (1, 2))


def leaves(rank: int, cuda: str) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(rank)
    drawn = (torch.randn(1, 33 + rank, 4, 64, generator=numbers) for _ in range(4))
    return [x.to(cuda, torch.bfloat16).requires_grad_() for x in drawn]


def gradients(run: Callable[..., torch.Tensor], tensors: list[torch.Tensor], seed: int = 5) -> list[torch.Tensor]:
    *inputs, upstream = tensors
    torch.manual_seed(seed)
    for x in inputs:
        x.grad = None
    out = run(*inputs)
    out.backward(upstream)  # a reentrant checkpoint knows no torch.autograd.grad
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def ways_of(cp: rt.ContextParallel, backend: str, cuda: str) -> dict[str, float]:
    """How far a compiled call and a recomputed one with dropout are from the plain one, in each mode."""
    dropout_p = 0.2 if rt.op_pair(backend, "cuda").claims.dropout else 0.0

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
        return rt.attention(q, k, v, is_causal=True, dropout_p=dropout_p, parallel=cp, backend=backend)

    def dropping(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, dropout_p)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q.cos(), k, v) + attend(q, k.sin(), v)

    torch._dynamo.reset()
    tensors = leaves(cp.rank, cuda)
    ways = {
        "aot_eager": (torch.compile(model, fullgraph=True, backend="aot_eager"), model),
        "inductor": (torch.compile(model, fullgraph=True), model),
        "recomputed": (lambda *x: rt.checkpoint(dropping, *x), dropping),
        "recomputed by torch": (lambda *x: checkpoint(dropping, *x, use_reentrant=False), dropping),
        "recomputed by torch, reentrant": (lambda *x: checkpoint(dropping, *x, use_reentrant=True), dropping),
    }
    found = {}
    for name, (run, plain) in ways.items():
        pairs = zip(gradients(run, tensors), gradients(plain, tensors), strict=True)
        found[name] = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
    return found


def ways_worker(rank: int, world: int, folder: str, backends: list[str]) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    found = {}
    for ulysses, ring in MODES:
        cp = rt.ContextParallel(rt.ContextParallelConfig(ulysses, ring, timeout=60.0))
        for backend in backends:
            found[backend, ulysses, ring] = ways_of(cp, backend, f"cuda:{rank}")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_compiled_and_recomputed_calls_over_nccl() -> None:
    """The gradient of what was drawn, and of what was compiled; a kernel may add up in any order."""
    backends = [s.name for s in rt.backends() if s.device == "cuda" and s.unavailable is None]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(ways_worker, (2, folder, backends), nprocs=2)
        for rank in range(2):
            for mode, ways in torch.load(Path(folder) / f"{rank}.pt").items():
                assert all(error < 0.01 for error in ways.values()), (rank, mode, ways)
