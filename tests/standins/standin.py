"""What a stand-in is."""

from __future__ import annotations

from dataclasses import dataclass

from ringtrue.contract import OpPair


@dataclass(frozen=True)
class StandIn:
    """A backend's pair around a module of our own with the public signatures of the real package.

    pair    what `make_pair` of the backend's file gives around it, without an edge
    covers  the backends whose glue it is
    device  where it computes: on "cuda" with a kernel of torch's that is the same as the package's
    """

    pair: OpPair
    covers: tuple[str, ...]
    device: str = "cpu"
