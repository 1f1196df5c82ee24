"""Whether a library is here, loads, and is of a release that somebody looked at."""

from __future__ import annotations

import importlib
import re

Release = tuple[int, ...]


def why_not(library: str, first: str, last: str) -> str:
    """Why the library cannot be audited: not installed, broken, or outside of first ... last; else an empty text.

    Numbers are compared as far as `last` has them: a last of "5.24" takes every 5.24.x.
    """
    try:
        module = importlib.import_module(library)
    except ModuleNotFoundError as error:
        missing = "" if error.name == library else f": {error}"
        return f"{library} is not installed{missing}"
    except Exception as error:  # a library may raise anything while it loads
        return f"{library} is broken: {type(error).__name__}: {error}"
    version = str(getattr(module, "__version__", "of no known release"))
    seen, start, end = (_numbers(text) for text in (version, first, last))
    if not seen or not start <= seen or seen[: len(end)] > end:
        range_ = first if first == last else f"{first} to {last}"
        return f"{library} {version} is a release that nobody looked at: what is claimed is of {range_}"
    return ""


def _numbers(version: str) -> Release:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()
