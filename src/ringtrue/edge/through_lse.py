"""The gradient of lse for pairs that take none: one more call of their own backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..contract import Grads, Mask, OpPair, Options, Wanted, accumulate_dtype
from .fit import fit, pad


def through_lse(
    pair: OpPair,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lowered: Mask,
    lse: Tensor,
    saved: tuple[Tensor, ...],
    options: Options,
    wanted: Wanted,
) -> Grads:
    """What a gradient g of lse adds, by one more call of the pair's own backward, as the kernel gives it (dv: nothing).

    dS = P (dP - rowsum(grad_out out)) becomes P g with v = 0, grad_out the first unit vector and out = -g in its
    column; in 16 bits g goes as its high and low part, over two columns, scaled by a power of two into their range.
    lse knows nothing of dropout, nor does this call.
    """
    claims, columns, exponent = pair.claims, [grad_lse], None
    if q.dtype != grad_lse.dtype:
        exponent = torch.frexp(grad_lse.abs().amax()).exponent
        scaled = torch.ldexp(grad_lse, -exponent)
        high = scaled.to(q.dtype)
        columns = [high, (scaled - high.to(scaled.dtype)).to(q.dtype)]
    nothing = v.new_zeros(*v.shape[:3], max(v.shape[3], len(columns)))
    wide_q, wide_k, wide_v = fit(claims, q, k, nothing)
    out = pad(-torch.stack(columns, -1).transpose(1, 2), wide_v.shape[-1]).contiguous()
    unit = out.new_zeros(out.shape[-1]).index_fill(0, torch.arange(len(columns), device=out.device), 1.0)
    unit = unit.expand(out.shape).contiguous()
    options, wanted = replace(options, dropout_p=0.0), wanted._replace(v=False)
    grads = pair.backward(unit, None, wide_q, wide_k, wide_v, lowered, out, lse, None, saved, options, wanted)
    if exponent is None:
        return grads
    return Grads(*(None if g is None else torch.ldexp(g.to(lse.dtype), exponent) for g in grads))


def plus(a: Grads, b: Grads) -> Grads:
    """Both in float32 (float64 for float64), as wide as `a`; rounded once more by whoever hands them out."""
    return Grads(
        *(
            x if x is None or y is None else x.to(accumulate_dtype(x.dtype)) + y[..., : x.shape[-1]]
            for x, y in zip(a, b, strict=True)
        )
    )
