"""A rank's key mask: made from the global ones, and read back from what was passed to a parallelized model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn

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
    context  or the context itself; with neither, the one in scope; with none of them the mask is whole

    Pass it as `joint_attention_kwargs={"attention_mask": mask}`. ArgumentError for anything but bool masks of one B.
    """
    if isinstance(image, int) and isinstance(text, Tensor):
        image = torch.ones((*text.shape[:1], image), dtype=torch.bool, device=text.device)
    _check_global("text", text, text)
    _check_global("image", image, text)
    assert isinstance(image, Tensor)
    if model is not None and context is None:
        binding = model.__dict__.get(ATTRIBUTE)
        context = None if binding is None else binding.context
    if model is None and context is None:
        context = rt.ContextParallel.current()
    if context is not None:
        text, image = (context.shard(mask, 1) for mask in (text, image))
    return torch.cat([text, image], dim=1)[:, None, None, :]


def _check_global(name: str, mask: object, text: Tensor) -> None:
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype == torch.bool and mask.shape[0] == text.shape[0]:
        return
    value = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    _fail(f"local_key_mask: {name} is no mask of keys", "bool (B, tokens), one B", value, "convert with mask.bool()")


def kind_of(given: object) -> str:
    """What a rank says of the mask that `read` gave it: "none", "key_bool", or "key_float" with its dtype."""
    if given is None:
        return "none"
    return f"key_float, {given.bias.dtype}" if isinstance(given, rt.KeyBias) else "key_bool"


def common_kind(kinds: Sequence[str]) -> Literal["none", "key_bool", "key_float"]:
    """The kind of mask of a forward, from what every rank says; DisagreementError, on all ranks alike, for a mix."""
    found = set(kinds)
    if found <= {"none", "key_bool"}:
        return "key_bool" if "key_bool" in found else "none"
    if len(found) == 1:
        return "key_float"
    text = rt.errors.message(
        "ranks passed attention masks of different kinds to one model forward",
        limit="one kind; None beside a bool mask is all True",
        value="; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds)),
        remedy="every rank passes its own local_key_mask",
    )
    raise rt.DisagreementError(text)


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
    if given.requires_grad and torch.is_grad_enabled():
        text = "the gradient of a float mask is not supported under parallelize"
        raise rt.UnsupportedError(
            rt.errors.message(text, value=value, remedy="mask.detach(), or rt.attention itself with KeyBias")
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
