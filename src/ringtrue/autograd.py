"""Where an OpPair meets autograd in eager calls: one light torch.autograd.Function. compiled.py is the other bridge."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .contract import ForwardOut, Mask, OpPair, Options, Wanted
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
) -> tuple[Tensor, Tensor | None]:
    """out and lse of one call, attached to the graph when an input wants a gradient; lse is None where nobody asks.

    `anchored` attaches them even when none of this rank's inputs does: its peers' gradients need it in backward.
    `rng` is the random state of dropout. The pair runs with autocast off, in both directions: its inputs are cast.
    """
    if not (anchored or any(wanted)):
        result = _forward(pair, q, k, v, mask, rng, options)
        return result.out, result.lse
    anchor = torch.zeros((), requires_grad=True) if anchored else None
    given = _Bridge.apply(q, k, v, mask.bias, anchor, (pair, mask, options, rng))
    return given if type(given) is tuple else (given, None)


def _forward(
    pair: OpPair, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options
) -> ForwardOut:
    if _autocast(q):
        with as_it_is(q):
            return pair.forward(q, k, v, mask, rng, options)
    return pair.forward(q, k, v, mask, rng, options)


def _autocast(x: Tensor) -> bool:
    if not torch._C._is_any_autocast_enabled():
        return False
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def as_it_is(x: Tensor) -> AbstractContextManager[object]:
    """Autocast off, where it is on."""
    return torch.autocast(x.device.type, enabled=False) if _autocast(x) else nullcontext()


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


Call = tuple[OpPair, Mask, Options, Tensor | None]


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, anchor: Tensor | None, call: Call
    ) -> Tensor | tuple[Tensor, Tensor]:
        pair, mask, options, rng = call
        result = _forward(pair, q, k, v, mask, rng, options)
        ctx.pair, ctx.options = pair, options
        ctx.mask = mask if mask.hides_nothing else None
        # a kernel's transposed view must not forbid in-place use of what is returned
        out, lse = (x.data if x._is_view() else x for x in result[:2])
        ctx.set_materialize_grads(False)
        both = options.return_lse or pair.claims.double_backward  # a second derivative goes through lse
        inputs = (q, k, v, out, lse) if pair.reads_inputs else (None,) * 5
        if ctx.mask is None or result.rng is not None or result.saved:
            ctx.mask_ends = mask.causal, mask.since
            ctx.save_for_backward(*inputs, *mask.tensors, result.rng, *result.saved)
        else:
            ctx.save_for_backward(*inputs)
        ctx.out_like = out.shape, out.dtype, out.device
        return (out, lse) if both else out

    @staticmethod
    def backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None = None):  # type: ignore[no-untyped-def]
        pair: OpPair = ctx.pair
        refuse_lse_gradient(pair, grad_lse)
        q, k, v, out, lse, *rest = ctx.saved_tensors  # read once: a checkpoint unpacks a tensor only once
        mask, rng, saved = ctx.mask, None, ()
        if rest:
            mask, rng, saved = Mask(*rest[:5], *ctx.mask_ends), rest[5], tuple(rest[6:])
        if grad_out is None:
            shape, dtype, device = ctx.out_like
            grad_out = torch.zeros(shape, dtype=dtype, device=device)
        wanted = Wanted(*ctx.needs_input_grad[:4])
        given = (grad_out, grad_lse, q, k, v, mask, out, lse, rng, saved, ctx.options, wanted)
        if not torch.is_grad_enabled() and not _autocast(grad_out):
            dq, dk, dv, dbias = pair.backward(*given)
        else:
            dq, dk, dv, dbias = _careful_backward(pair, *given)
        return (
            dq if wanted[0] else None, dk if wanted[1] else None, dv if wanted[2] else None,
            dbias if wanted[3] else None, None, None,
        )  # fmt: skip


def _careful_backward(pair: OpPair, grad_out: Tensor, grad_lse: Tensor | None, *given: Any) -> tuple[Any, ...]:
    """Backward under autocast, or with create_graph=True, where the pair's own backward may be differentiated again."""
    twice = torch.is_grad_enabled() and pair.claims.double_backward
    with torch.set_grad_enabled(twice), as_it_is(grad_out):
        grads = tuple(pair.backward(grad_out, grad_lse, *given))
    if torch.is_grad_enabled() and not twice:  # a second derivative must fail loudly, whatever it is taken of
        q, k, v, mask = given[:4]
        anchor = torch.zeros((), requires_grad=True)
        return _NoSecondDerivative.apply(pair.name, grads, anchor, grad_out, grad_lse, q, k, v, mask.bias)
    return grads


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
