"""Every backend that fits a call, on this machine: judged first, then timed in turn, forward and backward.

What is wrong, or raises, gets no time. A kernel that may be downloaded is left alone.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import ringtrue as rt

from ..audit.inputs import Case, Inputs, build
from ..audit.judge import Verdict, judge, truth_of
from ..audit.truth import Quantities
from ..audit.yardstick import yardstick
from .timing import Work, in_turn

JUDGED = {
    "cpu": 1024,
    "cuda": 4096,
}  # tokens of the call whose first and last head are judged, at most: truth has all weights
REPETITIONS = 5
TIE = 1.03
SLOW = 8.0  # what takes so many times as long as the fastest is not measured again

Four = tuple[Tensor, Tensor, Tensor, Tensor]


class DeviceLostError(Exception):
    """A backend's kernel failed so that its device is of no use to this process any more: its name, what it said."""


@dataclass(frozen=True)
class Shape:
    """A self-attention call, (1, tokens, heads, head_dim)."""

    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool

    def __str__(self) -> str:
        kind = "causal" if self.causal else "not causal"
        return f"(1, {self.tokens}, {self.heads}, {self.head_dim}), {str(self.dtype).removeprefix('torch.')}, {kind}"


@dataclass(frozen=True)
class Outcome:
    """What was found of one backend: `seconds` a call, or why there are none ("refused", "left alone", "wrong", "error"
    or "slow", for which there are) and the text of it."""

    backend: str
    seconds: float | None = None
    state: str = "right"
    why: str = ""


def measure(shape: Shape, device: str, seconds: float, without: Collection[str] = ()) -> tuple[Outcome, ...]:
    """Every backend of the device at one shape, the fastest first; `seconds` is what measuring one may take, about.

    Raises DeviceLostError where a kernel took the device from this process: no later call can be trusted.
    """
    judged = _Judged(shape, device)
    supports = [s for s in rt.backends() if s.device == device and s.name not in without]
    found = {support.name: _outcome(support, shape, judged) for support in supports}
    right = [name for name, outcome in found.items() if outcome.state == "right"]
    del judged  # its weights: the calls that are timed want room
    tensors = _drawn(shape, device)
    works: dict[str, Work] = {}
    estimates: dict[str, float] = {}
    for name in right:
        work = partial(_called, name, tensors, causal=shape.causal)
        try:
            estimates[name] = min(in_turn({name: work}, device, 1, 0.0)[name].seconds)
            works[name] = work
        except Exception as error:  # out of memory at the full length, say
            found[name] = _failed(name, device, error)
    slow = {name: each for name, each in estimates.items() if each > SLOW * min(estimates.values())}
    works = {name: work for name, work in works.items() if name not in slow}
    times = in_turn(works, device, REPETITIONS, seconds / REPETITIONS) if works else {}
    found |= {name: Outcome(name, each.median) for name, each in times.items()}
    found |= {name: Outcome(name, each, "slow") for name, each in slow.items()}
    fastest, places = min((t.median for t in times.values()), default=0.0), list(found)
    return tuple(sorted(found.values(), key=lambda o: (_rank(o.seconds, fastest), places.index(o.backend))))


def remembered(shape: Shape, outcomes: Sequence[Outcome]) -> rt.tuned.Measured:
    """What is written of them."""
    times = {o.backend: o.seconds for o in outcomes if o.seconds is not None}
    return rt.tuned.Measured(
        dtype=str(shape.dtype),
        q_len=shape.tokens,
        k_len=shape.tokens,
        head_dim=shape.head_dim,
        causal=shape.causal,
        order=tuple(times),
        wrong={o.backend: o.why for o in outcomes if o.state == "wrong"},
        failed={o.backend: o.why for o in outcomes if o.state == "error"},
        seconds=times,
    )


def _rank(seconds: float | None, fastest: float) -> float:
    """What outcomes are sorted by: those nearly as fast as the fastest are alike, and keep the registry's order."""
    return math.inf if seconds is None else max(seconds, TIE * fastest)


class _Judged:
    """The call that is judged, at the shape's length or the longest that can be, and what its two heads must give."""

    def __init__(self, shape: Shape, device: str) -> None:
        tokens = min(shape.tokens, JUDGED[device])
        case = Case(
            "tune", tokens, tokens, batch=1, heads=shape.heads, head_dim=shape.head_dim, dtype=shape.dtype,
            causal=0 if shape.causal else None,
        )  # fmt: skip
        x = build(case, device)
        self.tensors = x.q, x.k, x.v, x.grad_out
        self.picked = torch.tensor(sorted({0, shape.heads - 1}), device=device)
        q, k, v, g = self._heads(self.tensors)
        self.part = Inputs(q, k, v, x.mask, replace(x.options, return_lse=False), g)
        self.truth, self.yard = truth_of(self.part), yardstick(self.part)

    def verdicts(self, out: Tensor, grads: Sequence[Tensor]) -> list[Verdict]:
        out, dq, dk, dv = self._heads((out, *grads))
        return judge(Quantities(out, None, dq, dk, dv), self.truth, self.yard, self.part)

    def _heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x.index_select(2, self.picked) for x in tensors]


def _outcome(support: rt.Support, shape: Shape, judged: _Judged) -> Outcome:
    """Whether a backend takes the call, and is right at it."""
    name = support.name
    if support.unavailable is not None:
        return Outcome(name, state="refused", why=str(support.unavailable))
    if support.fetches:
        return Outcome(name, state="left alone", why="it may download its kernel; name it to use it")
    try:
        q, k, v, _ = _leaves(judged.tensors)
        why = rt.explain(q, k, v, is_causal=shape.causal, backend=name, parallel=False).reasons[name]
        if why:
            return Outcome(name, state="refused", why="; ".join(map(str, why)))
        verdicts = judged.verdicts(*_called(name, judged.tensors, causal=shape.causal))
    except Exception as error:  # whatever another project's kernel raises costs its own place alone
        return _failed(name, support.device, error)
    wrong = [str(verdict) for verdict in verdicts if not verdict.ok]
    return Outcome(name, state="wrong", why="; ".join(wrong)) if wrong else Outcome(name)


def _drawn(shape: Shape, device: str) -> Four:
    """q, k, v and the gradient of out of the call that is timed."""
    draw = torch.Generator(device).manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    q, k, v, g = (torch.randn(size, generator=draw, device=device, dtype=shape.dtype) for _ in range(4))
    return q, k, v, g


def _leaves(tensors: Four) -> Four:
    q, k, v, g = tensors
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_(), g


def _called(name: str, tensors: Four, *, causal: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    q, k, v, g = _leaves(tensors)
    out = rt.attention(q, k, v, is_causal=causal, backend=name, parallel=False)
    return out.detach(), torch.autograd.grad(out, (q, k, v), g)


def _failed(name: str, device: str, error: Exception) -> Outcome:
    """An error that is the call's own; DeviceLostError for one after which nothing runs."""
    said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    gc.collect()  # what the failed call held
    try:
        _alive(device)
    except RuntimeError as lost:
        raise DeviceLostError(name, said) from lost
    return Outcome(name, state="error", why=said)


def _alive(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
    torch.ones(1, device=device).sum().item()
