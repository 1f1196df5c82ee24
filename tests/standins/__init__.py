"""Modules with exactly the public signatures of optional packages, one file each: they prove the glue, no kernel."""

from __future__ import annotations

from .standin import StandIn

STANDINS: tuple[StandIn, ...] = ()
