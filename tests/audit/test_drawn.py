"""What is revealed of dropout is the mask that was really applied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringtrue.audit.drawn import drawn_mask
from ringtrue.audit.inputs import Case, Inputs, build
from ringtrue.audit.truth import truth
from ringtrue.contract import Claims, ForwardOut, Grads, OpPair

CASE = Case("drawn", 5, 11, heads=4, kv_heads=2, value_dim=3, dropout=0.25, mask="some:bqk")


def pair_with(mask: torch.Tensor, widths: list[int]) -> OpPair:
    """A pair that applies one known mask, whatever the state, and writes down how wide its values were."""

    def forward(q, k, v, m, rng, options) -> ForwardOut:  # type: ignore[no-untyped-def]
        assert rng is not None
        widths.append(v.shape[3])
        upstream = v.new_zeros(*q.shape[:3], v.shape[3])
        values = truth(q, k, v, m, options.scale, upstream, dropout=mask).values
        assert values.out is not None
        assert values.lse is not None
        return ForwardOut(values.out.to(q.dtype), values.lse.float())

    return OpPair("known", forward, lambda *_: Grads(None, None, None), Claims(frozenset()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_mask_of_a_pair_is_revealed_wherever_a_weight_is(dtype: torch.dtype) -> None:
    x: Inputs = build(replace(CASE, dtype=dtype))
    known = (torch.rand(2, 4, 5, 11, generator=torch.Generator().manual_seed(0)) > 0.25).double() / 0.75
    widths: list[int] = []
    found = drawn_mask(pair_with(known, widths), x)
    assert x.mask.dense is not None
    assert torch.equal(found, known * x.mask.dense)
    assert widths == [3, 3, 3, 3]  # as the call itself, so that a kernel draws the same
