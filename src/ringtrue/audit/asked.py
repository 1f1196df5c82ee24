"""From a case to what a subject is asked, and back to what it is judged against."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..contract import Wanted
from .drawn import revealed_by
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
        x.options.dropout_p, x.options.softcap, x.rng, ranks, x.options.deterministic,
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
    return replace(inputs, wanted=wanted, options=options, grad_lse=grad_lse, arithmetic=says.arithmetic)


def revealed(subject: Subject, inputs: Inputs, ranks: Ranks = Ranks()) -> Tensor:
    """The dropout mask that a subject draws, (B, H, Sq, Sk) float64; it must draw the same whatever v holds."""

    def forward(x: Inputs) -> Tensor:
        out = subject.run(call_of(x, ranks)).out
        if out is None:
            raise ValueError("the subject gave no out, so what it dropped cannot be seen")
        return out

    return revealed_by(forward, inputs)


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    """Everything that a subject is handed and must leave as it is, by name."""
    x, mask = inputs, inputs.mask
    parts = {"mask": mask.dense, "key mask": mask.key_keep, "key bias": mask.key_bias}
    places = {"query segments": mask.q_segments, "key segments": mask.k_segments}
    given = {"query": x.q, "key": x.k, "value": x.v, **parts, **places, "grad_out": x.grad_out, "grad_lse": x.grad_lse}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def run(subject: Subject, inputs: Inputs, ranks: Ranks = Ranks()) -> Quantities:
    """The subject's answer to these inputs."""
    return subject.run(call_of(inputs, ranks))
