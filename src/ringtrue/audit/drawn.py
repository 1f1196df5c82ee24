"""Reveals the mask that a pair draws for dropout, from outside: the only meaning of a right gradient is that mask's."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import OpPair
from .inputs import Inputs


def drawn_mask(pair: OpPair, inputs: Inputs) -> Tensor:
    """The mask of one call, (B, H, Sq, Sk) float64: 0 where dropped, 1 / (1 - p) where kept.

    Forward again with the same random state and columns of the identity as v, as many at a time as v has, so that the
    call looks the same to the kernel: out is then a part of the dropped weights. A weight that is 0 (hidden, or too
    small for the dtype) counts as dropped, which changes nothing.
    """
    x = inputs
    width, keys = x.v.shape[3], x.v.shape[1]
    parts = []
    for start in range(0, keys, width):
        columns = torch.eye(keys, dtype=x.v.dtype, device=x.v.device)[:, start : start + width]
        columns = torch.nn.functional.pad(columns, (0, width - columns.shape[1]))
        v = columns[None, :, None].expand(x.v.shape).contiguous()
        out = pair.forward(x.q, x.k, v, x.mask, x.rng, x.options).out
        parts.append(out[..., : min(width, keys - start)])
    weights = torch.cat(parts, -1).transpose(1, 2)
    return (weights != 0).double() / (1.0 - x.options.dropout_p)
