"""A rank's key mask: made from the global ones, and read back from what was passed to a parallelized model."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

import ringtrue as rt

from .models import ATTRIBUTE

FORMS = "(B, 1, 1, keys) or (B, keys), bool (True = may be attended to) or float (added to the scores)"


def local_key_mask(
    text: Tensor,
    image: Tensor | int,
    *,
    model: nn.Module | None = None,
    context: rt.ContextParallel | None = None,
) -> Tensor:
    """The mask of the keys that this rank holds, its text before its image: bool (B, 1, 1, keys).

    text     which text tokens of the whole sequence are real: bool (B, text tokens)
    image    likewise (B, image tokens), or how many there are when all of them are real
    model    a model: its context if it is parallelized, else none
    context  or the context itself; with neither, the one in scope (`with context:`), and without any the mask is whole

    Pass it as `joint_attention_kwargs={"attention_mask": mask}`. ArgumentError for anything but bool masks of one batch.
    """
    if isinstance(image, int):
        image = torch.ones(text.shape[0], image, dtype=torch.bool, device=text.device)
    for name, mask in (("text", text), ("image", image)):
        if mask.dim() != 2 or mask.dtype != torch.bool or mask.shape[0] != text.shape[0]:
            value = f"{tuple(mask.shape)} {mask.dtype}"
            _fail(f"local_key_mask: {name} is not a key mask", "bool (B, tokens), one B", value, "convert with mask.bool()")
    if model is not None and context is None:
        binding = model.__dict__.get(ATTRIBUTE)
        context = binding.context if binding is not None else None
    elif context is None:
        context = rt.scope.current_context()
    if context is not None:
        text, image = (context.shard(mask, 1) for mask in (text, image))
    return torch.cat([text, image], dim=1)[:, None, None, :]


def kind_of(given: object) -> str:
    """The kind of a mask that `read` took, as a declared call names it."""
    if given is None:
        return "none"
    return "key_bool" if isinstance(given, rt.KeyPadding) else "key_float"


def read(given: object, batch: int, keys: int) -> rt.KeyPadding | rt.KeyBias | None:
    """What was passed to a parallelized model as attention mask, as a mask of this rank's keys.

    ArgumentError or UnsupportedError for what is no mask of keys, or of another number of keys.
    """
    if given is None:
        return None
    if isinstance(given, rt.KeyPadding):
        given = given.keep
    elif isinstance(given, rt.KeyBias):
        given = given.bias
    if not isinstance(given, Tensor):
        _fail("attention_mask is not a mask of keys", FORMS, type(given).__name__, "make it with local_key_mask")
    assert isinstance(given, Tensor)
    value = f"{tuple(given.shape)} {given.dtype}"
    if given.dtype != torch.bool and not given.dtype.is_floating_point:
        _fail("attention_mask is neither bool nor float", FORMS, value, "convert a mask of 0 and 1 with mask.bool()")
    if given.dim() == 4 and given.shape[2] != 1:
        _refuse_rows(value)
    if given.dim() == 2 and given.shape[0] not in (1, batch):
        _refuse_rows(value)
    if given.dim() not in (2, 4) or (given.dim() == 4 and given.shape[1] != 1) or given.shape[0] not in (1, batch):
        _fail("attention_mask is not a mask of keys", f"{FORMS}, B = {batch}", value, "make it with local_key_mask")
    if given.shape[-1] != keys:
        _fail(
            "attention_mask has another number of keys than this rank holds",
            f"{keys} keys: this rank's text and image tokens",
            f"{given.shape[-1]} keys, of {value}",
            "make it with local_key_mask(text, image, model=model) from the masks of the whole sequence",
        )
    flat = given.reshape(given.shape[0], keys).expand(batch, keys)
    return rt.KeyPadding(flat) if flat.dtype == torch.bool else rt.KeyBias(flat)


def _refuse_rows(value: str) -> NoReturn:
    text = rt.errors.message(
        "[order-unknown] a mask with query rows under parallelize: a call sees the shards of each stream rank by rank",
        limit=FORMS,
        value=value,
        remedy="a mask of keys, made with local_key_mask",
    )
    raise rt.UnsupportedError(text)


def _fail(problem: str, limit: str, value: str, remedy: str) -> NoReturn:
    raise rt.ArgumentError(rt.errors.message(problem, limit=limit, value=value, remedy=remedy))
