"""Where the in-process ranks leave messages for each other: what may cross when, who waits for whom, and why in vain.

Operations of one group run one after another on each rank, as on one NCCL stream: a message crosses once both its ends
have come to it, and the next operation starts when all messages of the one before have crossed. So what ends well here
does not hang on gloo or NCCL for its order.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic
from typing import NamedTuple

from torch import Tensor

from ..errors import CommunicationError, message
from .parcel import Form, show, unpack


class Message(NamedTuple):
    """A packed copy of a parcel, and which operation of its sender it is."""

    what: str
    number: int
    form: Form
    buffer: Tensor

    def tensors(self) -> list[Tensor]:
        return unpack(self.buffer, [self.form])[0]


class Operation:
    """One posted operation: messages that have not left and forms of those that have not come, by peer; what came."""

    def __init__(self, what: str, number: int, leaving: dict[int, Message], coming: dict[int, Form]) -> None:
        self.what, self.number, self.leaving, self.coming = what, number, leaving, coming
        self.expected, self.arrived = dict(coming), dict[int, Message]()

    @property
    def done(self) -> bool:
        return not (self.leaving or self.coming)

    def __str__(self) -> str:
        return f"operation {self.number} ({self.what})"


class Channel:
    """One group: its members as ranks of the world, and for each the operations that are not done, oldest first."""

    def __init__(self, name: str, members: tuple[int, ...]) -> None:
        self.name, self.members = name, members
        self.queues: list[deque[Operation]] = [deque() for _ in members]
        self.last = ["before its first operation" for _ in members]
        self.unwaited: dict[Operation, int] = {}

    def advance(self) -> None:
        """Let every message cross whose two ends are the oldest operations of their ranks, until none can."""
        moved = True
        while moved:
            moved = False
            for me, queue in enumerate(self.queues):
                for peer in list(queue[0].leaving) if queue else ():
                    if self.queues[peer] and me in self.queues[peer][0].coming:
                        other = self.queues[peer][0]
                        other.arrived[me] = queue[0].leaving.pop(peer)
                        del other.coming[me]
                        moved = True
            for queue in self.queues:
                while queue and queue[0].done:
                    queue.popleft()
                    moved = True

    def will_come(self, peer: int, me: int) -> bool:
        """Whether rank `peer` has posted anything yet to cross between it and rank `me`."""
        return any(me in operation.leaving or me in operation.coming for operation in self.queues[peer])


class Board:
    """What all threads see, under one lock: the groups, where every rank is, who waits for what."""

    def __init__(self, size: int) -> None:
        self._changed = threading.Condition()
        self._channels: dict[str, Channel] = {}
        self._ended: dict[int, str] = {}
        self._waiting: dict[int, tuple[Channel, Operation]] = {}
        self._size, self._gave_up = size, False

    def channel(self, name: str, members: tuple[int, ...]) -> Channel:
        with self._changed:
            return self._channels.setdefault(name, Channel(name, members))

    def post(self, channel: Channel, me: int, operation: Operation) -> None:
        with self._changed:
            channel.queues[me].append(operation)
            channel.last[me] = f"after {operation}"
            channel.unwaited[operation] = me
            channel.advance()
            self._changed.notify_all()

    def end(self, rank: int, state: str) -> None:
        with self._changed:
            self._ended[rank] = state
            self._changed.notify_all()

    def wait_for(self, channel: Channel, me: int, operation: Operation, wait: float) -> None:
        """Block until the operation is done; raise at once where it cannot be any more, else after `wait` seconds."""
        rank, deadline = channel.members[me], monotonic() + wait
        with self._changed:
            channel.unwaited.pop(operation, None)
            self._waiting[rank] = channel, operation
            try:
                while not operation.done:
                    late = f"waited {wait:g} s" if monotonic() >= deadline else ""
                    why = self._hopeless(channel, me) or late
                    if why:
                        self._gave_up = True
                        raise CommunicationError(self._report(channel, me, operation, why))
                    self._changed.wait(deadline - monotonic())
            finally:
                del self._waiting[rank]

    def check_ended(self) -> None:
        """Refuse operations that nobody waited for: on a real transport their buffers would go while in use."""
        for channel in self._channels.values():
            for operation, me in channel.unwaited.items() if not self._gave_up else ():
                text = f"rank {me} of group {channel.name} never waited for its {operation}"
                raise CommunicationError(message(text, value=f"{'' if operation.done else 'not '}done"))

    def _hopeless(self, channel: Channel, me: int) -> str:
        oldest = channel.queues[me][0]
        for peer in {**oldest.leaving, **oldest.coming}:
            state = self._ended.get(channel.members[peer])
            if state is not None and not channel.will_come(peer, me):
                return f"rank {peer} {state}"
        live = [rank for rank in range(self._size) if rank not in self._ended]
        stuck = all(rank in self._waiting and not self._waiting[rank][1].done for rank in live)
        return "every rank waits, none can go on" if stuck else ""

    def _report(self, channel: Channel, me: int, operation: Operation, why: str) -> str:
        oldest = channel.queues[me][0]
        behind = "" if oldest is operation else f", which comes after its {oldest},"
        hops = [f"rank {peer} to send {show(form)}" for peer, form in oldest.coming.items()]
        hops += [f"rank {peer} to receive {show(sent.form)}" for peer, sent in oldest.leaving.items()]
        return message(
            f"rank {me} of group {channel.name} waits in {operation}{behind} for {' and '.join(hops)}",
            limit=why,
            value="; ".join(f"rank {j} {self._where(channel, j)}" for j in range(len(channel.members)) if j != me),
        )

    def _where(self, channel: Channel, member: int) -> str:
        rank = channel.members[member]
        if rank in self._waiting:
            group, operation = self._waiting[rank]
            return f"waits in {operation}" + ("" if group is channel else f" of group {group.name}")
        return f"{self._ended.get(rank, 'runs')} {channel.last[member]}"
