"""Claims in words: every question of one backend, or a few words on each of all; for the terminal and the pages alike.

A field of `Claims` that has no words of its own here is shown under its own name, so nothing that is claimed is hidden.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ringtrue as rt

MASKS = {
    "dense_bool": "bool tensor",
    "dense_float": "float tensor",
    "key_keep": "KeyPadding",
    "key_bias": "KeyBias",
    "segments": "Segments",
    "window": "Window",
}
CAUSAL = {"none": "no", "top_left": "top left", "bottom_right": "bottom right", "offset": "any alignment"}
BIAS = {
    "any": "any float dtype",
    "input": "one whose numbers the inputs' dtype holds",
    "accumulate": "float32, or wider",
}
ARITHMETIC = {
    "float32": "float32 or wider",
    "16-bit": "the inputs' dtype",
    "8-bit": "float16; query and key quantised to int8",
    "8-bit values": "8-bit floats, as the values; query and key quantised to int8",
}
SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
IN_ANOTHER_ROW = ("head_dims", "max_capability")
ON = re.compile(r"\d+x([A-Z]+\d+\w*)")  # the machine in the name of a page of docs/verified: 2xH200


@dataclass(frozen=True)
class Column:
    """A backend on one or more kinds of device with the same claims, and the answers in the order of the rows."""

    name: str
    devices: tuple[str, ...]
    supports: tuple[rt.Support, ...]
    cells: tuple[str, ...]


def rows() -> tuple[str, ...]:
    """The questions, in order."""
    return tuple(label for label, _ in _rows())


def columns(supports: Iterable[rt.Support], *, join: bool = False) -> tuple[Column, ...]:
    """The answers of every backend; `join` puts the devices on which one backend claims the same into one column."""
    groups: dict[object, list[rt.Support]] = {}
    for support in supports:
        groups.setdefault((support.name, support.claims if join else support.device), []).append(support)
    return tuple(
        Column(
            group[0].name,
            tuple(support.device for support in group),
            tuple(group),
            tuple(read(group[0].claims) for _, read in _rows()),
        )
        for group in groups.values()
    )


@dataclass(frozen=True)
class Brief:
    """What most people choose a backend by, in a few words each."""

    dtypes: str
    head_dims: str
    masks: str
    trains: str
    ring: str
    also: str


def brief(claims: rt.Claims) -> Brief:
    """The few words; `also` lists what not every kernel has."""
    also = (
        (claims.dropout, "dropout"),
        (claims.softcap, "softcap"),
        (claims.dbias, "gradient of a float mask"),
        (claims.deterministic, "deterministic"),
        (claims.deterministic_by_switch and not claims.deterministic, "deterministic by torch's switch"),
        (claims.double_backward, "double backward"),
        (claims.arithmetic.startswith("8-bit"), "quantised"),
        (bool(claims.options), "options: " + _joined(claims.options, {})),
    )
    return Brief(
        dtypes=", ".join(SHORT.get(_word(d), _word(d)) for d in _by_size(claims.dtypes)),
        head_dims=_head_dims(claims),
        masks=_masks(claims),
        trains=_trains(claims),
        ring=_said(_rings(claims)),
        also=", ".join(words for there, words in also if there) or "-",
    )


def verified(support: rt.Support) -> str:
    """How a kernel was proven, in words: "on H200" for a page of docs/verified that was measured on one."""
    seen = support.verified
    if seen in ("", "stand-in"):
        return "glue, with a stand-in" if seen else "no"
    machine = ON.search(seen)
    return f"on {machine[1]}" if machine else seen


def plain(claims: rt.Claims) -> dict[str, Any]:
    """All fields, as JSON has them."""
    return {field.name: _json(getattr(claims, field.name)) for field in dataclasses.fields(claims)}


Read = Callable[[rt.Claims], str]


def _rows() -> list[tuple[str, Read]]:
    """Those with words of their own, then every other field; what the edge makes alike for all pairs is left out."""
    fields = [field.name for field in dataclasses.fields(rt.Claims)]
    known: dict[str, tuple[str, Read]] = {
        "dtypes": ("dtypes", lambda c: ", ".join(_word(d) for d in _by_size(c.dtypes))),
        "masks": ("masks", lambda c: _joined(c.masks, MASKS)),
        "bias_dtype": ("dtype of a float mask", _bias_dtype),
        "causal": ("causal", lambda c: CAUSAL.get(str(c.causal), str(c.causal))),
        "alone": ("masks not with causal, window", lambda c: _joined(c.alone, MASKS)),
        "min_capability": ("compute capability", capability),
        "gqa": ("grouped-query attention", lambda c: _said(c.gqa)),
        "max_head_dim": ("head dims", _head_dims),
        "max_dropout_head_dim": (
            "head dims with dropout",
            lambda c: _up_to(c.max_dropout_head_dim) if c.dropout else "none",
        ),
        "max_deterministic_head_dim": (
            "head dims, deterministic",
            lambda c: _up_to(c.max_deterministic_head_dim) if exactly(c) else "none",
        ),
        "value_dim": ("value dim other than head dim", lambda c: _said(c.value_dim)),
        "dropout": ("dropout", lambda c: _said(c.dropout)),
        "softcap": ("softcap", lambda c: _said(c.softcap)),
        "softcap_dropout": ("softcap beside dropout", lambda c: _said(c.softcap and c.dropout and c.softcap_dropout)),
        "lse": ("log-sum-exp returned", lambda c: _said(c.lse)),
        "backward": ("gradients of q, k, v", _trains),
        "dbias": ("gradient of a float mask", lambda c: _said(c.dbias)),
        "dlse": ("gradient of the log-sum-exp", lambda c: _said(c.dlse)),
        "backward_from_lse": ("context parallelism", lambda c: "Ulysses, Ring" if _rings(c) else "Ulysses"),
        "deterministic": ("deterministic backward", _deterministic),
        "arithmetic": ("softmax weights kept in", lambda c: ARITHMETIC.get(str(c.arithmetic), str(c.arithmetic))),
        "options": ("backend_options", lambda c: _joined(c.options, {})),
        "functions": ("options that are functions of places", lambda c: _joined(c.functions, {})),
    }
    others = [name for name in fields if name not in known and not _made_alike(name)]
    generic = {name: (name.replace("_", " "), lambda c, name=name: _said(getattr(c, name))) for name in others}
    return [*known.values(), *generic.values()]


def _bias_dtype(claims: rt.Claims) -> str:
    takes = {"dense_float", "key_bias"} & claims.masks
    return BIAS.get(str(claims.bias_dtype), str(claims.bias_dtype)) if takes else "none"


def _masks(claims: rt.Claims) -> str:
    causal = claims.causal != "none"
    if claims.masks >= MASKS.keys():
        return "all" if causal else "all, not causal"
    return ", ".join(["causal"] * causal + [_joined(claims.masks, MASKS)] * bool(claims.masks)) or "none"


def capability(claims: rt.Claims) -> str:
    """The compute capabilities that it runs on, in words."""
    first, last = (None if c is None else f"{c[0]}.{c[1]}" for c in (claims.min_capability, claims.max_capability))
    if last is not None and first == last:
        return last
    if last is not None:
        return f"{first} to {last}" if first else f"up to {last}"
    return f"from {first} on" if first else "any"


def exactly(claims: rt.Claims) -> bool:
    """Whether its backward can be deterministic."""
    return claims.backward and (claims.deterministic or claims.deterministic_by_switch)


def _head_dims(claims: rt.Claims) -> str:
    if claims.head_dims is not None:
        return ", ".join(map(str, sorted(claims.head_dims)))
    return _up_to(claims.max_head_dim)


def _up_to(most: int | None) -> str:
    return "any" if most is None else f"up to {most}"


def _deterministic(claims: rt.Claims) -> str:
    kinds = ("yes" if claims.deterministic else "", "by torch's switch" if claims.deterministic_by_switch else "")
    return ", ".join(filter(None, kinds)) or "no"


def _made_alike(field: str) -> bool:
    """Whether the edge makes every pair the same in this (strides, signs, multiples), or another row has it."""
    return field.startswith("any_") or field.endswith(("_multiple", "_tile", "_by_switch")) or field in IN_ANOTHER_ROW


def _trains(claims: rt.Claims) -> str:
    """Whether it has a backward, of its own or by the option that has another backend give it."""
    return "as an option" if "backward" in claims.options and not claims.backward else _said(claims.backward)


def _rings(claims: rt.Claims) -> bool:
    return claims.backward_from_lse and claims.lse


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset | set | tuple | list):
        return _joined(value, {})
    return "none" if value is None else _word(value)


def _joined(items: Iterable[object], words: dict[str, str]) -> str:
    names = [str(item) for item in items]
    ordered = [name for name in words if name in names] + sorted(name for name in names if name not in words)
    return ", ".join(words.get(name, name) for name in ordered) or "none"


def _by_size(dtypes: Iterable[torch.dtype]) -> Sequence[torch.dtype]:
    return sorted(dtypes, key=lambda dtype: (-dtype.itemsize, str(dtype)))


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")


def _json(value: object) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(_word(item) for item in value)
    if isinstance(value, tuple | list):
        return [_json(item) for item in value]
    return value if isinstance(value, bool | int | float | str) or value is None else _word(value)
