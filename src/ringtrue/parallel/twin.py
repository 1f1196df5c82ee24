"""The in-process communicator: ranks are threads of one process; the shipped fake of the transport.

It blocks where a real transport may block, and says why (see `board.py`). Messages are copies; nothing is shared. With
CUDA tensors all ranks share one device and its default stream, which keeps every copy in order: for numbers, not speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import ArgumentError, CommunicationError, DisagreementError, ParallelError, PeerError, message
from .board import Board, Channel, Message, Operation
from .comm import Groups, Pending, Ready, arrange, check_exchange, check_shift
from .mesh import context_ranks
from .parcel import Form, Parcel, describe, pack, payload, show, unpack

T = TypeVar("T")


class Event(NamedTuple):
    """One message to another rank, in the order of posting; `bytes` without the gaps between packed tensors."""

    kind: str
    peer: int
    bytes: int
    group: str


class World:
    """`size` ranks as threads. A rank that waits longer than `wait` seconds for a peer gets a CommunicationError."""

    def __init__(self, size: int, wait: float = 5.0) -> None:
        self.size, self.wait = size, wait
        self.failures: dict[int, BaseException] = {}  # of the last run, per rank, in order of time

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """fn(rank_handle, *args) on every rank; the results in rank order.

        Raises the failure that explains the others, with a note that names its rank, or a CommunicationError when all
        ranks ended but an operation was never waited for.
        """
        board = Board(self.size)
        failures = self.failures = {}
        results: list[Any] = [None] * self.size

        def body(rank: Rank) -> None:
            try:
                # autograd's one thread for a CUDA device must not wait for a peer whose backward needs it, too
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank.rank] = fn(rank, *args)
                state = "finished"
            except BaseException as error:  # carried to the caller's thread below
                failures[rank.rank] = error
                state = f"died of {type(error).__name__}"
            board.end(rank.rank, state)

        ranks = [Rank(board, rank, self.size, self.wait) for rank in range(self.size)]
        threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank.rank}", daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            rank, error = min(failures.items(), key=lambda item: _distance(item[1]))
            error.add_note(f"raised on rank {rank} of {self.size} in-process ranks")
            raise error
        board.check_ended()
        return results


class Rank:
    """What a rank's function gets, and what it passes as `mesh`. `log` has the events of all its groups."""

    def __init__(self, board: Board, rank: int, size: int, wait: float) -> None:
        self.rank, self.size = rank, size
        self.generator = torch.Generator().manual_seed(rank)
        self.log: list[Event] = []
        self._board, self._wait, self._connections = board, wait, 0

    def connect(self, ulysses_degree: int, ring_degree: int, timeout: float) -> Groups:
        """The groups of this rank, every one a TwinComm. Raises ArgumentError where degrees do not fit."""
        context_ranks(None, ulysses_degree, ring_degree, self.rank, self.size)
        self._connections += 1

        def make(kind: str, members: tuple[int, ...]) -> TwinComm:
            name = f"{kind}[{','.join(map(str, members))}]#{self._connections}"
            channel = self._board.channel(name, members)
            return TwinComm(self._board, channel, self.rank, min(self._wait, timeout), self.log)

        return arrange(make, self.rank, ulysses_degree, ring_degree)


class TwinComm:
    """A `Comm` between threads. `log` and `bytes_sent` tell what this rank sent to other ranks of the group."""

    def __init__(self, board: Board, channel: Channel, world_rank: int, wait: float, log: list[Event]) -> None:
        self.name, self.size = f"{channel.name}@{world_rank}", len(channel.members)
        self.rank = channel.members.index(world_rank)
        self.log: list[Event] = []
        self._board, self._channel, self._wait, self._logs = board, channel, wait, (self.log, log)
        self._count = 0

    @property
    def bytes_sent(self) -> int:
        return sum(event.bytes for event in self.log)

    def exchange(
        self, parcels: Sequence[Parcel], forms: Sequence[Form], device: torch.device
    ) -> Pending[list[list[Tensor]]]:
        check_exchange(self, parcels, forms)
        own = self._copy(parcels[self.rank], device)
        leaving = {peer: parcel for peer, parcel in enumerate(parcels) if peer != self.rank}
        coming = {peer: form for peer, form in enumerate(forms) if peer != self.rank}
        operation = self._post("exchange", leaving, coming, device)
        return _InFlight(self, operation, lambda got: [got.get(j, own) for j in range(self.size)])

    def shift(
        self, parcel: Parcel, to: int | None, form: Form, source: int | None, device: torch.device, tag: int = 0
    ) -> Pending[list[Tensor]]:
        if check_shift(self, parcel, to, form, source):
            return Ready(self._copy(parcel, device))
        leaving = {to: parcel} if to is not None and payload(describe(parcel)) else {}
        coming = {source: form} if source is not None and payload(form) else {}
        silent = [] if source is None or coming else unpack(pack([], device)[0], [form])[0]
        operation = self._post(f"shift, tag {tag}", leaving, coming, device)
        return _InFlight(self, operation, lambda got: silent if source is None else got.get(source, silent))

    def _copy(self, parcel: Parcel, device: torch.device) -> list[Tensor]:
        return self._pack(parcel, device).tensors()

    def _pack(self, parcel: Parcel, device: torch.device, what: str = "") -> Message:
        if device.type not in ("cpu", "cuda"):
            raise ArgumentError(
                message("the in-process twin moves CPU and CUDA tensors only", limit="cpu, cuda", value=device)
            )
        return Message(what, self._count, describe(parcel), pack([parcel], device)[0])

    def _post(self, what: str, leaving: dict[int, Parcel], coming: dict[int, Form], device: torch.device) -> Operation:
        self._count += 1
        messages = {peer: self._pack(parcel, device, what) for peer, parcel in leaving.items()}
        for peer, sent in messages.items():
            for log in self._logs:
                log.append(Event(what.partition(",")[0], peer, payload(sent.form), self._channel.name))
        operation = Operation(what, self._count, messages, coming)
        self._board.post(self._channel, self.rank, operation)
        return operation

    def finish(self, operation: Operation, seconds: float | None = None) -> dict[int, list[Tensor]]:
        """Wait until the operation is done, check what came and unpack it, per peer."""
        wait = self._wait if seconds is None else min(seconds, self._wait)
        self._board.wait_for(self._channel, self.rank, operation, wait)
        for peer, sent in operation.arrived.items():
            expected = operation.expected[peer]
            if sent.what != operation.what or tuple(sent.form) != tuple(expected):
                raise CommunicationError(
                    message(
                        f"rank {self.rank} of group {self.name} got something else than it expected from rank {peer}",
                        limit=f"{operation} expected {show(expected)}",
                        value=f"rank {peer} sent {show(sent.form)} in operation {sent.number} ({sent.what})",
                        remedy="post the operations of a group in one order, with the same sizes, on all its ranks",
                    )
                )
        return {peer: sent.tensors() for peer, sent in operation.arrived.items()}


class _InFlight(Generic[T]):
    """A posted operation, and how its result is made of what comes from each peer."""

    def __init__(self, comm: TwinComm, operation: Operation, pick: Callable[[dict[int, list[Tensor]]], T]) -> None:
        self._comm, self._operation, self._pick = comm, operation, pick

    def wait(self, seconds: float | None = None) -> T:
        return self._pick(self._comm.finish(self._operation, seconds))


def _distance(error: BaseException) -> int:
    """How far a failure is from the cause: a rank's own error first, what followed from it on others last."""
    if not isinstance(error, ParallelError):
        return 0
    return 1 if isinstance(error, DisagreementError) else 2 if isinstance(error, PeerError) else 3
