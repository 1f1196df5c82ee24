"""The in-process ranks: they block like a real transport, and say who waits for whom when that is in vain."""

from __future__ import annotations

import threading
from time import monotonic, sleep

import pytest
import torch

from ringtrue.errors import ArgumentError, CommunicationError, DisagreementError, PeerError
from ringtrue.parallel.comm import Template, connect
from ringtrue.parallel.twin import Event, World

CPU = torch.device("cpu")
FOUR = [Template((4,), torch.float32)]


def pair(rank):
    """The ring group of two ranks."""
    return connect(rank, 1, 2, 120.0).ring


def swap(comm, value: float, tag: int = 0):
    """Post a swap of four floats with the other of two ranks."""
    other = 1 - comm.rank
    return comm.shift([torch.full((4,), value)], other, FOUR, other, CPU, tag)


def test_groups() -> None:
    """Ring and Ulysses neighbours of a 2 x 2 context, with the rank in every group's name."""
    names = World(4).run(lambda rank: [comm.name for comm in connect(rank, 2, 2, 9.0)])
    assert names[2] == ["ring[0,2]#1@2", "ulysses[2,3]#1@2", "context[0,1,2,3]#1@2", "header[0,1,2,3]#1@2"]
    assert len({name for of_rank in names for name in of_rank}) == 16


def test_whole_group_is_reused() -> None:
    """With one degree 1, the context group is the other one."""

    def body(rank):
        ring, wide = connect(rank, 1, 2, 9.0), connect(rank, 2, 1, 9.0)
        return ring.context is ring.ring, wide.context is wide.ulysses, ring.ulysses.size, wide.ring.size

    assert World(2).run(body) == [(True, True, 1, 1)] * 2


def test_degrees_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"(?s)4 ranks.*= 2"):
        World(4).run(lambda rank: connect(rank, 2, 1, 9.0))


def test_both_neighbours_are_the_same_rank() -> None:
    """A ring of two: several shifts outstanding on two tags, waited for in another order, arrive where they belong."""

    def body(rank):
        comm = pair(rank)
        pending = [swap(comm, 10.0 * rank.rank + i, tag=i % 2) for i in range(4)]
        return [int(p.wait()[0][0]) for p in reversed(pending)]

    assert World(2).run(body) == [[13, 12, 11, 10], [3, 2, 1, 0]]


def test_received_data_is_not_shared() -> None:
    """A sender may write to what it sent, and a receiver to what it got."""

    def body(rank):
        comm, sent = pair(rank), torch.full((4,), float(rank.rank))
        pending = comm.exchange([[sent], [sent]], [FOUR, FOUR], CPU)
        sent += 100
        got = pending.wait()
        got[0][0] -= 50
        return [float(x[0][0]) for x in got], float(sent[0])

    assert World(2).run(body) == [([-50.0, 1.0], 100.0), ([-50.0, 1.0], 101.0)]


def test_generators_differ_and_repeat() -> None:
    draw = lambda rank: float(torch.rand((), generator=rank.generator))
    first, second = World(2).run(draw), World(2).run(draw)
    assert first == second
    assert first[0] != first[1]


def test_bytes_and_order_are_counted() -> None:
    """Only what goes to other ranks, without gaps between tensors; messages without bytes are no shifts."""

    def body(rank):
        groups = connect(rank, 1, 3, 9.0)
        ring, after, before = groups.ring, (rank.rank + 1) % 3, (rank.rank - 1) % 3
        odd = [Template((3,), torch.bool), Template((2,), torch.float32)]
        sent = [torch.zeros(3, dtype=torch.bool), torch.zeros(2)]
        ring.shift(sent, after, odd, before, CPU).wait()
        ring.shift([torch.zeros(0)], after, [Template((0,), torch.float32)], before, CPU).wait()
        ring.exchange([sent] * 3, [odd] * 3, CPU).wait()
        groups.ulysses.exchange([sent], [odd], CPU).wait()
        name = ring.name.partition("@")[0]
        expected = [Event("shift", after, 11, name)] + [Event("exchange", j, 11, name) for j in sorted({after, before})]
        assert ring.log == rank.log == expected
        assert groups.ulysses.log == []
        return ring.bytes_sent, groups.ulysses.bytes_sent

    assert World(3).run(body) == [(33, 0)] * 3


def test_missing_hop_is_reported_within_the_wait() -> None:
    """The peer is alive and busy elsewhere: the text says who waits for whom, where, and for how long."""
    over = threading.Event()

    def body(rank):
        comm = pair(rank)
        swap(comm, 0.0).wait()
        if rank.rank == 1:
            over.wait(30)
            return None
        start = monotonic()
        try:
            swap(comm, 1.0, tag=5).wait()
        except CommunicationError as error:
            return str(error), monotonic() - start
        finally:
            over.set()

    text, seconds = World(2, wait=0.3).run(body)[0]
    assert 0.3 <= seconds < 5
    assert "rank 0 of group ring[0,1]#1 waits in operation 2 (shift, tag 5)" in text
    assert "rank 1 to send [(4,) float32] and rank 1 to receive [(4,) float32]" in text
    assert "waited 0.3 s" in text
    assert "rank 1 runs after operation 1 (shift, tag 0)" in text


def failing_run(world: World, body) -> str:
    start = monotonic()
    with pytest.raises(CommunicationError) as caught:
        world.run(body)
    assert monotonic() - start < 20, "nobody may sit out the wait of a minute"
    assert "raised on rank" in caught.value.__notes__[0]
    return str(caught.value)


def test_talk_decided_locally_is_a_missing_hop() -> None:
    """A rank that leaves out an operation and ends: its peer fails at once, not after the wait."""

    def body(rank):
        comm = pair(rank)
        swap(comm, 0.0).wait()
        if rank.rank == 0:
            swap(comm, 1.0).wait()

    text = failing_run(World(2, wait=60), body)
    assert "rank 0 of group ring[0,1]#1 waits in operation 2" in text
    assert "rank 1 finished" in text
    assert "rank 1 finished after operation 1 (shift, tag 0)" in text


def test_everybody_waits() -> None:
    """Ranks that wait in two groups for each other: seen at once, and each one's place is told."""

    def body(rank):
        groups = connect(rank, 1, 2, 120.0)
        comm = groups.ring if rank.rank == 0 else groups.header
        comm.exchange([FOUR_ZEROS] * 2, [FOUR] * 2, CPU).wait()

    text = failing_run(World(2, wait=60), body)
    assert "every rank waits" in text
    assert "waits in operation 1 (exchange) of group" in text


FOUR_ZEROS = [torch.zeros(4)]


def test_a_send_waits_for_its_receive() -> None:
    """Blocking sends in a circle hang on a real transport; so they do here."""

    def body(rank):
        comm, other = pair(rank), 1 - rank.rank
        comm.shift(FOUR_ZEROS, other, [], None, CPU).wait()
        comm.shift([], None, FOUR, other, CPU).wait()

    assert "to receive [(4,) float32]" in failing_run(World(2, wait=60), body)


def test_orders_that_only_tags_could_tell_apart() -> None:
    """NCCL pairs by order alone: the receiver refuses a message of another tag."""

    def body(rank):
        comm = pair(rank)
        pending = [swap(comm, 0.0, tag) for tag in ((0, 1) if rank.rank == 0 else (1, 0))]
        return [p.wait() for p in pending]

    text = failing_run(World(2, wait=60), body)
    assert "operation 1 (shift, tag" in text
    assert "in one order" in text


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ([Template((5,), torch.float32)], ["(5,) float32", "(4,) float32"]),
        ([Template((4,), torch.int32)], ["(4,) int32", "(4,) float32"]),
        ([Template((2,), torch.float32)] * 2, ["(2,) float32, (2,) float32"]),
    ],
)
def test_other_size_or_dtype_is_refused_by_the_receiver(form, texts) -> None:
    def body(rank):
        comm = pair(rank)
        if rank.rank == 0:
            comm.shift(FOUR_ZEROS, 1, [], None, CPU).wait()
        else:
            comm.shift([], None, form, 0, CPU).wait()

    text = failing_run(World(2, wait=60), body)
    assert "rank 1 of group ring[0,1]#1@1 got something else" in text
    for part in texts:
        assert part in text


def test_other_kind_of_operation_is_refused() -> None:
    def body(rank):
        comm = pair(rank)
        if rank.rank == 0:
            comm.exchange([FOUR_ZEROS] * 2, [FOUR] * 2, CPU).wait()
        else:
            swap(comm, 1.0).wait()

    text = failing_run(World(2, wait=60), body)
    assert "(exchange)" in text
    assert "(shift, tag 0)" in text


def test_a_size_only_one_side_takes_for_zero() -> None:
    """The sender is told that nobody receives."""

    def body(rank):
        comm = pair(rank)
        form = [Template((0,), torch.float32)]
        if rank.rank == 0:
            comm.shift(FOUR_ZEROS, 1, [], None, CPU).wait()
        else:
            comm.shift([], None, form, 0, CPU).wait()

    assert "rank 1 to receive [(4,) float32]" in failing_run(World(2, wait=60), body)


def test_death_of_a_rank_is_the_cause_that_is_raised() -> None:
    """Waiters fail at once; the rank's own error comes out, and says which rank."""

    def body(rank):
        comm = connect(rank, 1, 3, 9.0).ring
        if rank.rank == 2:
            sleep(0.05)
            raise KeyError("on purpose")
        comm.exchange([FOUR_ZEROS] * 3, [FOUR] * 3, CPU).wait()

    world, start = World(3, wait=60), monotonic()
    with pytest.raises(KeyError, match="on purpose") as caught:
        world.run(body)
    assert monotonic() - start < 20
    assert caught.value.__notes__ == ["raised on rank 2 of 3 in-process ranks"]
    assert set(world.failures) == {0, 1, 2}
    assert all("died of" in str(world.failures[rank]) for rank in (0, 1))


@pytest.mark.parametrize("cause", [PeerError, DisagreementError])
def test_what_followed_is_not_raised(cause: type[Exception]) -> None:
    def body(rank):
        if rank.rank == 1:
            sleep(0.05)
            raise cause("cause")
        raise CommunicationError("consequence")

    with pytest.raises(cause, match="cause"):
        World(2).run(body)


def test_operation_nobody_waited_for() -> None:
    """Its buffers would go while in use."""

    def body(rank):
        swap(pair(rank), 0.0)

    with pytest.raises(CommunicationError, match="never waited for its operation 1"):
        World(2).run(body)


def test_other_devices_are_refused() -> None:
    def body(rank):
        pair(rank).exchange([FOUR_ZEROS] * 2, [FOUR] * 2, torch.device("meta")).wait()

    with pytest.raises(ArgumentError, match="CPU and CUDA tensors only"):
        World(2).run(body)


def test_two_contexts_do_not_mix() -> None:
    """Connecting twice makes two sets of groups; a world runs again from the start."""

    def body(rank):
        first, second = pair(rank), pair(rank)
        pending = [swap(first, 1.0), swap(second, 2.0)]
        return [float(p.wait()[0][0]) for p in reversed(pending)]

    world = World(2)
    assert world.run(body) == world.run(body) == [[2.0, 1.0]] * 2
