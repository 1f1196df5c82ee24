"""Pairs that remember: only another call before can show it."""

from __future__ import annotations

from .memories import first_lse, first_options, first_state, first_strides
from .plant import Plant

AFTER = "another call before"
MEMORIES: dict[str, Plant] = {
    "strides-of-grad-out": Plant(
        "the strides of the first call's grad_out are used for all of its sizes",
        f"{AFTER}, with grad_out stored otherwise",
        first_strides("grad_out"),
        diagnosis="grad_out read through other strides",
        source="pytorch/pytorch#191576",
    ),
    "strides-of-out": Plant(
        "the strides of the first call's out are used for all",
        f"{AFTER}, with out stored otherwise",
        first_strides("out"),
    ),
    "first-scale": Plant(
        "the first call's scale is used for all of its sizes", f"{AFTER}, with another scale", first_options("scale")
    ),
    "first-softcap": Plant(
        "the first call's softcap is used for all",
        f"{AFTER}, with a softcap",
        first_options("softcap"),
        needs=lambda c: c.softcap,
    ),
    "first-random-state": Plant(
        "backward uses the random state of the first call",
        f"{AFTER}, with another random state",
        first_state,
        needs=lambda c: c.dropout,
    ),
    "shared-lse": Plant(
        "lse is written into a buffer that calls of one size share", f"{AFTER}, with another scale", first_lse
    ),
}
