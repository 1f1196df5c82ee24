"""The truth against loops, finite differences and autograd of torch's own attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ringtrue.audit.inputs import Case, Inputs, build
from ringtrue.audit.judge import truth_of
from ringtrue.contract import Mask

SMALL = (
    Case("plain", 4, 5),
    Case("square", 4, 4, heads=4),
    Case("gqa-causal", 5, 4, heads=4, kv_heads=2, causal=1),
    Case("causal-blind", 5, 3, causal=-2),
    Case("wide-values-bool", 4, 6, head_dim=3, value_dim=5, mask="some:bqk"),
    Case("blind", 6, 5, mask="blind:hqk"),
    Case("keep-float", 4, 6, mask="float_input:hqk+keep_ragged"),
    Case("bias-gqa", 4, 6, mask="bias_infinite_input", heads=4, kv_heads=2, scale=-0.7),
    Case("lse", 4, 5, grad_lse=True),
    Case("lse-blind-bias", 6, 5, mask="blind:bqk+bias_input", causal=2, grad_lse=True),
    Case("softcap", 4, 5, values="peaked", softcap=1.5, mask="float_input:qk"),
    Case("window", 6, 5, causal=1, since=-2, grad_lse=True),
    Case("segments-window", 6, 5, mask="apart+bias_input", since=-3, softcap=2.0),
)
EVERY = pytest.mark.parametrize("case", [replace(c, dtype=torch.float64) for c in SMALL], ids=lambda c: c.id)


def dropped(inputs: Inputs, p: float = 0.4) -> Inputs:
    """The same call with a dropout mask that was drawn."""
    shape = (inputs.q.shape[0], inputs.q.shape[2], inputs.q.shape[1], inputs.k.shape[1])
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > p
    return replace(inputs, dropout=keep.double() / (1 - p))


def allowed(mask: Mask, b: int, h: int, i: int, j: int) -> bool:
    """Whether one query may see one key, asked one at a time."""
    biases, keeps = [], []
    if mask.dense is not None:
        place = (x if size > 1 else 0 for x, size in zip((b, h, i, j), mask.dense.shape, strict=True))
        (keeps if mask.dense.dtype == torch.bool else biases).append(mask.dense[tuple(place)].item())
    if mask.key_keep is not None:
        keeps.append(mask.key_keep[b, j].item())
    if mask.key_bias is not None:
        biases.append(mask.key_bias[b, j].item())
    if mask.q_segments is not None and mask.k_segments is not None:
        keeps.append(mask.q_segments[b, i].item() == mask.k_segments[b, j].item())
    if mask.since is not None:
        keeps.append(j >= i + mask.since)
    return all(keeps) and -math.inf not in biases and (mask.causal is None or j <= i + mask.causal)


def bias_at(mask: Mask, b: int, h: int, i: int, j: int) -> float:
    total = 0.0
    if mask.dense is not None and mask.dense.dtype != torch.bool:
        place = (x if size > 1 else 0 for x, size in zip((b, h, i, j), mask.dense.shape, strict=True))
        total += mask.dense[tuple(place)].item()
    return total + (0.0 if mask.key_bias is None else mask.key_bias[b, j].item())


def by_loops(x: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse, one query at a time, with nothing but Python's math."""
    group = x.q.shape[2] // x.k.shape[2]
    out = torch.zeros(x.grad_out.shape, dtype=torch.float64)
    lse = torch.full((x.q.shape[0], x.q.shape[2], x.q.shape[1]), -math.inf, dtype=torch.float64)
    for b, i, h in torch.cartesian_prod(*(torch.arange(n) for n in x.q.shape[:3])).tolist():
        seen = [j for j in range(x.k.shape[1]) if allowed(x.mask, b, h, i, j)]
        if not seen:
            continue
        scores = []
        for j in seen:
            raw = x.options.scale * sum((x.q[b, i, h] * x.k[b, j, h // group]).tolist())
            cap = x.options.softcap
            scores.append((cap * math.tanh(raw / cap) if cap else raw) + bias_at(x.mask, b, h, i, j))
        lse[b, h, i] = math.log(sum(math.exp(s) for s in scores))
        for j, s in zip(seen, scores, strict=True):
            drawn = 1.0 if x.dropout is None else x.dropout[b, h, i, j].item()
            out[b, i, h] += math.exp(s - lse[b, h, i].item()) * drawn * x.v[b, j, h // group]
    return out, lse


@EVERY
def test_forward_equals_loops(case: Case) -> None:
    inputs = build(case)
    values = truth_of(inputs).values
    out, lse = by_loops(inputs)
    torch.testing.assert_close(values.out, out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(values.lse, lse, rtol=1e-11, atol=1e-12)


def test_forward_under_dropout_equals_loops() -> None:
    inputs = dropped(build(replace(SMALL[2], dtype=torch.float64)))
    out, lse = by_loops(inputs)
    torch.testing.assert_close(truth_of(inputs).values.out, out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(truth_of(inputs).values.lse, lse, rtol=1e-11, atol=1e-12)


def loss(inputs: Inputs) -> float:
    """What the upstream gradients belong to: a sum over out and over the finite part of lse."""
    values = truth_of(inputs).values
    assert values.out is not None
    assert values.lse is not None
    total = (values.out * inputs.grad_out).sum()
    if inputs.grad_lse is not None:
        total = total + (values.lse.masked_fill(values.lse == -math.inf, 0.0) * inputs.grad_lse).sum()
    return float(total)


def moved(inputs: Inputs, name: str, by: Tensor) -> Inputs:
    """One input, or the float mask, moved."""
    if name != "bias":
        return replace(inputs, **{name: getattr(inputs, name) + by})
    part = "key_bias" if inputs.mask.key_bias is not None else "dense"
    return replace(inputs, mask=replace(inputs.mask, **{part: getattr(inputs.mask, part) + by}))


@EVERY
@pytest.mark.parametrize("drop", [False, True], ids=["", "dropout"])
def test_gradients_equal_finite_differences(case: Case, drop: bool) -> None:
    inputs = dropped(build(case)) if drop else build(case)
    values = truth_of(inputs).values
    draw, step = torch.Generator().manual_seed(1), 1e-5
    for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("bias", inputs.mask.bias)):
        gradient = getattr(values, f"d{name}")
        if x is None:
            assert gradient is None
            continue
        assert gradient.shape == x.shape
        for _ in range(4):
            way = torch.randn(x.shape, generator=draw, dtype=torch.float64)
            slope = (loss(moved(inputs, name, step * way)) - loss(moved(inputs, name, -step * way))) / (2 * step)
            assert slope == pytest.approx(float((gradient * way).sum()), rel=2e-8, abs=2e-8)


@pytest.mark.parametrize(
    "case",
    [
        Case("plain", 9, 13),
        Case("gqa-causal", 13, 13, heads=4, kv_heads=2, causal=0),
        Case("bool", 9, 13, mask="some:bhqk"),
        Case("float", 9, 13, mask="float_input:hqk"),
        Case("float-infinite", 9, 13, mask="float_infinite_input:bqk", scale=0.3),
    ],
    ids=lambda c: c.id,
)
def test_everything_equals_autograd_of_torchs_attention(case: Case) -> None:
    inputs = build(replace(case, dtype=torch.float64))
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    mask = inputs.mask.dense
    bias = mask.clone().requires_grad_() if mask is not None and mask.dtype != torch.bool else mask
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=None if bias is None else bias.expand(2, inputs.q.shape[2], -1, -1),
        is_causal=inputs.mask.causal is not None,
        scale=inputs.options.scale,
        enable_gqa=True,
    ).transpose(1, 2)
    values = truth_of(inputs).values
    torch.testing.assert_close(values.out, out.detach())
    leaves = [x for x in (q, k, v, bias) if x is not None and x.requires_grad]
    grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    for mine, theirs in zip((values.dq, values.dk, values.dv, values.dbias), grads, strict=False):
        torch.testing.assert_close(mine, theirs)


def test_rows_that_see_nothing_are_zero_and_minus_infinity() -> None:
    inputs = build(Case("blind", 6, 5, mask="blind:qk", grad_lse=True))
    values = truth_of(inputs).values
    blind = slice(1, None, 3)
    assert (values.out[:, blind] == 0).all()
    assert (values.dq[:, blind] == 0).all()
    assert (values.lse[:, :, blind] == -math.inf).all()
    assert values.lse[:, :, ::3].isfinite().all()
    assert all(x.isfinite().all() for x in (values.out, values.dq, values.dk, values.dv))


def test_rows_that_are_all_lowest_are_ordinary() -> None:
    """No score is left beside such a bias: finite weights that sum to 1, all alike."""
    inputs = build(Case("lowest", 4, 5, dtype=torch.float64))
    lowest = torch.full((1, 1, 1, 5), torch.finfo(torch.float32).min)
    found = truth_of(replace(inputs, mask=Mask(dense=lowest)))
    assert torch.equal(found.weights, torch.full_like(found.weights, 0.2))
    torch.testing.assert_close(found.values.out, inputs.v.mean(1, keepdim=True).expand_as(found.values.out))
    assert (found.values.lse == lowest[0, 0, 0, 0].double()).all()


def test_one_key_has_no_gradient_in_q_and_k() -> None:
    values = truth_of(build(Case("one", 4, 1, dtype=torch.float64))).values
    assert values.dq.abs().max() < 1e-14
    assert values.dk.abs().max() < 1e-14


@pytest.mark.parametrize(
    "case",
    [Case("b", 5, 7, batch=0), Case("q", 0, 7), Case("k", 5, 0), Case("bias", 5, 0, mask="bias")],
    ids=lambda c: c.id,
)
def test_empty_sizes(case: Case) -> None:
    inputs = build(case)
    values = truth_of(inputs).values
    assert values.out.shape == inputs.grad_out.shape
    assert (values.out == 0).all()
    assert (values.lse == -math.inf).all()
    for gradient, x in ((values.dq, inputs.q), (values.dk, inputs.k), (values.dv, inputs.v)):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()
