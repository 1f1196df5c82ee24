"""Which diffusers releases and which models are known, and what their forwards look like: data, one entry a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

import ringtrue as rt

ATTRIBUTE = "_ringtrue"  # where a model keeps its binding


@dataclass(frozen=True)
class Family:
    """One model class of diffusers.

    streams    the inputs whose tokens attend to each other, in the order in which the model concatenates them
    positions  the input that holds the positions of a stream's tokens
    inputs     what a plan must split, and along which dim
    whole      inputs that go wrong under a plan that does not split them
    kwargs     the input through which the attention mask travels, as "attention_mask"
    refused    processors whose calls are not the plain joint attention of the streams
    """

    name: str
    streams: tuple[str, ...]
    positions: Mapping[str, str]
    inputs: Mapping[str, int]
    output: str
    whole: tuple[str, ...]
    kwargs: str
    refused: tuple[str, ...]


FLUX = Family(
    name="FluxTransformer2DModel",
    streams=("encoder_hidden_states", "hidden_states"),
    positions={"encoder_hidden_states": "txt_ids", "hidden_states": "img_ids"},
    inputs={"encoder_hidden_states": 1, "hidden_states": 1, "txt_ids": 0, "img_ids": 0},
    output="hidden_states",
    whole=("controlnet_block_samples", "controlnet_single_block_samples"),
    kwargs="joint_attention_kwargs",
    refused=("FluxIPAdapterAttnProcessor",),
)
FAMILIES = (FLUX,)
INSTALL = "pip install 'ringtrue[diffusers]'"
PACKAGE = rt.optional.Package("diffusers", INSTALL, at_least="0.39", below="0.43")
NAMES = rt.optional.Package(f"{__package__}.theirs", INSTALL, distribution="diffusers")  # it imports all that we need


def require(call: str) -> None:
    """UnsupportedError unless diffusers is installed, in a release that this package was run with, and can be used."""
    reason = rt.optional.why_not(PACKAGE) or rt.optional.why_not(NAMES)
    if reason is not None:
        text = rt.errors.message(
            f"[{reason.code}] {reason.text}",
            call=f"{call}(...)",
            limit=reason.limit,
            value=reason.value,
            remedy=reason.remedy,
        )
        raise rt.UnsupportedError(text)


def family_of(model: object, call: str) -> Family:
    """The family of a model; UnsupportedError, with the class's name, for every other class.

    A subclass counts while forward and plan are the family's own: FSDP2 makes such subclasses.
    """
    import diffusers

    for family in FAMILIES:
        base = getattr(diffusers, family.name)
        if isinstance(model, base) and type(model).forward is base.forward and type(model)._cp_plan is base._cp_plan:
            return family
    inner = "pass the model inside, before it is wrapped" if isinstance(model, nn.Module) else "pass the model itself"
    text = rt.errors.message(
        f"{type(model).__name__} is not supported",
        call=f"{call}(...)",
        limit=", ".join(f"diffusers' {family.name}" for family in FAMILIES),
        value=f"{type(model).__module__}.{type(model).__qualname__}",
        remedy=f"{inner}; for other models call rt.attention in a processor of your own",
    )
    raise rt.UnsupportedError(text)
