"""What subjects have in common that hand a call to somebody who writes (B, H, S, D) and torch's dense masks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..audit.subject import Call


def unsupported(call: Call, *words: str) -> None:
    """Raises for what an interface has no argument for: a subject that dropped it would be judged on another call.

    words: "window", "segments", "softcap", "dropout", "mask"
    """
    asked = {
        "window": call.mask.since is not None,
        "segments": call.mask.q_segments is not None,
        "softcap": bool(call.softcap),
        "dropout": bool(call.dropout_p),
        "mask": bool(call.mask.kinds),
    }
    there = [word for word in words if asked[word]]
    if there:
        raise NotImplementedError(f"there is no argument for {' or '.join(there)}")


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, D) as (B, H, S, D): two strides swapped, nothing copied."""
    return [x.transpose(1, 2) for x in tensors]


def dense_kinds(call: Call) -> bool:
    """Whether a tensor masks anything, beside causal."""
    mask = call.mask
    return any(x is not None for x in (mask.dense, mask.key_keep, mask.key_bias))


def other_dtype(call: Call) -> str:
    """Why a float mask is not what torch documents, "of the same type as query"; empty where it is."""
    bias = call.mask.bias
    return "" if bias is None or bias.dtype == call.query.dtype else f"a {bias.dtype} mask beside {call.query.dtype}"


def seeded(call: Call) -> None:
    """Dropout draws from torch's global generator: the same mask for the same call."""
    if call.rng is not None:
        torch.manual_seed(int(call.rng[0]))


def given(pairs: Iterable[tuple[str, bool]], before: str = ", ") -> str:
    """The arguments of a call that are there, as they are written: ", a=1, b=2"."""
    return "".join(f"{before}{text}" for text, there in pairs if there)
