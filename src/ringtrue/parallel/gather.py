"""`cp.gather`: the shards of all ranks, whole on every rank. Under torch.compile two operators, as for attention."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiled import RANKS_TALK, last_backward, next_follows, unknown_size
from ..errors import ArgumentError, GradientError, message
from . import agreement, traced
from .config import ContextParallelConfig
from .declaration import check_lengths
from .layout import Layout
from .named import Named, find
from .plan import balanced_lengths, layout_of
from .shard import Gather, dim_of, joined, own_piece, returned

SAID = (
    "str context, int dim, int prefix, SymInt[] lengths, bool given, str backward, bool requires_grad, bool grad_mode, "
    "str root, int number"
)


class Said(NamedTuple):
    """What a gather says besides its tensor, in the order of the schema."""

    context: str
    dim: int
    prefix: int
    lengths: list[int]
    given: bool  # whether the lengths are
    backward: str
    requires_grad: bool
    grad_mode: bool
    root: str  # where in compiled code it is; "" = eager
    number: int

    @property
    def wants(self) -> bool:
        return self.requires_grad and self.grad_mode


def said(context: Named, x: Tensor, dim: int, prefix: int, lengths: Sequence[int] | None, backward: str) -> Said:
    """A call of `gather` as values; torch traces this."""
    root, number = traced.here() if torch.compiler.is_compiling() else ("", 0)
    given = lengths is not None
    known = [] if lengths is None else list(check_lengths(context.config, "gather: lengths", lengths))
    if lengths is None and context.config.lengths == "equal":
        given, known = True, [x.shape[dim]] * context.size
    grad_mode = torch.is_grad_enabled()
    return Said(context.key, dim, prefix, known, given, backward, x.requires_grad, grad_mode, root, number)


def gather(context: Named, x: Tensor, dim: int, prefix: int, lengths: Sequence[int] | None, backward: str) -> Tensor:
    """What `ContextParallel.gather` says."""
    if not torch.compiler.is_compiling():
        _check_together(context, x, dim, prefix, backward, lengths is not None)
    say = said(context, x, dim, prefix, lengths, backward)
    if torch.compiler.is_compiling():
        whole = torch.ops.ringtrue.gather_together(x, *say)[0]
        return _behind_prefix(context, whole, x, say) if prefix else whole
    agreed, anchored = _agree(context, x, say)
    dim = dim % x.dim()
    own = x.narrow(dim, prefix, x.shape[dim] - prefix) if prefix else x
    anchor = torch.zeros((), requires_grad=True) if anchored else None
    whole = Gather.apply(own, anchor, dim, _layout(context.config, agreed, prefix), context.groups.context, backward)
    return _behind_prefix(context, whole, x, say) if prefix else whole


def _behind_prefix(context: Named, whole: Tensor, x: Tensor, say: Said) -> Tensor:
    dim = say.dim % x.dim()
    held = x.narrow(dim, 0, say.prefix)
    held = own_piece(held, dim, context.size, context.rank) if say.backward == "slice" else held
    return torch.cat([held, whole], dim)


def _agree(context: Named, x: Tensor, say: Said) -> tuple[list[int], bool]:
    """Tokens per rank, prefix included, and whether peers need this rank in backward although it wants nothing."""
    dim = say.dim % x.dim()
    if say.given:
        if say.lengths[context.rank] != x.shape[dim]:
            limit = f"{context.size} lengths, own {x.shape[dim]}"
            raise ArgumentError(message("gather: lengths do not fit", limit=limit, value=say.lengths))
        return say.lengths, False
    others = [n for i, n in enumerate(x.shape) if i != dim]
    same = {"dtype": str(x.dtype), "dim": dim, "other dims": others, "backward": say.backward, "prefix": say.prefix}
    own = {"length": x.shape[dim], "wants": say.wants, "grad mode": say.grad_mode}
    place = (say.root, say.number) if say.root else None
    told = [header.own for header in context.agree("gather", same, {**own, "place": place})]
    wants = [bool(own["wants"]) for own in told]
    agreement.check_grad_mode(wants, [bool(own["grad mode"]) for own in told], "gather")
    traced.check([own["place"] for own in told], wants, "gather")
    return [int(own["length"]) for own in told], not say.wants and any(wants)  # type: ignore[call-overload]


def _check_together(context: Named, x: object, dim: object, prefix: object, backward: object, alone: bool) -> None:
    """What this rank can see for itself; the others are told, unless they do not wait for a header (`alone`)."""
    with contextlib.nullcontext() if alone else context.refusing_together("gather"):
        place = dim_of(x, dim, "gather")
        if backward not in ("sum", "slice"):
            raise ArgumentError(message("gather: unknown backward", limit='"sum" or "slice"', value=repr(backward)))
        length = x.shape[place]  # type: ignore[attr-defined]
        if type(prefix) is not int or not 0 <= prefix <= length:
            limit = f"0 to {length} tokens"
            raise ArgumentError(message("gather: no such prefix", limit=limit, value=repr(prefix)))


def _layout(config: ContextParallelConfig, lengths: Sequence[int], prefix: int) -> Layout:
    """The layout of shards that are to be joined; ArgumentError for lengths that no shards have."""
    own = [length - prefix for length in lengths]
    balanced = config.load_balance != "head_tail" or tuple(own) == balanced_lengths(config, sum(own))
    if min(own) < 0 or not balanced:
        raise ArgumentError(
            message(
                "gather: these are no shards of this context",
                limit=f"shards of load_balance={config.load_balance!r}, behind the prefix",
                value=f"tokens per rank behind the prefix {own}",
                remedy="cut tensors with cp.shard",
            )
        )
    return layout_of(config, own)


def _forward(x: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    """The tokens of all ranks, prefix left out, and how many each holds."""
    say = Said(*values)
    context: Named = find(say.context)
    _check_together(context, x, say.dim, say.prefix, say.backward, say.given)
    with torch.no_grad():
        lengths, _ = _agree(context, x, say)
        dim = say.dim % x.dim()
        own = x.narrow(dim, say.prefix, x.shape[dim] - say.prefix)
        whole = joined(own, dim, _layout(context.config, lengths, say.prefix), context.groups.context)
    return whole.contiguous(), torch.tensor(lengths, dtype=torch.int64, device="cpu")


def _forward_shapes(x: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    say = Said(*values)
    shape: list[Any] = list(x.shape)
    if -x.dim() <= say.dim < x.dim():  # else refused when it runs, by all ranks
        shape[say.dim] = sum(n - say.prefix for n in say.lengths) if say.given else unknown_size()
    return x.new_empty(shape), torch.empty(find(say.context).size, dtype=torch.int64, device="cpu")


def _backward(grad: Tensor, lengths: Tensor, sizes: list[int], *values: Any) -> tuple[Tensor, Tensor]:
    say = Said(*values[:-1])
    context: Named = find(say.context)
    dim = say.dim % grad.dim()
    layout = _layout(context.config, lengths.tolist(), say.prefix)
    with torch.no_grad():
        own = returned(grad, dim, layout, context.groups.context, say.backward)
        shape = list(own.shape)
        shape[dim] = say.prefix
        whole = torch.cat([own.new_zeros(shape), own], dim)
    return torch.zeros((), device="cpu"), whole


def _backward_shapes(grad: Tensor, lengths: Tensor, sizes: list[int], *values: Any) -> tuple[Tensor, Tensor]:
    return torch.empty((), device="cpu"), grad.new_empty(sizes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *ctx.values = inputs
    ctx.sizes = tuple(x.shape)
    ctx.save_for_backward(output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    (lengths,) = ctx.saved_tensors
    done, own = torch.ops.ringtrue.gather_together_backward(grad, lengths, ctx.sizes, *ctx.values, last_backward())
    next_follows(done)
    return own, *(None for _ in ctx.values)


def _refuse(ctx: Any, *_: Any) -> None:
    raise GradientError(
        message("double backward (a derivative of a gradient) of a compiled cp.gather is not supported")
    )


_OPERATOR = torch.library.custom_op(
    "ringtrue::gather_together", _forward, mutates_args=(), schema=f"(Tensor x, {SAID}) -> (Tensor, Tensor)",
    tags=RANKS_TALK,
)  # fmt: skip
_OPERATOR_BACKWARD = torch.library.custom_op(
    "ringtrue::gather_together_backward", _backward, mutates_args=(), tags=RANKS_TALK,
    schema=f"(Tensor grad, Tensor own, SymInt[] sizes, {SAID}, Tensor? after) -> (Tensor, Tensor)",
)  # fmt: skip
_OPERATOR.register_fake(_forward_shapes)
_OPERATOR_BACKWARD.register_fake(_backward_shapes)
_OPERATOR.register_autograd(_gradient, setup_context=_keep)
_OPERATOR_BACKWARD.register_autograd(_refuse, setup_context=None)
