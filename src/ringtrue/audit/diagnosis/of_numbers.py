"""Faults of numbers: scale, softcap, bases of logarithms, upstream gradients, dropout, what backward is handed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..inputs import Inputs
from ..truth import Quantities, Truth, bias_of, by_head, softmax, sum_groups, sum_to_bias, visible
from .fault import Fault, everywhere, in_backward

LN_2 = math.log(2)


def numbers(x: Inputs, right: Truth) -> Iterator[Fault]:
    yield from scales(x)
    yield from bases(x, right)
    yield from caps(x)
    yield from upstream(x, right)
    yield from handed(x, right)
    yield from swapped(x)
    yield from undropped(x)


def scales(x: Inputs) -> Iterator[Fault]:
    given, default = x.options.scale, x.q.shape[3] ** -0.5
    known = {
        "the default scale in place of the given one": default,
        "a scale that is missing": 1.0,
        "a scale that is applied twice": given * given,
        "a scale that is applied on top of the default one": given * default,
        "the scale's magnitude without its sign": abs(given),
    }
    tried = {given}
    for cause, scale in known.items():
        if scale not in tried:
            tried.add(scale)
            yield from everywhere(cause, x, _with(x, scale=scale))


def bases(x: Inputs, right: Truth) -> Iterator[Fault]:
    """Exponentials and logarithms of base 2."""
    lse = right.values.lse
    assert lse is not None
    powers = _with(x, scale=x.options.scale * LN_2)
    for fault in everywhere("exp2 of scores that are not scaled by log2(e)", x, powers):
        yield fault
        yield replace(fault, change=_lse_times(1 / LN_2))
    yield Fault("an lse in base 2 (log2), read as a natural one in backward", x, x, lse=lse / LN_2)
    yield Fault("a natural lse, read as one in base 2 (log2) in backward", x, x, lse=lse * LN_2)


def _lse_times(by: float):  # type: ignore[no-untyped-def]
    return lambda f: f._replace(lse=None if f.lse is None else f.lse * by)


def caps(x: Inputs) -> Iterator[Fault]:
    if not x.options.softcap:
        return
    yield from everywhere("a softcap that is ignored", x, _with(x, softcap=0.0))
    if not x.mask.hides_nothing and x.dropout is None:
        yield Fault("a softcap that is applied after the mask", x, steps=_capped_after_mask(x))


def _capped_after_mask(x: Inputs) -> Truth:
    """c tanh((scale q k + bias) / c): what is hidden comes back at -c, and a bias is squeezed."""
    group, cap = x.q.shape[2] // x.k.shape[2], x.options.softcap
    q, g = by_head(x.q), by_head(x.grad_out)
    k, v = (by_head(t).repeat_interleave(group, 1) for t in (x.k, x.v))
    raw = x.options.scale * (q @ k.mT)
    raw = (raw + bias_of(x.mask, raw)).masked_fill(~visible(x.mask, raw.shape, raw.device), -torch.inf)
    scores = cap * torch.tanh(raw / cap)
    slope = 1 - (scores / cap) ** 2
    weights, lse = softmax(scores, torch.ones_like(scores, dtype=torch.bool))
    out = weights @ v
    delta = (g * out).sum(-1, keepdim=True)
    if x.grad_lse is not None:
        delta = delta - x.grad_lse.double().unsqueeze(-1)
    grad_weights = g @ v.mT
    grad_scores = weights * (grad_weights - delta) * slope
    grad_raw = x.options.scale * grad_scores
    values = Quantities(
        out.transpose(1, 2),
        lse,
        (grad_raw @ k).transpose(1, 2),
        sum_groups(grad_raw.mT @ q, x.k.shape[2]).transpose(1, 2),
        sum_groups(weights.mT @ g, x.k.shape[2]).transpose(1, 2),
        None if x.mask.bias is None else sum_to_bias(grad_scores, x.mask),
    )
    magnitude = abs(x.options.scale) * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).unsqueeze(-2)
    return Truth(values, weights, grad_weights, slope, delta, magnitude)


def upstream(x: Inputs, right: Truth) -> Iterator[Fault]:
    g = x.grad_out
    yield Fault("an upstream gradient taken as ones", x, replace(x, grad_out=torch.ones_like(g)))
    if g.shape[0] > 1:
        one = {n: getattr(x, n)[:1].expand_as(getattr(x, n)) for n in ("k", "v")}
        yield from in_backward("the first sample's key and value for all samples", x, replace(x, **one))
        first = replace(x, grad_out=g[:1].expand_as(g))
        yield Fault("the first sample's upstream gradient for all samples", x, first)
    if x.grad_lse is None:
        return
    without = replace(x, grad_lse=None)
    yield Fault("ignoring the gradient of lse", x, without)
    yield Fault("the gradient of lse with the wrong sign", x, replace(x, grad_lse=-x.grad_lse))
    if x.mask.bias is not None:
        more = sum_to_bias(right.weights * x.grad_lse.double().unsqueeze(-1), x.mask)
        less = lambda f: f._replace(dbias=None if f.dbias is None else f.dbias - more)
        yield Fault("ignoring the gradient of lse in dbias", x, change=less, linear=False)


def handed(x: Inputs, right: Truth) -> Iterator[Fault]:
    """What backward is given of forward's results."""
    out, lse = right.values.out, right.values.lse
    assert out is not None
    assert lse is not None
    zeros = torch.zeros_like(lse)
    yield Fault("an lse that backward was not given (zeros)", x, x, lse=zeros)
    yield Fault("an out that backward was not given (zeros)", x, x, out=torch.zeros_like(out))
    yield Fault("an out and an lse that backward was not given (zeros)", x, x, out=torch.zeros_like(out), lse=zeros)
    for dtype in (torch.bfloat16, torch.float16):
        coarse = lse.to(dtype).double()
        name = str(dtype).removeprefix("torch.")
        if bool((coarse.isfinite() == lse.isfinite()).all()):
            yield Fault(f"an lse rounded to {name} on its way to backward", x, x, lse=coarse)
            change = lambda f, c=coarse: f._replace(lse=c)
            yield Fault(f"an lse rounded to {name}", x, x, lse=coarse, change=change, linear=False)
        rough = out.to(dtype).double()
        if torch.finfo(dtype).eps > torch.finfo(x.q.dtype).eps and bool(rough.isfinite().all()):
            change = lambda f, c=rough: f._replace(out=c)
            yield Fault(f"an out rounded to {name}", x, x, out=rough, change=change, linear=False)


def swapped(x: Inputs) -> Iterator[Fault]:
    if x.k.shape == x.v.shape:
        yield Fault("a swap of dk and dv", x, change=lambda f: f._replace(dk=f.dv, dv=f.dk))
    if x.q.shape == x.k.shape:
        yield Fault("a swap of dq and dk", x, change=lambda f: f._replace(dq=f.dk, dk=f.dq))


def undropped(x: Inputs) -> Iterator[Fault]:
    if x.dropout is None:
        return
    kept = 1 - x.options.dropout_p
    for cause, mask in (
        ("dropout that is ignored", torch.ones_like(x.dropout)),
        ("dropout whose weights are not divided by 1 - p", x.dropout * kept),
        ("dropout whose weights are divided by 1 - p twice", x.dropout / kept),
    ):
        yield Fault(f"{cause} in backward", x, replace(x, dropout=mask))
        yield Fault(f"{cause} in forward", replace(x, dropout=mask), x)
        yield Fault(cause, replace(x, dropout=mask))


def _with(x: Inputs, **options: float) -> Inputs:
    return replace(x, options=replace(x.options, **options))  # type: ignore[arg-type]
