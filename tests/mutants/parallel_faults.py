"""Faults between ranks, each a patch of one place in `ringtrue.parallel`; the tests must catch each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ringtrue import merge
from ringtrue.contract import ForwardOut, OpPair
from ringtrue.parallel import globalise, plan, ring, shard
from ringtrue.parallel.layout import dealt
from ringtrue.parallel.schedule import Schedule


def _written(found: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    return found if into is None else (into[0].copy_(found[0]), into[1].copy_(found[1]))


def merge_without_care(
    total: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor, odds: object = 0.0, into: Any = None
) -> tuple[Tensor, Tensor]:
    """-inf - -inf is NaN, and nobody looked."""
    out = out.to(lse.dtype)
    if total is None:
        return out, lse
    new = torch.logaddexp(total[1], lse)
    weights = ((x - new).exp().transpose(1, 2).unsqueeze(-1) for x in (total[1], lse))
    return _written((total[0] * next(weights) + out * next(weights), new), into)


_merge, _add, _travel, _ring, _gather_keys = (
    merge.merge,
    ring._add,
    ring._travel,
    plan.ring,
    globalise._Globalise._gather,
)


def merge_in_bf16(
    total: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor, odds: Any = 0.0, into: Any = None
) -> tuple[Tensor, Tensor]:
    """Partial results are rounded at every step (zhuzilin/ring-flash-attention#42)."""
    merged, new = _merge(total, out, lse, odds)
    return _written((merged.bfloat16().to(merged.dtype), new), into)


def sum_in_bf16(parts: list[Tensor], dk: Tensor, dv: Tensor, wanted: Any) -> None:
    """dk and dv are rounded at every step."""
    _add(parts, dk, dv, wanted)
    for total in (dk, dv):
        total.copy_(total.bfloat16())


def without_last_step(comm: Any, schedule: Schedule, k: Tensor, v: Tensor) -> Iterator[Any]:
    """The keys of the rank just ahead are never looked at."""
    for step, block in enumerate(_travel(comm, schedule, k, v)):
        if step < comm.size - 1 or comm.size == 1:
            yield block


def stops_when_it_has_nothing(comm: Any, schedule: Schedule, k: Tensor, v: Tensor) -> Iterator[Any]:
    """Whether to talk is decided locally: a rank without queries does not pass the keys on."""
    for step, block in enumerate(_travel(comm, schedule, k, v)):
        yield block
        if step == 0 and not schedule.q[comm.rank]:
            return


def with_lse_zero(pair: OpPair, *args: Any) -> OpPair:
    """A ring step in which a row sees nothing reports lse 0, as torch's CPU flash and efficient kernels do."""

    def forward(*inputs: Any) -> ForwardOut:
        result = pair.forward(*inputs)
        return result._replace(lse=result.lse.masked_fill(result.lse == -torch.inf, 0.0))

    return _ring(replace(pair, forward=forward), *args)


def own_slice_only(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """gather's backward forgets the other ranks' gradients."""
    return dealt(grad, ctx.layout, ctx.dim)[ctx.comm.rank].contiguous(), *(None,) * 5


def neighbours_keys(op: Any, mine: Tensor | None, k: Tensor) -> Tensor:
    """Key masks are joined in another rank order than the keys."""
    return torch.cat(dealt(_gather_keys(op, mine, k), op.k, 1)[::-1], 1)


FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "merge without -inf care": lambda: patch.object(merge, "merge", merge_without_care),
    "merge in bf16": lambda: patch.object(merge, "merge", merge_in_bf16),
    "dk/dv summed in bf16": lambda: patch.object(ring, "_add", sum_in_bf16),
    "last ring step left out": lambda: patch.object(ring, "_travel", without_last_step),
    "whether to talk decided locally": lambda: patch.object(ring, "_travel", stops_when_it_has_nothing),
    "lse 0 for an empty row in one ring step": lambda: patch.object(plan, "ring", with_lse_zero),
    "gather backward missing the sum": lambda: patch.object(shard.Gather, "backward", staticmethod(own_slice_only)),
    "key mask of the wrong rank": lambda: patch.object(globalise._Globalise, "_gather", neighbours_keys),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The named fault, in this process, for the time of the block."""
    with FAULTS[name]():
        yield
