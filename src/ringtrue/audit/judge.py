"""The judge: one verdict per quantity, by the rule of rule.py. Each passes on its own or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import accumulate_dtype
from .inputs import Inputs
from .noise import noise
from .rule import RULE
from .truth import Quantities, Truth, truth
from .yardstick import yardstick

NAMES = Quantities._fields


@dataclass(frozen=True)
class Verdict:
    """How far one quantity is from the truth, how far it may be, in both norms; or the `problem` in measuring it."""

    quantity: str
    ok: bool
    error_2: float = float("nan")
    bound_2: float = float("nan")
    error_inf: float = float("nan")
    bound_inf: float = float("nan")
    problem: str = ""

    @property
    def strain(self) -> float:
        """The error as a share of its bound, the worse of both norms; at most 1 passes."""
        if self.problem:
            return float("inf")
        pairs = ((self.error_2, self.bound_2), (self.error_inf, self.bound_inf))
        return max(0.0 if error == 0 else error / bound if bound else float("inf") for error, bound in pairs)

    def __str__(self) -> str:
        head = f"{self.quantity:<5} {'ok  ' if self.ok else 'FAIL'}"
        if self.problem:
            return f"{head}  {self.problem}"
        norms = (("2-norm", self.error_2, self.bound_2), ("max", self.error_inf, self.bound_inf))
        return head + "".join(f"  {name} {e:.3e} {'<=' if e <= b else '> '} {b:.3e}" for name, e, b in norms)


def judge(result: Quantities, truth: Truth, yard: Quantities | None, inputs: Inputs) -> list[Verdict]:
    """A verdict for everything the call asked for: out, lse (options.return_lse), dq, dk, dv, dbias (wanted).

    A wrong shape or dtype, something missing, a NaN, an inf, or an lse that is -inf elsewhere than the truth's fails.
    """
    scale = noise(truth, inputs)
    verdicts = []
    for name, like in expected_of(inputs).items():
        x, ref = getattr(result, name), getattr(truth.values, name)
        other = None if yard is None else getattr(yard, name)
        problem = _problem(x, like, ref)
        if problem:
            verdicts.append(Verdict(name, ok=False, problem=problem))
        else:
            verdicts.append(_measure(name, x, ref, other, getattr(scale, name), RULE.floor[inputs.q.dtype]))
    return verdicts


def judged(result: Quantities, inputs: Inputs) -> list[Verdict]:
    """The same, with truth and yardstick made on the spot."""
    return judge(result, truth_of(inputs), yardstick(inputs), inputs)


def judge_against(result: Quantities, expected: Quantities, inputs: Inputs, calls: int = 2) -> list[Verdict]:
    """What two or more calls of one subject must agree on: `expected` by the others, with the rule's bounds.

    Every one of the `calls` may be off by what a right one is, so the bounds are that many times the rule's.
    """
    right, yard = truth_of(inputs), yardstick(inputs)
    scale = noise(right, inputs)
    verdicts = []
    for name, like in expected_of(inputs).items():
        x, other = getattr(result, name), getattr(expected, name)
        if other is None:
            continue
        problem = _problem(x, like, other.double())
        if problem:
            verdicts.append(Verdict(name, ok=False, problem=problem))
            continue
        ref = getattr(right.values, name)
        bounds = _measure(name, x, ref, getattr(yard, name, None), getattr(scale, name), RULE.floor[inputs.q.dtype])
        finite = other.isfinite() & x.isfinite()
        error_2, error_inf = norms((x.double() - other.double()).masked_fill(~finite, 0.0))
        bound_2, bound_inf = calls * bounds.bound_2, calls * bounds.bound_inf
        ok = error_2 <= bound_2 and error_inf <= bound_inf
        verdicts.append(Verdict(name, ok, error_2, bound_2, error_inf, bound_inf))
    return verdicts


def truth_of(inputs: Inputs) -> Truth:
    """The truth of one call."""
    x, options = inputs, inputs.options
    return truth(x.q, x.k, x.v, x.mask, options.scale, x.grad_out, x.grad_lse, options.softcap, x.dropout)


def relative_errors(result: Quantities, truth: Truth) -> dict[str, float]:
    """||x - ref||_2 / ||ref||_2 of every gradient and of out: what the ring law compares."""
    errors = {}
    for name in ("out", "dq", "dk", "dv"):
        x, ref = getattr(result, name), getattr(truth.values, name)
        errors[name] = float((x.double() - ref).norm() / ref.norm())
    return errors


def expected_of(inputs: Inputs) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of everything that was asked for."""
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.mask.bias
    expected = {"out": (inputs.grad_out.shape, q.dtype)}
    if inputs.options.return_lse:
        expected["lse"] = (torch.Size((q.shape[0], q.shape[2], q.shape[1])), accumulate_dtype(q.dtype))
    for name, x, wanted in zip(("dq", "dk", "dv", "dbias"), (q, k, v, bias), inputs.wanted, strict=True):
        if wanted and x is not None:
            expected[name] = (x.shape, x.dtype)
    return expected


def _problem(x: Tensor | None, like: tuple[torch.Size, torch.dtype], ref: Tensor) -> str:
    """Why no distance between a result and the truth is defined; empty where one is."""
    if x is None:
        return "missing"
    if (x.shape, x.dtype) != like:
        return f"is {tuple(x.shape)} {x.dtype}, must be {tuple(like[0])} {like[1]}"
    if x.isnan().any():
        return f"NaN in {int(x.isnan().sum())} of {x.numel()} places"
    strays = (x.isinf() | ref.isinf()) & (x.double() != ref)
    if strays.any():
        return f"infinite (or wrongly finite) in {int(strays.sum())} of {x.numel()} places"
    return ""


def _measure(name: str, x: Tensor, ref: Tensor, yard: Tensor | None, scale: Tensor | None, floor: float) -> Verdict:
    finite = ref.isfinite()  # equal infinities are at no distance
    ref = ref.masked_fill(~finite, 0.0)
    error_2, error_inf = norms(x.double().masked_fill(~finite, 0.0) - ref)
    ref_2, ref_inf = norms(ref)
    yard_2, yard_inf = (0.0, 0.0) if yard is None else norms(yard.double().masked_fill(~finite, 0.0) - ref)
    noise_2, noise_inf = (0.0, 0.0) if scale is None else norms(scale)
    bound_2 = max(RULE.yard_2 * yard_2 + floor * ref_2, RULE.noise_2 * noise_2)
    bound_inf = max(RULE.yard_inf * yard_inf + floor * ref_inf, RULE.noise_inf * noise_inf)
    ok = error_2 <= bound_2 and error_inf <= bound_inf
    return Verdict(name, ok, error_2, bound_2, error_inf, bound_inf)


def norms(x: Tensor) -> tuple[float, float]:
    """The 2-norm and the largest magnitude; 0 and 0 of nothing."""
    return (float(x.norm()), float(x.abs().max())) if x.numel() else (0.0, 0.0)
