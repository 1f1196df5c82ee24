"""Reveals the mask that is drawn for dropout, from outside: the only meaning of a right gradient is that mask's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..contract import OpPair
from .inputs import Inputs


def drawn_mask(pair: OpPair, inputs: Inputs) -> Tensor:
    """The mask of one call of a pair, (B, H, Sq, Sk) float64: 0 where dropped, 1 / (1 - p) where kept."""
    return revealed_by(lambda x: pair.forward(x.q, x.k, x.v, x.mask, x.rng, x.options).out, inputs)


def revealed_by(forward: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
    """The same of anything that gives out.

    Forward again with the same random state and columns of the identity as v, as many at a time as v has, so that the
    call looks the same to the kernel: out is then a part of the dropped weights. A weight that is 0 (hidden, or too
    small for the dtype) counts as dropped, which changes nothing.
    """
    width, keys = inputs.v.shape[3], inputs.v.shape[1]
    parts = []
    for start in range(0, keys, width):
        columns = torch.eye(keys, dtype=inputs.v.dtype, device=inputs.v.device)[:, start : start + width]
        columns = torch.nn.functional.pad(columns, (0, width - columns.shape[1]))
        v = columns[None, :, None].expand(inputs.v.shape).contiguous()
        parts.append(forward(replace(inputs, v=v))[..., : min(width, keys - start)])
    weights = torch.cat(parts, -1).transpose(1, 2)
    return (weights != 0).double() / (1.0 - inputs.options.dropout_p)
