"""Where an OpPair meets autograd in eager calls: one light torch.autograd.Function. compiled.py is the other bridge."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .contract import Mask, OpPair, Options, Wanted
from .errors import GradientError, message


def run(
    pair: OpPair,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    options: Options,
    wanted: Wanted,
    anchored: bool = False,
    rng: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of one call, attached to the graph when an input wants a gradient.

    `anchored` attaches them even when none of this rank's inputs does: its peers' gradients need it in backward.
    `rng` is the random state of dropout. The pair runs with autocast off, in both directions: its inputs are cast.
    """
    if not (anchored or any(wanted)):
        with as_it_is(q):
            result = pair.forward(q, k, v, mask, rng, options)
        return result.out, result.lse
    anchor = torch.zeros((), requires_grad=True) if anchored else None
    return _Bridge.apply(q, k, v, mask.bias, anchor, pair, mask, options, rng)


def as_it_is(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off, where it is on."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def refuse_lse_gradient(pair: OpPair, grad_lse: Tensor | None) -> None:
    """GradientError where a gradient of lse came that the pair would not look at."""
    if grad_lse is not None and not pair.claims.dlse:
        raise GradientError(
            message(
                f"backend {pair.name!r} gives no gradient through lse here",
                limit="one device, and a backend whose claims have dlse",
                remedy="lse.detach(), or parallel=False",
            )
        )


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        pair: OpPair,
        mask: Mask,
        options: Options,
        rng: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        with as_it_is(q):
            result = pair.forward(q, k, v, mask, rng, options)
        ctx.pair, ctx.options, ctx.bounds = pair, options, (mask.causal, mask.since)
        out, lse = result.out.data, result.lse.data  # a kernel's transposed view must not forbid in-place use of out
        inputs = (q, k, v, out, lse) if pair.reads_inputs else (None,) * 5
        ctx.save_for_backward(*inputs, *mask.tensors, result.rng, *result.saved)
        ctx.set_materialize_grads(False)
        ctx.out_like = result.out.new_empty(0).expand(0), result.out.shape
        return out, lse

    @staticmethod
    def backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None):  # type: ignore[no-untyped-def]
        pair: OpPair = ctx.pair
        refuse_lse_gradient(pair, grad_lse)
        q, k, v, out, lse, *rest = ctx.saved_tensors  # read once: a checkpoint unpacks a tensor only once
        parts, rng, saved = rest[:5], rest[5], tuple(rest[6:])
        mask = Mask(*parts, *ctx.bounds)
        if grad_out is None:
            like, shape = ctx.out_like
            grad_out = like.new_zeros(shape)
        wanted = Wanted(*ctx.needs_input_grad[:4])
        twice = torch.is_grad_enabled() and pair.claims.double_backward  # create_graph=True
        with torch.set_grad_enabled(twice), as_it_is(grad_out):
            grads = pair.backward(grad_out, grad_lse, q, k, v, mask, out, lse, rng, saved, ctx.options, wanted)
        kept = tuple(g if w else None for g, w in zip(grads, wanted, strict=True))
        if torch.is_grad_enabled() and not twice:  # a second derivative must fail loudly, whatever it is taken of
            anchor = torch.zeros((), requires_grad=True)
            kept = _NoSecondDerivative.apply(pair.name, kept, anchor, grad_out, grad_lse, q, k, v, mask.bias)
        return *kept, None, None, None, None, None


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name: str, grads: tuple[Tensor | None, ...], *_: Tensor | None):  # type: ignore[no-untyped-def]
        ctx.name = name
        return tuple(None if g is None else g.clone() for g in grads)

    @staticmethod
    def backward(ctx, *_: Tensor | None):  # type: ignore[no-untyped-def]
        raise GradientError(
            message(
                f"double backward (a derivative of a gradient) through backend {ctx.name!r} is not supported",
                limit="a backend whose claims have double_backward, on one device",
                remedy='use backend="native_math", parallel=False for this call',
            )
        )
