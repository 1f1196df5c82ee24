"""From a case to what a subject is asked, and back to what it is judged against."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..contract import Wanted
from .inputs import Inputs
from .subject import Call, Ranks, Says, Subject
from .truth import Quantities


def call_of(inputs: Inputs, ranks: Ranks = Ranks()) -> Call:  # a NamedTuple, fine as a default
    """The call that these inputs are."""
    x = inputs
    names = zip(("query", "key", "value", "bias"), x.wanted, strict=True)
    return Call(
        x.q, x.k, x.v, x.mask, x.grad_out, x.options.scale, x.grad_lse,
        frozenset(name for name, wanted in names if wanted),
        x.options.dropout_p, x.options.softcap, x.rng, ranks,
    )  # fmt: skip


def within(says: Says, inputs: Inputs) -> Inputs:
    """What of a case is asked of a subject: no lse and no gradient of a mask from one that has none to give.

    That a subject gives neither is no refusal: torch's own attention returns no lse, and few kernels give dbias. One
    without a backward is asked for out alone, but where the case is about which gradients are wanted."""
    wanted = inputs.wanted._replace(bias=inputs.wanted.bias and says.mask_grad)
    if not says.backward and all(wanted[:3]):
        wanted = Wanted(False, False, False)
    options = replace(inputs.options, return_lse=says.lse)
    grad_lse = inputs.grad_lse if says.lse_grad else None
    return replace(inputs, wanted=wanted, options=options, grad_lse=grad_lse)


def revealed(subject: Subject, inputs: Inputs, ranks: Ranks = Ranks()) -> Tensor:
    """The dropout mask that a subject draws, (B, H, Sq, Sk) float64: as `drawn.drawn_mask`, through the whole subject.

    Only the sum over columns of the identity is read, so the subject must draw the same mask whatever v holds.
    """
    width, keys = inputs.v.shape[3], inputs.v.shape[1]
    parts = []
    for start in range(0, keys, width):
        columns = torch.eye(keys, dtype=inputs.v.dtype, device=inputs.v.device)[:, start : start + width]
        columns = torch.nn.functional.pad(columns, (0, width - columns.shape[1]))
        v = columns[None, :, None].expand(inputs.v.shape).contiguous()
        out = subject.run(call_of(replace(inputs, v=v), ranks)).out
        if out is None:
            raise ValueError("the subject gave no out, so what it dropped cannot be seen")
        parts.append(out[..., : min(width, keys - start)])
    weights = torch.cat(parts, -1).transpose(1, 2)
    return (weights != 0).double() / (1.0 - inputs.options.dropout_p)


def run(subject: Subject, inputs: Inputs, ranks: Ranks = Ranks()) -> Quantities:
    """The subject's answer to these inputs."""
    return subject.run(call_of(inputs, ranks))
