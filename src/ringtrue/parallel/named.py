"""Contexts by name, which is all that an operator of compiled code can hold; a name lives as long as its context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakValueDictionary

from ..errors import ArgumentError, message
from .comm import Groups
from .config import ContextParallelConfig
from .header import Header

_by_key: WeakValueDictionary[str, Any] = WeakValueDictionary()


class Named(Protocol):
    """What operators need of a context."""

    key: str
    config: ContextParallelConfig
    groups: Groups
    rank: int
    size: int

    def agree(self, what: str, same: Mapping[str, object], own: Mapping[str, object]) -> Iterable[Header]: ...

    def refusing_together(self, what: str = ...) -> AbstractContextManager[None]: ...


def keep(context: Named) -> None:
    """Give out the context under its name from now on."""
    _by_key[context.key] = context


def find(key: str) -> Any:
    """The context of that name in this process."""
    found = _by_key.get(key)
    if found is None:
        raise ArgumentError(message("the context of this call is gone", value=key, remedy="keep the ContextParallel"))
    return found
