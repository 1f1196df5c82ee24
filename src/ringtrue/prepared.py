"""What an earlier, identical call was found to need: an eager call without a mask is checked and chosen for once.

Identical means: all that `call.normalise` and `select.fitting` look at. A call with anything else (a mask, options,
dropout, autocast, an OpPair, a flag that is no plain bool) has no key and goes the long way. Never under torch.compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import autocast_dtype
from .contract import Mask, OpPair, Options, Wanted

LIMIT = 4096  # then all is forgotten: sizes that never come back must not hold memory
Key = tuple[object, ...]


class Prepared(NamedTuple):
    """A checked call but for its tensors."""

    pair: OpPair
    mask: Mask
    options: Options
    wanted: Wanted


_calls: dict[Key, Prepared] = {}


def key_of(q: object, k: object, v: object, asked: object, arguments: Mapping[str, object]) -> Key | None:
    """The key of a call, or None for one that goes the long way. `asked` is the backend, the scope's included."""
    (
        attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, return_lse, layout, deterministic, backend_options,
    ) = arguments.values()  # fmt: skip
    if attn_mask is not None or backend_options is not None or type(asked) is not str or type(layout) is not str:
        return None
    # 1 equals True, and False equals 0: what is refused by its type must not find what its equal left
    if not (
        type(is_causal) is type(enable_gqa) is type(return_lse) is bool and type(deterministic) in (bool, NoneType)
    ):
        return None
    if not (type(dropout_p) is type(softcap) is float and type(scale) in (float, NoneType)) or dropout_p != 0.0:
        return None
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return None
    if q.is_nested or k.is_nested or v.is_nested or not q.layout is k.layout is v.layout is torch.strided:
        return None
    if torch._C._is_any_autocast_enabled() and autocast_dtype(q.device.type) is not None:
        return None
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.requires_grad, k.requires_grad, v.requires_grad, torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(), deterministic,
        is_causal, scale, enable_gqa, softcap, return_lse, layout, asked,
    )  # fmt: skip


def find(key: Key | None) -> Prepared | None:
    """What the call with this key needs, if one was made."""
    return None if key is None else _calls.get(key)


def keep(key: Key | None, prepared: Prepared) -> None:
    """Remember what the call with this key needed."""
    if key is None:
        return
    if len(_calls) >= LIMIT:
        _calls.clear()
    _calls[key] = prepared


def forget() -> None:
    """Forget every call: another set of backends would be chosen from."""
    _calls.clear()
