"""Checksums of a model's inputs: ranks of one context that were given different noise train on nonsense, silently.

Of bit patterns, in integers: the same on every device and in every order of summation, and no rounding hides anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import ringtrue as rt

from .models import Family

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 22  # elements at a time: what is computed in int64 stays small beside the model
_MASK = (1 << 64) - 1


def of_inputs(named: Mapping[str, Any], family: Family, device: torch.device) -> dict[str, str] | None:
    """A checksum of every input that must be equal on all ranks, by name; the attention mask may differ.

    One synchronisation. None while a CUDA stream is being captured, where there can be none.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    inputs = {name: value for name, value in named.items() if name not in ("return_dict", family.kwargs)}
    kwargs = named.get(family.kwargs) or {}
    inputs |= {f"{family.kwargs}[{key!r}]": value for key, value in kwargs.items() if key != "attention_mask"}
    sums = {name: [_sum(x).to(device) for x in _tensors(value)] for name, value in inputs.items()}
    flat = [each for many in sums.values() for each in many]
    numbers = iter(torch.stack(flat).tolist() if flat else ())
    found = {}
    for name, value in inputs.items():
        total = 0
        for _ in sums[name]:
            total = (total * 1099511628211 + next(numbers)) & _MASK  # tensors of a list, in their order
        if sums[name]:
            found[name] = f"{total:016x}"
        elif isinstance(value, (bool, int, float, str)):
            found[name] = repr(value)
    return found


def compare(said: Sequence[Any]) -> None:
    """DisagreementError, on all ranks alike, where an input has several checksums; a rank that brings none is skipped.

    said   what `of_inputs` gave on every rank, in rank order
    """
    sums = {rank: each for rank, each in enumerate(said) if each is not None}
    lines = []
    for name in dict.fromkeys(name for each in sums.values() for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in sums.items():
            ranks.setdefault(each.get(name, "not given"), []).append(rank)
        if len(ranks) > 1:
            parts = (f"rank {', '.join(map(str, which))}: {value}" for value, which in ranks.items())
            lines.append(f"{name} ({'; '.join(parts)})")
    if lines:
        text = rt.errors.message(
            "ranks of one context passed different inputs to this model forward",
            limit="every rank of a context passes the same whole inputs, bit for bit; parallelize splits them",
            value="checksums of " + "\n           ".join(lines),
            remedy="most likely each rank drew its own noise or timestep, or loaded its own sample: seed the generator "
            "and the data loader alike on the ranks of a context (data-parallel ranks differ from each other), or "
            "broadcast the batch from one rank; if the inputs are meant to differ, parallelize(..., check_inputs=0)",
        )
        raise rt.DisagreementError(text)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _sum(x: Tensor) -> Tensor:
    """An int64 scalar that depends on every bit of `x` and on where it is: a batch in another order differs too."""
    x = x.detach()
    x = torch.view_as_real(x) if x.is_complex() else x
    bits = x.contiguous().view(_BITS[x.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64)
        place = torch.arange(start, start + piece.numel(), device=x.device)
        mixed = piece + place * -7046029254386353131  # the mixing steps of splitmix64 (Steele et al., OOPSLA 2014)
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
        mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
        total += (mixed ^ (mixed >> 31)).sum()
    return total
