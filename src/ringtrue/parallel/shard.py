"""`shard` and `gather`: the only differentiable collectives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contract import accumulate_dtype
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
        forms = [[Template(_with(x, dim, count(spans)), x.dtype)] for spans in layout]
        received = comm.exchange([[x]] * comm.size, forms, x.device).wait()
        return in_order([part for (part,) in received], layout, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        parts = dealt(grad, ctx.layout, ctx.dim)
        mine = parts[ctx.comm.rank]
        if ctx.how == "slice":
            return mine.contiguous(), *(None,) * 5
        form = [Template(tuple(mine.shape), grad.dtype)]
        received = ctx.comm.exchange([[p] for p in parts], [form] * ctx.comm.size, grad.device).wait()
        total = torch.zeros(mine.shape, dtype=accumulate_dtype(grad.dtype), device=grad.device)
        for (part,) in received:
            total += part
        return total.to(grad.dtype), *(None,) * 5


def own_piece(x: Tensor, dim: int, size: int, rank: int) -> Tensor:
    """A tensor that every rank holds, with the gradient of this rank's piece alone, so that each counts once."""
    pieces = [x.narrow(dim, start, stop - start) for start, stop in cuts(x.shape[dim], size)]
    return torch.cat([piece if owner == rank else piece.detach() for owner, piece in enumerate(pieces)], dim)


def _with(x: Tensor, dim: int, length: int) -> tuple[int, ...]:
    shape = list(x.shape)
    shape[dim] = length
    return tuple(shape)
