"""Laws between two calls, which need no truth: they hold for attention of any size and any mask.

heads     heads in another order (each group with its key head): everything comes back in that order
samples   a sample on its own is what it was in the batch
linear    out is linear in v: out(a v + b w) = a out(v) + b out(w); the weights do not change
token     one key and value changed: queries that see it move, and no other, not by a bit (finds ignored masks)

The first three are judged with the bounds of the rule at the place where the second call is right by the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..contract import Mask
from .asked import run
from .inputs import Inputs
from .judge import Verdict, judge_against
from .subject import Subject
from .truth import Quantities, visible

Law = Callable[[Subject, Inputs], list[Verdict]]


def heads(subject: Subject, inputs: Inputs) -> list[Verdict]:
    """Key heads are rolled by one, and the query heads of each with it."""
    x, kv_heads = inputs, inputs.k.shape[2]
    group = x.q.shape[2] // kv_heads
    to_q, to_k = group, 1

    def rolled(t: Tensor, by: int, dim: int) -> Tensor:
        return t.roll(by, dim)

    dense = x.mask.dense
    if dense is not None and dense.shape[1] > 1:
        dense = rolled(dense, to_q, 1)
    moved = replace(
        x,
        q=rolled(x.q, to_q, 2), k=rolled(x.k, to_k, 2), v=rolled(x.v, to_k, 2), grad_out=rolled(x.grad_out, to_q, 2),
        mask=replace(x.mask, dense=dense),
        grad_lse=None if x.grad_lse is None else rolled(x.grad_lse, to_q, 1),
    )  # fmt: skip
    first, second = run(subject, x), run(subject, moved)
    back = Quantities(
        out=_back(second.out, to_q, 2), lse=_back(second.lse, to_q, 1), dq=_back(second.dq, to_q, 2),
        dk=_back(second.dk, to_k, 2), dv=_back(second.dv, to_k, 2),
        dbias=_back(second.dbias, to_q, 1) if second.dbias is not None and second.dbias.dim() == 4 else second.dbias,
    )  # fmt: skip
    return judge_against(back, first, x)


def _back(x: Tensor | None, by: int, dim: int) -> Tensor | None:
    return x if x is None or x.shape[dim] == 1 else x.roll(-by, dim)


def samples(subject: Subject, inputs: Inputs) -> list[Verdict]:
    """The last sample alone."""
    x = inputs
    last = slice(x.q.shape[0] - 1, None)

    def of(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[0] == 1 else t[last]

    dense, key_keep, key_bias, q_segments, k_segments = (of(t) for t in x.mask.tensors)
    mask = Mask(dense, key_keep, key_bias, q_segments, k_segments, x.mask.causal, x.mask.since)
    wanted = x.wanted._replace(bias=False)  # of a mask that all samples share, one sample has a part
    alone = replace(
        x, q=x.q[last], k=x.k[last], v=x.v[last], grad_out=x.grad_out[last], mask=mask, grad_lse=of(x.grad_lse),
        wanted=wanted,
    )  # fmt: skip
    first, second = run(subject, x), run(subject, alone)
    parts = (first.out, first.lse, first.dq, first.dk, first.dv)
    return judge_against(second, Quantities(*(None if t is None else t[last] for t in parts)), alone)


def linear(subject: Subject, inputs: Inputs) -> list[Verdict]:
    """2 v - w / 2, exact in binary."""
    x = replace(inputs, wanted=inputs.wanted._replace(q=False, k=False, v=False, bias=False), grad_lse=None)
    w = x.v.roll(1, 1)
    mixed = replace(x, v=(2 * x.v.double() - w.double() / 2).to(x.v.dtype))
    rest = replace(x, v=(2 * x.v.double() - mixed.v.double()).to(x.v.dtype))  # w / 2, with what rounding left
    outs = [run(subject, each).out for each in (x, rest, mixed)]
    if any(out is None for out in outs):
        return [Verdict("out", ok=False, problem="missing")]
    a, b, c = outs
    assert a is not None
    assert b is not None
    expected = Quantities(out=(2 * a.double() - b.double()).to(a.dtype))
    options = replace(mixed.options, return_lse=False)
    return judge_against(Quantities(out=c), expected, replace(mixed, options=options), calls=3)


def token(subject: Subject, inputs: Inputs) -> list[Verdict]:
    """The middle key of every sample is changed by far, in k and v; who moves?"""
    x = inputs
    place = x.k.shape[1] // 2
    k, v = x.k.clone(), x.v.clone()
    k[:, place] += 1
    v[:, place] += 8
    seen = visible(x.mask, torch.Size((x.q.shape[0], x.q.shape[2], x.q.shape[1], x.k.shape[1])), x.q.device)[..., place]
    before, after = run(subject, x), run(subject, replace(x, k=k, v=v))
    found = []
    for name, rows in (("out", seen.transpose(1, 2)), ("dq", seen.transpose(1, 2))):
        a, b = getattr(before, name), getattr(after, name)
        if a is None or b is None:
            continue
        moved = (a != b).any(-1)
        if x.quantised and name == "out":  # means and scales of other keys show in the last bits of every row
            kept = torch.where(rows.unsqueeze(-1), a, b)
            found += judge_against(Quantities(out=kept), Quantities(out=a), replace(x, grad_lse=None))
            moved &= rows
        strays, still = int((moved & ~rows).sum()), int((~moved & rows).sum()) if name == "out" else 0
        problem = f"{strays} rows moved that cannot see key {place}" if strays else ""
        problem = problem or (f"{still} rows did not move that see key {place}" if still else "")
        found.append(Verdict(name, ok=not problem, problem=problem) if problem else Verdict(name, True, 0, 0, 0, 0))
    return found


SYMMETRIES: dict[str, Law] = {"heads": heads, "samples": samples, "linear": linear, "token": token}
