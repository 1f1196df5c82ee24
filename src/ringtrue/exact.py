"""A quantised forward with an exact backward: what the option "backward" makes of a pair that has none of its own.

`with_backward(pair, other)` is an OpPair -> OpPair that gets the other pair from selection; both have their edge. Its
forward is the pair's. Its backward runs the other pair's forward once more, for the exact out and lse, and then that
pair's backward: the gradients are those of exact attention at these inputs, not those of what the forward computed, and
neither the quantised out nor its lse has a part in them. Nothing but q, k, v and the mask needs to be kept. Backward
costs one exact forward in time and, while it runs, one more out and lse in memory.

A step of a ring would have to be given the exact lse of *all* keys, which no rank has: `claimed` refuses rings.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from .contract import Claims, Facts, Grads, Mask, OpPair, Options, Reason, Wanted

OPTION = "backward"


def named(claims: Claims, options: tuple[tuple[str, object], ...]) -> object:
    """The name that the option gives, whatever it is; None where it is not given, or the pair does not know it."""
    return dict(options).get(OPTION) if OPTION in claims.options else None


def exact(claims: Claims) -> bool:
    """Whether a pair with these claims can give the backward: exact, from an lse."""
    return claims.backward and claims.backward_from_lse and not claims.arithmetic.startswith("8-bit")


def claimed(claims: Claims, other: Claims) -> Claims:
    """What the two claim together; both with the edge."""
    return replace(
        claims, backward=True, backward_from_lse=False, dbias=False, dlse=other.dlse, double_backward=False,
        deterministic=other.deterministic, deterministic_by_switch=other.deterministic_by_switch,
    )  # fmt: skip


def facts_of(facts: Facts) -> Facts:
    """The call as the other pair meets it: its options are not that pair's."""
    return replace(facts, options=(), needs_lse=True)


def unknown(name: object, names: list[str]) -> Reason:
    """The reason against a name that cannot give the backward."""
    return Reason(
        "backward-option", f"backend_options[{OPTION!r}] names no exact backend with a backward from an lse",
        ", ".join(names), repr(name), "name one of those",
    )  # fmt: skip


def against(name: str, reason: Reason) -> Reason:
    """A reason against the backend that shall give the backward, as one against the call."""
    return replace(reason, code="backward-option", text=f"{name}, which shall give the backward, {reason.text}")


def with_backward(pair: OpPair, other: OpPair) -> OpPair:
    """The pair's forward and the other's backward, from an out and lse that it computes anew."""
    return replace(pair, backward=partial(_backward, other), claims=claimed(pair.claims, other.claims))


def _backward(
    other: OpPair,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    out: Tensor,
    lse: Tensor,
    rng: Tensor | None,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """The quantised out and lse are not looked at, nor is what the quantised forward kept."""
    options = replace(options, extra=(), return_lse=True)
    again = other.forward(q, k, v, mask, None, options)
    return other.backward(grad_out, grad_lse, q, k, v, mask, again.out, again.lse, None, again.saved, options, wanted)
