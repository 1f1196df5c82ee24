"""The truth itself, checked: its gradients against finite differences of its own forward, on a few entries.

With L = sum(out * grad_out) + sum(lse * grad_lse) in float64, dL/dx is (L(x + h) - L(x - h)) / 2h, extrapolated from
two steps h (Richardson); a step that is too coarse for a steep case is made smaller until two of them agree.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .inputs import Inputs
from .judge import Verdict, truth_of

ENTRIES = 3  # of each gradient: the largest, and two at random
STEPS = (1e-3, 1e-4, 1e-5)
CLOSE = 1e-5  # relative to the largest gradient of its kind; a right one is at 1e-7 or below
SMALLEST = 1e-4  # gradients are not expected closer than to this, which is where differences of 1e-16 are lost in h


def differences(inputs: Inputs) -> list[Verdict]:
    """A verdict for each of dq, dk, dv and dbias that the case wants, on float64 copies of its numbers."""
    x = _doubled(inputs)
    values = truth_of(x).values
    found = []
    fields = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias"}
    for (name, field), wanted in zip(fields.items(), x.wanted, strict=True):
        grad = getattr(values, name)
        if not wanted or grad is None or not grad.numel():
            continue
        size = float(grad.abs().max())
        error = max(abs(_slope(x, field, place) - float(grad.flatten()[place])) for place in _places(grad, x, field))
        bound = CLOSE * max(size, SMALLEST)
        found.append(Verdict(name, error <= bound, error, bound, error, bound))
    return found


def _doubled(x: Inputs) -> Inputs:
    bias = x.mask.bias
    mask = x.mask
    if bias is not None:
        wide = bias.double()
        mask = replace(mask, key_bias=wide) if mask.key_bias is not None else replace(mask, dense=wide)
    q, k, v, g = (t.double() for t in (x.q, x.k, x.v, x.grad_out))
    grad_lse = None if x.grad_lse is None else x.grad_lse.double()
    return replace(x, q=q, k=k, v=v, grad_out=g, grad_lse=grad_lse, mask=mask)


def _places(grad: Tensor, x: Inputs, field: str) -> list[int]:
    """Which entries: the largest gradient, and some others whose input is an ordinary number."""
    draw = torch.Generator().manual_seed(grad.numel())
    some = [int(grad.abs().argmax()), *torch.randint(grad.numel(), (ENTRIES - 1,), generator=draw).tolist()]
    given = x.mask.bias if field == "bias" else getattr(x, field)
    assert given is not None
    return [place for place in some if abs(float(given.flatten()[place])) < 1e6]


def _slope(x: Inputs, field: str, place: int) -> float:
    before = None
    best, apart = 0.0, float("inf")
    for step in STEPS:
        coarse, fine = ((_at(x, field, place, h) - _at(x, field, place, -h)) / (2 * h) for h in (step, step / 2))
        slope = (4 * fine - coarse) / 3
        if before is not None and abs(slope - before) < apart:
            best, apart = slope, abs(slope - before)
        before = slope
    return best


def _at(x: Inputs, field: str, place: int, by: float) -> float:
    """L with one entry moved."""
    given = x.mask.bias if field == "bias" else getattr(x, field)
    assert given is not None
    moved = given.clone(memory_format=torch.contiguous_format)
    moved.view(-1)[place] += by
    if field == "bias":
        keyed = x.mask.key_bias is not None
        x = replace(x, mask=replace(x.mask, key_bias=moved) if keyed else replace(x.mask, dense=moved))
    else:
        x = replace(x, **{field: moved})  # type: ignore[arg-type]
    values = truth_of(x).values
    assert values.out is not None
    assert values.lse is not None
    total = (values.out * x.grad_out).sum()
    if x.grad_lse is not None:
        total = total + (values.lse.masked_fill(values.lse == -torch.inf, 0.0) * x.grad_lse).sum()
    return float(total)
