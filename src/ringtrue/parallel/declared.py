"""A call with what was declared of it: lengths, a joint prefix, replicated keys; and how its ranks come to a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..contract import Choice, Facts, OpPair
from ..errors import ArgumentError, message
from . import agreement
from .plan import Plan

if TYPE_CHECKING:
    from ..call import Call
    from .context import ContextParallel

MaskKind = Literal["none", "key_bool", "key_float", "rows_bool", "rows_float", "segments"]


class Planned(NamedTuple):
    """What the ranks agreed on: the composed pair, of which backend, and whether peers need this rank's backward."""

    pair: OpPair
    choice: Choice
    anchored: bool
    plan: Plan


@dataclass(frozen=True)
class DeclaredCall:
    """A context with what was declared of one call; lengths None: those of a header, or with lengths="equal" this
    rank's for all."""

    context: ContextParallel
    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    mask: MaskKind = "none"
    joint_prefix: int = 0
    kv_replicated: bool = False

    @property
    def silent(self) -> bool:
        """Whether nothing is exchanged before the call."""
        return self.q_lengths is not None or self.context.config.lengths == "equal"

    def facts(self, call: Call) -> Facts:
        """The facts as a kernel meets them."""
        context = self.context
        ring = context.config.ring_degree > 1 and not self.kv_replicated
        return replace(call.facts, needs_lse=call.facts.needs_lse or context.size > 1, from_lse=ring)

    @contextlib.contextmanager
    def refusing_together(self) -> Iterator[None]:
        """As the context's; where nothing is exchanged a refusal stays on its rank."""
        with contextlib.nullcontext() if self.silent else self.context.refusing_together():
            yield

    def plan(self, call: Call, choices: tuple[Choice, ...]) -> Planned:
        """Agree with the other ranks, or check this rank's part against what was declared."""
        context = self.context
        if self.silent:
            plan, choice = agreement.settled_alone(self, call), choices[0]
        else:
            same, own = agreement.same(call, choices, self), agreement.own(call, choices)
            plan, backend = agreement.settle(self, call, context.agree("attention", same, own))
            choice = next(choice for choice in choices if choice.backend == backend)
        anchored = any(plan.wanted) and not any(call.facts.wanted)
        return Planned(plan.compose(context.groups, choice.pair), choice, anchored, plan)

    def replan(self, call: Call, pair: OpPair, numbers: Sequence[int]) -> OpPair:
        """The composition of a call that was planned before; talks to nobody."""
        return agreement.again(self, call, numbers).compose(self.context.groups, pair)


def declare(
    context: ContextParallel,
    q_lengths: Sequence[int] | None,
    k_lengths: Sequence[int] | None,
    mask: MaskKind,
    joint_prefix: int,
    kv_replicated: bool,
) -> DeclaredCall:
    """The checked declaration; ArgumentError for one that says nothing sensible."""
    if type(joint_prefix) is not int or joint_prefix < 0:
        limit = "0, 1, 2, ... tokens"
        raise ArgumentError(message("call: no such joint_prefix", limit=limit, value=repr(joint_prefix)))
    if type(kv_replicated) is not bool:
        raise ArgumentError(message("call: kv_replicated is not a bool", value=repr(kv_replicated)))
    if mask not in agreement.DECLARED:
        limit = ", ".join(agreement.DECLARED)
        raise ArgumentError(message("call: unknown mask kind", limit=limit, value=repr(mask)))
    missing = [lengths is None for lengths in (q_lengths, k_lengths)]
    if any(missing) != all(missing) or (all(missing) and mask != "none" and context.config.lengths != "equal"):
        raise ArgumentError(
            message(
                "call: lengths are not declared",
                limit=f"q_lengths and k_lengths, {context.size} numbers each",
                value=f"q_lengths={q_lengths}, k_lengths={k_lengths}",
                remedy='give both, or configure lengths="equal"',
            )
        )
    q, k = (_lengths(context, name, x) for name, x in (("q_lengths", q_lengths), ("k_lengths", k_lengths)))
    return DeclaredCall(context, q, k, mask, joint_prefix, kv_replicated)


def _lengths(context: ContextParallel, name: str, given: object) -> tuple[int, ...] | None:
    if given is None:
        return None
    fits = isinstance(given, Sequence) and len(given) == context.size
    if not fits or not all(type(n) is int and n >= 0 for n in given):  # type: ignore[attr-defined]
        raise ArgumentError(message(f"call: {name} does not fit", limit=f"{context.size} lengths", value=given))
    return tuple(given)  # type: ignore[arg-type]
