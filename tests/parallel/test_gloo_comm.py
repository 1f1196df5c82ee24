"""The same script over gloo and over the twin moves the same bytes; failures over gloo come within the timeout."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gloo import Failure, Pool, PoolTimeoutError
from ringtrue.errors import CommunicationError, DisagreementError
from ringtrue.parallel.comm import Comm, Template, connect
from ringtrue.parallel.header import Header, agree
from ringtrue.parallel.twin import Rank, World

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64, torch.float16)


def form(a: int, b: int, round_: int) -> list[Template]:
    """What rank a sends to rank b in a round: one to three tensors, some of them empty, of changing dtypes."""
    rows = (a * 5 + b * 3 + round_) % 4
    dtypes = [DTYPES[(a + b + round_ + i) % len(DTYPES)] for i in range(1 + (a + b) % 3)]
    return [Template((rows, 3 + i), dtype) for i, dtype in enumerate(dtypes)]


def parcel(a: int, b: int, round_: int) -> list[Tensor]:
    """Values that tell sender, receiver and round apart; every other tensor is a transposed view."""
    generator = torch.Generator().manual_seed(100 * a + 10 * b + round_)
    tensors = []
    for i, (shape, dtype) in enumerate(form(a, b, round_)):
        values = torch.randn(shape[::-1] if i % 2 else shape, generator=generator)
        tensors.append(((values > 0) if dtype == torch.bool else (100 * values).to(dtype)).reshape(values.shape))
        tensors[-1] = tensors[-1].t() if i % 2 else tensors[-1]
    return tensors


def exchange_all(comm: Comm, round_: int) -> list[Tensor]:
    peers = range(comm.size)
    sent = [parcel(comm.rank, j, round_) for j in peers]
    got = comm.exchange(sent, [form(j, comm.rank, round_) for j in peers], CPU).wait()
    return [tensor for received in got for tensor in received]


def shift_by(comm: Comm, step: int, round_: int, tag: int = 0):
    to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
    return comm.shift(parcel(comm.rank, to, round_), to, form(source, comm.rank, round_), source, CPU, tag)


def script(mesh: Rank | None) -> list[list[Tensor]]:
    """Exchanges and shifts of every kind over the four groups of a 2 x 2 context."""
    ring, ulysses, context, header = groups = connect(mesh, 2, 2, 20.0)
    done = [exchange_all(comm, 1) for comm in groups]
    nothing = [[] for _ in range(4)]
    done.append([tensor for got in context.exchange(nothing, nothing, CPU).wait() for tensor in got])
    # both neighbours of a ring of 2 are the same rank: two tags and several rounds outstanding
    pending = [shift_by(ring, 1, 2, 0), shift_by(ring, -1, 3, 1), shift_by(ring, 1, 4, 0), shift_by(ring, -1, 5, 1)]
    done += [p.wait() for p in reversed(pending)]
    pending = [shift_by(context, step, 5 + step, step % 2) for step in (1, 2, 3)]
    done.append(exchange_all(ulysses, 9))  # another group, while shifts are outstanding
    done += [p.wait() for p in pending]
    done.append(shift_by(context, 0, 8).wait())  # to itself
    # one-sided, and a rank with no part in it
    here = context.rank
    to, source = (2 if here == 1 else None), (1 if here == 2 else None)
    done.append(context.shift(parcel(1, 2, 0), to, form(1, 2, 0), source, CPU).wait())
    empty = [Template((0, 5), torch.float32)]
    done.append(context.shift([torch.empty(0, 5)], (here + 1) % 4, empty, (here - 1) % 4, CPU).wait())
    done.append(exchange_all(header, 2))
    return done


def gloo_script(rank: int, world: int) -> list[list[Tensor]]:
    return script(None)


def test_gloo_and_twin_move_the_same_bytes(pool: Pool) -> None:
    """Every rank receives bitwise the same from both transports, and what was meant for it."""
    real, twin = pool.run(gloo_script, 4), World(4).run(script)
    for rank in range(4):
        assert len(real[rank]) == len(twin[rank])
        for step, (ours, theirs) in enumerate(zip(real[rank], twin[rank], strict=True)):
            assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs], (rank, step)
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), (rank, step)
        expected = [tensor for j in range(4) for tensor in parcel(j, rank, 1)]
        assert all(torch.equal(a, b) for a, b in zip(real[rank][2], expected, strict=True))


def mesh_script(rank: int, world: int, shape: tuple[int, ...], names: tuple[str, ...], part) -> tuple:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    groups = connect(mesh[part] if part else mesh, 2, world // 2 if "ring" in names or len(shape) == 1 else 1, 20.0)
    seen = [[int(t) for (t,) in got] for got in (_ranks(comm, rank) for comm in groups)]
    return tuple(comm.name.partition("#")[0] for comm in groups), seen


def _ranks(comm: Comm, rank: int) -> list[list[Tensor]]:
    form_ = [[Template((), torch.int64)]] * comm.size
    return comm.exchange([[torch.tensor(rank)]] * comm.size, form_, CPU).wait()


@pytest.mark.parametrize(
    ("shape", "names", "ring", "ulysses", "context"),
    [
        ((2, 2), ("ring", "ulysses"), [[0, 2], [1, 3]], [[0, 1], [2, 3]], [0, 1, 2, 3]),
        ((2, 2), ("ulysses", "ring"), [[0, 1], [2, 3]], [[0, 2], [1, 3]], [0, 2, 1, 3]),
        ((4,), ("cp",), [[0, 2], [1, 3]], [[0, 1], [2, 3]], [0, 1, 2, 3]),
    ],
)
def test_mesh_decides_who_is_whose_peer(pool: Pool, shape, names, ring, ulysses, context) -> None:
    """Global ranks of every group in group order, also where that order is not the order of global ranks."""
    for rank, (_, seen) in enumerate(pool.run(mesh_script, 4, shape, names, None)):
        assert seen[0] == next(group for group in ring if rank in group)
        assert seen[1] == next(group for group in ulysses if rank in group)
        assert seen[2] == seen[3] == context


def slice_script(rank: int, world: int) -> tuple[list[str], list[list[int]]]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "ring", "ulysses"))
    groups = connect(mesh["ring", "ulysses"], 2, 1, 20.0)
    return [comm.name for comm in groups], [[int(t) for (t,) in _ranks(comm, rank)] for comm in groups]


def test_slice_of_a_larger_mesh(pool: Pool) -> None:
    """Each data-parallel half has a context of its own, whose Ulysses group serves as context group too."""
    for rank, (names, seen) in enumerate(pool.run(slice_script, 4)):
        half = [0, 1] if rank < 2 else [2, 3]
        assert seen == [[rank], half, half, half]
        assert names[2] == names[1]


def unsorted_shifts(rank: int, world: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    context = connect(mesh, 2, 2, 20.0).context
    to, source = (context.rank + 1) % 4, (context.rank - 1) % 4
    (got,) = context.shift([torch.tensor(context.rank)], to, [Template((), torch.int64)], source, CPU).wait()
    return [context.rank, int(got)]


def test_shifts_use_context_ranks(pool: Pool) -> None:
    """Peers are named by group rank, although torch sorts the ranks of its groups."""
    assert pool.run(unsorted_shifts, 4) == [[0, 3], [2, 1], [1, 0], [3, 2]]


def stalled(rank: int, world: int, kind: str, over: Path) -> tuple[str, float]:
    comm = connect(None, 1, 2, 2.0).ring
    one = [Template((4,), torch.float32)]
    comm.exchange([[torch.zeros(4)]] * 2, [one] * 2, CPU).wait()
    if rank == 1:
        return stall(over)
    start = monotonic()
    with pytest.raises(CommunicationError) as caught:
        if kind == "exchange":
            comm.exchange([[torch.zeros(4)]] * 2, [one] * 2, CPU).wait()
        else:
            comm.shift([torch.zeros(4)], 1, one, 1, CPU, 1).wait()
    over.touch()
    assert caught.value.__cause__ is not None
    return str(caught.value), monotonic() - start


def stall(over: Path) -> tuple[str, float]:
    """Do nothing until the other rank has given up."""
    while not over.exists():
        sleep(0.05)
    return "", 0.0


@pytest.mark.parametrize("kind", ["exchange", "shift"])
def test_stalled_peer_is_an_error_within_the_timeout(pool: Pool, kind: str, tmp_path: Path) -> None:
    text, seconds = pool.run(stalled, 2, kind, tmp_path / "over", timeout=30)[0]
    assert seconds < 10
    assert kind in text
    assert "rank 0 of group ring[0,1]" in text
    assert "timeout 2 s" in text


def absent(rank: int, world: int, over: Path) -> tuple[str, float]:
    if rank == 1:
        return stall(over)
    start = monotonic()
    with pytest.raises(CommunicationError) as caught:
        connect(None, 1, 2, 2.0)
    over.touch()
    return str(caught.value), monotonic() - start


def test_rank_that_does_not_come_to_connect(pool: Pool, tmp_path: Path) -> None:
    text, seconds = pool.run(absent, 2, tmp_path / "over", timeout=30)[0]
    assert seconds < 10
    assert "group ring[0,1]" in text
    assert "same number of process groups" in text


def disagreeing(rank: int, world: int) -> str:
    header = connect(None, 2, 2, 20.0).header
    dtype = "bfloat16" if rank == 3 else "float32"
    with pytest.raises(DisagreementError) as caught:
        agree(header, Header(1, "attention", {"dtype": dtype}, {"q": rank}))
    return str(caught.value)


def test_ranks_that_disagree_all_say_so(pool: Pool) -> None:
    texts = pool.run(disagreeing, 4)
    assert len(set(texts)) == 1
    assert "dtype: ranks 0-2 float32, rank 3 bfloat16" in texts[0]


def fails_on_one(rank: int, world: int) -> int:
    if rank == 1:
        raise ValueError("on purpose")
    return rank


def test_pool_returns_failures_as_text(pool: Pool) -> None:
    results = pool.run(fails_on_one, 2, check=False)
    assert results[0] == 0
    assert isinstance(results[1], Failure)
    assert (results[1].type_name, results[1].text) == ("ValueError", "on purpose")
    assert "fails_on_one" in results[1].traceback


def hangs(rank: int, world: int) -> None:
    sleep(60)


def test_pool_shows_where_a_hanging_task_was() -> None:
    """And is usable afterwards."""
    pool = Pool(1)
    try:
        assert pool.run(double, 1, 1) == [2]  # what is imported on first use must not count against the second below
        with pytest.raises(PoolTimeoutError, match=r"(?s)ranks \[0\] are not done.*rank 0, alive.*in hangs"):
            pool.run(hangs, 1, timeout=1)
        assert pool.run(double, 1, 4) == [8]
    finally:
        pool.close()


def double(rank: int, world: int, number: int) -> int:
    return 2 * number
