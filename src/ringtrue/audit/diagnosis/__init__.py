"""Diagnosis: the known fault whose numbers a wrong result has, in a sentence; empty where none fits.

Every known fault is computed in float64 for the very call that went wrong, and held against the result under the bounds
of the rule. It is named only if it explains everything: what is wrong, by far better than the truth does, and what is
right. Where two faults give the same numbers in this call both are said; of many, the two simplest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..inputs import Inputs
from ..judge import expected_of, judge, norms, truth_of
from ..noise import noise
from ..rule import RULE
from ..truth import Quantities, Truth
from ..yardstick import yardstick
from .fault import Fault, Models
from .form import Form, form, listed, verb
from .of_factor import another_draw, factor, rounded
from .of_layout import layouts
from .of_masks import masks
from .of_numbers import numbers
from .of_sharing import sharing

KNOWN = (layouts, numbers, masks, sharing)  # the simplest first
SLACK = 2.0  # a faulty kernel may take its steps in another order than ours
MOST = 1 << 23  # weights (B H Sq Sk) of a call; for larger ones form, factor and rounding are looked at alone


def diagnose(inputs: Inputs, result: Quantities, *, ranks: bool = False) -> str:
    """Why `result` is not the answer to `inputs`, e.g. "dk and dv are what a second transpose of key and value gives".

    ranks  it was computed by several, so a factor may be their number
    Empty where no known fault fits, or where nothing is wrong. Costs tens of milliseconds for a small call.
    """
    if 0 in (*inputs.q.shape, *inputs.k.shape):
        return ""
    with torch.no_grad():
        right = truth_of(inputs)
    expected = expected_of(inputs)
    shaped = form(inputs, result, right, expected)
    if not shaped.known:
        return ""
    found = Evidence(inputs, shaped, right, ranks)
    if not found.wrong:
        return _sentence(shaped.texts)
    with torch.no_grad():
        why = found.explained()
    return _sentence([*shaped.texts, why]) if why else ""


def _sentence(parts: list[str]) -> str:
    return "; ".join(parts)


class Evidence:
    """One result beside the truth: what of it is wrong, and how far it may be from an explanation."""

    def __init__(self, inputs: Inputs, shaped: Form, right: Truth, ranks: bool) -> None:
        self.inputs, self.right, self.ranks = inputs, right, ranks
        there = [n for n in expected_of(inputs) if n not in shaped.missing]
        self.result = Quantities(*(getattr(shaped.result, n) if n in there else None for n in Quantities._fields))
        yard = yardstick(inputs)
        verdicts = {v.quantity: v for v in judge(self.result, right, yard, inputs)}
        self.wrong = [n for n in there if not verdicts[n].ok]
        self.rest = [n for n in there if verdicts[n].ok]
        exact = {n: (s[0], s[1]) for n, s in expected_of(inputs).items() if n in there}
        ideal = {n: getattr(right.values, n).to(dtype) for n, (_, dtype) in exact.items()}
        whole = Quantities(*(ideal.get(n) for n in Quantities._fields))
        self.bounds = {v.quantity: (v.bound_2, v.bound_inf) for v in judge(whole, right, yard, inputs)}
        self.noise = noise(right, inputs)
        self.share = 0.05 if inputs.q.dtype in (torch.float32, torch.float64) else 0.35
        self._doubles = {n: getattr(self.result, n).double() for n in there}
        self._finite = {n: bool(x.isfinite().all()) for n, x in self._doubles.items()}
        self._limits = {n: self._limit(n) for n in there}

    def _limit(self, name: str) -> float:
        """How far an explanation may be at a first look: what is wrong must be far nearer to it than to the truth."""
        if name in self.wrong:
            return self.share * self._distance(name, getattr(self.right.values, name))
        size = self._doubles[name]
        return max(16 * self.bounds[name][0], 0.2 * float(size.masked_fill(~size.isfinite(), 0).norm()))

    def explained(self) -> str:
        """The words that fit; the first two where several do."""
        args = self.result, self.right, self.wrong, self.bounds
        causes: dict[str, None] = {}
        for fault in self._fitting() if self.right.weights.numel() <= MOST else ():
            causes.setdefault(fault.cause)
            if len(causes) > 1:
                break
        if not causes:
            simple = factor(self.inputs, *args, ranks=self.ranks) or rounded(*args)
            return simple or another_draw(self.inputs, self.result, self.right, self.wrong)
        which = f"{listed(self.wrong)} {verb(self.wrong, 'is', 'are')} what"
        return f"{which} {' (or: '.join(causes)}{')' if len(causes) > 1 else ''} gives"

    def _fitting(self) -> Iterator[Fault]:
        models = Models(self.inputs, self.right)
        ahead = any(n in ("out", "lse") for n in self.wrong)
        known = (fault for table in KNOWN for fault in table(self.inputs, self.right))
        for fault in (*self._scaled_out(), *known):
            same = fault.forward is self.inputs and fault.steps is None
            if fault.change is None and same == ahead:
                continue  # forward is wrong and the fault leaves it right, or the other way round
            if self._fits(models, fault):
                yield fault

    def _scaled_out(self) -> Iterator[Fault]:
        """An out that is off by a factor, which backward is handed: dq and dk are off by another way."""
        out, right = self.result.out, self.right.values.out
        if "out" in self.wrong and self.wrong != ["out"] and out is not None and right is not None:
            by = float((out.double() * right).sum() / (right * right).sum())
            cause = f"an out that is {by:.4g} times what must come back"
            change = lambda f: f._replace(out=by * right)
            yield Fault(cause, self.inputs, self.inputs, out=by * right, change=change, linear=False)

    def _fits(self, models: Models, fault: Fault) -> bool:
        forward = (fault.steps or models.forward(fault.forward)).values
        if fault.change is None and not all(self._near(n, forward) for n in ("out", "lse")):
            return False
        values = models.values(fault)
        if not all(self._near(n, values) for n in (*self.wrong, *self.rest)):
            return False
        scale = models.noise(fault)
        return all(self._explains(n, values, scale) for n in (*self.wrong, *self.rest))

    def _near(self, name: str, values: Quantities) -> bool:
        """A quick look, which rules most faults out: no further off than the truth is, where it is wrong."""
        got, ref = getattr(self.result, name), getattr(values, name)
        if got is None:
            return True
        if ref is None or ref.shape != got.shape:
            return False
        error = self._distance(name, ref)
        return error < torch.inf and error <= self._limits[name]

    def _distance(self, name: str, ref: Tensor) -> float:
        """The 2-norm of the difference; infinite where one is infinite and the other is not."""
        got = self._doubles[name]
        return float(torch.dist(got, ref)) if self._finite[name] else _norms_or_inf(got, ref)[0]

    def _explains(self, name: str, values: Quantities, scale: Quantities) -> bool:
        """Within the rule's bounds, at the fault's own rounding scale."""
        got, ref, size = getattr(self.result, name), getattr(values, name), getattr(scale, name)
        right, usual = getattr(self.right.values, name), getattr(self.noise, name)
        errors = _norms_or_inf(got, ref)
        for i, (error, floor) in enumerate(zip(errors, self.bounds[name], strict=True)):
            bound = floor
            if size is not None and usual is not None and size.shape == got.shape:
                ratio = (RULE.noise_2, RULE.noise_inf)[i]
                own, ours = norms(size)[i], norms(usual)[i]
                bound = max(bound, own * max(ratio, floor / ours if ours else 0.0))
            if not error <= min(SLACK * bound, 1e300):
                return False
        if name not in self.wrong:
            return True
        off = _norms_or_inf(got, right)
        return all(error <= self.share * other for error, other in zip(errors, off, strict=True) if other)


def _norms_or_inf(got: Tensor, ref: Tensor) -> tuple[float, float]:
    """Both norms of the difference; infinite where one is and the other is not."""
    finite = ref.isfinite()
    same = finite == got.isfinite()
    if not bool(same.all()) or not torch.equal(got[~finite].double(), ref[~finite].double()):
        return float("inf"), float("inf")
    return norms((got.double() - ref).masked_fill(~finite, 0.0))
