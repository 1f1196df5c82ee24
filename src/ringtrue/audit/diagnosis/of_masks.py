"""Faults of masks: ignored, added as numbers, inverted, another sample's or place's; and rows that see nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...contract import Mask, accumulate_dtype
from ..inputs import Inputs
from ..truth import Quantities, Truth, visible
from .fault import Fault, everywhere

WORDS = {"dense": "the mask", "key_keep": "the key mask", "key_bias": "the bias of keys", "q_segments": "the segments"}


def masks(x: Inputs, right: Truth) -> Iterator[Fault]:
    for cause, mask in changed(x.mask, x):
        wrong = replace(x, mask=mask)
        yield from everywhere(cause, x, wrong)
        if x.mask.bias is not None and mask.bias is None:
            zero = lambda f: f._replace(dbias=None if f.dbias is None else torch.zeros_like(f.dbias))
            yield Fault(cause, wrong, change=zero)
    yield from blind_rows(x, right)


def changed(mask: Mask, x: Inputs) -> Iterator[tuple[str, Mask]]:
    """A cause, and the mask that is computed with."""
    yield from added(mask, accumulate_dtype(x.q.dtype))
    yield from ignored(mask)
    yield from inverted(mask)
    yield from of_another(mask)
    yield from moved(mask, x.q.shape[1], x.k.shape[1])
    yield from segments(mask, x)


def added(mask: Mask, dtype: torch.dtype) -> Iterator[tuple[str, Mask]]:
    """Bool parts as numbers that are added; all of them, and each alone."""
    found = {}
    if mask.dense is not None and mask.dense.dtype == torch.bool:
        found["dense"] = replace(mask, dense=mask.dense.to(dtype))
    if mask.key_keep is not None:
        number = mask.key_keep.to(dtype)
        bias = number if mask.key_bias is None else mask.key_bias + number
        found["keep"] = replace(mask, key_keep=None, key_bias=bias)
    if len(found) == 2:
        found["both"] = replace(found["keep"], dense=found["dense"].dense)
    for part in found.values():
        yield "a bool mask that is added as 0 and 1", part


def ignored(mask: Mask) -> Iterator[tuple[str, Mask]]:
    """Each part that is there, all tensors, and everything."""
    there = [name for name in WORDS if getattr(mask, name) is not None]
    if len(there) > 1 or (there and (mask.causal is not None or mask.since is not None)):
        yield "a mask that is ignored, causal and window too", Mask()
    if len(there) > 1:
        yield "masks that are ignored", Mask(causal=mask.causal, since=mask.since)
    for name in there:
        gone = {name: None} | ({"k_segments": None} if name == "q_segments" else {})
        yield f"ignoring {WORDS[name]}", replace(mask, **gone)
    if mask.since is not None:
        yield "a window that is ignored", replace(mask, since=None, causal=None)
        yield "a window without a beginning", replace(mask, since=None)
    if mask.causal is not None:
        word = "causal" if mask.since is None else "the window's end"
        yield f"ignoring {word}", replace(mask, causal=None)


def inverted(mask: Mask) -> Iterator[tuple[str, Mask]]:
    if mask.dense is not None and mask.dense.dtype == torch.bool:
        yield "an inverted bool mask", replace(mask, dense=~mask.dense)
    if mask.key_keep is not None:
        yield "an inverted key mask", replace(mask, key_keep=~mask.key_keep)
    if mask.dense is not None and mask.dense.dtype != torch.bool:
        yield "a float mask that is turned into a bool one", replace(mask, dense=mask.dense.bool())
    if mask.key_bias is not None:
        keep = mask.key_bias.bool() if mask.key_keep is None else mask.key_keep & mask.key_bias.bool()
        yield "a float mask that is turned into a bool one", replace(mask, key_bias=None, key_keep=keep)


def of_another(mask: Mask) -> Iterator[tuple[str, Mask]]:
    """The first sample's, or the first head's, for all."""
    parts = {n: getattr(mask, n) for n in ("dense", "key_keep", "key_bias", "q_segments", "k_segments")}
    wide = {n: t for n, t in parts.items() if t is not None and t.shape[0] > 1}
    if wide:
        yield "the first sample's mask for all samples", replace(mask, **{n: _first(t, 0) for n, t in wide.items()})  # type: ignore[arg-type]
    if mask.dense is not None and mask.dense.shape[1] > 1:
        yield "the first head's mask for all heads", replace(mask, dense=_first(mask.dense, 1))


def _first(t: Tensor, dim: int) -> Tensor:
    return t.narrow(dim, 0, 1).expand_as(t)


def moved(mask: Mask, q_len: int, k_len: int) -> Iterator[tuple[str, Mask]]:
    """Causal limits and windows at another place."""
    if mask.causal is None and mask.since is None:
        yield "a causal mask that nobody asked for", replace(mask, causal=0)
        if q_len != k_len:
            yield "a causal mask (bottom-right) that nobody asked for", replace(mask, causal=k_len - q_len)
    ends = {0: "a causal mask aligned top-left", k_len - q_len: "a causal mask aligned bottom-right"}
    if mask.causal is not None and mask.since is None:
        ahead = mask.causal + k_len - q_len  # of one who takes offsets from the other corner
        for causal, words in {ahead: "a causal mask aligned bottom-right", **ends}.items():
            if causal != mask.causal:
                yield words, replace(mask, causal=causal)
    for by, words in ((-1, "one key early"), (1, "one key late")):
        if mask.causal is not None:
            what = "a causal limit" if mask.since is None else "a window that ends"
            yield f"{what} {words}", replace(mask, causal=mask.causal + by)
        if mask.since is not None:
            yield f"a window that begins {words}", replace(mask, since=mask.since + by)


def segments(mask: Mask, x: Inputs) -> Iterator[tuple[str, Mask]]:
    if mask.q_segments is not None and x.q.shape[1] and x.k.shape[1]:
        places = torch.arange(x.k.shape[1], device=x.k.device).clamp(max=x.q.shape[1] - 1)
        yield "the queries' segments for the keys", replace(mask, k_segments=mask.q_segments[:, places])


def blind_rows(x: Inputs, right: Truth) -> Iterator[Fault]:
    """What rows that see nothing come back with."""
    lse, v, g = right.values.lse, x.v.double(), x.grad_out.double()
    assert lse is not None
    blind = (lse == -torch.inf).transpose(1, 2).unsqueeze(-1)
    if not bool(blind.any()) or not x.k.shape[1]:
        return
    group = x.q.shape[2] // v.shape[2]
    mean = v.mean(1, keepdim=True).repeat_interleave(group, 2)
    every = v.mean((1, 2), keepdim=True)
    extra = (g * blind).sum(1, keepdim=True).unflatten(2, (v.shape[2], group)).sum(3) / v.shape[1]
    zero = lambda f: f._replace(lse=None if f.lse is None else f.lse.masked_fill(f.lse == -torch.inf, 0.0))

    def filled(by: Tensor, more: Tensor | float = 0.0) -> Fault:
        def change(f: Quantities) -> Quantities:
            out = None if f.out is None else torch.where(blind, by, f.out)
            return f._replace(out=out, dv=None if f.dv is None else f.dv + more)

        return Fault("an average of all values in rows that see nothing", x, change=change, linear=False)

    for fault in (filled(mean), filled(mean, extra), filled(every)):
        yield fault
        yield replace(fault, change=lambda f, c=fault.change: zero(c(f)))  # type: ignore[misc]
    yield Fault("an lse of 0 for rows that see nothing", x, change=zero)
    hidden = visible(x.mask, right.weights.shape, x.q.device).any(-1).logical_not()
    yield Fault("an lse of 0 for rows that see nothing in backward", x, x, lse=lse.masked_fill(hidden, 0.0))
