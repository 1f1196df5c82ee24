"""What a function claims, as a TOML file: the fields of audit.subject.Says by their names, one a line.

    dtypes = ["float32", "bfloat16"]
    masks = ["bool", "key_bool"]
    causal = "bottom_right"
    gqa = true
    head_dims = [256, 8]          # the largest, and what each must be a multiple of

What the file leaves out is at the default of `Says`, which claims little.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import ringtrue as rt

from ..audit.subject import Says

DTYPES = ("float32", "bfloat16", "float16", "float64")
# what the words of a field may be; a field that is not here is true or false
WORDS: dict[str, tuple[str, ...]] = {
    "dtypes": DTYPES,
    "masks": ("bool", "float", "key_bool", "key_float"),
    "causal": ("any", "top_left", "bottom_right", "square", "none"),
    "arithmetic": ("float32", "16-bit", "8-bit", "8-bit values"),
    "ranks": ("ulysses", "ring", "both", "uneven", "balanced", "prefix", "replicated"),
}
FIELDS = tuple(field.name for field in fields(Says))


def read(path: Path | str) -> Says:
    """The claims of a file. ArgumentError (a ValueError) names the key, what it may be, and the value seen."""
    path = Path(path)
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise rt.ArgumentError(f"{path.name} is not TOML: {error}") from error
    return says(found, path.name)


def says(found: dict[str, Any], name: str = "claims") -> Says:
    """The same from what such a file holds."""
    return Says(**{key: _value(key, value, name) for key, value in found.items()})


def _value(key: str, value: Any, name: str) -> Any:
    if key not in FIELDS:
        raise _error(f"{name}: unknown claim {key!r}", ", ".join(FIELDS), value)
    if key == "head_dims":
        numbers = isinstance(value, list) and len(value) == 2 and all(type(x) is int and x >= 1 for x in value)
        if not numbers:
            raise _error(f"{name}: {key}", "[largest, multiple], two integers of at least 1", value)
        return value[0], value[1]
    words = WORDS.get(key)
    if words is None:
        if not isinstance(value, bool):
            raise _error(f"{name}: {key}", "true or false", value)
        return value
    if key in ("causal", "arithmetic"):
        if value not in words:
            raise _error(f"{name}: {key}", f"one of {', '.join(words)}", value)
        return value
    if not isinstance(value, list) or not all(word in words for word in value):
        raise _error(f"{name}: {key}", f"a list of {', '.join(words)}", value)
    return frozenset(value)


def _error(problem: str, limit: str, value: Any) -> rt.ArgumentError:
    return rt.ArgumentError(rt.errors.message(problem, limit=limit, value=repr(value)))
