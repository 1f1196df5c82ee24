"""What ranks see of a call that others cannot: grad mode, a mask's columns, an expanded mask, a refusal of `gather`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from ringtrue.parallel.twin import Rank, World

LENGTHS = (5, 3)
TOKENS = sum(LENGTHS)


def context(mesh: Rank, ulysses: int, ring: int) -> rt.ContextParallel:
    return rt.ContextParallel(rt.ContextParallelConfig(ulysses, ring, mesh=mesh, timeout=5.0))


def qkv(grad: bool = False) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [torch.randn((2, TOKENS, 3, 4), generator=numbers, dtype=torch.float64, requires_grad=grad) for _ in "qkv"]


def part(rank: int) -> slice:
    start = sum(LENGTHS[:rank])
    return slice(start, start + LENGTHS[rank])


def everywhere(fn: Callable[[Rank], object], size: int = 2) -> list[BaseException]:
    """What each rank raised: all of them must."""
    world = World(size)
    with pytest.raises(rt.RingtrueError):
        world.run(fn)
    assert set(world.failures) == set(range(size))
    return [world.failures[rank] for rank in range(size)]


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["ulysses", "ring"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("lengths", [(5, 3), (7, 1)])
def test_an_expanded_row_is_this_ranks_row(
    degrees: tuple[int, int], dtype: torch.dtype, lengths: tuple[int, int]
) -> None:
    """Every query of a rank sees the same keys, those of another rank see others: one row in memory, a mask of rows."""
    visible = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    visible[: lengths[0], :4] = visible[lengths[0] :, 2:] = True
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -torch.inf)
    q, k, v = qkv()
    expected = rt.attention(q, k, v, mask, backend="native_math")

    def rank(mesh: Rank) -> Tensor:
        cp = context(mesh, *degrees)
        start = sum(lengths[: cp.rank])
        mine = slice(start, start + lengths[cp.rank])
        row = mask[start][None].expand(lengths[cp.rank], TOKENS)
        return rt.attention(q[:, mine], k[:, mine], v[:, mine], row, parallel=cp, backend="native_math")

    torch.testing.assert_close(torch.cat(World(2).run(rank), 1), expected)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["ulysses", "ring"])
@pytest.mark.parametrize("wanting", [(0,), (1,), (0, 1)], ids=str)
def test_an_expanded_mask_beside_a_full_one_is_the_same_mask(
    degrees: tuple[int, int], wanting: tuple[int, ...]
) -> None:
    """Where it is expanded it is one row in memory, and stays so unless its places have gradients of their own."""
    q, k, v = qkv()
    row = torch.linspace(-1, 1, TOKENS, dtype=q.dtype)
    expected = rt.attention(q, k, v, row.expand(TOKENS, TOKENS), backend="native_math")

    def rank(mesh: Rank) -> tuple[Tensor, tuple[int, ...] | None]:
        cp = context(mesh, *degrees)
        mine = part(cp.rank)
        rows = row.expand(2, 3, mine.stop - mine.start, TOKENS)
        rows = rows if cp.rank == 0 else rows.contiguous()
        rows = rows.detach().requires_grad_(cp.rank in wanting)
        out = rt.attention(q[:, mine], k[:, mine], v[:, mine], rows, parallel=cp, backend="native_math")
        out.sum().backward()
        return out.detach(), None if rows.grad is None else tuple(rows.grad.shape)

    results = World(2).run(rank)
    torch.testing.assert_close(torch.cat([out for out, _ in results], 1), expected)
    for i, (out, grad) in enumerate(results):
        assert grad == ((2, 3, out.shape[1], TOKENS) if i in wanting else None)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["ulysses", "ring"])
def test_no_grad_on_one_rank_makes_all_raise(degrees: tuple[int, int]) -> None:
    """Its backward would never come, and the others would wait for it."""

    def rank(mesh: Rank) -> None:
        cp = context(mesh, *degrees)
        q, k, v = (x[:, part(cp.rank)] for x in qkv(grad=True))
        with torch.set_grad_enabled(cp.rank == 0):
            rt.attention(q, k, v, parallel=cp)

    for error in everywhere(rank):
        assert isinstance(error, rt.DisagreementError)
        assert "rank 1: grad mode off" in str(error)


def test_grad_mode_may_differ_where_nothing_is_wanted() -> None:
    def rank(mesh: Rank) -> Tensor:
        cp = context(mesh, 2, 1)
        with torch.set_grad_enabled(cp.rank == 0):
            return cp.gather(rt.attention(*(x[:, part(cp.rank)] for x in qkv()), parallel=cp), 1)

    for out in World(2).run(rank):
        torch.testing.assert_close(out, rt.attention(*qkv()))


def test_gather_without_grad_on_one_rank_makes_all_raise() -> None:
    def rank(mesh: Rank) -> None:
        cp = context(mesh, 2, 1)
        with torch.set_grad_enabled(cp.rank == 1):
            cp.gather(torch.ones(2, requires_grad=True), 0)

    assert all(isinstance(error, rt.DisagreementError) for error in everywhere(rank))


WRONG: dict[str, dict[str, object]] = {
    "dim": {"dim": 5},
    "no dim": {"dim": None},
    "flag": {"dim": True},
    "backward": {"dim": 0, "backward": "mean"},
    "list": {"x": [1.0], "dim": 0},
    "sparse": {"x": torch.eye(2).to_sparse(), "dim": 0},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_refused_gather_is_told_to_the_others(wrong: dict[str, object]) -> None:
    def rank(mesh: Rank) -> None:
        cp = context(mesh, 1, 2)
        arguments = {"x": torch.ones(2, 2), **(wrong if cp.rank == 1 else {"dim": 0})}
        cp.gather(**arguments)  # type: ignore[arg-type]

    others, own = everywhere(rank)
    assert isinstance(own, rt.ArgumentError)
    assert isinstance(others, rt.PeerError)
    assert "rank 1: ArgumentError" in str(others)


def test_a_mask_sharded_like_its_keys_is_sent_to_key_padding() -> None:
    """Shards of unequal length: all ranks say what a mask must be, not only that theirs differ."""

    def rank(mesh: Rank) -> None:
        cp = context(mesh, 2, 1)
        q, k, v = (x[:, part(cp.rank)] for x in qkv())
        rt.attention(q, k, v, torch.ones(2, 1, 1, LENGTHS[cp.rank], dtype=torch.bool), parallel=cp)

    for error in everywhere(rank):
        assert isinstance(error, rt.ArgumentError)
        for told in ("8 columns", "[5, 3]", "KeyPadding"):
            assert told in str(error)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
def test_one_column_on_one_rank_stands_for_all_keys(dtype: torch.dtype) -> None:
    """Its rows are alike for every key; another rank's may not be."""
    q, k, v = qkv()
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    visible[LENGTHS[0] :, 3] = visible[1] = False
    mask = visible if dtype == torch.bool else torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, -torch.inf)
    expected = rt.attention(q, k, v, mask, backend="native_math")

    def rank(mesh: Rank) -> Tensor:
        cp = context(mesh, 2, 1)
        mine = part(cp.rank)
        rows = mask[mine] if cp.rank else mask[mine, :1]
        out = rt.attention(q[:, mine], k[:, mine], v[:, mine], rows, parallel=cp, backend="native_math")
        assert isinstance(out, Tensor)
        return out

    torch.testing.assert_close(torch.cat(World(2).run(rank), 1), expected)


def test_explain_knows_the_context() -> None:
    """Inside a context a mask has the columns of all keys, and a ring needs a backward from a merged lse."""

    def rank(mesh: Rank) -> list[str]:
        cp = context(mesh, 1, 2)
        q, k, v = (x[:, part(cp.rank)] for x in qkv())
        rows = torch.ones(LENGTHS[cp.rank], TOKENS, dtype=torch.bool)
        with cp:
            inside = rt.explain(q, k, v, rows)
        return [str(inside.backend), str(rt.explain(q, k, v, rows, parallel=cp).backend), cp.groups.context.name]

    for inside, passed, _ in World(2).run(rank):
        assert inside == passed == rt.explain(*qkv()).backend


def test_a_second_derivative_of_gather_is_refused() -> None:
    """Its gradient crosses ranks outside of autograd: a penalty on it would lose its own gradient, silently."""

    def rank(mesh: Rank) -> None:
        cp = context(mesh, 1, 2)
        x = torch.ones(2 + cp.rank, requires_grad=True)
        (grad,) = torch.autograd.grad(cp.gather(x, 0).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.square().sum().backward()

    World(2).run(rank)


@pytest.mark.parametrize("timeout", ["soon", float("inf"), float("nan"), 0])
def test_timeout_is_a_number_of_seconds(timeout: object) -> None:
    with pytest.raises(rt.ArgumentError, match="timeout"):
        rt.ContextParallelConfig(timeout=timeout)  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [5, ["5"], [1.5], [-1], [1, 2], torch.ones(2).numpy(), torch.ones(1)], ids=str)
def test_declared_lengths_are_numbers_of_tokens(lengths: object) -> None:
    cp = rt.ContextParallel(rt.ContextParallelConfig())
    with pytest.raises(rt.ArgumentError, match="q_lengths does not fit"):
        cp.call(q_lengths=lengths, k_lengths=[5])  # type: ignore[arg-type]
    with pytest.raises(rt.ArgumentError, match="lengths does not fit"):
        cp.gather(torch.ones(5), 0, lengths=lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["keys", ["none"], None, rt.Causal()], ids=str)
def test_a_declared_mask_is_one_of_a_few_words(kind: object) -> None:
    with pytest.raises(rt.ArgumentError, match="unknown mask kind"):
        rt.ContextParallel(rt.ContextParallelConfig()).call([5], [5], mask=kind)  # type: ignore[arg-type]
