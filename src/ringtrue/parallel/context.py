"""A context: the ranks that share one sequence, and what they agree on before each call."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from .. import scope
from ..contract import Choice, Facts, OpPair
from ..errors import ArgumentError, ParallelError, message
from . import agreement
from .comm import Connectable, connect, default_group
from .config import ContextParallelConfig
from .declaration import NOTHING, Declaration, MaskKind, declare
from .gather import gather
from .header import Header, agree, tell
from .layout import Layout, cuts, positions
from .named import find, keep
from .plan import Plan, balanced_lengths, layout_of
from .shard import dim_of, shard

if TYPE_CHECKING:
    from ..call import Call

GRACE = 5.0  # seconds that a rank with an exception of its own waits for its peers' next header
TOLD = "_told_to_peers"  # marks an exception whose text the other ranks have
_numbers = itertools.count(1)


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
        self.key = f"{next(_numbers)}:{config.ulysses_degree}x{config.ring_degree}"  # its name in this process
        self._calls = itertools.count()
        keep(self)

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

    def scope(self) -> AbstractContextManager[None]:
        """`with cp.scope():` is `with cp:` for compiled code: torch cannot enter an object made outside of it."""
        return scope.context_scope(self)

    def __repr__(self) -> str:
        degrees = f"ulysses_degree={self.config.ulysses_degree}, ring_degree={self.config.ring_degree}"
        return f"ContextParallel(rank {self.rank} of {self.size}, {degrees})"

    def _shards(self, total: int) -> Layout:
        """Where `shard` puts the tokens of a sequence."""
        lengths = [stop - start for start, stop in cuts(total, self.size)]
        if self.config.load_balance == "head_tail":
            lengths = list(balanced_lengths(self.config, total))
        return layout_of(self.config, lengths)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of `x`, which is whole and equal on every rank, maybe empty: `tensor_split` along `dim`, or
        what `load_balance="head_tail"` gives it.

        Backward zero-pads: the gradient of `x` is Partial("sum").
        """
        dim = dim_of(x, dim, "shard")
        return shard(x, dim, self._shards(x.shape[dim])[self.rank])

    def positions(self, global_length: int) -> Tensor:
        """The global position of each token of this rank's shard: int64 (local length,), on the CPU.

        What depends on a token's place (RoPE, position embeddings) must use them. Behind a joint prefix of n tokens
        they begin at n: add it.
        """
        if type(global_length) is not int or global_length < 0:
            text = message("positions: no such length", limit="0, 1, 2, ... tokens", value=repr(global_length))
            raise ArgumentError(text)
        return positions(self._shards(global_length)[self.rank])

    def gather(
        self,
        x: Tensor,
        dim: int,
        prefix: int = 0,
        lengths: Sequence[int] | None = None,
        backward: Literal["sum", "slice"] = "sum",
    ) -> Tensor:
        """Every rank's shard, joined along `dim` in global order, whole and equal on every rank.

        prefix    the first so many tokens are a joint prefix, the same on every rank: it stays in front, once.
        lengths   tokens per context rank, prefix included; given, nothing is exchanged beforehand. Local size is
                  checked against it.
        backward  "sum" (the rule of this library): each rank's gradient of a shard is summed by its owner, in float32;
                  that of a prefix is each rank's own, Partial("sum") like all else.
                  "slice" (diffusers' convention, last gather only): each rank keeps its own slice, and one piece of a
                  prefix; parameters after it are then not Partial.
        """
        return gather(self, x, dim, prefix, lengths, backward)

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
    ) -> DeclaredCall:
        """What to pass as `parallel` to declare things of one call.

        q_lengths, k_lengths  tokens per context rank, as each rank passes them, both or neither. Nothing is then
                              exchanged before the call; this rank's sizes and mask are checked against the declaration;
                              dtype and wanted gradients are equal on all ranks by contract.
        mask                  the kind of mask of a call that exchanges nothing; "rows_*": a tensor mask with this
                              rank's rows
        joint_prefix          the first so many tokens of q, k and v are the same on every rank, such as a text beside
                              its part of a video. They count once, in front of all others; out is equal there on all
                              ranks. A tensor mask has a row for each token here, and their columns once, in front.
        kv_replicated         k and v (and key masks) are whole on every rank: nothing is sent; their gradients are
                              Partial("sum"). k_lengths is then their whole length, for every rank.
        """
        return DeclaredCall(self, declare(self.config, q_lengths, k_lengths, mask, joint_prefix, kv_replicated))

    @torch.compiler.disable
    def agree(
        self, what: str, same: Mapping[str, object], own: Mapping[str, object], error: str | None = None
    ) -> tuple[Header, ...]:
        """One small header from every rank, in rank order, before any payload.

        DisagreementError on all ranks when anything in `same` differs; PeerError on the others when one has an error.
        """
        return agree(self.groups.header, Header(next(self._calls), what, same, own, error))

    @property
    def silent(self) -> bool:
        """Whether nothing is exchanged before a call of which nothing more is declared."""
        return self.config.lengths == "equal"

    def facts(self, call: Call) -> Facts:
        """The facts as a kernel of this context meets them: exchanges need lse, a ring's backward gets a merged one."""
        return DeclaredCall(self, NOTHING).facts(call)

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
            tell(self.groups.header, Header(next(self._calls), "attention", {}, {}, text), GRACE)

    def plan(self, call: Call, choices: tuple[Choice, ...]) -> Planned:
        """Agree with the other ranks on this call."""
        return DeclaredCall(self, NOTHING).plan(call, choices)

    def replan(self, call: Call, pair: OpPair, numbers: Sequence[int]) -> OpPair:
        """The composition of a call that was planned before, from its plan's numbers."""
        return DeclaredCall(self, NOTHING).replan(call, pair, numbers)


def _known_to_peers(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, came from other ranks or was told to them."""
    while error is not None:
        if isinstance(error, ParallelError) or TOLD in error.__dict__:
            return True
        error = error.__cause__ or error.__context__
    return False


class Planned(NamedTuple):
    """What the ranks agreed on: the composed pair, of which backend, and whether peers need this rank's backward."""

    pair: OpPair
    choice: Choice
    anchored: bool
    plan: Plan


@dataclass(frozen=True)
class DeclaredCall:
    """A context with what was declared of one call."""

    context: ContextParallel
    said: Declaration  # no default: torch 2.11 cannot trace one

    @property
    def silent(self) -> bool:
        """Whether nothing is exchanged before the call."""
        return self.said.q_lengths is not None or self.context.silent

    def facts(self, call: Call) -> Facts:
        """The facts as a kernel meets them."""
        context = self.context
        ring = context.config.ring_degree > 1 and not self.said.kv_replicated
        needs_lse = call.facts.needs_lse or ring
        return replace(call.facts, needs_lse=needs_lse, from_lse=ring, sharded=context.size > 1)

    @contextlib.contextmanager
    def refusing_together(self) -> Iterator[None]:
        """As the context's; where nothing is exchanged a refusal stays on its rank."""
        with contextlib.nullcontext() if self.silent else self.context.refusing_together():
            yield

    def plan(self, call: Call, choices: tuple[Choice, ...]) -> Planned:
        """Agree with the other ranks, or check this rank's part against what was declared."""
        context, config, rank = self.context, self.context.config, self.context.rank
        if self.silent:
            plan, choice = agreement.settled_alone(config, rank, self.said, call), choices[0]
        else:
            same, own = agreement.same(config, self.said, call, choices), agreement.own(call, choices)
            plan, backend = agreement.settle(config, rank, self.said, call, context.agree("attention", same, own))
            choice = next(choice for choice in choices if choice.backend == backend)
        anchored = any(plan.wanted) and not any(call.facts.wanted)
        return Planned(plan.compose(context.groups, choice.pair), choice, anchored, plan)

    def replan(self, call: Call, pair: OpPair, numbers: Sequence[int]) -> OpPair:
        """The composition of a call that was planned before; talks to nobody."""
        context = self.context
        plan = agreement.again(context.config, context.rank, self.said, call, numbers)
        return plan.compose(context.groups, pair)


_made: dict[tuple[object, ...], ContextParallel] = {}


def context_parallel(config: ContextParallelConfig) -> ContextParallel:
    """The context of a config, made once for the default process group of the time: the same groups whenever it is
    asked for again. All ranks of the context ask for it together. Raises as ContextParallel does."""
    world = default_group()
    for known in [key for key in _made if key[1] is not world]:  # that process group was destroyed
        del _made[known]
    found = _made.get((config, world))
    if found is None:
        found = _made[config, world] = ContextParallel(config)
    return found


__all__ = ["Connectable", "ContextParallel", "DeclaredCall", "Planned", "context_parallel", "find"]
