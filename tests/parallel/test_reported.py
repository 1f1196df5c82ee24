"""What was reported of calls on several ranks, on real processes: values and gradients, and nobody waits in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from draws import Result, build, context, joined, play, verdicts
from playing import local_of
from problems import Draw
from recipes import Recipe
from torch import Tensor

import ringtrue as rt
from calls import SLOW
from gloo import Pool
from ringtrue.audit.judge import relative_errors, truth_of
from ringtrue.audit.truth import Quantities

LIMIT = 30.0  # seconds for a task: a hang is a failure with the stacks of all ranks
BACKENDS = [s.name for s in rt.backends() if s.device == "cpu" and s.unavailable is None and s.name not in SLOW]


def told(ulysses: int, ring: int, *q: int, heads: int = 4, kv_heads: int = 4, dim: int = 16, **more: object) -> Recipe:
    return Recipe(
        ulysses=ulysses, ring=ring, q=q, kv_heads=kv_heads, group=heads // kv_heads, dim=dim, value_dim=dim,
        **{"batch": 1, "dtype": "float32", "uses": ("out",), **more},  # type: ignore[arg-type]
    )  # fmt: skip


CASES = {
    "BR-63a backward of a ring reads the keys that travelled": told(1, 2, 16, 16),
    "BR-63b ring of 4": told(1, 4, 8, 8, 8, 8, heads=2, kv_heads=2, dim=32),
    "BR-63c both": told(2, 2, 8, 8, 8, 8),
    "BR-63d grouped heads": told(1, 2, 16, 16, kv_heads=2),
    "BR-65 each rank saw only itself": told(2, 1, 16, 16),
    "BR-66a 7 tokens are not 6": told(1, 2, 4, 3),
    "BR-66b 7 tokens, causal": told(1, 2, 4, 3, causal="top_left"),
    "BR-66c short shards leave nothing behind": told(1, 4, 5, 3, 4, 1),
    "BR-66 7 tokens, causal, Ulysses": told(2, 1, 4, 3, causal="top_left"),
    "BR-69 only the last rank has padding": told(2, 1, 8, 8, key="some"),
    "BR-69 the same in a ring": told(1, 2, 8, 8, key="some"),
    "BR-71 whole keys, odd length": told(2, 1, 10, 9, k=(13,), replicated=True),
    "BR-71 the same on a ring": told(1, 2, 10, 9, k=(13,), replicated=True),
    "BR-73a padding, Ulysses": told(2, 1, 8, 8, batch=2, key="keep"),
    "BR-73b padding, ring": told(1, 2, 8, 8, batch=2, key="keep"),
    "BR-73c no key of rank 0 is real": told(2, 1, 8, 8, key="keep"),
    "BR-73c the same in a ring": told(1, 2, 8, 8, key="keep"),
    "BR-75 rounding in 16 bits": told(1, 4, 32, 32, 32, 32, heads=2, kv_heads=2, dim=64, dtype="bfloat16"),
    "BR-77 frozen projection": told(1, 2, 8, 8, wants=("qv",)),
}
REAL = {"BR-69": slice(0, 13), "BR-73a": slice(0, 11), "BR-73b": slice(0, 11), "BR-73c": slice(8, 16)}  # keys


def problem(name: str) -> Draw:
    made = build(CASES[name])
    real = REAL.get(name.split(" ")[0])
    if real is None:
        return made
    keep = torch.zeros(made.inputs.k.shape[:2], dtype=torch.bool)
    keep[:, real] = True
    return replace(made, inputs=replace(made.inputs, mask=replace(made.inputs.mask, key_keep=keep)))


def on_gloo(rank: int, world: int, name: str, backend: str) -> Result:
    return play(None, problem(name), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_reported_call(pool: Pool, name: str, backend: str) -> None:
    asked = problem(name)
    results = pool.run(on_gloo, asked.size, name, backend, timeout=LIMIT)
    assert not [str(v) for v in verdicts(results, asked) if not v.ok]


def test_ranks_of_br_69_pass_different_things() -> None:
    """Rank 0 has nothing to hide and passes no mask at all."""
    asked = problem("BR-69 only the last rank has padding")
    masks = [local_of(asked, rank).mask for rank in range(2)]
    assert masks[0] is None
    assert isinstance(masks[1], rt.KeyPadding)


def mixed(rank: int, world: int) -> str:
    """A float mask beside none: no rank may guess what the other meant."""
    cp = rt.ContextParallel(rt.ContextParallelConfig(ulysses_degree=2, timeout=10.0))
    q = torch.randn(1, 4, 2, 8)
    try:
        rt.attention(q, q, q, rt.KeyBias(torch.zeros(1, 4)) if rank else None, parallel=cp)
    except rt.DisagreementError as error:
        return str(error)
    return "accepted"


def test_br_69_a_float_mask_beside_none_is_an_error_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(mixed, 2, timeout=LIMIT)
    assert first == second
    assert "mask" in first


@pytest.mark.parametrize("backend", BACKENDS)
def test_br_75_errors_are_at_most_twice_those_of_one_device(pool: Pool, backend: str) -> None:
    name = "BR-75 rounding in 16 bits"
    asked = problem(name)
    right = truth_of(asked.inputs)
    ring = joined(pool.run(on_gloo, 4, name, backend, timeout=LIMIT), asked)
    alone = one_device(asked, backend)
    ours, theirs = relative_errors(ring, right), relative_errors(alone, right)
    assert all(ours[quantity] <= 2 * theirs[quantity] for quantity in ours), (ours, theirs)


def one_device(asked: Draw, backend: str) -> Quantities:
    x = asked.inputs
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    out = rt.attention(q, k, v, backend=backend, parallel=False)
    return Quantities(out.detach(), None, *torch.autograd.grad(out, (q, k, v), x.grad_out))


def recomputed(rank: int, world: int, name: str, how: str) -> Result:
    """One rank under activation checkpointing."""
    asked = problem(name)
    cp = context(asked)
    local = local_of(asked, rank)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return rt.attention(q, k, v, return_lse=True, parallel=None if how == "scope" else cp)  # type: ignore[return-value]

    if how == "scope":
        with cp:
            out, lse = rt.checkpoint(attend, local.q, local.k, local.v)
    else:
        again = torch.utils.checkpoint.checkpoint
        out, lse = again(attend, local.q, local.k, local.v, use_reentrant=how == "reentrant")
    out.backward(local.grad_out)
    return Result(out.detach(), lse.detach(), local.q.grad, local.k.grad, local.v.grad)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "scope"])
def test_br_77_recomputed_with_a_frozen_projection(pool: Pool, how: str) -> None:
    """Only q and v want gradients; what is recomputed is what was computed."""
    name = "BR-77 frozen projection"
    results = pool.run(recomputed, 2, name, how, timeout=LIMIT)
    assert not [str(v) for v in verdicts(results, problem(name)) if not v.ok]
