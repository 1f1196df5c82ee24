"""Parcels, groups of one rank, and degrees that do not fit: everything about the transport that needs no peer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ringtrue.errors import ArgumentError
from ringtrue.parallel.comm import Alone, Template, connect
from ringtrue.parallel.mesh import context_ranks
from ringtrue.parallel.parcel import ALIGN, describe, pack, payload, room, unpack

CPU = torch.device("cpu")


def odd_parcel() -> list[torch.Tensor]:
    """One tensor of every way to be awkward: strides, offsets, dtypes, no elements, no dims, gradients, conjugates."""
    base = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)
    return [
        base.transpose(1, 3),
        base[:, 1:, ::2, 3],
        base[0, 0, 0, :1].expand(3, 7),
        torch.tensor([[True, False, True]]).t(),
        torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)[:, 1],
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 4, dtype=torch.float16),
        torch.arange(7, dtype=torch.int64)[1:],
        torch.arange(3, dtype=torch.uint8),
        torch.ones(2, 2, requires_grad=True) * 2,
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([float("nan"), float("-inf"), -0.0]),
    ]


def test_packing_keeps_every_tensor() -> None:
    """Values, shapes and dtypes come back; what comes back are views of the one buffer, without a graph."""
    parcels = [odd_parcel(), [], odd_parcel()[::-1]]
    forms = [describe(parcel) for parcel in parcels]
    buffer, sizes = pack(parcels, CPU)
    assert buffer.dtype == torch.uint8
    assert sizes == [room(form) for form in forms]
    assert buffer.numel() == sum(sizes)
    assert not buffer.requires_grad
    for parcel, received in zip(parcels, unpack(buffer, forms), strict=True):
        for sent, got in zip(parcel, received, strict=True):
            assert (got.shape, got.dtype) == (sent.shape, sent.dtype)
            assert torch.equal(got.nan_to_num() if got.is_floating_point() else got, _plain(sent))
            assert got.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert (got.data_ptr() - buffer.data_ptr()) % ALIGN == 0 or got.numel() == 0


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num() if x.is_floating_point() else x


def test_packing_is_bitwise() -> None:
    """A signed zero and the payload of a NaN survive."""
    sent = torch.tensor([-0.0, float("nan")])
    bits = sent.view(torch.int32)
    bits[1] |= 7
    (got,) = unpack(pack([[sent]], CPU)[0], [describe([sent])])[0]
    assert torch.equal(got.view(torch.int32), bits)


def test_sizes() -> None:
    form = [Template((3,), torch.bool), Template((0, 9), torch.float32), Template((), torch.float64)]
    assert payload(form) == 11
    assert room(form) == 32
    assert room([]) == room([Template((0,), torch.float32)]) == 0


def test_one_rank_needs_nobody() -> None:
    """Degrees of 1 without torch.distributed: four groups of one rank, which hand back copies."""
    groups = connect(None, 1, 1, 1.0)
    for comm in groups:
        assert isinstance(comm, Alone)
        assert (comm.rank, comm.size) == (0, 1)
        sent = torch.arange(6.0).reshape(2, 3).t()
        ((got,),) = comm.exchange([[sent]], [describe([sent])], CPU).wait()
        (shifted,) = comm.shift([sent], 0, describe([sent]), 0, CPU).wait()
        sent += 1
        assert torch.equal(got, sent - 1)
        assert torch.equal(shifted, sent - 1)
        assert comm.exchange([[]], [[]], CPU).wait() == [[]]
        assert comm.shift([], None, [], None, CPU).wait() == []


def test_operations_that_cannot_be_right() -> None:
    """Seen without asking a peer."""
    comm = connect(None, 1, 1, 1.0).ring
    one = torch.zeros(3)
    with pytest.raises(ArgumentError, match="sends itself something else"):
        comm.exchange([[one]], [[Template((4,), torch.float32)]], CPU)
    with pytest.raises(ArgumentError, match="one parcel and one form a rank"):
        comm.exchange([[one], [one]], [[], []], CPU)
    with pytest.raises(ArgumentError, match="ranks 0 to 0"):
        comm.shift([one], 1, [], None, CPU)
    with pytest.raises(ArgumentError, match="only what it receives from itself"):
        comm.shift([one], 0, [], None, CPU)


def fake_mesh(names: tuple[str, ...] | None, ranks: list) -> SimpleNamespace:
    return SimpleNamespace(mesh_dim_names=names, mesh=torch.tensor(ranks))


@pytest.mark.parametrize(
    ("mesh", "ulysses", "ring", "expected"),
    [
        (None, 2, 3, [0, 1, 2, 3, 4, 5]),
        (fake_mesh(("cp",), [4, 2, 5, 0]), 2, 2, [4, 2, 5, 0]),
        (fake_mesh(None, [4, 0]), 2, 1, [4, 0]),
        (fake_mesh(("ring",), [0, 3]), 1, 2, [0, 3]),
        (fake_mesh(("ring", "ulysses"), [[0, 1, 2], [3, 4, 5]]), 3, 2, [0, 1, 2, 3, 4, 5]),
        (fake_mesh(("ulysses", "ring"), [[0, 1, 2], [3, 4, 5]]), 2, 3, [0, 3, 1, 4, 2, 5]),
    ],
)
def test_order_of_context_ranks(mesh, ulysses, ring, expected) -> None:
    """Context rank = ring_rank * ulysses_degree + ulysses_rank, whatever the order of the mesh's dims."""
    assert context_ranks(mesh, ulysses, ring, 0, 6) == expected


@pytest.mark.parametrize(
    ("mesh", "ulysses", "ring", "rank", "world", "texts"),
    [
        (None, 2, 1, 0, None, ["not initialised", "torchrun", "init_process_group"]),
        (None, 2, 1, 0, 4, ["default group", "4 ranks", "= 2", "mesh['ring', 'ulysses']"]),
        (None, 0, 1, 0, 4, ["ulysses_degree", "1 or more", "0"]),
        (None, 2, True, 0, 4, ["ring_degree", "True"]),
        (fake_mesh(("cp",), [0, 1, 2, 3]), 2, 1, 0, 4, ["the mesh", "4 ranks", "= 2"]),
        (fake_mesh(("ring", "ulysses"), [[0, 1]]), 1, 2, 0, 4, ['"ring"', "ring_degree", "2", "1"]),
        (fake_mesh(("dp", "cp"), [[0, 1]]), 2, 1, 0, 4, ["('dp', 'cp')", '"ring" and "ulysses"']),
        (fake_mesh(("cp",), [0, 1]), 2, 1, 3, 4, ["global rank 3 is not in the mesh", "[0, 1]"]),
    ],
)
def test_degrees_that_do_not_fit(mesh, ulysses, ring, rank, world, texts) -> None:
    """The message shows the limit, the value seen and what to do."""
    with pytest.raises(ArgumentError) as caught:
        context_ranks(mesh, ulysses, ring, rank, world)
    for text in texts:
        assert text in str(caught.value)
