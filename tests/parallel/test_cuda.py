"""Every mode with the CUDA kernels, on one GPU: in-process ranks share it (test_nccl.py has one process a GPU)."""

from __future__ import annotations

import pytest
import torch
from draws import draw, failures
from rings import errors, growths

import ringtrue as rt
from ringtrue.plants.between_ranks import planted

HERE = [s for s in rt.backends() if s.device == "cuda" and s.unavailable is None]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a CUDA device")]
EVERY = pytest.mark.parametrize("support", HERE, ids=lambda s: s.name)
BLOCK = 20


@EVERY
@pytest.mark.parametrize("block", range(10))
def test_every_mode_equals_the_truth(support: rt.Support, block: int) -> None:
    """200 draws a backend, in bfloat16, of what its claims allow."""
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        problem = draw(seed, backends=[support.name], dtypes=["bfloat16"], claims=support.claims, most=9)
        failed = failures(problem, device="cuda")
        assert not failed, (seed, str(problem), failed)


@EVERY
def test_errors_do_not_grow_with_the_ring(support: rt.Support) -> None:
    failed = [str(g) for g in growths(rt.op_pair(support.name, "cuda"), torch.bfloat16, device="cuda") if not g.ok]
    assert not failed


@EVERY
@pytest.mark.parametrize("fault", ["merge in bf16", "dk/dv summed in bf16"])
def test_rounding_at_every_step_is_caught(support: rt.Support, fault: str) -> None:
    pair = rt.op_pair(support.name, "cuda")
    with planted(fault):
        sixteen = errors(pair, 16, torch.bfloat16, "cuda")
    broken = {g.quantity for g in growths(pair, torch.bfloat16, sixteen, "cuda") if not g.ok}
    assert broken >= ({"out"} if fault == "merge in bf16" else {"dk", "dv"})
