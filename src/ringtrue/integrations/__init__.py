"""Other people's libraries, plugged into; each is loaded when it is first asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

_KNOWN = ("diffusers",)


def __getattr__(name: str) -> ModuleType:
    if name in _KNOWN:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_KNOWN)}")
