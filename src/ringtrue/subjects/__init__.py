"""What can be audited. A subject is found by a name: "family", "family/which", or "package.module:function".

A family is one module here, imported when it is asked for, whose `found(device)` gives its subjects; a library that is
not installed, or of a release that nobody looked at, is a subject whose `unavailable` says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from fnmatch import fnmatchcase

from ..audit.subject import Plain, Says, Subject
from .function import function

FAMILIES = {
    "ours": "ringtrue's own backends and op pairs",
    "torch": "F.scaled_dot_product_attention: torch's choice, and each of its kernels alone",
    "diffusers": "diffusers' dispatcher and op pairs, alone and under its context parallelism",
    "flex": "torch's flex_attention, as it is and compiled",
    "transformers": "transformers' attention functions: eager ones and all that are registered",
    "xformers": "xformers' memory_efficient_attention: its choice, and each pair of operators",
    "ring-flash-attn": "its rings, over processes",
    "yunchang": "long-context-attention: Ulysses, rings and both, over processes",
}
MODULES = {"torch": "torch_sdpa"}  # where a family's module has another name
TRUTH = Plain(
    "truth",
    lambda call: call.query,  # never asked: what is checked is the audit's own reference
    Says(dtypes=frozenset({"float64"})),
    "float64 eager attention, checked by finite differences",
)


def found(name: str, device: str, *, layout: str = "bshd", claims: Says | None = None) -> list[Subject]:
    """The subjects that a name, or a pattern ("torch/*"), means: at least one. ValueError lists what there is.

    layout, claims  of a function (function.py); a family knows its own
    """
    if name == TRUTH.name:
        return [TRUTH]
    if ":" in name:
        return [function(name, layout, claims)]
    family, _, which = name.partition("/")
    if family not in FAMILIES:
        raise ValueError(f"unknown subject {name!r}: {', '.join(FAMILIES)}, or package.module:function")
    subjects = list(of_family(family, device))
    exact = [s for s in subjects if s.name == name]
    chosen = exact or [s for s in subjects if not which or fnmatchcase(s.name, name) or s.name.startswith(f"{name}/")]
    if not chosen:
        raise ValueError(f"unknown subject {name!r} on {device}: {', '.join(s.name for s in subjects)}")
    return chosen


def of_family(family: str, device: str) -> Iterator[Subject]:
    """Every subject of a family."""
    module = MODULES.get(family, family.replace("-", "_"))
    yield from importlib.import_module(f"{__name__}.{module}").found(device)
