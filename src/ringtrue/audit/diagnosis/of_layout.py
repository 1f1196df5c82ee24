"""Faults of layout and of strides: right numbers, read in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..inputs import Inputs
from ..truth import Quantities, Truth
from .fault import Fault, everywhere, in_backward

NAMES = {"q": "query", "k": "key", "v": "value", "grad_out": "grad_out"}


def layouts(x: Inputs, right: Truth) -> Iterator[Fault]:
    yield from other_layout(x)
    yield from transposed_twice(x)
    yield from strides_ignored(x)
    yield from strides_of_out(x, right)
    yield from lse_transposed(x)


def other_layout(x: Inputs) -> Iterator[Fault]:
    """A function of (B, H, S, D) that is called with (B, S, H, D): every shape fits, and heads attend to heads."""
    if x.q.shape != x.k.shape or x.mask.kinds:
        return
    q, k, v, g = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.grad_out))
    swapped = replace(x, q=q, k=k, v=v, grad_out=g, grad_lse=None)
    turn = lambda t: None if t is None else t.transpose(1, 2)
    change = lambda f: Quantities(*(turn(t) for t in (f.out, f.lse, f.dq, f.dk, f.dv)))
    yield Fault(
        "heads that attend to heads in place of tokens (another layout than is said, --layout)", swapped, change=change
    )


def by_reshape(t: Tensor) -> Tensor:
    """Heads outermost in memory, read as if tokens were."""
    return t.transpose(1, 2).reshape(t.shape)


def by_strides(t: Tensor) -> Tensor:
    """Tokens outermost in memory, read as if heads were."""
    batch, length, heads, dim = t.shape
    return t.reshape(batch, heads, length, dim).transpose(1, 2)


def transposed_twice(x: Inputs) -> Iterator[Fault]:
    """(B, S, H, D) swapped once too often in backward; the gradients come back as they are, or swapped back."""
    sets = {"key and value": "kv", "query": "q", "query, key and value": "qkv", "key": "k", "value": "v"}
    square = x.q.shape[1] == x.q.shape[2] and x.k.shape[1] == x.k.shape[2]
    readings = ((by_reshape, by_strides),) if square else ((by_reshape, by_strides), (by_strides, by_reshape))
    for (words, names), (read, undo), back in product(sets.items(), readings, (False, True)):
        if all(min(getattr(x, n).shape[1:3]) <= 1 for n in names):
            continue
        wrong = replace(x, **{n: read(getattr(x, n)) for n in names})  # type: ignore[arg-type]
        change = _each([f"d{n}" for n in names], undo) if back else None
        for fault in in_backward(f"a second transpose of {words}", x, wrong):
            yield replace(fault, change=change)


def _each(names: list[str], read: Callable[[Tensor], Tensor]) -> Callable[[Quantities], Quantities]:
    def change(found: Quantities) -> Quantities:
        there = {n: getattr(found, n) for n in names}
        return found._replace(**{n: read(g) for n, g in there.items() if g is not None})

    return change


def strides_ignored(x: Inputs) -> Iterator[Fault]:
    """A tensor's memory read through other strides than its own: contiguous ones, or those of heads outermost."""
    for name, word in NAMES.items():
        given: Tensor = getattr(x, name)
        for how, strides in _strides(given).items():
            read = _through(given, strides)
            if read is None:
                continue
            wrong = replace(x, **{name: read})  # type: ignore[arg-type]
            cause = f"{word} read through other strides than its own ({how})"
            yield from everywhere(cause, x, wrong) if name != "grad_out" else in_backward(cause, x, wrong)


def strides_of_out(x: Inputs, right: Truth) -> Iterator[Fault]:
    """out on its way to backward; its own strides are not known here, so both layouts that kernels give are tried."""
    out = right.values.out
    assert out is not None
    for how, read in (("heads outermost", by_strides), ("contiguous", by_reshape)):
        if not torch.equal(read(out), out):
            yield Fault(f"out read through other strides than its own ({how}) in backward", x, x, out=read(out))


def lse_transposed(x: Inputs) -> Iterator[Fault]:
    """With as many heads as queries the shape does not tell."""
    if x.q.shape[1] == x.q.shape[2] > 1:
        turn = lambda f: f._replace(lse=None if f.lse is None else f.lse.transpose(1, 2))
        yield Fault("an lse laid out as (B, Sq, H)", x, change=turn)


def _strides(t: Tensor) -> dict[str, tuple[int, ...]]:
    _, length, heads, dim = t.shape
    every = length * heads * dim
    found = {"contiguous": (every, heads * dim, dim, 1), "heads outermost": (every, dim, length * dim, 1)}
    return {how: strides for how, strides in found.items() if strides != t.stride()}


def _through(t: Tensor, strides: tuple[int, ...]) -> Tensor | None:
    """None where the memory is too small, holds what no kernel could compute with, or reads the same."""
    room = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    if not t.numel() or sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True)) >= room:
        return None
    read = t.as_strided(t.shape, strides)
    return read if bool(read.isfinite().all()) and not torch.equal(read, t) else None
