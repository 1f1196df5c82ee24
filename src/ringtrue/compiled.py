"""The bridge under torch.compile: an attention call as two opaque operators, forward and backward.

An operator takes the call as the user made it, flattened to tensors and plain values, and walks an eager call's path
when it runs: normalise, choose, edge, pair. What was chosen comes out as a number, so that backward takes the same
pair. While torch traces, the fake kernels run only the pair's `shapes`, never a kernel. An absent result is an empty
tensor; results are contiguous and share no memory with anything. What torch traces reads and writes no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import SymInt, Tensor

from .autograd import as_it_is, refuse_lse_gradient
from .contract import Facts, ForwardOut, Grads, Mask, OpPair, Options, accumulate_dtype
from .errors import GradientError, RingtrueError, message

# Which tensors forward hands to backward, and in what order: part of every call, so that a graph which torch cached on
# disk for another release is not taken. Count up when a pair or a wrapper saves something else.
FORMAT = 2
PLAIN = (
    "str mask, SymInt[] numbers, bool[] requires_grad, bool grad_mode, float dropout_p, bool is_causal, float? scale, "
    "bool enable_gqa, float softcap, bool return_lse, str layout, bool deterministic, str options, str asked, "
    "bool outside, bool alone, int format"
)
FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor[] parts, Tensor? rng, {PLAIN}) -> (Tensor, Tensor, Tensor, Tensor[])"
BACKWARD = (
    "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor[] parts, Tensor out, Tensor lse, "
    f"Tensor chosen, Tensor? rng, Tensor[] saved, {PLAIN}) -> (Tensor, Tensor, Tensor, Tensor)"
)


class Plain(NamedTuple):
    """What a call says besides tensors, in the order of both schemas."""

    mask: str  # how `parts` and `numbers` make a mask: masks.py
    numbers: list[int]
    requires_grad: list[bool]  # q, k, v and the float mask; an operator's own inputs never say
    grad_mode: bool
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    softcap: float
    return_lse: bool
    layout: str
    deterministic: bool
    options: str  # backend_options, as repr writes them
    asked: str  # "" when neither the call nor a scope named a backend
    outside: bool  # that backend, or none, was found outside of the compiled code
    alone: bool  # the call said parallel=False
    format: int = FORMAT


class Normalised(Protocol):
    """A checked call in the contract's layout."""

    @property
    def q(self) -> Tensor: ...
    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def mask(self) -> Mask: ...
    @property
    def options(self) -> Options: ...
    @property
    def facts(self) -> Facts: ...
    @property
    def text(self) -> object: ...


class Resolver(Protocol):
    """What an operator needs of the rooms above it; tests put other pairs in through one of their own."""

    def normalise(self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], plain: Plain) -> Normalised:
        """The checked call; raises like an eager one."""

    def choose(self, call: Normalised, plain: Plain, traced: bool) -> tuple[int, OpPair]:
        """The pair that takes the call, and the number that it can be found again by."""

    def pair(self, chosen: int, call: Normalised) -> OpPair:
        """The pair that the forward of this call chose."""


class Operators:
    """`<namespace>::attention` and `<namespace>::attention_backward`, registered once; called, it is a traced call."""

    def __init__(self, namespace: str, resolver: Resolver) -> None:
        self.resolver = resolver
        self.attention, self.attention_backward = register(
            namespace,
            "attention",
            (FORWARD, self._forward, self._forward_shapes),
            (BACKWARD, self._backward, backward_shapes),
            self._gradients,
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], rng: Tensor | None, plain: Plain
    ) -> tuple[Tensor, Tensor]:
        """out (B, Sq, H, Dv) and lse of a call that was taken apart; torch traces this."""
        out, lse, _, _ = self.attention(q, k, v, parts, rng, *plain)
        return out, lse

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], rng: Tensor | None, *values: Any
    ) -> tuple[Any, ...]:
        plain = Plain(*values)
        with as_it_is(q), torch.no_grad():
            call = self.resolver.normalise(q, k, v, parts, plain)
            chosen, pair = self.resolver.choose(call, plain, traced=False)
            result = pair.forward(call.q, call.k, call.v, call.mask, rng, call.options)
        number = torch.tensor(chosen, device="cpu")  # where backward reads it without waiting
        return _given(result, number, call.facts.training)

    def _forward_shapes(
        self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], rng: Tensor | None, *values: Any
    ) -> tuple[Any, ...]:
        plain = Plain(*values)
        if plain.scale is None:  # what stands for it would be computed from a head dim that may be a symbol
            plain = plain._replace(scale=1.0)
        plain = plain._replace(numbers=[int(n) for n in plain.numbers])  # the ends of a window are no symbols
        with as_it_is(q), torch.no_grad():
            try:
                call = self.resolver.normalise(q, k, v, parts, plain)
                _, pair = self.resolver.choose(call, plain, traced=True)
            except RingtrueError as error:  # of this kind, Dynamo leaves the call to Python, which raises it as it is
                raise NotImplementedError(str(error)) from error
            result = pair.shapes(call.q, call.k, call.v, call.mask, rng, call.options)
        return _given(result, torch.empty((), dtype=torch.int64, device="cpu"), call.facts.training)

    def _backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: list[Tensor],
        out: Tensor,
        lse: Tensor,
        chosen: Tensor,
        rng: Tensor | None,
        saved: list[Tensor],
        *values: Any,
    ) -> tuple[Tensor, ...]:
        plain = Plain(*values)
        with as_it_is(q), torch.no_grad():
            call = self.resolver.normalise(q, k, v, parts, plain)
            pair = self.resolver.pair(int(chosen), call)
            refuse_lse_gradient(pair, grad_lse)
            held = (call.q, call.k, call.v) if pair.reads_inputs else (None, None, None)
            ends = (out, lse) if pair.reads_inputs else (None, None)
            wanted = call.facts.wanted
            grads = pair.backward(grad_out, grad_lse, *held, call.mask, *ends, rng, tuple(saved), call.options, wanted)
        return handed_back(grads, call, pair, parts, plain)

    def _gradients(self, ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        plain = Plain(*ctx.values)
        tensors, parts = told(ctx, grad_out, grad_lse, plain)
        return to_inputs(self.attention_backward(*tensors, *plain), parts, plain, plain)


Impl = tuple[str, Callable[..., Any], Callable[..., Any]]


def register(
    namespace: str,
    name: str,
    forward: Impl,
    backward: Impl,
    gradients: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> tuple[Any, Any]:
    """The operators `name` and `name`_backward, each from (schema, function, fake kernel), tied by `gradients`."""
    operators = []
    for suffix, (schema, function, fake) in (("", forward), ("_backward", backward)):
        whole = f"{namespace}::{name}{suffix}"
        operators.append(torch.library.custom_op(whole, function, mutates_args=(), schema=schema, tags=tags))
        operators[-1].register_fake(fake)
    operators[0].register_autograd(gradients, setup_context=_keep)
    operators[1].register_autograd(_refuse, setup_context=None)
    ops = getattr(torch.ops, namespace)
    return getattr(ops, name).default, getattr(ops, f"{name}_backward").default


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, parts, rng, *ctx.values = inputs
    out, lse, chosen, saved = output
    ctx.parts = len(parts)
    ctx.save_for_backward(q, k, v, out, lse, chosen, rng, *parts, *saved)
    ctx.set_materialize_grads(False)


def told(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, plain: Plain
) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The tensors that backward's schema begins with: both gradients, and what forward kept; and the mask's parts."""
    q, k, v, out, lse, chosen, rng, *rest = ctx.saved_tensors
    parts, saved = rest[: ctx.parts], rest[ctx.parts :]
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_lse = grad_lse if plain.return_lse else None  # nobody has it, yet a traced backward may bring zeros for it
    return (grad_out, grad_lse, q, k, v, parts, out, lse, chosen, rng, saved), parts


def to_inputs(grads: Sequence[Tensor], parts: list[Tensor], plain: Plain, values: Sequence[Any]) -> tuple[Any, ...]:
    """What autograd wants of a backward: something for every input of the forward operator."""
    *inputs, bias = (plain.grad_mode and x for x in plain.requires_grad)
    return (
        *(g if w else None for g, w in zip(grads[:3], inputs, strict=True)),
        [grads[3] if bias and x.is_floating_point() else None for x in parts],
        None,
        *([] if x == [] else None for x in values),  # torch wants an empty list back as one
    )


def handed_back(grads: Grads, call: Normalised, pair: OpPair, parts: list[Tensor], plain: Plain) -> tuple[Tensor, ...]:
    """What a backward operator returns: gradients as the fake kernel said, empty where none is wanted."""
    wanted = call.facts.wanted
    inputs = zip(grads[:3], (call.q, call.k, call.v), wanted[:3], strict=True)
    dq, dk, dv = (_in_layout(_promised(g, x, pair), plain.layout) if w else x.new_empty(0) for g, x, w in inputs)
    bias = call.mask.bias
    if bias is None or not wanted.bias:
        return dq, dk, dv, call.q.new_empty(0)
    return dq, dk, dv, _of_part(_promised(grads.dbias, bias, pair), parts)


def _given(result: ForwardOut, chosen: Tensor, training: bool) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """What a forward operator returns; without a backward to come, nothing for it, and nothing on the CPU."""
    out, lse = result.out.contiguous(), result.lse.contiguous()
    if not training:
        return out, lse, out.new_empty(0, dtype=torch.int64), []
    return out, lse, chosen, [x.contiguous() for x in result.saved]


def backward_shapes(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: list[Tensor],
    out: Tensor,
    lse: Tensor,
    chosen: Tensor,
    rng: Tensor | None,
    saved: list[Tensor],
    *values: Any,
) -> tuple[Tensor, ...]:
    """The fake kernel of a backward: gradients in the caller's layout, empty where none is wanted."""
    plain = Plain(*values)
    *inputs, bias = (plain.grad_mode and x for x in plain.requires_grad)
    swapped = plain.layout == "bhsd"
    grads = []
    for x, wanted in zip((q, k, v), inputs, strict=True):
        shape = x.transpose(1, 2).shape if swapped else x.shape
        grads.append(_in_layout(x.new_empty(shape), plain.layout) if wanted else x.new_empty(0))
    part = next((x for x in parts if x.is_floating_point()), None)
    return *grads, q.new_empty(0) if part is None or not bias else part.new_empty(part.shape)


def _promised(grad: Tensor | None, like: Tensor, pair: OpPair) -> Tensor:
    """A gradient that is what the fake kernel said; compiled code would read any other as if it were."""
    if grad is None or grad.shape != like.shape or grad.dtype != like.dtype:
        seen = "none" if grad is None else f"{grad.dtype} {tuple(grad.shape)}"
        limit = f"{like.dtype} {tuple(like.shape)}"
        raise GradientError(message(f"backend {pair.name!r} gave another gradient than asked", limit=limit, value=seen))
    return grad


def _in_layout(grad: Tensor, layout: str) -> Tensor:
    """A gradient in the contract's layout as one in the caller's, its memory always (B, S, H, D)."""
    grad = grad.contiguous()
    return grad.transpose(1, 2) if layout == "bhsd" else grad


def _of_part(dbias: Tensor, parts: list[Tensor]) -> Tensor:
    """The gradient of the one float mask, a bias (b, h, q, k) or (B, Sk), as that of the tensor passed for it."""
    user = next(x for x in parts if x.is_floating_point())
    if dbias.dim() == 4:
        dbias = dbias.to(accumulate_dtype(dbias.dtype)).sum_to_size((1,) * (4 - user.dim()) + tuple(user.shape))
    return dbias.reshape(user.shape).to(user.dtype).contiguous()


def _refuse(ctx: Any, *_: Any) -> None:
    raise GradientError(
        message(
            "double backward (a derivative of a gradient) of a compiled attention call is not supported",
            remedy="compute the gradient penalty with plain eager attention, outside torch.compile",
        )
    )


# ---- operators in which ranks talk -----------------------------------------------------------------------------------

RANKS_TALK = (torch.Tag.cudagraph_unsafe,)  # a replay would leave out what they tell each other
_CHAIN = "_ringtrue_backward"


def unknown_size() -> SymInt:
    """In a fake kernel: a size that only the running operator knows."""
    context = torch.library.get_ctx()
    env = context._shape_env
    if env is None or env.allow_dynamic_output_shape_ops:
        return context.new_dynamic_size()
    # torch asks whether to break the graph at such an operator; this one may stay, as torch's own of device meshes do
    size = env.create_unbacked_symint()
    torch.fx.experimental.symbolic_shapes._constrain_range_for_size(size, min=0)
    return size


def last_backward() -> Tensor | None:
    """What the last backward operator that torch traced into this graph said of being done."""
    return getattr(_tracer(), _CHAIN, None)


def next_follows(done: Tensor) -> None:
    """The next backward operator of this graph comes after the one that gave `done`."""
    tracer = _tracer()
    if tracer is not None:
        setattr(tracer, _CHAIN, done)  # goes when the tracer goes


def _tracer() -> Any:
    """What records the graph that torch traces now, if it does."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # slow to import, and seldom needed

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer
