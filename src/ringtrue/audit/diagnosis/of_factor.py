"""Faults that need no other arguments: right numbers times a constant, rounded, or those of another dropout mask."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..inputs import Inputs
from ..judge import norms
from ..truth import Quantities, Truth, by_head, sum_groups
from .form import listed, verb

Bounds = Mapping[str, tuple[float, float]]
GRADIENTS = ("dq", "dk", "dv", "dbias")
ENOUGH = 8  # numbers, below which one factor fits anything


def factor(
    x: Inputs, result: Quantities, right: Truth, wrong: list[str], bounds: Bounds, *, ranks: bool = False
) -> str:
    """Each wrong quantity is the right one times a number."""
    found: dict[str, tuple[float, float]] = {}
    for name in wrong:
        fit = _fit(getattr(result, name), getattr(right.values, name), bounds[name])
        if fit is None:
            return ""
        found[name] = fit
    together: dict[str, list[str]] = {}
    for name, (by, unsure) in found.items():
        together.setdefault(_words(by, unsure, name, x, ranks), []).append(name)
    parts = [f"{listed(names)} {verb(names, 'is', 'are')} {words}" for words, names in together.items()]
    if len(together) > 1 and any("that is" not in part and "zero" not in part for part in parts):
        return ""  # several numbers, none of them known: no explanation
    return " and ".join(parts)


def _fit(got: Tensor, ref: Tensor, bound: tuple[float, float]) -> tuple[float, float] | None:
    """The factor, and how far it may be off; None where no factor explains the difference."""
    finite = ref.isfinite()
    if got.numel() < ENOUGH or not torch.equal(finite, got.isfinite()):
        return None
    a, b = (t.double().masked_fill(~finite, 0.0) for t in (got, ref))
    size = float((b * b).sum())
    if not size:
        return None
    by = float((a * b).sum()) / size
    error_2, error_inf = norms(a - by * b)
    off_2, off_inf = norms(a - b)
    slack = max(1.0, abs(by))
    if error_2 > slack * bound[0] or error_inf > slack * bound[1] or error_2 > off_2 / 2 or error_inf > off_inf / 2:
        return None
    return by, min(0.02, max(1e-4, 2 * bound[0] * slack / math.sqrt(size)))


def _words(by: float, unsure: float, name: str, x: Inputs, ranks: bool) -> str:
    scale, p = x.options.scale, x.options.dropout_p
    group = x.q.shape[2] // x.k.shape[2]
    if abs(by) < unsure:
        return "zero"
    known = {"-1: the sign is turned": -1.0}
    if name == "lse":
        known |= {"1 / ln 2: it is in base 2 (log2)": 1 / math.log(2), "ln 2": math.log(2)}
    elif name in ("dq", "dk") and scale:
        known |= {"1 / scale: the scale is missing": 1 / scale, "scale: it is applied twice": scale}
    if name in ("dk", "dv") and group > 1:
        known |= {"1 / (H / Hk): a mean over the heads of a group": 1 / group, "H / Hk: a group counted twice": group}
    if p:
        known |= {"1 - p: dropout's factor is missing": 1 - p, "1 / (1 - p): dropout's factor twice": 1 / (1 - p)}
    fits = [words for words, number in known.items() if abs(by / number - 1) < unsure]
    if name in GRADIENTS and (not fits or (ranks and name == "dq")):
        for n in range(2, 65):
            if abs(by / n - 1) < min(unsure, 0.1 / n):
                fits.append(f"the number of ranks, where a sum counts each of {n}")
            elif abs(by * n - 1) < min(unsure, 0.1 / n):
                fits.append(f"1 / ranks, where a mean over {n} takes the place of a sum")
    digits = max(0, math.floor(-math.log10(2 * unsure)))  # no more than are known: 4, not 3.998
    number = f"{round(by, digits):.4g} times what must come back"
    return f"{number}, that is {' or '.join(fits)}" if fits else number


def rounded(result: Quantities, right: Truth, wrong: list[str], bounds: Bounds) -> str:
    """Each wrong quantity is the right one in a coarser dtype."""
    found: dict[str, list[str]] = {}
    for name in wrong:
        got, ref = getattr(result, name), getattr(right.values, name)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            finite = ref.isfinite()
            finer = torch.finfo(dtype).eps <= torch.finfo(got.dtype).eps
            if finer or got.numel() < ENOUGH or not torch.equal(got.to(dtype).to(got.dtype), got):
                continue
            step = torch.finfo(dtype).eps / 2 * 1.01
            off = (got.double() - ref).masked_fill(~finite, 0.0).abs()
            room = step * ref.masked_fill(~finite, 0.0).abs() + bounds[name][1] + torch.finfo(dtype).tiny
            if torch.equal(finite, got.isfinite()) and bool((off <= room).all()):
                found.setdefault(str(dtype).removeprefix("torch."), []).append(name)
                break
        else:
            return ""
    return " and ".join(f"{listed(n)} {verb(n, 'is', 'are')} right but for rounding to {d}" for d, n in found.items())


def another_draw(x: Inputs, result: Quantities, right: Truth, wrong: list[str]) -> str:
    """Gradients of a dropout mask that is not forward's: as far from the mean over masks as such a mask takes them.

    Of dq, dk and dv the mean over masks is the gradient without dropout (delta being forward's), and the variance of
    each element follows from p. All that is wrong must have that variance, and nothing to do with forward's mask.
    """
    if x.dropout is None or set(wrong) != {n for n in ("dq", "dk", "dv") if getattr(result, n) is not None}:
        return ""
    group, p = x.q.shape[2] // x.k.shape[2], x.options.dropout_p
    q, g = by_head(x.q), by_head(x.grad_out)
    k, v = (by_head(t).repeat_interleave(group, 1) for t in (x.k, x.v))
    weights, odds = right.weights, p / (1 - p)
    plain = g @ v.mT
    mean = x.options.scale * right.slope * weights * (plain - right.delta)
    spread = (x.options.scale * right.slope * weights * plain) ** 2 * odds
    add = lambda t: sum_groups(t, x.k.shape[2]).transpose(1, 2)
    expected = {
        "dq": ((mean @ k).transpose(1, 2), (spread @ k**2).transpose(1, 2)),
        "dk": (add(mean.mT @ q), add(spread.mT @ q**2)),
        "dv": (add(weights.mT @ g), add((weights**2 * odds).mT @ g**2)),
    }
    for name in wrong:
        middle, variance = expected[name]
        live = variance > 1e-12 * variance.max()
        size = variance[live].sqrt()
        drawn = (getattr(result, name).double() - middle)[live] / size
        forward = (getattr(right.values, name) - middle)[live] / size
        if drawn.numel() < 200 or not 0.7 < float((drawn**2).mean()) < 1.4:
            return ""
        if abs(float((drawn * forward).mean())) > 0.3:
            return ""
    return f"{listed(wrong)} {verb(wrong, 'is', 'are')} what another dropout mask than forward's gives (not replayed)"
