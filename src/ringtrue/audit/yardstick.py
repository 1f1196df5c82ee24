"""The yardstick: what plain eager attention loses in the inputs' own precision. It sets tolerances, never a value."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import accumulate_dtype
from . import quantised
from .inputs import Inputs
from .truth import Quantities, bias_of, visible


def yardstick(inputs: Inputs) -> Quantities | None:
    """Eager attention in the inputs' dtype; float32 eager where that is not finite; None for float64 inputs.

    Where the subject quantises query and key, out and lse are those of eager attention that does too."""
    if inputs.q.dtype == torch.float64:
        return None
    for dtype in dict.fromkeys((inputs.q.dtype, torch.float32)):
        result = eager(inputs, dtype)
        if _finite(result, inputs):
            if inputs.quantised:
                out, lse = quantised.eager(inputs)
                result = result._replace(out=out, lse=lse)
            return result
    return None


def eager(inputs: Inputs, dtype: torch.dtype) -> Quantities:
    """Forward in `dtype` (scores kept in it, lse taken from them in float32), gradients by autograd."""
    leaf = {name: getattr(inputs, name).detach().to(dtype, copy=True).requires_grad_() for name in ("q", "k", "v")}
    q, k, v = (x.transpose(1, 2) for x in leaf.values())
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    scores = (q @ k.mT) * inputs.options.scale
    if inputs.options.softcap:
        scores = torch.tanh(scores / inputs.options.softcap) * inputs.options.softcap
    seen = visible(inputs.mask, scores.shape, scores.device)
    bias = bias_of(inputs.mask, scores).requires_grad_() if inputs.mask.bias is not None else None
    if bias is not None:
        scores = scores + bias
    dead = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(dead, 0.0)  # a row of nothing but -inf would be NaN
    lse = scores.to(accumulate_dtype(dtype)).logsumexp(-1).masked_fill(dead.squeeze(-1), -torch.inf)
    weights = scores.softmax(-1).masked_fill(dead, 0.0)
    if inputs.dropout is not None:
        weights = weights * inputs.dropout.to(dtype)
    out = (weights @ v).transpose(1, 2)

    outputs, upstream = [out], [inputs.grad_out.to(dtype)]
    if inputs.grad_lse is not None:
        outputs.append(lse)
        upstream.append(inputs.grad_lse.masked_fill(dead.squeeze(-1), 0.0))
    wrt = [*leaf.values(), *([] if bias is None else [bias])]
    dq, dk, dv, *rest = torch.autograd.grad(outputs, wrt, upstream)
    return Quantities(out.detach(), lse.detach(), dq, dk, dv, _bias_shaped(rest[0], inputs) if rest else None)


def _bias_shaped(grad: Tensor, inputs: Inputs) -> Tensor:
    bias = inputs.mask.bias
    assert bias is not None
    return (grad.sum_to_size(bias.shape) if bias.dim() == 4 else grad.sum((1, 2))).to(bias.dtype)


def _finite(result: Quantities, inputs: Inputs) -> bool:
    """No NaN or inf anywhere, but for lse -inf in the rows that see nothing (those that stay -inf in the truth too)."""
    lse = result.lse
    assert lse is not None
    shape = (*lse.shape, inputs.k.shape[1])
    live = visible(inputs.mask, torch.Size(shape), lse.device).any(-1)
    others = (x for x in (result.out, result.dq, result.dk, result.dv, result.dbias) if x is not None)
    return bool(lse[live].isfinite().all()) and all(bool(x.isfinite().all()) for x in others)
