"""A window's ends as flash-attn counts them: around the line that leads to the last query and the last key."""

from __future__ import annotations

from typing import NamedTuple

from ..contract import Mask


class Ends(NamedTuple):
    """`causal`, `window_size_left` and `window_size_right` of flash-attn; -1 is no limit."""

    causal: bool
    left: int
    right: int


def ends_of(mask: Mask, q_len: int, k_len: int) -> Ends:
    """Of a mask whose causal offset, without a window, is k_len - q_len, and whose window has no negative end."""
    if mask.since is None:
        return Ends(mask.causal is not None, -1, -1)
    ahead = k_len - q_len
    return Ends(False, ahead - mask.since, -1 if mask.causal is None else mask.causal - ahead)
