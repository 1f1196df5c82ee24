"""Faults of who reads whose keys: grouped heads, keys left out, and the steps and ranks of a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..inputs import Inputs
from ..truth import Quantities, Truth
from .fault import Fault, everywhere

RANKS = (2, 3, 4, 8)


def sharing(x: Inputs, right: Truth) -> Iterator[Fault]:
    yield from groups(x)
    if x.k.shape[1] > 1:
        yield from left_out(x)
        yield from ring(x)


def groups(x: Inputs) -> Iterator[Fault]:
    """Hk < H: dk and dv of a group's heads not added, or heads dealt out in another order."""
    kv_heads = x.k.shape[2]
    group = x.q.shape[2] // kv_heads if kv_heads else 1
    if group <= 1:
        return
    spread = replace(x, k=x.k.repeat_interleave(group, 2), v=x.v.repeat_interleave(group, 2))
    by_group = lambda t: t.unflatten(2, (kv_heads, group))
    for words, pick in (
        ("the first head", lambda t: by_group(t)[..., 0, :]),
        ("the last head", lambda t: by_group(t)[..., -1, :]),
        ("the mean", lambda t: by_group(t).mean(3)),
    ):
        cause = f"{words} of each group of query heads in place of their sum"
        yield Fault(cause, x, spread, own=True, change=_of_keys(pick))
    dealt = replace(x, k=x.k.repeat(1, 1, group, 1), v=x.v.repeat(1, 1, group, 1))
    fold = _of_keys(lambda t: t.unflatten(2, (group, kv_heads)).sum(2))
    for fault in everywhere("query heads that read key head h % Hk in place of h // (H / Hk)", x, dealt):
        yield replace(fault, change=None if fault.backward is x else fold)


def _of_keys(pick: Callable[[Tensor], Tensor]) -> Callable[[Quantities], Quantities]:
    def change(f: Quantities) -> Quantities:
        return f._replace(dk=None if f.dk is None else pick(f.dk), dv=None if f.dv is None else pick(f.dv))

    return change


def left_out(x: Inputs) -> Iterator[Fault]:
    """Keys that nobody looks at, and queries that come back as zeros."""
    keys, queries = x.k.shape[1], x.q.shape[1]
    last = torch.arange(keys, device=x.k.device) < keys - 1
    yield from everywhere("leaving out the last key", x, _kept(x, last[None]))
    for n in (2, 4):
        half = torch.arange(keys, device=x.k.device) < -(-keys // n)
        yield Fault(f"seeing the first of {n} parts of the keys alone", _kept(x, half[None]))
    for n in RANKS:
        if n <= min(keys, queries):
            mine = _owner(queries, n, x).unsqueeze(1) == _owner(keys, n, x)
            yield Fault(f"queries that see the keys of their own rank alone ({n} ranks)", _apart(x, mine))
            after = (_owner(queries, n, x).unsqueeze(1) + 1) % n != _owner(keys, n, x)
            if n > 2:
                yield Fault(f"a ring without its last step ({n} ranks)", _apart(x, after))
    if queries > keys:
        live = (torch.arange(queries, device=x.q.device) < keys)[None, :, None, None]
        gone = replace(x, grad_out=x.grad_out * live)
        change = lambda f: f._replace(out=None if f.out is None else f.out * live)
        yield Fault("zeros for queries beyond the number of keys", x, gone, change=change)


def ring(x: Inputs) -> Iterator[Fault]:
    """Backward in steps: with the keys of the first step in all of them, or each with an out and lse of its own."""
    keys, queries = x.k.shape[1], x.q.shape[1]
    middle = keys // 2
    cut = [[0, min(1, middle), middle, keys], *(_edges(keys, n) for n in (2, 3, 4))]
    stale, own = "the key and value of a backward's first step in all its steps", "an lse of each step's own keys"
    for edges in cut:
        yield Fault(stale, x, _stale(x, edges, 0))
        parts = tuple(_kept(x, _within(keys, a, b, x)[None]) for a, b in pairwise(edges) if b > a)
        yield Fault(f"an out and {own} in backward", x, x, own=True, parts=parts)
    for n in RANKS:
        if n <= min(keys, queries):
            edges, rows = _edges(keys, n), _owner(queries, n, x)
            parts = tuple(_of_rows(_stale(x, edges, r), rows == r) for r in range(n))
            yield Fault(f"stale key and value: {stale} ({n} ranks)", x, x, parts=parts)
            if keys % n == 0:
                yield _first_step_alone(x, n)
            if n > 2 and keys % n == 0 and not x.mask.kinds and x.mask.causal is None:
                parts = tuple(_of_rows(_reflected(x, n, r), rows == r) for r in range(n))
                yield Fault(f"a ring whose sums travel the wrong way round ({n} ranks)", x, x, parts=parts)


def _first_step_alone(x: Inputs, n: int) -> Fault:
    """Every step of a ring's backward repeats the first: own keys, with the out and lse of those, summed as if rotated.

    (diffusers up to 0.39: what backward reads was saved in the first step, and the loop's own variables go unused.)
    """
    keys, queries = x.k.shape[1], x.q.shape[1]
    alone = _apart(x, _owner(queries, n, x).unsqueeze(1) == _owner(keys, n, x))

    def change(f: Quantities) -> Quantities:
        def mixed(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.unflatten(1, (n, -1)).sum(1).repeat(1, n, 1, 1)

        return f._replace(dq=None if f.dq is None else n * f.dq, dk=mixed(f.dk), dv=mixed(f.dv))

    cause = f"stale key and value: the first step of a ring's backward, its keys, out and lse, in all steps ({n} ranks)"
    return Fault(cause, x, alone, own=True, change=change)


def _stale(x: Inputs, edges: Sequence[int], first: int) -> Inputs:
    """Every part's tokens replaced by those of part `first`; where a part is longer, the rest stays its own."""

    def of(t: Tensor) -> Tensor:
        parts = [t[:, a:b] for a, b in pairwise(edges)]
        one = parts[first]
        return torch.cat([torch.cat([one[:, : p.shape[1]], p[:, one.shape[1] :]], 1) for p in parts], 1)

    return replace(x, k=of(x.k), v=of(x.v))


def _reflected(x: Inputs, n: int, r: int) -> Inputs:
    """Part c of the keys at the place of part 2r - c, as sums that move against the keys see them from rank r.

    (diffusers 0.40 to 0.42: right for two ranks, where both ways around are the same.)
    """
    order = torch.tensor([(2 * r - s) % n for s in range(n)], device=x.k.device)
    k, v = (t.unflatten(1, (n, -1))[:, order].flatten(1, 2) for t in (x.k, x.v))
    return replace(x, k=k, v=v)


def _of_rows(x: Inputs, rows: Tensor) -> Inputs:
    """The gradient that comes of these queries."""
    g = x.grad_lse
    own = x.grad_out * rows[None, :, None, None]
    return replace(x, grad_out=own, grad_lse=None if g is None else g * rows[None, None])


def _kept(x: Inputs, keep: Tensor) -> Inputs:
    """Keys hidden by (1, Sk) beside what hides them already."""
    keep = keep.expand(x.q.shape[0], -1)
    keep = keep if x.mask.key_keep is None else keep & x.mask.key_keep
    return replace(x, mask=replace(x.mask, key_keep=keep))


def _apart(x: Inputs, seen: Tensor) -> Inputs:
    """Keys hidden by (Sq, Sk) beside what hides them already."""
    dense = x.mask.dense
    if dense is None:
        return replace(x, mask=replace(x.mask, dense=seen[None, None]))
    if dense.dtype == torch.bool:
        return replace(x, mask=replace(x.mask, dense=dense & seen))
    hidden = torch.full_like(dense, -torch.inf)
    return replace(x, mask=replace(x.mask, dense=torch.where(seen, dense, hidden)))


def _edges(length: int, parts: int) -> list[int]:
    ends = [0]
    for part in torch.arange(length).tensor_split(parts):
        ends.append(ends[-1] + len(part))
    return ends


def _owner(length: int, parts: int, x: Inputs) -> Tensor:
    """The rank of every token where a sequence is cut as evenly as can be."""
    sizes = torch.tensor([len(p) for p in torch.arange(length).tensor_split(parts)], device=x.q.device)
    return torch.repeat_interleave(torch.arange(parts, device=x.q.device), sizes)


def _within(length: int, start: int, stop: int, x: Inputs) -> Tensor:
    places = torch.arange(length, device=x.k.device)
    return (places >= start) & (places < stop)
