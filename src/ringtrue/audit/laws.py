"""Laws a pair must keep beside the rule: what makes a ring provable on one device, and what a ring may lose.

Chunk law: forward on parts of K and V, merged, equals the whole; backward on each part with the *global* out and lse
gives a dq that adds up and dk, dv that concatenate. Judged like any other result.
Ring law: errors must not grow with the number of ranks beyond what right float32 sums cost.
The order law, that nothing depends on what ran before, is in order.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..contract import Grads, OpPair, accumulate_dtype
from .inputs import Inputs
from .rule import RULE, Arithmetic
from .truth import Quantities


def whole(pair: OpPair, inputs: Inputs, stored: Callable[[Tensor], Tensor] = lambda out: out) -> Quantities:
    """One forward and one backward call of a pair; `stored` gives out other strides on its way to backward."""
    x = inputs
    result = pair.forward(x.q, x.k, x.v, x.mask, x.rng, x.options)
    if not any(x.wanted):
        return Quantities(result.out, result.lse)
    held = (x.q, x.k, x.v) if pair.reads_inputs else (None, None, None)
    ends = (stored(result.out), result.lse) if pair.reads_inputs else (None, None)
    grads = pair.backward(
        x.grad_out, x.grad_lse, *held, x.mask, *ends, result.rng, result.saved, x.options, x.wanted
    )  # fmt: skip
    return Quantities(result.out, result.lse, *grads)


def chunk_law(pair: OpPair, inputs: Inputs, cuts: Sequence[int]) -> Quantities:
    """The same call on parts of the keys, cut before each key in `cuts` (ascending; equal cuts make an empty part)."""
    x = inputs
    rows = slice(0, x.q.shape[1])
    parts = list(_parts(cuts, x.k.shape[1]))
    pieces = [pair.forward(x.q, x.k[:, c], x.v[:, c], x.mask.at(rows, c), None, x.options) for c in parts]
    out, lse = merged([p.out for p in pieces], [p.lse for p in pieces])
    out = out.to(x.q.dtype)
    if not any(x.wanted):
        return Quantities(out, lse)
    grads = [
        pair.backward(
            x.grad_out, x.grad_lse, x.q, x.k[:, c], x.v[:, c], x.mask.at(rows, c), out, lse,
            p.rng, p.saved, x.options, x.wanted,
        )
        for c, p in zip(parts, pieces, strict=True)
    ]  # fmt: skip
    return Quantities(out, lse, _total([g.dq for g in grads]), _joined([g.dk for g in grads]),
                      _joined([g.dv for g in grads]), _bias_grad(grads, inputs))  # fmt: skip


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Partial (out (B, Sq, H, Dv), lse (B, H, Sq)) over disjoint keys -> the whole, in float32 (or float64)."""
    lse = torch.stack(list(lses))
    total = lse.logsumexp(0)
    shares = (lse - total.masked_fill(total == -torch.inf, 0.0)).exp().transpose(2, 3).unsqueeze(-1)
    return (torch.stack([o.to(lse.dtype) for o in outs]) * shares).sum(0), total


def _parts(cuts: Sequence[int], length: int) -> Iterator[slice]:
    edges = (0, *cuts, length)
    if sorted(edges) != list(edges):
        raise ValueError(f"cuts must ascend from 0 to {length}: {list(cuts)}")
    return (slice(a, b) for a, b in pairwise(edges))


def _total(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Contributions in the inputs' dtype, summed in float32."""
    there = [g for g in grads if g is not None]
    if len(there) != len(grads):
        return None
    return torch.stack([g.to(accumulate_dtype(g.dtype)) for g in there]).sum(0).to(there[0].dtype)


def _joined(grads: Sequence[Tensor | None], dim: int = 1) -> Tensor | None:
    there = [g for g in grads if g is not None]
    return torch.cat(there, dim) if len(there) == len(grads) else None


def _bias_grad(grads: Sequence[Grads], inputs: Inputs) -> Tensor | None:
    """Parts of a float mask's gradient: joined along the keys, or summed where the mask has no key dim."""
    bias, parts = inputs.mask.bias, [g.dbias for g in grads]
    if bias is None or not inputs.wanted.bias:
        return None
    return _total(parts) if bias.dim() == 4 and bias.shape[-1] == 1 else _joined(parts, -1)


@dataclass(frozen=True)
class Growth:
    """The worst ratio of one quantity's errors between two numbers of ranks, over all seeds."""

    quantity: str
    ranks: tuple[int, int]
    ratio: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.ratio <= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.ok else "> "
        return f"{self.quantity:<4} {self.ranks[0]:>2} ranks / {self.ranks[1]}: {self.ratio:.3f} {sign} {self.limit}"


Errors = Sequence[Mapping[str, float]]


def ring_law(one: Errors, two: Errors, sixteen: Errors, arithmetic: Arithmetic) -> list[Growth]:
    """Errors of out, dq, dk and dv (judge.relative_errors), seed by seed, of one pair at 1, 2 and 16 ranks.

    For 16-bit inputs, Gaussian, non-causal, S = 512, six seeds; a pair of float32 arithmetic rounds once on one device,
    so a right ring costs about sqrt 2 there and its limits are wider.
    """
    limits = RULE.ring[arithmetic]
    table = (
        ((16, 1), sixteen, one, limits.sixteen_to_one),
        ((16, 2), sixteen, two, limits.sixteen_to_two),
        ((2, 1), two, one, limits.two_to_one),
    )
    return [
        Growth(name, ranks, max(a[name] / b[name] for a, b in zip(many, few, strict=True)), limit)
        for name in ("out", "dq", "dk", "dv")
        for ranks, many, few, limit in table
    ]
