"""A context: the ranks that share one sequence, and what they agree on before each call."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .. import scope
from ..contract import Choice, Facts, OpPair
from ..errors import ArgumentError, ParallelError, UnsupportedError, message
from . import agreement
from .comm import Connectable, connect
from .config import ContextParallelConfig
from .header import Header, agree, tell
from .shard import Gather, shard

if TYPE_CHECKING:
    from ..call import Call

GRACE = 5.0  # seconds that a rank with an exception of its own waits for its peers' next header
TOLD = "_told_to_peers"  # marks an exception whose text the other ranks have
MaskKind = Literal["none", "key_bool", "key_float", "rows_bool", "rows_float"]


class ContextParallel:
    """The ranks of one context, with groups of their own, built once.

    `with cp:` makes it the context of the attention calls inside. Context rank = ring_rank x ulysses_degree +
    ulysses_rank. Every gradient, of inputs and of all parameters, is Partial("sum") over the context ranks: the
    objective is the sum over ranks of what each rank back-propagates. All ranks make the same calls in the same order.

    Raises ArgumentError when the degrees do not fit the mesh or the process group.
    """

    def __init__(self, config: ContextParallelConfig) -> None:
        mesh = config.mesh
        self.config = config
        self.groups = connect(mesh, config.ulysses_degree, config.ring_degree, config.timeout)  # type: ignore[arg-type]
        self.rank = self.groups.context.rank
        self.size = self.groups.context.size
        self._numbers = itertools.count()

    @classmethod
    def current(cls) -> ContextParallel | None:
        """The context of the innermost `with cp:` around the caller, or None."""
        found = scope.current_context()
        return found if isinstance(found, cls) else None

    def __enter__(self) -> ContextParallel:
        scope.enter_context(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        scope.leave_context()
        if error is not None:
            self._tell(error)

    def __repr__(self) -> str:
        degrees = f"ulysses_degree={self.config.ulysses_degree}, ring_degree={self.config.ring_degree}"
        return f"ContextParallel(rank {self.rank} of {self.size}, {degrees})"

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of `x`, which is whole and equal on every rank: `tensor_split` along `dim`, maybe empty.

        Backward zero-pads: the gradient of `x` is Partial("sum").
        """
        return shard(x, self._dim(x, dim), self.size, self.rank)

    @torch.compiler.disable
    def gather(
        self,
        x: Tensor,
        dim: int,
        lengths: Sequence[int] | None = None,
        backward: Literal["sum", "slice"] = "sum",
    ) -> Tensor:
        """Every rank's shard of any length, joined along `dim`, whole and equal on every rank.

        lengths   tokens per context rank; given, nothing is exchanged beforehand. Local size is checked against it.
        backward  "sum" (the rule of this library): each rank's gradient of a shard is summed by its owner, in float32.
                  "slice" (diffusers' convention, last gather only): each rank keeps its own slice; parameters after it
                  are then not Partial.
        """
        with contextlib.nullcontext() if lengths is not None else self.refusing_together("gather"):
            dim = self._dim(x, dim)
            if backward not in ("sum", "slice"):
                raise ArgumentError(message("gather: unknown backward", limit='"sum" or "slice"', value=repr(backward)))
        wants = torch.is_grad_enabled() and x.requires_grad
        anchored = False
        if lengths is None and self.config.lengths == "equal":
            lengths = [x.shape[dim]] * self.size
        if lengths is None:
            others = [n for i, n in enumerate(x.shape) if i != dim]
            same = {"dtype": str(x.dtype), "dim": dim, "other dims": others, "backward": backward}
            own = {"length": x.shape[dim], "wants": wants, "grad mode": torch.is_grad_enabled()}
            headers = self.agree("gather", same, own)
            said = [(bool(h.own["wants"]), bool(h.own["grad mode"])) for h in headers]
            agreement.check_grad_mode([want for want, _ in said], [mode for _, mode in said], "gather")
            lengths = [int(h.own["length"]) for h in headers]
            anchored = not wants and any(h.own["wants"] for h in headers)
        elif len(lengths) != self.size or lengths[self.rank] != x.shape[dim]:
            raise ArgumentError(
                message(
                    "gather: lengths do not fit", limit=f"{self.size} lengths, own {x.shape[dim]}", value=list(lengths)
                )
            )
        anchor = torch.zeros((), requires_grad=True) if anchored else None
        return Gather.apply(x, anchor, dim, tuple(lengths), self.groups.context, backward)

    def loss(self, loss: Tensor) -> Tensor:
        """For a loss that every rank computes identically from a gathered output: loss / number of context ranks."""
        return loss / self.size

    def call(
        self,
        q_lengths: Sequence[int] | None = None,
        k_lengths: Sequence[int] | None = None,
        mask: MaskKind = "none",
        joint_prefix: int = 0,
        kv_replicated: bool = False,
    ) -> ContextParallel | DeclaredCall:
        """What to pass as `parallel` to declare a call's lengths (tokens per context rank) and mask kind.

        Nothing is then exchanged before the call; this rank's sizes and mask are checked against the declaration; dtype
        and wanted gradients are equal on all ranks by contract.
        """
        for name, value in (("joint_prefix", joint_prefix), ("kv_replicated", kv_replicated)):
            if value:
                raise UnsupportedError(
                    message(f"{name} is not supported yet", value=value, remedy="shard q, k and v alike")
                )
        kinds = agreement.DECLARED
        if mask not in kinds:
            raise ArgumentError(message("call: unknown mask kind", limit=", ".join(kinds), value=repr(mask)))
        if q_lengths is None and k_lengths is None and mask == "none":
            return self
        if q_lengths is None or k_lengths is None:
            if self.config.lengths != "equal" or q_lengths is not None or k_lengths is not None:
                raise ArgumentError(
                    message(
                        "call: lengths are not declared",
                        limit=f"q_lengths and k_lengths, {self.size} numbers each",
                        value=f"q_lengths={q_lengths}, k_lengths={k_lengths}",
                        remedy='give both, or configure lengths="equal"',
                    )
                )
            return DeclaredCall(self, None, None, mask)
        declared: tuple[tuple[str, Any], ...] = (("q_lengths", q_lengths), ("k_lengths", k_lengths))
        for name, given in declared:
            fits = isinstance(given, Sequence) and len(given) == self.size
            if not fits or not all(isinstance(n, int) and n >= 0 for n in given):
                raise ArgumentError(message(f"call: {name} does not fit", limit=f"{self.size} lengths", value=given))
        return DeclaredCall(self, tuple(q_lengths), tuple(k_lengths), mask)

    @torch.compiler.disable
    def agree(
        self, what: str, same: Mapping[str, object], own: Mapping[str, object], error: str | None = None
    ) -> tuple[Header, ...]:
        """One small header from every rank, in rank order, before any payload.

        DisagreementError on all ranks when anything in `same` differs; PeerError on the others when one has an error.
        """
        return agree(self.groups.header, Header(next(self._numbers), what, same, own, error))

    def facts(self, call: Call) -> Facts:
        """The facts as a kernel of this context meets them: exchanges need lse, a ring's backward gets a merged one."""
        _refuse_what_is_not_passed_around(call)
        ring = self.config.ring_degree > 1
        return replace(call.facts, needs_lse=call.facts.needs_lse or self.size > 1, from_lse=ring)

    @contextlib.contextmanager
    def refusing_together(self, what: str = "attention") -> Iterator[None]:
        """A rank that refuses its own call tells the others, so that all of them raise instead of waiting."""
        try:
            yield
        except Exception as error:
            if self.config.lengths == "exchange":
                with contextlib.suppress(ParallelError):  # peers that do not come must not hide this rank's own error
                    self.agree(what, {}, {}, f"{type(error).__name__}: {error}")
                error.__dict__[TOLD] = True
            raise

    @torch.compiler.disable
    def _tell(self, error: BaseException) -> None:
        """An exception that leaves `with cp:` travels in the next header, where the other ranks wait for this one."""
        if self.config.lengths == "exchange" and isinstance(error, Exception) and not _known_to_peers(error):
            text = f"{type(error).__name__}: {error}"
            tell(self.groups.header, Header(next(self._numbers), "attention", {}, {}, text), GRACE)

    def plan(self, call: Call, choices: tuple[Choice, ...]) -> tuple[OpPair, bool]:
        """Agree with the other ranks on this call -> (the composed pair, whether peers need this rank's backward)."""
        if self.config.lengths == "equal":
            return DeclaredCall(self, None, None, "none").plan(call, choices)
        headers = self.agree("attention", agreement.same(call, choices), agreement.own(call, choices))
        plan, backend = agreement.settle(self.config, self.rank, call, headers)
        pair = next(choice.pair for choice in choices if choice.backend == backend)
        anchored = any(plan.wanted) and not any(call.facts.wanted)
        return plan.compose(self.groups, pair), anchored

    def _dim(self, x: Tensor, dim: int) -> int:
        if not -x.dim() <= dim < x.dim():
            raise ArgumentError(message("dim is out of range", limit=f"{-x.dim()} to {x.dim() - 1}", value=dim))
        return dim % x.dim()


def _known_to_peers(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, came from other ranks or was told to them."""
    while error is not None:
        if isinstance(error, ParallelError) or TOLD in error.__dict__:
            return True
        error = error.__cause__ or error.__context__
    return False


def _refuse_what_is_not_passed_around(call: Call) -> None:
    """What one device can and a context cannot yet, whatever the backend."""
    facts = call.facts
    table = (
        (facts.wanted.bias, "the gradient of a float mask", "mask.detach()"),
        (facts.dropout, "dropout", "dropout_p=0"),
        (facts.softcap, "softcap", "softcap=0"),
        (call.window != (None, None), "Window", "a mask with this rank's rows"),
        ("segments" in facts.mask_kinds, "Segments", "a mask with this rank's rows"),
    )
    for hit, what, remedy in table:
        if hit:
            raise UnsupportedError(
                message(
                    f"{what} is not supported under context parallelism yet",
                    call=call.text,
                    remedy=f"{remedy}, or parallel=False with native_math",
                )
            )


@dataclass(frozen=True)
class DeclaredCall:
    """A context with one call's lengths (None: every rank holds as many tokens as this one) and mask kind declared."""

    context: ContextParallel
    q_lengths: tuple[int, ...] | None
    k_lengths: tuple[int, ...] | None
    mask: MaskKind

    def facts(self, call: Call) -> Facts:
        return self.context.facts(call)

    @contextlib.contextmanager
    def refusing_together(self) -> Iterator[None]:
        """Nothing is exchanged in a declared call, so a refusal stays on its rank."""
        yield

    def plan(self, call: Call, choices: tuple[Choice, ...]) -> tuple[OpPair, bool]:
        """The composed pair; `declared` checks this rank's part against the declaration."""
        context = self.context
        size = context.size
        q_lengths = self.q_lengths or (call.facts.q_len,) * size
        k_lengths = self.k_lengths or (call.facts.k_len,) * size
        plan = agreement.declared(context.config, context.rank, call, q_lengths, k_lengths, self.mask)
        return plan.compose(context.groups, choices[0].pair), False


__all__ = ["Connectable", "ContextParallel", "DeclaredCall"]
