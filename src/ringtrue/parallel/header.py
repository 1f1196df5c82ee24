"""Agreement: one small header a rank crosses a CPU group before any payload; all decide from the same ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import ArgumentError, DisagreementError, ParallelError, PeerError, message
from .comm import Comm, Pending, Template

SIZE = 4096  # bytes of every header, whatever it says: nobody has to ask for a length
PREFIX = 4


@dataclass(frozen=True)
class Header:
    """What one rank says about one call. Values are JSON: str, int, float, bool, None, lists and dicts of them.

    call   number of this call on this rank
    what   "attention", "gather", "model forward" ...
    same   must be equal on all ranks
    own    may differ: lengths, wanted, candidates, mask kinds
    error  this rank refused its own call: the text that every other rank raises
    """

    call: int
    what: str
    same: Mapping[str, object]
    own: Mapping[str, object]
    error: str | None = None


def agree(comm: Comm, mine: Header) -> tuple[Header, ...]:
    """The headers of all ranks, in rank order, as JSON gives them back (tuples are lists).

    A rank whose header carries an error gets them too, so that it can raise its own; every other rank raises PeerError
    then. DisagreementError, the same on every rank, where call, what or same differ. ArgumentError for a header that
    is too large, after its peers were told.
    """
    try:
        packed = _pack(mine)
    except ArgumentError as error:
        if mine.error is None and comm.size > 1:
            agree(comm, replace(mine, same={}, own={}, error=str(error)))  # peers wait for a header: let them fail too
        raise
    if comm.size == 1:
        return (_unpack(packed),)
    headers = tuple(_unpack(parcel[0]) for parcel in _exchange(comm, packed).wait())
    refusals = [f"rank {rank}: {header.error}" for rank, header in enumerate(headers) if header.error is not None]
    if mine.error is not None:
        return headers
    if refusals:
        raise PeerError(f"another rank refused this {mine.what}\n" + "\n".join(refusals))
    differences = list(_differences(headers))
    if differences:
        raise DisagreementError(f"ranks disagree about this {headers[0].what}\n" + "\n".join(differences))
    return headers


def tell(comm: Comm, mine: Header, seconds: float) -> None:
    """Send a header with an error; peers who do not come within `seconds` learn of it at their next header, if ever."""
    if comm.size > 1:
        with suppress(ParallelError):
            _exchange(comm, _pack(mine)).wait(seconds)


def _exchange(comm: Comm, packed: Tensor) -> Pending[list[list[Tensor]]]:
    form = [Template((SIZE,), torch.uint8)]
    return comm.exchange([[packed]] * comm.size, [form] * comm.size, torch.device("cpu"))


def _pack(header: Header) -> Tensor:
    text = _json(vars(header))
    if len(text) > SIZE - PREFIX and header.error is not None:
        header = replace(header, same={}, own={})  # nobody reads them beside an error
        error = header.error or ""
        while error and len(text := _json(vars(replace(header, error=error + "…")))) > SIZE - PREFIX:
            error = error[: -max(1, (len(text) - SIZE + PREFIX) // 6)]  # JSON takes 6 bytes a character at most
    if len(text) > SIZE - PREFIX:
        fields = {**header.same, **header.own}
        largest = max(fields, key=lambda name: len(_json(fields[name])), default="what")
        raise ArgumentError(
            message(
                "this call says too much for a header",
                limit=f"{SIZE - PREFIX} bytes",
                value=f"{len(text)} bytes, most of them in {largest!r}",
                remedy="send a digest of it",
            )
        )
    whole = len(text).to_bytes(PREFIX, "little") + text
    return torch.frombuffer(bytearray(whole.ljust(SIZE, b"\0")), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Header:
    whole = bytes(packed.tolist())
    return Header(**json.loads(whole[PREFIX : PREFIX + int.from_bytes(whole[:PREFIX], "little")]))


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True).encode(errors="replace")


def _differences(headers: tuple[Header, ...]) -> Iterator[str]:
    """ "dtype: rank 0 float32, ranks 1,3-5 bfloat16" for every field that must be equal and is not."""
    told: list[dict[str, object]] = [{"call number": h.call, "what": h.what, **h.same} for h in headers]
    for name in dict.fromkeys(name for fields in told for name in fields):
        ranks: dict[str, list[int]] = {}
        for rank, fields in enumerate(told):
            ranks.setdefault(_json(fields[name]).decode() if name in fields else "not given", []).append(rank)
        if len(ranks) > 1:
            bare = [isinstance(fields.get(name), str) for fields in told]
            yield f"  {name}: " + ", ".join(
                f"{_span(which)} {json.loads(value) if all(bare) else value}" for value, which in ranks.items()
            )


def _span(ranks: list[int]) -> str:
    """[1] -> "rank 1"; [0, 2, 3, 4] -> "ranks 0,2-4"."""
    starts = [ranks[0], *(b for a, b in pairwise(ranks) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ranks) if b != a + 1), ranks[-1]]
    runs = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(runs)}"
