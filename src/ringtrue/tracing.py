"""A call as torch.compile traces it: taken apart for the operators, and put together again inside of them.

What torch traces looks only at what no operator can be told. All else is checked, and refused, inside of them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import call as calls
from . import scope, select
from .backends import REGISTRY
from .checks import Asks, Checker
from .compiled import Normalised, Operators, Plain
from .contract import Choice, OpPair, Wanted
from .masks import put_together, taken_apart
from .parallel import traced
from .parallel.named import find
from .parallel.plan import Plan
from .together import Agreed, Shared, Together


def compilable(backend: object, parallel: object) -> bool:
    """Whether a call can be traced: with a backend that has a name, on this device alone or under a context."""
    asked = scope.traced_backend()[0] if backend is None else backend
    return not isinstance(asked, OpPair) and (parallel is None or parallel is False or is_context(parallel))


def is_context(parallel: object) -> bool:
    """Whether this is a context, or a declared call of one."""
    return not isinstance(parallel, type) and hasattr(parallel, "refusing_together")


def run(
    q: Tensor, k: Tensor, v: Tensor, backend: object, parallel: object, arguments: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, Dv) and lse of a call that is compilable."""
    asked, outside = (backend, False) if backend is not None else scope.traced_backend()
    said = dict(arguments)
    if said["deterministic"] is None:
        said["deterministic"] = torch.are_deterministic_algorithms_enabled()
    check = Checker("", "bshd")  # torch cannot trace the description of a call
    check.flags(**{name: said[name] for name in ("is_causal", "enable_gqa", "return_lse", "deterministic")})
    check.kinds(**{name: said[name] for name in ("dropout_p", "scale", "softcap")})
    functions = [name for name, value in (said["backend_options"] or {}).items() if callable(value)]
    if functions:
        check.fail("backend_options of a compiled call are plain values", "names and numbers", ", ".join(functions))
    q, k, v = calls.autocast(q, k, v)  # operators run with autocast off
    mask, parts, numbers = taken_apart(said.pop("attn_mask"))
    parts = [calls.autocast_bias(x, q) if x.is_floating_point() else x for x in parts]
    plain = Plain(
        mask=mask,
        numbers=numbers,
        requires_grad=[x.requires_grad for x in (q, k, v)] + [any(x.requires_grad for x in parts)],
        grad_mode=torch.is_grad_enabled(),
        options=repr(said.pop("backend_options") or {}),
        asked="" if asked is None else select.known(asked),
        outside=outside,
        alone=parallel is False,
        **said,
    )
    rng = calls.random_state() if said["dropout_p"] > 0 else None
    context, entered = scope.traced_context() if parallel is None else (parallel, False)
    if context is None or context is False:
        return OPERATORS(q, k, v, parts, rng, plain)
    return TOGETHER(q, k, v, parts, rng, plain, _shared(context, entered))


def _shared(context: Any, entered: bool) -> Shared:
    """A context or a declared call of one, taken apart."""
    root, number = traced.here()
    if not hasattr(context, "context"):
        return Shared(context.key, entered, "none", False, [], root, number)
    said = context.said
    lengths = [said.joint_prefix, *(said.q_lengths or ()), *(said.k_lengths or ())]
    return Shared(context.context.key, entered, said.mask, said.kv_replicated, lengths, root, number)


def _declared(shared: Shared) -> Any:
    """What `_shared` took apart."""
    context = find(shared.context)
    if not shared.lengths:
        return context
    prefix, *lengths = shared.lengths
    q_lengths, k_lengths = (lengths[: context.size], lengths[context.size :]) if lengths else (None, None)
    return context.call(q_lengths, k_lengths, shared.kind, prefix, shared.kv_replicated)


def _checked(
    q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], plain: Plain, shared: Shared | None = None
) -> calls.Call:
    return calls.normalise(
        q, k, v,
        attn_mask=put_together(plain.mask, parts, plain.numbers),
        dropout_p=plain.dropout_p,
        is_causal=plain.is_causal,
        scale=plain.scale,
        enable_gqa=plain.enable_gqa,
        softcap=plain.softcap,
        return_lse=plain.return_lse,
        layout=plain.layout,
        deterministic=plain.deterministic,
        backend_options=ast.literal_eval(plain.options),
        sharded=shared is not None,
        asks=Asks(Wanted(*plain.requires_grad), plain.grad_mode),
        place=None if shared is None else (shared.root, shared.number),
    )  # fmt: skip


def _number(choice: Choice) -> int:
    return next(i for i, b in enumerate(REGISTRY) if b.name == choice.backend)


class _Rooms:
    """What the operators of one device need of the rooms above the bridge (compiled.Resolver)."""

    def normalise(self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], plain: Plain) -> calls.Call:
        return _checked(q, k, v, parts, plain)

    def choose(self, call: Normalised, plain: Plain, traced: bool) -> tuple[int, OpPair]:
        if not traced and plain.outside:
            scope.confirm_backend(plain.asked or None, call.text)
        if not traced and not plain.alone:
            scope.confirm_context(None, call.text)
        asked, facts = plain.asked or select.DEFAULT, call.facts
        if traced and asked == select.NATIVE:  # all pairs give the same shapes, and torch cannot be asked about symbols
            asked = select.AUTO
        asked = select.meant(asked, facts, call.q, call.k, call.v, call.mask, call.options)
        choice = select.fitting(asked, facts, call.text, traced, alike=True)[0]  # traced or not, the same
        return _number(choice), choice.pair

    def pair(self, chosen: int, call: Normalised) -> OpPair:
        return select.composed(REGISTRY[chosen], call.facts.device, call.facts.options)


class _Ranks:
    """What the operators of a context need of them (together.Ranks)."""

    def agree(self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], plain: Plain, shared: Shared) -> Agreed:
        context = _declared(shared)
        with context.refusing_together():
            call = _checked(q, k, v, parts, plain, shared)
            if plain.outside:
                scope.confirm_backend(plain.asked or None, call.text)
            if shared.entered:
                scope.confirm_context(find(shared.context), call.text)
            asked, facts = plain.asked or select.DEFAULT, context.facts(call)
            asked = select.meant(asked, facts, call.q, call.k, call.v, call.mask, call.options)
            choices = select.fitting(asked, facts, call.text, alike=context.silent)
        planned = context.plan(call, choices)
        return Agreed(call, planned.pair, (_number(planned.choice), *planned.plan.numbers()))

    def again(
        self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], plain: Plain, shared: Shared, numbers: list[int]
    ) -> tuple[calls.Call, OpPair]:
        call = _checked(q, k, v, parts, plain, shared)
        backend, *agreed = numbers
        pair = select.composed(REGISTRY[backend], call.facts.device, call.facts.options)
        return call, _declared(shared).replan(call, pair, agreed)

    def count(self, shared: Shared) -> int:
        return 1 + Plan.count(find(shared.context).size)


OPERATORS = Operators("ringtrue", _Rooms())
TOGETHER = Together("ringtrue", _Ranks())
