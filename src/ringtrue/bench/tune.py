"""Every backend that fits a call, on this machine: judged first, then timed in turn, forward and backward.

What is wrong, or raises, gets no time. A kernel that may be downloaded is left alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import ringtrue as rt

from ..audit.inputs import Case, Inputs, build
from ..audit.judge import judge, truth_of
from ..audit.truth import Quantities
from ..audit.yardstick import yardstick
from .timing import Work, in_turn

JUDGED = {"cpu": 1024, "cuda": 4096}  # tokens of the call that is judged, at most: truth has all weights, in float64
HEADS = 2  # the first and the last are judged
REPETITIONS = 5
SLOW = 8.0  # what takes so many times as long as the fastest is not measured again

Say = Callable[[str], None]


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


def measure(shape: Shape, device: str, seconds: float, say: Say = lambda text: None) -> tuple[Outcome, ...]:
    """Every backend of the device at one shape, the fastest first; `seconds` is what measuring one may take, about."""
    found: dict[str, Outcome] = {}
    x = _call(shape, shape.tokens, device)
    works: dict[str, Work] = {}
    estimates: dict[str, float] = {}
    for support in (support for support in rt.backends() if support.device == device):
        name = support.name
        outcome = _judged(support, shape, device)
        if outcome.state == "right":
            say(f"  {name}: right")
            work = partial(_gradients, name, x, shape.causal)
            try:
                estimates[name] = min(in_turn({name: work}, device, 1, 0.0)[name].seconds)
                works[name] = work
            except Exception as error:  # out of memory at the full length, say
                outcome = Outcome(name, state="error", why=_said(error))
        found[name] = outcome
        _tidy(device)
    fastest = min(estimates.values(), default=0.0)
    slow = {name: each for name, each in estimates.items() if each > SLOW * fastest}
    times = (
        in_turn({n: w for n, w in works.items() if n not in slow}, device, REPETITIONS, seconds / REPETITIONS)
        if works
        else {}
    )
    found |= {name: Outcome(name, each.median) for name, each in times.items()}
    found |= {name: Outcome(name, each, "slow") for name, each in slow.items()}
    return tuple(sorted(found.values(), key=lambda o: (o.seconds is None, o.seconds or 0.0)))


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


def _judged(support: rt.Support, shape: Shape, device: str) -> Outcome:
    """Whether a backend takes the call, and is right at it: at its length, or at the longest that can be judged."""
    name = support.name
    if support.unavailable is not None:
        return Outcome(name, state="refused", why=str(support.unavailable))
    if support.fetches:
        return Outcome(name, state="left alone", why="it may download its kernel; name it to use it")
    x = _call(shape, min(shape.tokens, JUDGED[device]), device)
    try:
        q, k, v = _leaves(x)
        why = rt.explain(q, k, v, is_causal=shape.causal, backend=name, parallel=False).reasons[name]
        if why:
            return Outcome(name, state="refused", why="; ".join(map(str, why)))
        out, grads = _called(name, x, shape.causal)
        picked = torch.tensor([0, shape.heads - 1][:HEADS] if shape.heads > 1 else [0], device=device)
        q, k, v, g, out, dq, dk, dv = (t.index_select(2, picked) for t in (x.q, x.k, x.v, x.grad_out, out, *grads))
        part = Inputs(q, k, v, x.mask, replace(x.options, return_lse=False), g)
        verdicts = judge(Quantities(out, None, dq, dk, dv), truth_of(part), yardstick(part), part)
    except Exception as error:  # whatever another project's kernel raises costs its own place alone
        return Outcome(name, state="error", why=_said(error))
    wrong = [str(verdict) for verdict in verdicts if not verdict.ok]
    return Outcome(name, state="wrong", why="; ".join(wrong)) if wrong else Outcome(name)


def _call(shape: Shape, tokens: int, device: str) -> Inputs:
    case = Case(
        "tune", tokens, tokens, batch=1, heads=shape.heads, head_dim=shape.head_dim, dtype=shape.dtype,
        causal=0 if shape.causal else None,
    )  # fmt: skip
    return build(case, device)


def _leaves(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return x.q.detach().requires_grad_(), x.k.detach().requires_grad_(), x.v.detach().requires_grad_()


def _called(name: str, x: Inputs, causal: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = q, k, v = _leaves(x)
    out = rt.attention(q, k, v, is_causal=causal, backend=name, parallel=False)
    return out.detach(), torch.autograd.grad(out, leaves, x.grad_out)


def _gradients(name: str, x: Inputs, causal: bool) -> object:
    return _called(name, x, causal)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _tidy(device: str) -> None:
    """Give back what a judged or failed call held, so that the next one has room."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
