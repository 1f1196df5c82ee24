"""Every backend, one line each, in the order in which `auto` prefers them. README.md here says how to add one."""

from __future__ import annotations

from ..contract import Backend
from . import native_flash, native_math

REGISTRY: tuple[Backend, ...] = (
    native_flash.BACKEND,
    native_math.BACKEND,
)
