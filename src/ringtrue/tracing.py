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
from .contract import OpPair, Wanted
from .masks import put_together, taken_apart


def compilable(backend: object, parallel: object) -> bool:
    """Whether a call can be traced: on this device alone, with a backend that has a name."""
    asked = scope.traced_backend()[0] if backend is None else backend
    alone = scope.traced_context() is None if parallel is None else parallel is False
    return alone and not isinstance(asked, OpPair)


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
    return OPERATORS(q, k, v, parts, calls.random_state() if said["dropout_p"] > 0 else None, plain)


class _Rooms:
    """What the operators need of the rooms above the bridge (compiled.Resolver)."""

    def normalise(self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], plain: Plain) -> calls.Call:
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
            asks=Asks(Wanted(*plain.requires_grad), plain.grad_mode),
        )  # fmt: skip

    def choose(self, call: Normalised, plain: Plain, traced: bool) -> tuple[int, OpPair]:
        if not traced and plain.outside:
            scope.confirm_backend(plain.asked or None, call.text)
        if not traced and not plain.alone:
            scope.confirm_no_context(call.text)
        asked, facts = plain.asked or select.DEFAULT, call.facts
        if traced and asked == select.NATIVE:  # all pairs give the same shapes, and torch cannot be asked about symbols
            asked = select.AUTO
        asked = select.meant(asked, facts, call.q, call.k, call.v, call.mask, call.options)
        choice = select.fitting(asked, facts, call.text, traced)[0]
        return next(i for i, b in enumerate(REGISTRY) if b.name == choice.backend), choice.pair

    def pair(self, chosen: int, call: Normalised) -> OpPair:
        return select.composed(REGISTRY[chosen], call.facts.device)


OPERATORS = Operators("ringtrue", _Rooms())
