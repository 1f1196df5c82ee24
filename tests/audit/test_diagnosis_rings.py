"""Two rings that went wrong in public, step by step as their ranks ran them, and what the diagnosis says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringtrue.audit.diagnosis import diagnose
from ringtrue.audit.inputs import Case, Inputs, build
from ringtrue.audit.judge import truth_of
from ringtrue.audit.truth import Quantities, by_head


def step(x: Inputs, rows: slice, keys: slice, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One rank in one step: dq of its queries, dk and dv of these keys, from the out and lse that it is given."""
    q, g = by_head(x.q)[:, :, rows], by_head(x.grad_out)[:, :, rows]
    k, v = by_head(x.k)[:, :, keys], by_head(x.v)[:, :, keys]
    weights = (x.options.scale * q @ k.mT - lse[:, :, rows, None]).exp()
    delta = (g * by_head(out)[:, :, rows]).sum(-1, keepdim=True)
    scores = weights * (g @ v.mT - delta)
    grads = (x.options.scale * scores @ k, x.options.scale * scores.mT @ q, weights.mT @ g)
    dq, dk, dv = (t.transpose(1, 2) for t in grads)
    return dq, dk, dv


def ends(x: Inputs, keys: slice) -> tuple[Tensor, Tensor]:
    """out and lse of all queries over these keys alone."""
    scores = x.options.scale * by_head(x.q) @ by_head(x.k)[:, :, keys].mT
    return (scores.softmax(-1) @ by_head(x.v)[:, :, keys]).transpose(1, 2), scores.logsumexp(-1)


def result(x: Inputs, grads: list[Tensor]) -> Quantities:
    right = truth_of(x).values
    assert right.out is not None
    assert right.lse is not None
    dq, dk, dv = (t.float() for t in grads)
    return Quantities(right.out.float(), right.lse.float(), dq, dk, dv)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_first_step_in_all_steps(ranks: int) -> None:
    x, size = build(Case("stale-ring", 16, 16)), 16 // ranks
    own = [slice(r * size, (r + 1) * size) for r in range(ranks)]
    steps = [step(x, part, part, *ends(x, part)) for part in own]
    dq = torch.cat([ranks * s[0] for s in steps], 1)
    dk, dv = (sum(s[i] for s in steps).repeat(1, ranks, 1, 1) for i in (1, 2))  # type: ignore[union-attr]
    told = diagnose(x, result(x, [dq, dk, dv]))
    assert "stale key and value" in told
    assert f"({ranks} ranks)" in told


@pytest.mark.parametrize("ranks", [3, 4])
def test_sums_that_travel_the_wrong_way_round(ranks: int) -> None:
    """Keys come from rank r + i in step i, and the sums move on to rank r + 1: they meet again for two ranks only."""
    length = 4 * ranks
    x = build(Case("ring-sums", length, length))
    own = [slice(4 * r, 4 * (r + 1)) for r in range(ranks)]
    out, lse = ends(x, slice(0, length))
    dq, sums = [], {s: [0, 0] for s in range(ranks)}
    for r in range(ranks):
        steps = [step(x, own[r], own[(r + i) % ranks], out, lse) for i in range(ranks)]
        dq.append(sum(s[0] for s in steps))
        for i, (_, dk, dv) in enumerate(steps):
            at = sums[(r - i) % ranks]  # the sum that began at rank r - i is here in step i
            at[0], at[1] = at[0] + dk, at[1] + dv
    dk, dv = (torch.cat([sums[s][i] for s in range(ranks)], 1) for i in (0, 1))
    told = diagnose(x, result(x, [torch.cat(dq, 1), dk, dv]))
    assert told == f"dk and dv are what a ring whose sums travel the wrong way round ({ranks} ranks) gives"


def test_a_right_ring_has_no_diagnosis() -> None:
    x = build(Case("right-ring", 12, 12))
    own = [slice(4 * r, 4 * (r + 1)) for r in range(3)]
    out, lse = ends(x, slice(0, 12))
    steps = [[step(x, a, b, out, lse) for b in own] for a in own]
    dq = torch.cat([sum(s[0] for s in row) for row in steps], 1)  # type: ignore[arg-type]
    dk, dv = (torch.cat([sum(row[c][i] for row in steps) for c in range(3)], 1) for i in (1, 2))  # type: ignore[arg-type]
    assert diagnose(x, result(x, [dq, dk, dv])) == ""
