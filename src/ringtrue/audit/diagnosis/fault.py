"""What a known fault would give: the formulas of truth.py with other arguments in forward, in backward or in both.

A fault is data (`Fault`); `Models` computes its float64 quantities and their rounding scale, each argument once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...contract import Mask
from ..inputs import Inputs
from ..judge import truth_of
from ..noise import noise
from ..truth import Quantities, Truth, bias_of, by_head, sum_groups, sum_to_bias, visible

Change = Callable[[Quantities], Quantities]


@dataclass(frozen=True, eq=False)
class Fault:
    """A hypothesis.

    cause     a noun phrase: "dq and dk are what CAUSE gives"
    forward   the call that forward computes in fact
    backward  the call that backward computes in fact; None: forward's
    own       backward takes out and lse from its own call, not from forward
    out, lse  what backward is handed in place of forward's out (B, Sq, H, Dv) and lse (B, H, Sq)
    change    what happens to the quantities afterwards; `linear`: to their rounding scales too
    parts     backward is the sum of these calls, in place of one
    steps     both passes, where no change of arguments makes them
    """

    cause: str
    forward: Inputs
    backward: Inputs | None = None
    own: bool = False
    out: Tensor | None = None
    lse: Tensor | None = None
    change: Change | None = None
    linear: bool = True
    parts: tuple[Inputs, ...] = ()
    steps: Truth | None = None


def everywhere(cause: str, right: Inputs, wrong: Inputs) -> Iterator[Fault]:
    """The same fault in both passes, in backward alone, in forward alone."""
    yield Fault(cause, wrong)
    yield from in_backward(cause, right, wrong)
    yield Fault(f"{cause} in forward alone", wrong, right)
    yield Fault(f"{cause} in forward alone", wrong, right, own=True)


def in_backward(cause: str, right: Inputs, wrong: Inputs) -> Iterator[Fault]:
    """A backward that is handed forward's out and lse, and one that computes them again."""
    yield Fault(f"{cause} in backward", right, wrong)
    yield Fault(f"{cause} in backward", right, wrong, own=True)


class Models:
    """The quantities of faults of one call, float64; forwards are kept, since most faults share them."""

    def __init__(self, inputs: Inputs, right: Truth) -> None:
        self.inputs, self.right = inputs, right
        self._forwards: dict[int, tuple[Inputs, Truth]] = {id(inputs): (inputs, right)}
        self._backwards: dict[tuple[int, ...], tuple[tuple[object, ...], Truth]] = {}

    def forward(self, x: Inputs) -> Truth:
        if id(x) not in self._forwards:
            self._forwards[id(x)] = x, self._bias_as_asked(x, truth_of(x))
        return self._forwards[id(x)][1]

    def gradients(self, fault: Fault) -> list[tuple[Inputs, Truth]]:
        """The calls whose gradients add up to the fault's, and the steps of each."""
        ahead = fault.steps or self.forward(fault.forward)
        if fault.parts:
            return [(x, self._backward(x, fault, ahead)) for x in fault.parts]
        if fault.backward is None and fault.out is None and fault.lse is None:
            return [(fault.forward, ahead)]
        x = fault.forward if fault.backward is None else fault.backward
        return [(x, self._backward(x, fault, ahead))]

    def _backward(self, x: Inputs, fault: Fault, ahead: Truth) -> Truth:
        given = self.forward(x) if fault.own else ahead
        if fault.own and fault.out is None and fault.lse is None:
            return given
        out = given.values.out if fault.out is None else fault.out
        lse = given.values.lse if fault.lse is None else fault.lse
        assert out is not None
        assert lse is not None
        key = (id(x), id(out), id(lse))
        if key not in self._backwards:
            self._backwards[key] = (x, out, lse), _backward(x, self.inputs.mask, out, lse)
        return self._backwards[key][1]

    def values(self, fault: Fault) -> Quantities:
        """What the fault gives."""
        return self._together(fault, lambda x, steps: steps.values, fault.change)

    def noise(self, fault: Fault) -> Quantities:
        """How far a faulty kernel may be from that: the rounding scale of the steps that it takes."""
        like = self.inputs.mask
        of = lambda x, steps: noise(steps, replace(x, mask=like))
        return self._together(fault, of, fault.change if fault.linear else None)

    def _together(self, fault: Fault, of: Callable[[Inputs, Truth], Quantities], change: Change | None) -> Quantities:
        ahead = of(fault.forward, fault.steps or self.forward(fault.forward))
        behind = [of(x, steps) for x, steps in self.gradients(fault)]
        grads = (None if parts[0] is None else sum(parts) for parts in list(zip(*behind, strict=True))[2:])
        found = Quantities(ahead.out, ahead.lse, *grads)
        return found if change is None else change(found)

    def _bias_as_asked(self, x: Inputs, found: Truth) -> Truth:
        """A changed mask may have no float part, or another one: the gradient is that of the asked one."""
        if self.inputs.mask.bias is None or x.mask is self.inputs.mask:
            return found if x.mask is self.inputs.mask else replace(found, values=found.values._replace(dbias=None))
        grad_scores = found.weights * (found.grad_weights - found.delta)
        return replace(found, values=found.values._replace(dbias=sum_to_bias(grad_scores, self.inputs.mask)))


def _backward(x: Inputs, asked: Mask, out: Tensor, lse: Tensor) -> Truth:
    """Backward as kernels do it, from an out and lse that they are given: P = exp(S - lse)."""
    kv_heads, options = x.k.shape[2], x.options
    group = x.q.shape[2] // kv_heads
    queries, upstream = by_head(x.q), by_head(x.grad_out)
    keys, values = (by_head(t).repeat_interleave(group, 1) for t in (x.k, x.v))
    raw = options.scale * (queries @ keys.mT)
    cap = options.softcap
    capped = cap * torch.tanh(raw / cap) if cap else raw
    slope = 1 - (capped / cap) ** 2 if cap else torch.ones_like(raw)
    scores = (capped + bias_of(x.mask, raw)).masked_fill(~visible(x.mask, raw.shape, raw.device), -torch.inf)
    weights = (scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)).exp()
    drawn = torch.ones_like(weights) if x.dropout is None else x.dropout.double()
    delta = (upstream * by_head(out)).sum(-1, keepdim=True)
    if x.grad_lse is not None:
        delta = delta - x.grad_lse.double().unsqueeze(-1)
    grad_weights = drawn * (upstream @ values.mT)
    grad_scores = weights * (grad_weights - delta)
    grad_raw = options.scale * grad_scores * slope
    found = Quantities(
        out=out.double(),
        lse=lse,
        dq=(grad_raw @ keys).transpose(1, 2),
        dk=sum_groups(grad_raw.mT @ queries, kv_heads).transpose(1, 2),
        dv=sum_groups((weights * drawn).mT @ upstream, kv_heads).transpose(1, 2),
        dbias=None if asked.bias is None else sum_to_bias(grad_scores, asked),
    )
    magnitude = abs(options.scale) * queries.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).unsqueeze(-2)
    return Truth(found, weights, grad_weights, slope, delta, magnitude)
