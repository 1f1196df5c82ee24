"""Faults between ranks, each a patch of one place in `ringtrue.parallel`; the tests must catch each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .. import call, merge
from ..contract import ForwardOut, Grads, OpPair
from ..parallel import context, globalise, joint, plan, ring, shard, ulysses
from ..parallel.comm import Template
from ..parallel.layout import dealt
from ..parallel.schedule import Block, Schedule
from ..parallel.twin import World


def _written(found: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    return found if into is None else (into[0].copy_(found[0]), into[1].copy_(found[1]))


def merge_without_care(
    total: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor, odds: object = 0.0, into: Any = None
) -> tuple[Tensor, Tensor]:
    """-inf - -inf is NaN, and nobody looked."""
    out = out.to(lse.dtype)
    if total is None:
        return out, lse
    new = torch.logaddexp(total[1], lse)
    weights = ((x - new).exp().transpose(1, 2).unsqueeze(-1) for x in (total[1], lse))
    return _written((total[0] * next(weights) + out * next(weights), new), into)


_merge, _add, _travel, _ring, _gather_keys = (
    merge.merge,
    ring._add,
    ring._travel,
    plan.ring,  # type: ignore[attr-defined]
    globalise._Globalise._gather,
)


def merge_in_bf16(
    total: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor, odds: Any = 0.0, into: Any = None
) -> tuple[Tensor, Tensor]:
    """Partial results are rounded at every step (zhuzilin/ring-flash-attention#42)."""
    merged, new = _merge(total, out, lse, odds)
    return _written((merged.bfloat16().to(merged.dtype), new), into)


def sum_in_bf16(parts: list[Tensor], dk: Tensor, dv: Tensor, wanted: Any) -> None:
    """dk and dv are rounded at every step."""
    _add(parts, dk, dv, wanted)
    for total in (dk, dv):
        total.copy_(total.bfloat16())


def without_last_step(comm: Any, schedule: Schedule, k: Tensor, v: Tensor) -> Iterator[Any]:
    """The keys of the rank just ahead are never looked at."""
    for step, block in enumerate(_travel(comm, schedule, k, v)):
        if step < comm.size - 1 or comm.size == 1:
            yield block


def stops_when_it_has_nothing(comm: Any, schedule: Schedule, k: Tensor, v: Tensor) -> Iterator[Any]:
    """Whether to talk is decided locally: a rank without queries does not pass the keys on."""
    for step, block in enumerate(_travel(comm, schedule, k, v)):
        yield block
        if step == 0 and not schedule.q[comm.rank]:
            return


def with_lse_zero(pair: OpPair, *args: Any) -> OpPair:
    """A ring step in which a row sees nothing reports lse 0, as torch's CPU flash and efficient kernels do."""

    def forward(*inputs: Any) -> ForwardOut:
        result = pair.forward(*inputs)
        return result._replace(lse=result.lse.masked_fill(result.lse == -torch.inf, 0.0))

    return _ring(replace(pair, forward=forward), *args)


def own_slice_only(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """gather's backward forgets the other ranks' gradients."""
    return dealt(grad, ctx.layout, ctx.dim)[ctx.comm.rank].contiguous(), *(None,) * 5


def neighbours_keys(op: Any, mine: Tensor | None, k: Tensor) -> Tensor:
    """Key masks are joined in another rank order than the keys."""
    return torch.cat(dealt(_gather_keys(op, mine, k), op.k, 1)[::-1], 1)


_here = threading.local()
_state, _backward, _row, _globalise = ring._state, ring._Ring.backward, Schedule._row, plan.globalise  # type: ignore[attr-defined]


def backward_with_the_last_state(op: Any, *given: Any) -> Grads:
    """Forward kept one random state for all steps of the ring."""
    _here.backward = True
    try:
        return _backward(op, *given)
    finally:
        _here.backward = False


def last_state(rng: Tensor | None, owner: int, number: int) -> Tensor | None:
    return _state(rng, 0 if getattr(_here, "backward", False) else owner, number)


def one_state(rng: Tensor | None, owner: int, number: int) -> Tensor | None:
    """Every step of a ring drops the same places: the gradient is right, the randomness is not."""
    return rng


def one_state_for_all_ranks(op: Any, rng: Tensor | None) -> Tensor | None:
    """Ranks with one seed drop the same places of their own heads or rows."""
    return rng


def rank_order(parts: Sequence[Tensor], layout: Any, dim: int) -> Tensor:
    """What ranks hold, joined as if it lay rank after rank."""
    return torch.cat(list(parts), dim)


def own_upstream_only(op: Any, upstream: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Each rank takes its own objective for the whole gradient of the prefix rows."""
    return [op._cut(x, dim) for x, dim in upstream]


def prefix_forgotten(*given: Any, joint_prefix: int = 0, **more: Any) -> Any:
    """Text tokens are every rank's own: they count as often as there are ranks."""
    return _call(*given, **more)


_call = context.ContextParallel.call


def sums_replicated_keys(pair: OpPair, comm: Any, k: Any, *rest: Any) -> OpPair:
    """dk of keys that every rank holds is summed over ranks, and then by the training script again."""
    whole = _globalise(pair, comm, k, *rest)

    def backward(*given: Any) -> Grads:
        grads = whole.backward(*given)
        if k is not None or grads.dk is None:
            return grads
        form = [Template(tuple(grads.dk.shape), grads.dk.dtype)]
        received = comm.exchange([[grads.dk]] * comm.size, [form] * comm.size, grads.dk.device).wait()
        return grads._replace(dk=torch.stack([part for (part,) in received]).sum(0))

    return replace(whole, backward=backward)


def window_from_here(schedule: Schedule, span: Any, rows: slice, keys: Any) -> list[Block]:
    """The window counts from this rank's first query and each block's first key."""
    blocks = _row(replace(schedule, since=None), span, rows, keys)
    since = schedule.since
    return blocks if since is None else [replace(b, since=since + rows.start - b.cols.start) for b in blocks]


def without_lse_gradient(op: Any, grad_out: Tensor, grad_lse: Tensor | None, options: Any) -> Any:
    """Heads are exchanged for the gradient of out, and that of lse is forgotten."""
    return _send_upstream(op, grad_out, None, options)


_send_upstream = ulysses._Round.send_upstream


def neighbours_columns(x: Tensor, layout: Any, dim: int) -> list[Tensor]:
    """Each rank gets the gradient of another rank's key bias."""
    return dealt(x, layout, dim)[::-1]


def neighbours_segments(op: Any, mine: Tensor | None, k: Tensor) -> Tensor:
    """Documents of keys are joined in another rank order than the keys."""
    whole = _gather_keys(op, mine, k)
    of_ids = not whole.is_floating_point() and whole.dtype != torch.bool
    return whole if not of_ids else torch.cat(dealt(whole, op.k, 1)[::-1], 1)


def contiguous_layout(config: Any, lengths: Sequence[int], prefix: int = 0) -> Any:
    """Balanced shards, and positions as if they were contiguous."""
    return _layout_of(replace(config, load_balance="none"), lengths, prefix)


_layout_of = plan.layout_of


_contribute = ring._Ring._contribute


def the_other_way_round(op: Any, owner: int, leaving: list[Tensor], k: Tensor, v: Tensor) -> Any:
    """What is added to another's dk and dv goes as far back as it should go ahead; two ranks are the same both ways."""
    return _contribute(op, (2 * op.comm.rank - owner) % op.comm.size, leaving, k, v)


def first_step_in_all(op: Any, grad_out: Tensor, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Grads:
    """Backward reads what the first step saved, in every step: its keys, and the out and lse of those alone."""
    mask, _, _, rng, _, options, _ = rest
    own = op.pair.forward(q, k, v, mask, rng, options)
    ends = (own.out, own.lse, rng, own.saved, options, op.wanted)
    grads = op.pair.backward(grad_out, grad_lse, q, k, v, mask, *ends)
    comm, sums = op.comm, []
    for part in (grads.dk, grads.dv):  # they travel, and are added to whatever is there
        form = [Template(tuple(part.shape), part.dtype)]
        received = comm.exchange([[part]] * comm.size, [form] * comm.size, part.device).wait()
        sums.append(torch.stack([x for (x,) in received]).sum(0))
    return Grads(comm.size * grads.dq, *sums)


@contextmanager
def both(*faults: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "merge without -inf care": lambda: patch.object(merge, "merge", merge_without_care),
    "merge in bf16": lambda: patch.object(merge, "merge", merge_in_bf16),
    "dk/dv summed in bf16": lambda: patch.object(ring, "_add", sum_in_bf16),
    "last ring step left out": lambda: patch.object(ring, "_travel", without_last_step),
    "whether to talk decided locally": lambda: patch.object(ring, "_travel", stops_when_it_has_nothing),
    "lse 0 for an empty row in one ring step": lambda: patch.object(plan, "ring", with_lse_zero),
    "gather backward missing the sum": lambda: patch.object(shard.Gather, "backward", staticmethod(own_slice_only)),
    "key mask of the wrong rank": lambda: patch.object(globalise._Globalise, "_gather", neighbours_keys),
    "one random state for all ring steps": lambda: both(
        patch.object(ring._Ring, "backward", backward_with_the_last_state), patch.object(ring, "_state", last_state)
    ),
    "every ring step drops the same places": lambda: patch.object(ring, "_state", one_state),
    "every rank drops the same places": lambda: patch.object(globalise._Globalise, "_state", one_state_for_all_ranks),
    "tokens joined in rank order": lambda: patch.object(ulysses, "in_order", rank_order),
    "key mask joined in rank order": lambda: patch.object(globalise, "in_order", rank_order),
    "gather joins in rank order": lambda: patch.object(shard, "in_order", rank_order),
    "prefix gradient not summed": lambda: patch.object(joint._Joint, "_sum", own_upstream_only),
    "prefix counted on every rank": lambda: patch.object(context.ContextParallel, "call", prefix_forgotten),
    "replicated dk summed twice": lambda: patch.object(plan, "globalise", sums_replicated_keys),
    "window offset local": lambda: patch.object(Schedule, "_row", window_from_here),
    "lse gradient dropped under Ulysses": lambda: patch.object(ulysses._Round, "send_upstream", without_lse_gradient),
    "dbias of another rank's keys": lambda: patch.object(globalise, "dealt", neighbours_columns),
    "segments of the wrong rank": lambda: patch.object(globalise._Globalise, "_gather", neighbours_segments),
    "ring sums the wrong way round": lambda: patch.object(ring._Ring, "_contribute", the_other_way_round),
    "first step in all steps of a ring": lambda: patch.object(ring._Ring, "backward", first_step_in_all),
    "head_tail positions contiguous": lambda: patch.object(plan, "layout_of", contiguous_layout),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The named fault, in this process, for the time of the block."""
    with FAULTS[name]():
        yield


def in_process(size: int, fn: Callable[[Any], Any]) -> list[Any]:
    """fn(mesh) on `size` ranks that are threads of this process, as torch's own generator of one seed would have it."""

    def body(mesh: Any) -> Any:
        _drawing.generator = torch.Generator().manual_seed(7)
        return fn(mesh)

    with patch.object(call, "random_state", _random_state):
        return World(size, wait=2.0).run(body)


def _random_state() -> Tensor:
    return torch.nn.functional.pad(torch.randint(2**63 - 1, (1,), generator=_drawing.generator), (0, 1))


_drawing = threading.local()
