"""The error family, and the one place where messages are composed.

RingtrueError
|- ArgumentError (ValueError)       what was passed does not fit together (shapes, dtypes, devices, names, degrees)
|- UnsupportedError (NotImplementedError)  well-formed, but nothing chosen can honour it; before any kernel
|- GradientError (RuntimeError)     found in backward: a gradient was asked for that this call cannot give
|- ScopeError (RuntimeError)        a call was recomputed in backward after its scope was left
|- ParallelError (RuntimeError)     anything between ranks
   |- DisagreementError             ranks differ in shape, dtype, flags, mask kind or backend; raised on all of them
   |- PeerError                     another rank failed before this call; its message is carried along
   |- CommunicationError            a peer did not take part in time, or sent something of another size
"""

from __future__ import annotations


class RingtrueError(Exception):
    """Base of every error this library raises on purpose."""


class ArgumentError(RingtrueError, ValueError):
    """What was passed does not fit together."""


class UnsupportedError(RingtrueError, NotImplementedError):
    """The call is well-formed, but nothing chosen can honour it."""


class GradientError(RingtrueError, RuntimeError):
    """A gradient was asked for, in backward, that this call cannot give."""


class ScopeError(RingtrueError, RuntimeError):
    """A call was recomputed during backward, outside the scope that had chosen for it."""


class ParallelError(RingtrueError, RuntimeError):
    """Something between ranks went wrong."""


class DisagreementError(ParallelError):
    """Ranks passed different things to one call; raised on every rank."""


class PeerError(ParallelError):
    """Another rank refused the call; its message is quoted."""


class CommunicationError(ParallelError):
    """A peer did not take part in time, or sent something of another size."""


def message(problem: str, *, call: object = "", limit: object = "", value: object = "", remedy: str = "") -> str:
    """One error text: what is wrong, then the call, the limit, the value seen and what to do instead."""
    lines = [problem]
    for label, text in (("call", call), ("limit", limit), ("value", value), ("remedy", remedy)):
        if text != "":
            lines.append(f"  {label + ':':<8}{text}")
    return "\n".join(lines)
