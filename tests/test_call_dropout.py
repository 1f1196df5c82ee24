"""Dropout: drawn outside of the pair from torch's generator, carried to backward, and the same when recomputed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ringtrue as rt
from calls import WIDEST, assert_close, like, qkv
from calls import one_thread as one_thread
from ringtrue import masks
from ringtrue.audit.drawn import drawn_mask
from ringtrue.audit.inputs import Inputs
from ringtrue.audit.judge import judged
from ringtrue.audit.laws import whole
from ringtrue.backends import REGISTRY
from ringtrue.call import random_state
from ringtrue.contract import Facts, Mask, OpPair, Options, Wanted, accumulate_dtype
from ringtrue.edge import edge
from ringtrue.select import fitting, preference


class Dropping(NamedTuple):
    """A backend that claims dropout, on a device that is here, in its widest dtype."""

    name: str
    device: str

    @property
    def pair(self) -> OpPair:
        return next(b for b in REGISTRY if b.name == self.name).pairs[self.device]

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype in WIDEST if dtype in self.pair.claims.dtypes]

    def there(self, *tensors: torch.Tensor, grad: bool = False) -> list[torch.Tensor]:
        return [x.detach().to(self.device, self.dtypes[0]).requires_grad_(grad) for x in tensors]


DROPS = [
    Dropping(b.name, device)
    for b in REGISTRY
    for device, pair in b.pairs.items()
    if pair.claims.dropout and (device == "cpu" or torch.cuda.is_available()) and b.unavailable(device) is None
]
EVERY_DROPPING = pytest.mark.parametrize(
    "backend",
    [pytest.param(d, id=f"{d.name}-{d.device}", marks=() if d.device == "cpu" else pytest.mark.gpu) for d in DROPS],
)


STEP = 1 / 256  # some kernels draw a byte a weight


def run(backend: Any, *tensors: torch.Tensor, p: float = 0.3, **arguments: Any) -> Any:
    return rt.attention(*tensors, dropout_p=p, backend=backend.name, **arguments)


def random(x: torch.Tensor) -> torch.Tensor:
    return like(x).to(x.device)


@EVERY_DROPPING
def test_the_seed_decides(backend: Any) -> None:
    tensors = backend.there(*qkv(), grad=True)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = run(backend, *tensors)
        found.append((out, *torch.autograd.grad(out, tensors, random(out))))
    again = run(backend, *tensors)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert not torch.equal(again, found[2][0])


@EVERY_DROPPING
def test_backward_moves_no_generator_and_p_zero_draws_nothing(backend: Any) -> None:
    tensors = backend.there(*qkv(), grad=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run(backend, *tensors, p=0.0).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    out = run(backend, *tensors)
    drawn = torch.get_rng_state()
    assert not torch.equal(drawn, before)
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_state_is_a_seed_and_no_offset() -> None:
    torch.manual_seed(5)
    first, second = random_state(), random_state()
    assert (first.dtype, first.shape, first.device.type) == (torch.int64, (2,), "cpu")
    assert first[0] != second[0]
    assert first[1] == second[1] == 0
    torch.manual_seed(5)
    assert torch.equal(random_state(), first)


@EVERY_DROPPING
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_same_when_a_checkpoint_recomputes(backend: Any, reentrant: bool) -> None:
    tensors = backend.there(*qkv(), grad=True)
    found = []
    for kept in (False, True):
        torch.manual_seed(4)
        x = [t * 1.0 for t in tensors]
        arguments = {"use_reentrant": reentrant}
        out = checkpoint(run, backend, *x, **arguments) if kept else run(backend, *x)
        torch.rand(7)  # something else draws between forward and backward
        for t in tensors:
            t.grad = None
        out.backward(random(out))  # a reentrant checkpoint knows only this form
        found.append((out, *(t.grad.clone() for t in tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def inputs(backend: Dropping, wide: int = 12, p: float = 0.3, mask: Mask | None = None, dtype: Any = None) -> Inputs:
    dtype, device = dtype or backend.dtypes[-1], backend.device
    q, k, v = (x.to(device) for x in qkv(9, wide, heads=4, kv_heads=2, value_dim=5, dtype=dtype))
    upstream = like(torch.empty(2, 9, 4, 5, dtype=dtype)).to(device)
    mask = Mask(*(None if x is None else x.to(device) for x in mask.tensors), mask.causal, mask.since) if mask else None
    options = Options(1 / math.sqrt(8), dropout_p=p, return_lse=True)
    wanted = Wanted(True, True, True, mask is not None and mask.bias is not None)
    return Inputs(q, k, v, mask or Mask(), options, upstream, wanted=wanted, rng=torch.tensor([11, 0]))


@EVERY_DROPPING
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_mask_drops_its_share_and_keeps_the_sum(backend: Any, p: float) -> None:
    x = inputs(backend, 200, p)
    drawn = drawn_mask(edge(backend.pair), x)
    assert set(drawn.unique().tolist()) == {0.0, 1.0 / (1.0 - p)}
    kept = (drawn > 0).double()
    spread = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean() - (1 - p)) < 4 * spread + STEP
    for dim in range(4):  # no dim along which all is drawn alike
        one, other = kept.select(dim, 0), kept.select(dim, 1)
        assert (one != other).double().mean() > p * (1 - p)


@EVERY_DROPPING
def test_the_masks_of_neighbours_are_independent(backend: Any) -> None:
    """Of the next offset (the next part of a call), the next seed, the next sample and the next head: no correlation.

    Shifted too: Philox masks of overlapping offsets are the same numbers, some keys or queries further on.
    """
    x = replace(inputs(backend, 256, 0.5), rng=torch.tensor([5, 0]))
    states = [torch.tensor(state) for state in ([5, 0], [5, 1], [5, 2], [5, 4], [6, 0], [9, 0])]
    first, *others = ((drawn_mask(edge(backend.pair), replace(x, rng=s)) > 0).double() - 0.5 for s in states)
    pairs = [(first, other) for other in others]
    pairs += [(first[:1], first[1:]), (first[:, :-1], first[:, 1:]), (first[:, :, :-1], first[:, :, 1:])]
    for one, other in pairs:
        for shift in (0, 1, 2, 4, 8, 32, 64):
            common = (one * other.roll(shift, -1)).mean() * 4
            assert abs(common) < 5 / math.sqrt(one.numel())


@EVERY_DROPPING
def test_lse_knows_nothing_of_it(backend: Any) -> None:
    tensors = backend.there(*qkv(), grad=True)
    (_, with_it), (_, without) = (run(backend, *tensors, p=p, return_lse=True) for p in (0.5, 0.0))
    assert_close(with_it, without)
    for a, b in zip(*(torch.autograd.grad(x, tensors[:2], random(x)) for x in (with_it, without)), strict=True):
        assert_close(a, b)


def poorer(backend: Any, **claims: Any) -> OpPair:
    """The pair as if it took less, so that its edge does more: a lowered mask, two calls for lse."""
    pair = backend.pair
    return edge(replace(pair, claims=replace(pair.claims, **claims)))


HIDDEN = torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(2)) < 0.3
ROWS = torch.ones(2, 1, 9, 12).masked_fill(HIDDEN, -math.inf)
MASKS = {
    "none": Mask(),
    "a window": Mask(causal=3, since=-2),
    "causal in two blocks": Mask(causal=4),
    "rows": Mask(ROWS),
    "rows and a window": Mask(ROWS, causal=6, since=-5),
}


@EVERY_DROPPING
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rich", [True, False], ids=["as it is", "poorer"])
def test_the_gradient_belongs_to_the_mask_that_was_drawn(backend: Any, name: str, rich: bool) -> None:
    """Also where the edge makes several calls of one: each block draws its own, the same in both directions."""
    claims = backend.pair.claims
    if MASKS[name].kinds and not claims.masks:
        pytest.skip("takes no mask")
    poor: dict[str, Any] = {"causal": "top_left", "dlse": False, "gqa": False, "dropout_tile": 2 * 4 * 12 * 4}
    if claims.masks:
        poor["masks"] = frozenset({"dense_float"})
    if not rich and backend.device == "cuda":
        pytest.skip("is as poor as that")
    pair = poorer(backend, **({} if rich else poor))
    for dtype in (backend.dtypes[0], torch.bfloat16):
        x = inputs(backend, mask=MASKS[name], dtype=dtype)
        upstream = like(torch.empty(2, 4, 9, dtype=accumulate_dtype(dtype))).to(backend.device)
        x = replace(x, grad_lse=upstream, wanted=x.wanted._replace(bias=x.wanted.bias and claims.dbias))
        with mock.patch.object(masks, "BLOCK", 4):
            x = replace(x, dropout=drawn_mask(pair, x))
            verdicts = judged(whole(pair, x), x)
        assert all(v.ok for v in verdicts), "\n".join(map(str, verdicts))


@EVERY_DROPPING
def test_blocks_do_not_repeat_each_other(backend: Any) -> None:
    if not backend.pair.claims.masks:
        pytest.skip("takes no mask")
    pair = poorer(backend, masks=frozenset({"dense_float"}))
    ids = Mask(since=-100, q_segments=torch.zeros(2, 9).int(), k_segments=torch.zeros(2, 12).int())
    x = inputs(backend, 12, 0.5, ids)
    with mock.patch.object(masks, "BLOCK", 3):
        drawn = drawn_mask(pair, x)
    parts = drawn.split(3, 2)
    assert not any(torch.equal(a, b) for a, b in ((parts[0], parts[1]), (parts[1], parts[2]), (parts[0], parts[2])))


def test_auto_takes_the_kernels_on_cuda() -> None:
    """By their claims, on any machine."""
    sizes = (2, 96, 96, 4, 4, 64, 64)
    facts = Facts("cuda", torch.bfloat16, *sizes, wanted=Wanted(True, True, True), dropout=True, capability=(9, 0))
    here = {b.name for b in REGISTRY if "cuda" in b.pairs and not b.unavailable("cuda")}
    assert [c.backend for c in fitting("auto", facts)] == [n for n in preference(facts).names if n in here]
