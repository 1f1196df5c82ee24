"""Transport between ranks over torch.distributed, gloo and NCCL by the same code; the one file that imports it.

What arrives is always known beforehand (`Template`): nothing here asks a peer for a size.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, CommunicationError, message
from .mesh import context_ranks
from .parcel import ALIGN, Form, Parcel, Template, describe, pack, room, show, unpack

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Alone", "Comm", "Connectable", "Groups", "Pending", "Template", "TorchComm", "connect"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_connections = itertools.count(1)
EXCHANGE = 7  # the tag of exchanges over gloo; shifts have smaller ones
COUNTS, SIZES = 1 << 12, 65521  # a tag has 31 bits


class Pending(Protocol[T_co]):
    """An operation under way. It must be waited for: until then its buffers are in use."""

    def wait(self, seconds: float | None = None) -> T_co:
        """What was received. Raises CommunicationError, after `seconds` if that is less than the group's timeout."""


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

    def wait(self, seconds: float | None = None) -> T:
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
    """A group of torch.distributed. `places[j]` is the rank that torch gave to our rank j (torch sorts its ranks).

    steady  every exchange has the same sizes, whatever ranks think of a call: headers
    """

    def __init__(
        self,
        name: str,
        rank: int,
        places: Sequence[int],
        group: dist.ProcessGroup,
        timeout: float,
        steady: bool = False,
    ) -> None:
        self.name, self.rank, self.size = name, rank, len(places)
        self._places, self._group, self._timeout = tuple(places), group, timeout
        self._by_place = sorted(range(self.size), key=self._places.__getitem__)
        self._joined, self._steady = False, steady
        self._posted: Counter[tuple[object, ...]] = Counter()

    def exchange(
        self, parcels: Sequence[Parcel], forms: Sequence[Form], device: torch.device
    ) -> Pending[list[list[Tensor]]]:
        check_exchange(self, parcels, forms)
        if device.type == "cpu" and not self._steady:
            return self._exchange_by_peer(parcels, forms, device)
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

        return _InFlight(self, "exchange", [(work, "")], sent, finish)

    def _exchange_by_peer(
        self, parcels: Sequence[Parcel], forms: Sequence[Form], device: torch.device
    ) -> Pending[list[list[Tensor]]]:
        """One message a peer: an error can name the peer, and gloo cannot mistake sizes (see `_tag`)."""
        sent, sent_sizes = pack(parcels, device)
        received = torch.empty(sum(map(room, forms)), dtype=torch.uint8)
        leaving, coming = sent.split(sent_sizes), received.split([room(form) for form in forms])
        coming[self.rank].copy_(leaving[self.rank])
        works = []
        for step in range(1, self.size):  # not everybody to rank 0 first
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            works += self._post("exchange", leaving[to], to, coming[source], source, EXCHANGE)
        return _InFlight(self, "exchange", works, sent, lambda: unpack(received, forms))

    def shift(
        self, parcel: Parcel, to: int | None, form: Form, source: int | None, device: torch.device, tag: int = 0
    ) -> Pending[list[Tensor]]:
        if check_shift(self, parcel, to, form, source):
            return Ready(unpack(pack([parcel], device)[0], [form])[0])
        expected = [] if source is None else [form]
        received = torch.empty(sum(map(room, expected)), dtype=torch.uint8, device=device)
        sent, _ = pack([] if to is None else [parcel], device)
        what = f"shift to rank {to} from rank {source} (tag {tag})"
        if device.type == "cpu":
            works = self._post(what, sent, to, received, source, tag)
        else:
            works = self._post_nccl(what, sent, to, received, source)
        return _InFlight(self, what, works, sent, lambda: next(iter(unpack(received, expected)), []))

    def _post(
        self, what: str, sent: Tensor, to: int | None, received: Tensor, source: int | None, tag: int
    ) -> list[tuple[dist.Work, str]]:
        """Post a receive and a send over gloo, each with what an error says of it; without bytes nothing is posted."""
        works: list[tuple[dist.Work, str]] = []
        hops = (
            (dist.irecv, "group_src", received, source, "come from"),
            (dist.isend, "group_dst", sent, to, "be taken by"),
        )
        for hop, direction, buffer, peer, verb in hops:
            if peer is None or not buffer.numel():
                continue
            missing = f"{buffer.numel()} bytes were to {verb} rank {peer}"
            number = self._tag(direction, peer, tag, buffer.numel())
            with self.named(what, missing):
                work = hop(buffer, group=self._group, tag=number, **{direction: self._places[peer]})
            if work is not None:  # torch's None is for a rank outside of the group
                works.append((work, missing))
        return works

    def _tag(self, direction: str, peer: int, tag: int, size: int) -> int:
        """gloo pairs by peer and tag, and half-fills or aborts where sizes differ: so the tag tells count and size."""
        count = self._posted[direction, peer, tag]
        self._posted[direction, peer, tag] += 1
        return (tag * COUNTS + count % COUNTS) * SIZES + size // ALIGN % SIZES

    def _post_nccl(
        self, what: str, sent: Tensor, to: int | None, received: Tensor, source: int | None
    ) -> list[tuple[dist.Work, str]]:
        hops = ((dist.isend, sent, to), (dist.irecv, received, source))
        with self.named(what):
            self._join(sent.device)
            batch = [
                dist.P2POp(hop, buffer, group=self._group, group_peer=self._places[peer])
                for hop, buffer, peer in hops
                if peer is not None and buffer.numel()
            ]
            return [(work, "") for work in (dist.batch_isend_irecv(batch) if batch else [])]

    def _join(self, device: torch.device) -> None:
        # NCCL makes its communicator in the group's first operation and would hang if only some ranks came to that
        if not self._joined:
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        self._joined = True

    @contextmanager
    def named(self, operation: str, missing: str = "") -> Iterator[None]:
        """Re-raise what torch raises as a CommunicationError: group, rank, operation, timeout and what was missing."""
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                message(
                    f"{operation} failed on rank {self.rank} of group {self.name}: a peer did not take part",
                    limit=f"timeout {self._timeout:g} s",
                    value=f"{missing}: {_first_line(error)}" if missing else _first_line(error),
                    remedy="look for the rank that failed first; lengths that were declared must be alike on all ranks",
                )
            ) from error


class _InFlight(Generic[T]):
    """Work of torch.distributed; holds the sent buffer until it is done (`finish` holds the received one)."""

    def __init__(
        self,
        comm: TorchComm,
        what: str,
        works: list[tuple[dist.Work, str]],
        sent: Tensor | None,
        finish: Callable[[], T],
    ) -> None:
        self._comm, self._what, self._works, self._sent, self._finish = comm, what, works, sent, finish

    def wait(self, seconds: float | None = None) -> T:
        while self._works:
            work, missing = self._works[0]
            with self._comm.named(self._what, missing):
                if seconds is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=seconds))
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
        places = [sorted(theirs).index(other) for other in theirs]
        return TorchComm(name, theirs.index(rank), places, group, timeout, steady=kind == "header")

    return arrange(make, ranks.index(rank), ulysses_degree, ring_degree)


def default_group() -> object | None:
    """torch's default process group, None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


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
