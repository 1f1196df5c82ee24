"""From whole tensors to a loss and back, as a model does it: shard, project, attend, gather, and one gradient rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from ringtrue.parallel.twin import Rank, World

TEXT, IMAGE, WIDTH, HEADS = 3, 11, 8, 4
CHAINS = ["self", "causal, balanced", "joint text", "joint text, balanced", "cross", "cross, whole keys"]
DEGREES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]


@dataclass
class Leaves:
    """Whole inputs and one weight, the same on every rank: float64, so that only the rule matters."""

    text: Tensor
    image: Tensor
    weight: Tensor

    @classmethod
    def fresh(cls) -> Leaves:
        numbers = torch.Generator().manual_seed(3)
        shapes = ((2, TEXT, WIDTH), (2, IMAGE, WIDTH), (WIDTH, 3 * WIDTH))
        return cls(*(torch.randn(s, generator=numbers, dtype=torch.float64).requires_grad_() for s in shapes))

    def grads(self) -> list[Tensor]:
        leaves = (self.text, self.image, self.weight)
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def heads_of(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x @ weight).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(-3)
    return q, k, v


def loss_of(out: Tensor) -> Tensor:
    """Every place with a weight of its own."""
    places = torch.linspace(-1, 2, out[0].numel(), dtype=out.dtype).reshape(out.shape[1:])
    return (out.tanh() * places).sum()


def alone(kind: str) -> tuple[Tensor, list[Tensor]]:
    """One process."""
    x = Leaves.fresh()
    mask = rt.Causal() if "causal" in kind else None
    whole = torch.cat([x.text, x.image], 1) if "joint" in kind else x.image
    q, k, v = heads_of(whole, x.weight)
    if "cross" in kind:
        _, k, v = heads_of(x.text, x.weight)
    loss = loss_of(rt.attention(q, k, v, mask))
    loss.backward()
    return loss.detach(), x.grads()


def chain(mesh: Rank, kind: str, degrees: tuple[int, int], backward: str) -> tuple[Tensor, list[Tensor]]:
    """One rank of the same."""
    balance = "head_tail" if "balanced" in kind else "none"
    cp = rt.ContextParallel(rt.ContextParallelConfig(*degrees, mesh=mesh, load_balance=balance))  # type: ignore[arg-type]
    x = Leaves.fresh()
    mask = rt.Causal() if "causal" in kind else None
    own, prefix = cp.shard(x.image, 1), TEXT if "joint" in kind else 0
    q, k, v = heads_of(torch.cat([x.text, own], 1) if prefix else own, x.weight)
    call: object = cp.call(joint_prefix=prefix) if prefix else cp
    if "cross" in kind:
        whole = "whole" in kind
        _, k, v = heads_of(x.text if whole else cp.shard(x.text, 1), x.weight)
        call = cp.call(kv_replicated=True) if whole else cp
    out = rt.attention(q, k, v, mask, parallel=call)  # type: ignore[arg-type]
    out = cp.gather(out, 1, prefix=prefix, backward=backward)  # type: ignore[arg-type]
    loss = loss_of(out)
    (cp.loss(loss) if backward == "sum" else loss).backward()
    return loss.detach(), x.grads()


def compare(results: list[tuple[Tensor, list[Tensor]]], right: tuple[Tensor, list[Tensor]]) -> None:
    loss, grads = right
    assert all(torch.allclose(found, loss, rtol=1e-12) for found, _ in results)
    for name, whole, *parts in zip(("text", "image", "weight"), grads, *(g for _, g in results), strict=True):
        assert torch.allclose(sum(parts), whole, rtol=1e-10, atol=1e-12), name  # type: ignore[arg-type]


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("kind", CHAINS)
def test_gradients_are_the_sum_over_ranks(kind: str, degrees: tuple[int, int]) -> None:
    compare(World(degrees[0] * degrees[1]).run(chain, kind, degrees, "sum"), alone(kind))


@pytest.mark.parametrize("kind", ["self", "causal, balanced", "cross"])
def test_slice_is_for_one_identical_loss(kind: str) -> None:
    compare(World(4).run(chain, kind, (2, 2), "slice"), alone(kind))


@pytest.mark.parametrize("balance", ["none", "head_tail"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_gather_and_its_gradient(balance: str, prefix: int) -> None:
    """The prefix is there once; what every rank does with it adds up."""
    first = torch.arange(2.0 * prefix).reshape(2, prefix) - 100
    rest = torch.arange(18.0).reshape(2, 9)
    weights = [torch.randn(2, prefix + 9, generator=torch.Generator().manual_seed(r)) for r in range(4)]

    def body(mesh: Rank, spread: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        cp = rt.ContextParallel(rt.ContextParallelConfig(2, 2, mesh=mesh, load_balance=balance))  # type: ignore[arg-type]
        mine = cp.shard(rest, 1)
        x = torch.cat([first, mine], 1).requires_grad_()
        whole = cp.gather(x, 1, prefix=prefix)
        assert torch.equal(whole, torch.cat([first, rest], 1))
        (whole * weights[cp.rank]).sum().backward()
        assert x.grad is not None
        return spread(x.grad, cp.positions(9))

    def spread(grad: Tensor, where: Tensor) -> Tensor:
        total = torch.zeros(2, prefix + 9)
        total[:, :prefix] = grad[:, :prefix]
        return total.index_copy(1, where + prefix, grad[:, prefix:])

    total = sum(World(4).run(body, spread))
    assert torch.allclose(total, sum(weights), atol=1e-5)  # type: ignore[arg-type]
