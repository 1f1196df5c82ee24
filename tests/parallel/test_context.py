"""shard, gather in both conventions, loss, declared calls, scopes, and what travels how often."""

from __future__ import annotations

import pytest
import torch
from draws import Draw, build, on_twin, play, verdicts
from playing import Result
from recipes import Recipe
from torch import Tensor

import ringtrue as rt
from ringtrue.parallel.twin import Rank, World


def context(mesh: Rank, ulysses: int = 1, ring: int = 1, **options: object) -> rt.ContextParallel:
    return rt.ContextParallel(rt.ContextParallelConfig(ulysses, ring, mesh=mesh, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, 1, 3, 7])
def test_shard_and_gather_invert_each_other(length: int) -> None:
    x = torch.arange(2 * length * 3.0).reshape(2, length, 3)

    def body(mesh: Rank) -> tuple[Tensor, Tensor]:
        cp = context(mesh, 2, 2)
        part = cp.shard(x, dim=-2)
        return part, cp.gather(part, dim=1)

    results = World(4).run(body)
    assert [part.shape[1] for part, _ in results] == [len(c) for c in torch.arange(length).tensor_split(4)]
    assert all(torch.equal(whole, x) for _, whole in results)


@pytest.mark.parametrize("backward", ["sum", "slice"])
def test_gradients_of_shard_and_gather(backward: str) -> None:
    """One identical loss: "sum" makes gradients N times the whole, which cp.loss takes back; "slice" the whole."""
    x = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.arange(10.0, dtype=torch.float64).reshape(5, 2)

    def body(mesh: Rank) -> Tensor:
        cp = context(mesh, 1, 3)
        leaf = x.clone().requires_grad_()
        whole = cp.gather(cp.shard(leaf, 0), 0, backward=backward)
        loss = (whole * weight).sum()
        (cp.loss(loss) if backward == "sum" else loss).backward()
        return leaf.grad

    assert torch.allclose(sum(World(3).run(body)), weight)


def test_gather_needs_every_rank_even_one_without_gradient() -> None:
    """A rank whose shard wants no gradient still takes part in backward: its peers' gradients pass through it."""

    def body(mesh: Rank) -> Tensor | None:
        cp = context(mesh, 2, 1)
        x = torch.ones(2 + cp.rank, requires_grad=cp.rank == 1)
        (cp.gather(x, 0).sum() * (cp.rank + 1)).backward()
        return x.grad

    first, second = World(2).run(body)
    assert first is None
    assert torch.equal(second, torch.full((3,), 3.0))


def test_gather_refuses_what_it_was_not_told() -> None:
    def body(mesh: Rank) -> None:
        cp = context(mesh, 2, 1)
        with pytest.raises(rt.ArgumentError, match="lengths"):
            cp.gather(torch.ones(3), 0, lengths=[3, 3, 3])
        with pytest.raises(rt.ArgumentError, match="backward"):
            cp.gather(torch.ones(3), 0, backward="mean")  # type: ignore[arg-type]
        with pytest.raises(rt.ArgumentError, match="dim"):
            cp.shard(torch.ones(3), 1)

    World(2).run(body)


def test_only_one_ranks_input_wants_a_gradient() -> None:
    """What any rank wants, every rank computes: the header carries it."""

    def body(mesh: Rank, degrees: tuple[int, int]) -> Tensor | None:
        cp = context(mesh, *degrees)
        numbers = torch.Generator().manual_seed(cp.rank)
        q, k, v = (torch.randn(1, 3, 2, 4, generator=numbers, dtype=torch.float64) for _ in range(3))
        k.requires_grad_(cp.rank == 0)
        out = rt.attention(q, k, v, parallel=cp)
        out.sum().backward()
        return k.grad

    for degrees in ((2, 1), (1, 2)):
        first, second = World(2).run(body, degrees)
        assert second is None
        assert first is not None
        assert first.abs().sum() > 0


def test_no_graph_where_no_rank_wants_one() -> None:
    def body(mesh: Rank) -> bool:
        q = torch.randn(1, 3, 2, 4)
        return rt.attention(q, q, q, parallel=context(mesh, 2, 1)).requires_grad

    assert World(2).run(body) == [False, False]


def declared_play(mesh: Rank, problem: Draw) -> Result:
    result = play(mesh, problem)
    assert not [event for event in mesh.log if event.group.startswith("header")]
    return result


@pytest.mark.parametrize("kind", ["none", "key_bool", "key_float", "rows_bool", "rows_float"])
def test_declared_calls_exchange_no_header(kind: str) -> None:
    where, _, dtype = kind.partition("_")
    mask = {"none": {}, "key": {"key": "some" if dtype == "bool" else "bias"}, "rows": {"dense": dtype}}[where]
    problem = build(Recipe(ulysses=2, ring=2, q=(3, 0, 2, 4), k=(1, 5, 2, 0), declared=True, uses=("out",), **mask))
    assert problem.declared == kind
    assert all(v.ok for v in verdicts(World(4).run(declared_play, problem), problem))


def test_declaration_is_checked_on_its_rank() -> None:
    def body(mesh: Rank) -> None:
        cp = context(mesh, 2, 1)
        q = torch.randn(2, 3, 2, 4)
        keep = rt.KeyPadding(torch.ones(2, 3, dtype=torch.bool))
        with pytest.raises(rt.ArgumentError, match="other lengths"):
            rt.attention(q, q, q, parallel=cp.call([4, 4], [4, 4]))
        with pytest.raises(rt.ArgumentError, match="another kind"):
            rt.attention(q, q, q, keep, parallel=cp.call([3, 3], [3, 3]))
        with pytest.raises(rt.ArgumentError, match="mask kind"):
            cp.call([3, 3], [3, 3], mask="bool")  # type: ignore[arg-type]
        with pytest.raises(rt.ArgumentError, match="declared"):
            cp.call(mask="key_bool")
        with pytest.raises(rt.ArgumentError, match="joint_prefix"):
            cp.call(joint_prefix=-2)
        with pytest.raises(rt.ArgumentError, match="kv_replicated"):
            cp.call(kv_replicated=1)  # type: ignore[arg-type]

    World(2).run(body)


def test_equal_lengths_need_no_header() -> None:
    def body(mesh: Rank) -> Tensor:
        cp = context(mesh, 2, 1, lengths="equal")
        numbers = torch.Generator().manual_seed(cp.rank)
        q = torch.randn(2, 3, 2, 4, generator=numbers)
        with cp:
            out = cp.gather(rt.attention(q, q, q), 1)
        assert not [event for event in mesh.log if event.group.startswith("header")]
        return out

    first, second = World(2).run(body)
    assert torch.equal(first, second)
    whole = torch.cat([torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(r)) for r in range(2)], 1)
    assert torch.allclose(first, rt.attention(whole, whole, whole), atol=1e-6)


def test_scope_nests_and_false_is_local() -> None:
    def body(mesh: Rank) -> None:
        cp = context(mesh, 2, 1)
        q = torch.randn(1, 2, 2, 4)
        alone = rt.attention(q, q, q)
        with cp:
            assert rt.ContextParallel.current() is cp
            assert torch.equal(rt.attention(q, q, q, parallel=False), alone)
            with pytest.raises(ZeroDivisionError), cp:
                raise ZeroDivisionError
            assert rt.ContextParallel.current() is cp
        assert rt.ContextParallel.current() is None

    World(2).run(body)


def test_traffic_of_one_call() -> None:
    """Ulysses moves eight tensors; a ring passes keys on size - 1 times each way, and each contribution once."""

    def body(mesh: Rank, degrees: tuple[int, int]) -> dict[str, int]:
        cp = context(mesh, *degrees)
        q, k, v = (torch.randn(1, 4, 4, 8, requires_grad=True) for _ in range(3))
        out = rt.attention(q, k, v, parallel=cp)
        out.backward(torch.randn_like(out))
        return {name: sum(e.bytes for e in mesh.log if e.group.startswith(name)) for name in ("ring", "ulysses")}

    one = 4 * 4 * 8 * 4  # bytes of a shard
    for sent in World(4).run(body, (4, 1)):
        assert sent == {"ring": 0, "ulysses": 8 * one * 3 // 4}
    for sent in World(4).run(body, (1, 4)):
        assert sent == {"ring": (3 * 2 + 3 * 2 + 3 * 2) * one, "ulysses": 0}


def test_size_one_is_the_plain_call() -> None:
    problem = build(Recipe(q=(5,), causal="top_left", key="keep", uses=("out",)))
    for ours, theirs in zip(play(None, problem)[:5], on_twin(problem)[:5], strict=True):
        assert torch.equal(ours, theirs)


def test_out_may_be_changed_in_place() -> None:
    """As with torch's own attention: allowed, and an error in backward, which needs out, instead of wrong numbers."""
    for support in rt.backends():
        if support.device == "cpu":
            q = torch.randn(1, 3, 2, 4, requires_grad=True)
            out = rt.attention(q, q, q, backend=support.name)
            out.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_a_compiled_caller_under_a_context_is_right() -> None:
    """After the graph break nothing below may be compiled: there a Ulysses result once had another head dim."""

    def body(mesh: Rank) -> tuple[torch.Size, float]:
        cp = context(mesh, 2, 1)
        q = torch.randn(1, 6, 2, 4)
        plain = rt.attention(q, q, q, parallel=cp)
        run = torch.compile(lambda x: rt.attention(x, x, x, parallel=cp), backend="eager")
        out = run(q)
        return out.shape, float((out - plain).abs().max())

    for shape, error in World(2, wait=30.0).run(body):
        assert shape == (1, 6, 2, 4)
        assert error < 1e-6
