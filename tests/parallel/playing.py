"""One rank of a random call, on any transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from problems import Draw, places
from torch import Tensor

import ringtrue as rt
from ringtrue import call as calls
from ringtrue.parallel.twin import Rank


class Local(NamedTuple):
    """What one rank has: its inputs, and what it back-propagates."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    grad_out: Tensor
    grad_lse: Tensor | None
    bias: Tensor | None


class Result(NamedTuple):
    """What one rank gets; `drawn` where dropout left something, (B, H, Sq, Sk) of its queries and all keys."""

    out: Tensor
    lse: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None = None
    drawn: Tensor | None = None


def local_of(problem: Draw, rank: int, device: torch.device | str = "cpu") -> Local:
    x, mask = problem.inputs, problem.inputs.mask
    rows, cols = places(problem, rank)
    leaf = lambda part, name: part.to(device, copy=True).requires_grad_(problem.wanted(rank, name))
    parts: list[Any] = []
    bias = None
    if mask.dense is not None:
        dense = mask.dense[:, :, rows] if mask.dense.shape[2] == x.q.shape[1] else mask.dense
        dense = bias = leaf(dense, "b") if dense.is_floating_point() else dense.to(device)
        full = (x.q.shape[0], x.q.shape[2], len(rows), x.k.shape[1])
        parts.append(rt.Dense(dense.expand(full) if problem.expanded else dense))
    if mask.key_keep is not None:
        keep = mask.key_keep[:, cols]
        parts += [] if problem.keep_or_none and bool(keep.all()) else [rt.KeyPadding(keep.to(device))]
    if mask.key_bias is not None:
        bias = leaf(mask.key_bias[:, cols], "b")
        parts.append(rt.KeyBias(bias))
    if mask.q_segments is not None and mask.k_segments is not None:
        ids = mask.q_segments[:, rows], mask.k_segments[:, cols]
        same = mask.q_segments is mask.k_segments
        parts.append(rt.Segments(ids[0].to(device), None if same else ids[1].to(device)))
    parts += [] if problem.alignment is None else [rt.Causal(problem.alignment)]  # type: ignore[arg-type]
    parts += [] if problem.window == (None, None) else [rt.Window(*problem.window)]
    mask_of_rank = reduce(lambda a, b: a & b, parts) if parts else None
    tensors = leaf(x.q[:, rows], "q"), leaf(x.k[:, cols], "k"), leaf(x.v[:, cols], "v")
    grads = [
        None if g is None else _share(problem, rank, g, i, rows).to(device)
        for i, g in ((1, x.grad_out), (2, x.grad_lse))
    ]
    return Local(*tensors, mask_of_rank, *grads, bias)  # type: ignore[arg-type]


def _share(problem: Draw, rank: int, grad: Tensor, dim: int, rows: Tensor) -> Tensor:
    """The rank's rows of an upstream gradient; of those of the prefix only a part: every rank's add up to the whole."""
    own = grad.index_select(dim, rows)
    first = own.narrow(dim, 0, problem.prefix)
    if problem.prefix:
        parts = [
            torch.randint(-8, 9, first.shape, generator=torch.Generator().manual_seed(100 + r)) / 4 * bool(first.any())
            for r in range(problem.size - 1)
        ]
        whole = first.double()
        mine = parts[rank] if rank < len(parts) else whole - sum(parts)
        first.copy_(mine)
    return own


def context(problem: Draw, mesh: object = None, **options: object) -> rt.ContextParallel:
    ulysses, ring = problem.degrees
    balance = "head_tail" if problem.balanced else "none"
    timeout = 20.0 if isinstance(mesh, Rank) else 120.0  # of processes, one may be compiling a kernel meanwhile
    config = rt.ContextParallelConfig(ulysses, ring, mesh=mesh, load_balance=balance, timeout=timeout, **options)  # type: ignore[arg-type]
    # making groups of real processes takes longer than all of a draw
    return rt.context_parallel(config) if mesh is None else rt.ContextParallel(config)


def call_of(problem: Draw, cp: rt.ContextParallel) -> Any:
    """What is passed as `parallel`."""
    lengths = {}
    if problem.declared:
        q, k = (tuple(n + problem.prefix for n in own) for own in (problem.q_lengths, problem.k_lengths))
        lengths = {"q_lengths": q, "k_lengths": k * problem.size if problem.replicated else k, "mask": problem.declared}
    special = {"joint_prefix": problem.prefix, "kv_replicated": problem.replicated}
    special = {name: value for name, value in special.items() if value}
    return cp.call(**lengths, **special) if lengths or special else cp


def play(mesh: object, problem: Draw, backend: object = None, device: torch.device | str = "cpu") -> Result:
    """One rank."""
    cp = context(problem, mesh)
    local = local_of(problem, cp.rank, device)
    options = problem.inputs.options

    def attend(v: Tensor) -> tuple[Tensor, Tensor | None]:
        _seed(mesh, 7 + (cp.rank if problem.seeds == "own" else 0))
        got = rt.attention(
            local.q, local.k, v, local.mask, options.dropout_p, scale=options.scale, enable_gqa=True,
            softcap=options.softcap, return_lse=options.return_lse, parallel=call_of(problem, cp),
            backend=problem.backend if backend is None else backend,
        )  # fmt: skip
        return got if options.return_lse else (got, None)  # type: ignore[return-value]

    out, lse = attend(local.v)
    _back(problem, cp.rank, local, out, lse)
    drawn = _revealed(problem, local.v, lambda v: attend(v)[0], cp.rank) if options.dropout_p else None
    leaves = (local.q, local.k, local.v, local.bias)
    grads = (None if x is None or not x.requires_grad else x.grad for x in leaves)
    found = (out.detach(), None if lse is None else lse.detach(), *grads, drawn)
    return Result(*(None if x is None else x.cpu() for x in found))  # type: ignore[arg-type]


def _back(problem: Draw, rank: int, local: Local, out: Tensor, lse: Tensor | None) -> None:
    """This rank's part of the objective. A rank that wants nothing takes part where a peer does."""
    if not any(problem.inputs.wanted):
        assert not out.requires_grad
        return
    use = problem.used(rank)
    ends = [(out, local.grad_out)] if use != "lse" else []
    ends += [(lse, local.grad_lse)] if lse is not None and use != "out" else []
    torch.autograd.backward([x for x, _ in ends], [g for _, g in ends])


def _revealed(problem: Draw, own: Tensor, forward: Callable[[Tensor], Tensor], rank: int) -> Tensor:
    """The mask that was drawn: v = columns of the identity over all keys, as many at a time as v is wide."""
    cols, keys, width = places(problem, rank)[1].to(own.device), problem.inputs.k.shape[1], own.shape[3]
    kept = []
    for start in range(0, keys, width):
        one_hot = (cols[:, None] == torch.arange(start, start + width, device=own.device)).to(own.dtype)
        with torch.no_grad():
            out = forward(one_hot[None, :, None].expand(own.shape).contiguous())
        kept.append(out[..., : min(width, keys - start)] != 0)
    shape = (own.shape[0], problem.inputs.q.shape[2], len(places(problem, rank)[0]), 0)
    seen = torch.cat(kept, -1).transpose(1, 2) if kept else torch.zeros(shape, device=own.device)
    return seen.double() / (1 - problem.inputs.options.dropout_p)


_here = threading.local()


def _seed(mesh: object, seed: int) -> None:
    """What torch.manual_seed is to a process of its own."""
    if isinstance(mesh, Rank):
        _here.generator = mesh.generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextmanager
def generators() -> Iterator[None]:
    """Ranks that are threads share torch's default generator; here each draws from its own, the same numbers."""

    def random_state() -> Tensor:
        drawn = torch.randint(2**63 - 1, (1,), generator=_here.generator)
        return torch.nn.functional.pad(drawn, (0, 1))

    with patch.object(calls, "random_state", random_state):
        yield
