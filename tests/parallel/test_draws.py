"""Every mode against the float64 truth, over random lengths, heads and masks; the twin and gloo give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from draws import build, failures, main, on_ranks, play, verdicts
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from playing import Result
from problems import Draw, owned, places
from recipes import Recipe, recipe, replayed

import ringtrue as rt
from gloo import Pool
from ringtrue.parallel.twin import Rank, World

NAMES = ("auto", *dict.fromkeys(s.name for s in rt.backends() if s.device == "cpu" and s.unavailable is None))
ON_GLOO = 60


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As many as a process of the pool has: how work is cut over threads changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@settings(max_examples=500, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32 - 1))
def test_every_mode_equals_the_truth(seed: int) -> None:
    """Exchanged heads, travelling keys, joint tokens, empty shards and rows: nothing of it may show in the numbers."""
    told = recipe(Random(seed), backends=NAMES)
    failed = failures(build(told))
    assert not failed, (f"python tests/parallel/draws.py --reduce --replay '{told}'", *failed)


FIXED = {
    "3 heads on 2": Recipe(ulysses=2, q=(5, 4), kv_heads=3),
    "30 heads on 4": Recipe(ulysses=4, q=(3, 2, 0, 4), kv_heads=30, batch=1, dtype="bfloat16"),
    "one key head on 4": Recipe(ulysses=4, q=(3, 2, 1, 4), kv_heads=1, group=6, dtype="float32"),
    "two key heads for six heads on 4, bias": Recipe(
        ulysses=4, q=(3, 2, 1, 4), kv_heads=2, group=3, dense="float", wants=("qkvb",)
    ),
    "no batch": Recipe(ulysses=2, ring=2, q=(3, 2, 1, 4), batch=0),
    "no token at all": Recipe(ulysses=2, ring=2, q=(0, 0, 0, 0), k=(1, 0, 2, 0)),
    "no key at all": Recipe(ulysses=2, ring=2, q=(1, 0, 2, 0), k=(0, 0, 0, 0)),
    "dropout, ring of 4, causal, balanced": Recipe(
        ring=4, q=(7, 7, 7, 7), balanced=True, causal="top_left", dropout=0.4, seeds="own"
    ),
    "dropout, joint tokens, both, own seeds": Recipe(
        ulysses=2, ring=2, q=(3, 0, 2, 4), prefix=3, dropout=0.4, seeds="own"
    ),
    "joint tokens alone": Recipe(ulysses=2, ring=2, q=(0, 0, 0, 0), prefix=3),
    "joint tokens, a bias of every key": Recipe(ring=2, q=(3, 2), prefix=2, key="bias", wants=("qkvb",)),
    "joint tokens, a bias of every row": Recipe(ulysses=2, q=(3, 2), prefix=2, dense="float", wants=("qkvb",)),
    "whole keys, a bias of every key": Recipe(
        ulysses=2, q=(3, 2), k=(5,), replicated=True, key="bias", wants=("qkvb",)
    ),
    "only one rank wants the bias": Recipe(ring=2, q=(3, 2), dense="float", wants=("b", "")),
    "one bias for all rows": Recipe(ulysses=2, ring=2, q=(3, 2, 1, 4), dense="float", dims="hk", wants=("b",)),
    "one number for all": Recipe(ulysses=2, ring=2, q=(3, 2, 1, 4), dense="float", dims="", wants=("b",)),
}


@pytest.mark.parametrize("name", FIXED)
def test_fixed(name: str) -> None:
    assert not failures(build(FIXED[name]))


def on_gloo(rank: int, world: int, seed: int) -> Result:
    return play(None, drawn(seed))


def drawn(seed: int) -> Draw:
    return build(recipe(Random(seed), worlds=(2, 3, 4, 4), backends=NAMES))


@pytest.mark.parametrize("seed", range(1000, 1000 + ON_GLOO))
def test_twin_and_gloo_agree_bitwise(pool: Pool, seed: int) -> None:
    problem = drawn(seed)
    real, twin = pool.run(on_gloo, problem.size, seed), on_ranks(problem)
    for rank, (ours, theirs) in enumerate(zip(real, twin, strict=True)):
        for name, a, b in zip(Result._fields, ours, theirs, strict=True):
            assert (a is None and b is None) or torch.equal(a, b), (rank, name, str(problem))
    failed = [str(v) for v in verdicts(twin, problem) if not v.ok]
    assert not failed or not failures(problem), (str(problem), *failed)


def test_a_recipe_survives_its_text() -> None:
    for seed in range(50):
        told = recipe(Random(seed))
        assert replayed(str(told)) == told


def test_draws_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--draws", "3", "--from", "5"]) == 0
    assert main(["--replay", str(FIXED["3 heads on 2"])]) == 0
    assert capsys.readouterr().out.split("\n") == ["3 right", "1 right", ""]


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (2, 2), (1, 4), (2, 1)])
@pytest.mark.parametrize("length", [0, 1, 7, 16, 29])
def test_positions_shard_and_gather_agree(ulysses: int, ring: int, length: int) -> None:
    """The tests' own idea of the balanced order, which they judge by, is the library's."""
    world = ulysses * ring
    where = owned((length,), (ulysses, ring), balanced=True)
    x = torch.arange(2.0 * length).reshape(2, length)

    def body(mesh: Rank) -> None:
        cp = rt.ContextParallel(rt.ContextParallelConfig(ulysses, ring, mesh=mesh, load_balance="head_tail"))
        mine = where[cp.rank]
        assert torch.equal(cp.positions(length), mine)
        assert torch.equal(cp.shard(x, 1), x[:, mine])
        assert torch.equal(cp.gather(cp.shard(x, 1), 1), x)

    World(world).run(body)


def test_chunks_of_a_balanced_context() -> None:
    """8 chunks of 16 tokens on a ring of 4, two Ulysses ranks each."""
    told = build(Recipe(ulysses=2, ring=4, q=(16,) * 8, balanced=True, kv_heads=1, batch=1))
    assert places(told, 0)[0].tolist() == list(range(16))
    assert places(told, 1)[0].tolist() == list(range(112, 128))
    assert places(told, 7)[0].tolist() == list(range(64, 80))
