"""Modules with exactly the public signatures of optional packages, one file each: they prove the glue, no kernel."""

from __future__ import annotations

from ringtrue.backends import flash, flash_4, xformers

from . import flash_attn_2, flash_attn_4, xformers_fmha
from .standin import StandIn

STANDINS: tuple[StandIn, ...] = (
    StandIn(flash.make_pair("flash", lambda: flash_attn_2), ("flash", "flash_hub")),
    StandIn(flash_4.make_pair("flash_4", lambda: flash_attn_4), ("flash_4", "flash_4_hub")),
    StandIn(xformers.make_pair("xformers", lambda: xformers_fmha), ("xformers",)),
)
