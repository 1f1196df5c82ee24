"""`shard` and `gather`: the only differentiable collectives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import accumulate_dtype
from ..errors import ArgumentError, message
from .comm import Comm, Template
from .layout import Layout, Spans, count, cuts, dealt, in_order


def shard(x: Tensor, dim: int, spans: Spans) -> Tensor:
    """Some positions of a tensor that is whole on every rank; autograd zero-pads, so it is Partial("sum")."""
    pieces = [x.narrow(dim, start, stop - start) for start, stop in spans] or [x.narrow(dim, 0, 0)]
    # contiguous: a linear layer rounds twice on a strided 16-bit input
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous()


class Gather(torch.autograd.Function):
    """The shards of all ranks, joined along a dim. Backward "sum": every rank's gradient of a shard goes to its owner,
    which sums in float32; "slice": this rank's own slice only (diffusers' convention, for one identical loss).
    An `anchor` that requires grad makes a rank take part in backward although its own shard wants no gradient."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, anchor: Tensor | None, dim: int, layout: Layout, comm: Comm, backward: str
    ) -> Tensor:
        ctx.dim, ctx.layout, ctx.comm, ctx.how = dim, layout, comm, backward
        return joined(x, dim, layout, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return returned(grad, ctx.dim, ctx.layout, ctx.comm, ctx.how), *(None,) * 5


def joined(x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
    """What all ranks hold, in global order."""
    forms = [[Template(_with(x, dim, count(spans)), x.dtype)] for spans in layout]
    received = comm.exchange([[x]] * comm.size, forms, x.device).wait()
    return in_order([part for (part,) in received], layout, dim)


def returned(grad: Tensor, dim: int, layout: Layout, comm: Comm, how: str) -> Tensor:
    """The gradient of what this rank holds, from that of the whole."""
    parts = dealt(grad, layout, dim)
    mine = parts[comm.rank]
    if how == "slice":
        return mine.contiguous()
    form = [Template(tuple(mine.shape), grad.dtype)]
    received = comm.exchange([[p] for p in parts], [form] * comm.size, grad.device).wait()
    total = torch.zeros(mine.shape, dtype=accumulate_dtype(grad.dtype), device=grad.device)
    for (part,) in received:
        total += part
    return total.to(grad.dtype)


def own_piece(x: Tensor, dim: int, size: int, rank: int) -> Tensor:
    """A tensor that every rank holds, with the gradient of this rank's piece alone, so that each counts once."""
    pieces = [x.narrow(dim, start, stop - start) for start, stop in cuts(x.shape[dim], size)]
    return torch.cat([piece if owner == rank else piece.detach() for owner, piece in enumerate(pieces)], dim)


def _with(x: Tensor, dim: int, length: int) -> tuple[int, ...]:
    shape = list(x.shape)
    shape[dim] = length
    return tuple(shape)


def dim_of(x: object, dim: object, what: str) -> int:
    """A dim counted from 0; ArgumentError for what has no such dim, or none that could be cut."""
    if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided:
        value = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(message(f"{what}: not a plain strided tensor", limit="torch.strided", value=value))
    if type(dim) is not int or not -x.dim() <= dim < x.dim():
        limit = f"{-x.dim()} to {x.dim() - 1}" if x.dim() else "a tensor with a dim"
        raise ArgumentError(message(f"{what}: dim is out of range", limit=limit, value=repr(dim)))
    return dim % x.dim()
