"""Transport between ranks over torch.distributed, gloo and NCCL by the same code; the one file that imports it.

What arrives is always known beforehand (`Template`): nothing here asks a peer for a size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, CommunicationError, message
from .mesh import context_ranks
from .parcel import Form, Parcel, Template, describe, pack, room, show, unpack

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Alone", "Comm", "Connectable", "Groups", "Pending", "Template", "TorchComm", "connect"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_connections = itertools.count(1)


class Pending(Protocol[T_co]):
    """An operation under way. It must be waited for: until then its buffers are in use."""

    def wait(self) -> T_co:
        """What was received. Raises CommunicationError."""


class Comm(Protocol):
    """A group of ranks that exchange parcels; `rank` and all peers are ranks of this group.

    Every rank posts the operations of a group in one common order, leaving out shifts it has no part in: gloo pairs a
    send and a receive by peer and tag, NCCL by that order alone.
    """

    name: str
    rank: int
    size: int

    def exchange(
        self, parcels: Sequence[Parcel], forms: Sequence[Form], device: torch.device
    ) -> Pending[list[list[Tensor]]]:
        """All-to-all: parcels[j] goes to rank j, own rank included; forms[j] describes what comes from rank j.

        Every rank of the group takes part, also when it has nothing to send or receive.
        """

    def shift(
        self, parcel: Parcel, to: int | None, form: Form, source: int | None, device: torch.device, tag: int = 0
    ) -> Pending[list[Tensor]]:
        """Send one parcel to rank `to` and receive one from rank `source` (None: nothing; then [] is received).

        Several may be outstanding. A message without bytes is not sent. The very first operation of a group is called
        by all its ranks, if only with None and None: NCCL makes its communicator there.
        """


class Groups(NamedTuple):
    """The groups of one context, as seen by one of its ranks. A group of one rank talks to nobody."""

    ring: Comm
    ulysses: Comm
    context: Comm
    header: Comm


@runtime_checkable
class Connectable(Protocol):
    """A rank that makes its own groups, in the place of a DeviceMesh; the in-process twin is one."""

    def connect(self, ulysses_degree: int, ring_degree: int, timeout: float) -> Groups: ...


class Ready(Generic[T]):
    """A pending operation that was over when it was posted."""

    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        return self._value


class Alone:
    """A group of one rank: it hands back copies and never calls torch.distributed."""

    def __init__(self, name: str) -> None:
        self.name, self.rank, self.size = name, 0, 1

    def exchange(
        self, parcels: Sequence[Parcel], forms: Sequence[Form], device: torch.device
    ) -> Pending[list[list[Tensor]]]:
        check_exchange(self, parcels, forms)
        return Ready(unpack(pack(parcels, device)[0], forms))

    def shift(
        self, parcel: Parcel, to: int | None, form: Form, source: int | None, device: torch.device, tag: int = 0
    ) -> Pending[list[Tensor]]:
        check_shift(self, parcel, to, form, source)
        return Ready([] if source is None else unpack(pack([parcel], device)[0], [form])[0])


class TorchComm:
    """A group of torch.distributed. `places[j]` is the rank that torch gave to our rank j (torch sorts its ranks)."""

    def __init__(self, name: str, rank: int, places: Sequence[int], group: dist.ProcessGroup, timeout: float) -> None:
        self.name, self.rank, self.size = name, rank, len(places)
        self._places, self._group, self._timeout = tuple(places), group, timeout
        self._by_place = sorted(range(self.size), key=self._places.__getitem__)
        self._joined = False

    def exchange(
        self, parcels: Sequence[Parcel], forms: Sequence[Form], device: torch.device
    ) -> Pending[list[list[Tensor]]]:
        check_exchange(self, parcels, forms)
        expected = [forms[j] for j in self._by_place]
        sent, sent_sizes = pack([parcels[j] for j in self._by_place], device)
        sizes = [room(form) for form in expected]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._joined = True
        with self.named("exchange"):
            work = dist.all_to_all_single(received, sent, sizes, sent_sizes, group=self._group, async_op=True)

        def finish() -> list[list[Tensor]]:
            tensors = unpack(received, expected)
            return [tensors[place] for place in self._places]

        return _InFlight(self, "exchange", [work], sent, finish)

    def shift(
        self, parcel: Parcel, to: int | None, form: Form, source: int | None, device: torch.device, tag: int = 0
    ) -> Pending[list[Tensor]]:
        if check_shift(self, parcel, to, form, source):
            return Ready(unpack(pack([parcel], device)[0], [form])[0])
        expected = [] if source is None else [form]
        received = torch.empty(sum(map(room, expected)), dtype=torch.uint8, device=device)
        sent, _ = pack([] if to is None else [parcel], device)
        hops = [(dist.isend, sent, to), (dist.irecv, received, source)]
        what = f"shift to rank {to} from rank {source} (tag {tag})"
        with self.named(what):
            self._join(device)
            batch = [
                dist.P2POp(hop, buffer, group=self._group, tag=tag, group_peer=self._places[peer])
                for hop, buffer, peer in hops
                if peer is not None and buffer.numel()
            ]
            works = dist.batch_isend_irecv(batch) if batch else []
        return _InFlight(self, what, works, sent, lambda: next(iter(unpack(received, expected)), []))

    def _join(self, device: torch.device) -> None:
        # NCCL makes its communicator in the group's first operation and would hang if only some ranks came to that
        if not self._joined and device.type != "cpu":
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        self._joined = True

    @contextmanager
    def named(self, operation: str) -> Iterator[None]:
        """Re-raise what torch raises as a CommunicationError that names group, rank, operation and timeout."""
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                message(
                    f"{operation} failed on rank {self.rank} of group {self.name}: a peer did not take part",
                    limit=f"timeout {self._timeout:g} s",
                    value=_first_line(error),
                    remedy="look for the rank that failed first",
                )
            ) from error


class _InFlight(Generic[T]):
    """Work of torch.distributed; holds the sent buffer until it is done (`finish` holds the received one)."""

    def __init__(
        self, comm: TorchComm, what: str, works: list[dist.Work], sent: Tensor | None, finish: Callable[[], T]
    ) -> None:
        self._comm, self._what, self._works, self._sent, self._finish = comm, what, works, sent, finish

    def wait(self) -> T:
        with self._comm.named(self._what):
            while self._works:
                self._works[0].wait()
                del self._works[0]
        self._sent = None
        return self._finish()


def check_exchange(comm: Comm, parcels: Sequence[Parcel], forms: Sequence[Form]) -> None:
    """Refuse what cannot be right whatever peers do: one parcel and one form for each rank, the own ones equal."""
    if len(parcels) != comm.size or len(forms) != comm.size:
        seen = f"{len(parcels)} parcels, {len(forms)} forms"
        raise ArgumentError(message("an exchange takes one parcel and one form a rank", limit=comm.size, value=seen))
    own = describe(parcels[comm.rank])
    if own != tuple(forms[comm.rank]):
        text = f"rank {comm.rank} of group {comm.name} sends itself something else than it expects"
        raise ArgumentError(message(text, limit=show(forms[comm.rank]), value=show(own)))


def check_shift(comm: Comm, parcel: Parcel, to: int | None, form: Form, source: int | None) -> bool:
    """Whether this is a shift of a rank to itself. Refuses peers outside of the group, and half of such a shift."""
    itself = comm.rank in (to, source)
    if any(peer is not None and not 0 <= peer < comm.size for peer in (to, source)) or (
        itself and (to != source or describe(parcel) != tuple(form))
    ):
        text = f"rank {comm.rank} of group {comm.name} cannot shift so"
        seen = f"{show(describe(parcel))} to rank {to}, {show(form)} from rank {source}"
        limit = f"ranks 0 to {comm.size - 1}; to itself only what it receives from itself"
        raise ArgumentError(message(text, limit=limit, value=seen))
    return itself


def connect(mesh: DeviceMesh | Connectable | None, ulysses_degree: int, ring_degree: int, timeout: float) -> Groups:
    """Make the groups of this rank's context: ring, ulysses, header (gloo, CPU) and context, in this order.

    mesh  dims "ring" and "ulysses", or 1-D (context rank = ring_rank * ulysses_degree + ulysses_rank), or None for the
          whole default group; it is read for ranks only. Or a rank of the in-process twin.

    All ranks of the context call this together. Raises ArgumentError where degrees do not fit, CommunicationError when
    a rank does not come within `timeout` seconds.
    """
    if isinstance(mesh, Connectable):
        return mesh.connect(ulysses_degree, ring_degree, timeout)
    started = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if started else (0, None)
    ranks = context_ranks(mesh, ulysses_degree, ring_degree, rank, world)
    number = next(_connections)

    def make(kind: str, members: tuple[int, ...]) -> Comm:
        name = f"{kind}[{','.join(map(str, members))}]#{number}"
        if len(members) == 1:
            return Alone(name)
        theirs = [ranks[member] for member in members]
        group = _new_group(name, sorted(theirs), "gloo" if kind == "header" else None, timeout)
        return TorchComm(name, theirs.index(rank), [sorted(theirs).index(other) for other in theirs], group, timeout)

    return arrange(make, ranks.index(rank), ulysses_degree, ring_degree)


def arrange(
    make: Callable[[str, tuple[int, ...]], Comm], context_rank: int, ulysses_degree: int, ring_degree: int
) -> Groups:
    """The groups of a context rank; make(kind, members as context ranks) is called once a group, in order."""
    ring_rank, ulysses_rank = divmod(context_rank, ulysses_degree)
    whole = tuple(range(ring_degree * ulysses_degree))
    ring = make("ring", whole[ulysses_rank::ulysses_degree])
    ulysses = make("ulysses", whole[ring_rank * ulysses_degree :][:ulysses_degree])
    header = make("header", whole)
    context = ulysses if ring_degree == 1 else ring if ulysses_degree == 1 else make("context", whole)
    return Groups(ring, ulysses, context, header)


def _new_group(name: str, ranks: list[int], backend: str | None, timeout: float) -> dist.ProcessGroup:
    try:
        span = timedelta(seconds=timeout)
        return dist.new_group(ranks, timeout=span, backend=backend, use_local_synchronization=True)
    except RuntimeError as error:
        raise CommunicationError(
            message(
                f"group {name} could not be made on global rank {dist.get_rank()}: a peer did not take part",
                limit=f"timeout {timeout:g} s, global ranks {ranks}",
                value=_first_line(error),
                # torch derives the name under which the members meet from that number
                remedy="every rank of the context must come here, with the same number of process groups made before",
            )
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
