"""examples/video_transformer.py on 2 and 4 processes is one process's training, within the demo's bounds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import ringtrue as rt
import video_transformer as example
from gloo import Pool
from ringtrue.cli.demo.judge import GRADIENT_FACTOR, LOSS_FACTOR, LOSS_FLOOR, allowed, errors, ratio

SCRIPT = Path(example.__file__)
STEPS = 5
MODES = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]
CPU = torch.device("cpu")


class Trained(NamedTuple):
    """Output and gradients at step 0; losses before each step; weights after the last."""

    out: Tensor
    grads: dict[str, Tensor]
    losses: list[float]
    weights: dict[str, Tensor]


def trained(cp: rt.ContextParallel, shard_condition: bool, dtype: torch.dtype = torch.float32) -> Trained:
    torch.manual_seed(0)
    model = example.VideoTransformer().to(dtype)
    batch = example.make_batch(CPU, dtype)
    with torch.no_grad():
        out = model(batch, cp, shard_condition)
    example.backward(model, batch, cp, shard_condition)
    grads = {name: x.grad.clone() for name, x in model.named_parameters()}
    losses = example.train(model, batch, cp, STEPS, shard_condition)
    return Trained(out, grads, losses, {name: x.detach() for name, x in model.named_parameters()})


def eager(q: Tensor, k: Tensor, v: Tensor, mask: rt.KeyPadding | None = None, parallel: object = None) -> Tensor:
    """Attention as written in the formula."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask.keep[:, None, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


@cache
def reference(kind: str) -> Trained:
    """One process: "float64" (the truth) and "eager" (the yardstick) know no library; "single" is the example."""
    with pytest.MonkeyPatch.context() as patch:
        if kind != "single":
            patch.setattr(rt, "attention", eager)
        dtype = torch.float64 if kind == "float64" else torch.float32
        return trained(rt.ContextParallel(rt.ContextParallelConfig()), False, dtype)


# ---- what a script may forget


@contextmanager
def forgetting(what: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        cp, call = rt.ContextParallel, rt.ContextParallel.call
        table: dict[str, Callable[[], None]] = {
            "nothing": lambda: None,
            "the sum over ranks": lambda: patch.setattr(example, "sum_gradients", lambda model, cp: None),
            "cp.loss": lambda: patch.setattr(cp, "loss", lambda self, loss: loss),
            "cp.positions": lambda: patch.setattr(
                cp, "positions", lambda self, n: torch.arange(len(torch.arange(n).tensor_split(self.size)[self.rank]))
            ),
            "joint_prefix": lambda: patch.setattr(cp, "call", lambda self, joint_prefix=0, **rest: call(self, **rest)),
        }
        table[what]()
        yield


def on_rank(rank: int, world: int, degrees: tuple[int, int], shard_condition: bool, forgotten: str) -> Trained:
    with forgetting(forgotten):
        return trained(rt.ContextParallel(rt.ContextParallelConfig(*degrees, timeout=30)), shard_condition)


def outside(ranks: list[Trained]) -> list[str]:
    """Everything that is out of the demo's bounds, in words; weights are held to the bound of the losses."""
    truth, single = reference("float64"), reference("single")
    judged = errors(ranks[0].out, ranks[0].grads, truth.out, truth.grads)
    yard = errors(*reference("eager")[:2], truth.out, truth.grads)
    factor = ratio(judged.gradient, yard.gradient)
    print(
        f"worst gradient {judged.parameter}: {judged.gradient:.2e}, {factor:.2f} x the yardstick's {yard.gradient:.2e}"
    )
    found = [] if factor <= GRADIENT_FACTOR else [f"gradient of {judged.parameter}: {factor:.2f} x the yardstick's"]
    for step, losses in enumerate(zip(*(rank.losses for rank in ranks), strict=True)):
        off = max(abs(loss - single.losses[step]) for loss in losses)
        if not off <= allowed(single.losses[step], truth.losses[step]):
            found.append(f"loss {step}: off by {off:.1e}")
    for rank, result in enumerate(ranks):
        for name, weight in result.weights.items():
            exact, one = truth.weights[name], single.weights[name]
            bound = LOSS_FACTOR * (one - exact).norm() + LOSS_FLOOR * exact.norm()
            if not (weight - one).norm() <= bound:
                found.append(f"{name} on rank {rank}: off by {(weight - one).norm():.1e}, allowed {bound:.1e}")
    return found


@pytest.mark.parametrize("shard_condition", [False, True], ids=["whole condition", "split condition"])
@pytest.mark.parametrize("degrees", MODES, ids=lambda d: f"{d[0]}x{d[1]}")
def test_five_steps_are_those_of_one_process(pool: Pool, degrees: tuple[int, int], shard_condition: bool) -> None:
    ranks = pool.run(on_rank, degrees[0] * degrees[1], degrees, shard_condition, "nothing", timeout=120)
    assert outside(ranks) == []
    for rank in ranks[1:]:
        assert all(torch.equal(rank.weights[name], weight) for name, weight in ranks[0].weights.items())


@pytest.mark.parametrize("forgotten", ["the sum over ranks", "cp.loss", "cp.positions", "joint_prefix"])
def test_what_a_script_forgets_is_seen(pool: Pool, forgotten: str) -> None:
    for degrees in ((2, 1), (1, 2)):
        assert outside(pool.run(on_rank, 2, degrees, False, forgotten, timeout=120))


def test_one_process_learns() -> None:
    losses = reference("single").losses
    assert losses[-1] < losses[0]


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_commands_in_its_docstring() -> None:
    """One process, and torchrun with the last command's degrees: the same losses, printed once."""
    alone = run(str(SCRIPT)).splitlines()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), "--ring", "2")
    together = run(*torchrun).splitlines()
    assert len(alone) == len(together) == STEPS
    for one, other in zip(alone, together, strict=True):
        assert one.split()[:3] == other.split()[:3]
        assert float(one.split()[3]) == pytest.approx(float(other.split()[3]), abs=1e-5)
