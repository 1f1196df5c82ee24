"""`deterministic=True` under a context: the same bits run to run, whoever comes first; refused where it cannot be."""

from __future__ import annotations

import random
from dataclasses import replace
from time import sleep

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from ringtrue.parallel.twin import Rank, World

MODES = {
    "ulysses": ((3, 1), {}, {}),
    "ring": ((1, 4), {}, {}),
    "both": ((2, 2), {}, {}),
    "head_tail": ((1, 3), {"load_balance": "head_tail"}, {}),
    "joint prefix": ((2, 2), {}, {"joint_prefix": 2}),
    "replicated keys": ((1, 3), {}, {"kv_replicated": True}),
}
HERE = [s.name for s in rt.backends() if s.device == "cpu" and s.unavailable is None]


def step(mesh: Rank, mode: str, backend: str, hurry: int) -> list[Tensor]:
    """One rank's out and gradients; ranks arrive in an order that depends on `hurry`."""
    degrees, config, declared = MODES[mode]
    cp = rt.ContextParallel(rt.ContextParallelConfig(*degrees, mesh=mesh, **config))  # type: ignore[arg-type]
    numbers = torch.Generator().manual_seed(cp.rank)
    q, k, v, g = (torch.randn(2, 5, 6, 8, generator=numbers).bfloat16() for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    sleep(random.Random(100 * hurry + cp.rank).random() / 50)
    with rt.attention_backend(backend):
        out = rt.attention(*inputs, is_causal=True, deterministic=True, parallel=cp.call(**declared))  # type: ignore[arg-type]
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, inputs, g)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", HERE)
def test_two_runs_give_the_same_bits(mode: str, backend: str) -> None:
    (ulysses, ring), _, _ = MODES[mode]
    first, *others = (World(ulysses * ring).run(step, mode, backend, hurry) for hurry in range(3))
    for other in others:
        for mine, again in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


def test_a_kernel_that_cannot_is_refused_on_every_rank() -> None:
    pair = rt.op_pair("native_math")
    wild = replace(pair, name="wild", claims=replace(pair.claims, deterministic=False))

    def body(mesh: Rank) -> str:
        cp = rt.ContextParallel(rt.ContextParallelConfig(1, 2, mesh=mesh))
        q = torch.randn(1, 3, 2, 8, requires_grad=True)
        with pytest.raises(rt.RingtrueError) as caught:
            rt.attention(q, q, q, deterministic=True, parallel=cp, backend=wild)
        return str(caught.value)

    for text in World(2).run(body):
        assert "deterministic" in text
