"""The rounding scale N of a problem, per element of each quantity, from the float64 truth.

It gives a tolerance to what is exactly zero (dq and dk of one key), where a relative bound or the yardstick has none.
With E_P the rms error of the weights and E_dS that of the score gradients, squares elementwise, @ the matrix product:

    E_P      = P sqrt(u^2 + (u32 A)^2)                  A = |scale| |q||k|^T
    N_out^2  = E_P^2 @ v^2                              N_dv^2 = (E_P^T)^2 @ g^2
    E_dS^2   = (P u32)^2 (g^2 @ (v^2)^T + rowsum((g out)^2)) + (P u)^2 rowsum((g out)^2) + (E_P (dP - delta))^2
    N_dq^2   = scale^2 E_dS^2 @ k^2                     N_dk^2 = scale^2 (E_dS^T)^2 @ q^2
    N_dbias^2 = E_dS^2 summed over broadcast dims + (u_bias |dbias|)^2
    N_lse^2  = rowsum((P u32 A)^2) + (u32 |lse|)^2      for float32 and float64 inputs only

Where the subject quantises (quantised.py), N_out has E_P^2 = P^2 (u^2 + (u32 A)^2 + E_int8^2), with 2 u8^2 more where
weights and value are 8-bit floats too, and N_lse^2 = rowsum((P E_int8)^2); gradients are an exact pair's, as above.

Dropout's mask M multiplies E_P in N_out and N_dv, dP is M (g v^T). Softcap c, with t = tanh(X / c) and slope 1 - t^2:

    u32 A becomes u32 sqrt((slope A)^2 + (c t)^2): tanh contracts the error of X, and rounds what it gives
    E_dX^2 = slope^2 E_dS^2 + dS^2 ((2 t slope / c  u32 A)^2 + (2 t^2 u32)^2) takes the place of E_dS^2 in N_dq and N_dk
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import quantised
from .inputs import Inputs
from .rule import RULE
from .truth import Quantities, Truth, by_head, sum_groups, sum_to_bias


def noise(truth: Truth, inputs: Inputs) -> Quantities:
    """N for every quantity, float64, in the quantity's shape; lse None for 16-bit inputs, dbias None without a bias."""
    dtype, kv_heads = inputs.q.dtype, inputs.k.shape[2]
    u, u32 = RULE.unit[dtype], RULE.unit_32(dtype)
    group = inputs.q.shape[2] // kv_heads
    q2, g2 = by_head(inputs.q) ** 2, by_head(inputs.grad_out) ** 2
    k2, v2 = ((by_head(x) ** 2).repeat_interleave(group, 1) for x in (inputs.k, inputs.v))
    out, lse = truth.values.out, truth.values.lse
    assert out is not None
    assert lse is not None

    weights, score_error = truth.weights, u32 * _scores(truth, inputs.options.softcap)
    weight_error2 = weights**2 * (u**2 + score_error**2)
    drawn_error2 = weight_error2 if inputs.dropout is None else weight_error2 * inputs.dropout.double() ** 2
    row_terms = (g2 * by_head(out) ** 2).sum(-1, keepdim=True)
    grad_error2 = (
        (weights * u32) ** 2 * (g2 @ v2.mT + row_terms)
        + (weights * u) ** 2 * row_terms
        + weight_error2 * (truth.grad_weights - truth.delta) ** 2
    )
    scaled2 = inputs.options.scale**2 * _before_cap(truth, grad_error2, u32, inputs.options.softcap)
    squares = Quantities(
        out=(drawn_error2 @ v2).transpose(1, 2),
        dq=(scaled2 @ k2).transpose(1, 2),
        dk=sum_groups(scaled2.mT @ q2, kv_heads).transpose(1, 2),
        dv=sum_groups(drawn_error2.mT @ g2, kv_heads).transpose(1, 2),
        dbias=_dbias(truth, grad_error2, inputs),
    )
    found = Quantities(*(None if x is None else x.sqrt() for x in squares))
    if inputs.quantised:
        return found._replace(**_quantised(weights, drawn_error2, v2, inputs))
    if dtype not in (torch.float32, torch.float64):
        return found
    of_scores = (weights * score_error).norm(dim=-1)
    rows = torch.hypot(of_scores, u32 * lse.abs())  # no square of 1e308
    return found._replace(lse=rows.masked_fill(lse == -torch.inf, 0.0))  # those are compared as they are


def _quantised(weights: Tensor, weight_error2: Tensor, v2: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """N of out and lse of a subject that quantises."""
    error2 = weights**2 * quantised.score_noise(inputs)
    floats = 2 * quantised.FLOAT8_UNIT**2 if inputs.arithmetic == "8-bit values" else 0.0
    of_out = (weight_error2 + error2 + floats * weights**2) @ v2
    return {"out": of_out.sqrt().transpose(1, 2), "lse": error2.sum(-1).sqrt()}


def _scores(truth: Truth, cap: float) -> Tensor:
    """What the rounding of a score is relative to."""
    return torch.hypot(truth.slope * truth.magnitude, cap * (1 - truth.slope).sqrt()) if cap else truth.magnitude


def _before_cap(truth: Truth, grad_error2: Tensor, u32: float, cap: float) -> Tensor:
    """E_dX^2 from E_dS^2."""
    if not cap:
        return grad_error2
    slope, tanh2 = truth.slope, 1 - truth.slope
    slope_error2 = tanh2 * (2 * slope / cap * u32 * truth.magnitude) ** 2 + (2 * tanh2 * u32) ** 2
    grad_scores = truth.weights * (truth.grad_weights - truth.delta)
    return slope**2 * grad_error2 + grad_scores**2 * slope_error2


def _dbias(truth: Truth, grad_error2: Tensor, inputs: Inputs) -> Tensor | None:
    bias, dbias = inputs.mask.bias, truth.values.dbias
    if bias is None or dbias is None:
        return None
    return sum_to_bias(grad_error2, inputs.mask) + (RULE.unit[bias.dtype] * dbias) ** 2
