"""The text of a check, and back: LAW/CASE/DTYPE, where CASE is a case's name, or what the case is made of.

call/causal-wide/bfloat16                    the case of that name
call/causal-wide@heads=1,k_len=4/float32     the same with some fields changed
call/@q_len=3,k_len=3,heads=1/float32        the fields of inputs.Case and subject.Ranks; the others at their defaults

Values are written as none, true, false, numbers, words, and lengths as 4:0:5. The numbers of a case follow from its
text, so what is read back is the same call to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, get_type_hints

from .cases import CASES, MORE, PARALLEL
from .checks import DTYPES, LAWS, Check
from .inputs import STORAGE, VALUES, Case
from .order import named_orders
from .patterns import DENSE, KEYS, SEGMENTS
from .subject import Ranks

ALL_LAWS = ("call", "chunk", "order", "ranks", "truth", *LAWS)
_OWN = {"id", "seed", "dtype"}  # said elsewhere: by the id itself, by --seed, by the id's last part
_CASE = {name: kind for name, kind in get_type_hints(Case).items() if name not in _OWN}
_RANKS = {name: get_type_hints(Ranks)[name] for name in Ranks._fields}
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Case)} | Ranks._field_defaults
FIELDS = (*_CASE, *_RANKS)


def described(case: Case, ranks: Ranks = Ranks()) -> str:
    """What a case is made of, as the middle of an id: "@q_len=3,k_len=3,heads=1"."""
    values = {name: getattr(case, name) for name in _CASE} | ranks._asdict()
    shown = (name for name, value in values.items() if name in ("q_len", "k_len") or value != _DEFAULTS[name])
    return "@" + ",".join(f"{name}={_written(values[name])}" for name in shown)


def parse(text: str, *, seed: int = 0) -> Check:
    """The check of that id. ValueError where the text is none: it says what is wrong and what there is."""
    law, *middle, dtype = text.split("/") if text.count("/") == 2 else ("", "")
    if not middle:
        raise ValueError(
            f"{text!r} is not LAW/CASE/DTYPE, such as call/causal-wide/bfloat16 or call/@q_len=3,k_len=3/float32"
        )
    if law not in ALL_LAWS:
        raise ValueError(f"unknown law {law!r} in {text!r}: {', '.join(ALL_LAWS)}")
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r} in {text!r}: {', '.join(DTYPES)}")
    name, _, changes = middle[0].partition("@")
    values = _values(changes, text)
    if name:
        case, ranks = _named(name, law, dtype)
    elif {"q_len", "k_len"} <= values.keys():
        case, ranks = Case("", 0, 0), Ranks()
    else:
        raise ValueError(f"{text!r} names no case, so it must have q_len and k_len")
    if law == "order" and values:
        raise ValueError(f"the calls of an order have sizes of their own; {text!r} cannot change them")
    own = {name: value for name, value in values.items() if name in _CASE}
    case = replace(case, id=middle[0], dtype=DTYPES[dtype], seed=seed, **own)
    ranks = ranks._replace(**{name: value for name, value in values.items() if name in _RANKS})
    if wrong := problem(case, ranks):
        raise ValueError(f"{text!r}: {wrong}")
    return Check(case, law, ranks)


def problem(case: Case, ranks: Ranks = Ranks()) -> str:
    """Why there is no such case; empty where there is."""
    c, kv_heads = case, case.heads if case.kv_heads is None else case.kv_heads
    parts = [_pattern(part) for part in c.mask.split("+")] if c.mask else []
    same = c.q_len == c.k_len and kv_heads == c.heads and c.value_dim in (None, c.head_dim)
    limits = (
        ("sizes are not negative", min(c.batch, c.q_len, c.k_len) >= 0),
        ("heads and channels are at least 1", min(c.heads, kv_heads, c.head_dim, c.value_dim or c.head_dim) >= 1),
        (f"{kv_heads} key heads do not divide {c.heads} heads", kv_heads > 0 and not c.heads % kv_heads),
        (f"storage is one of {', '.join(STORAGE)}", c.storage in STORAGE),
        ("fused storage needs query, key and value of one shape", c.storage != "fused" or same),
        (f"values is one of {', '.join(VALUES)}", c.values in VALUES),
        ("wants is made of the letters q, k, v and b", set(c.wants) <= set("qkvb")),
        ("dropout is at least 0 and less than 1", 0 <= c.dropout < 1),
        *((wrong, False) for wrong in parts if wrong),
        ("degrees are at least 1", min(ranks.ulysses, ranks.ring) >= 1),
        ("lengths has one entry a rank", ranks.lengths is None or len(ranks.lengths) == ranks.size),
    )
    return "; ".join(text for text, fits in limits if not fits)


def _pattern(part: str) -> str:
    """What is wrong with one part of a mask, "name:axes" or "name"."""
    name, colon, axes = part.partition(":")
    kind = name.removesuffix("_input")
    if colon:
        known = kind in DENSE and bool(axes) and set(axes) <= set("bhqk") and len(set(axes)) == len(axes)
        return "" if known else f"mask {part!r} is not one of {', '.join(DENSE)} with axes of bhqk, as some:bqk"
    return "" if kind in KEYS or kind in SEGMENTS else f"mask {part!r} is not one of {', '.join((*KEYS, *SEGMENTS))}"


def _named(name: str, law: str, dtype: str) -> tuple[Case, Ranks]:
    known: dict[str, tuple[Case, Ranks]] = {}
    if law == "order":
        known = {n: (Case(n, 16, 16, heads=4, head_dim=64), Ranks()) for n in named_orders(DTYPES[dtype])}
    elif law == "ranks":
        known = {case.id: (case, ranks) for case, ranks in PARALLEL}
    else:
        known = {case.id: (case, Ranks()) for case in (*CASES, *MORE)}
    if name not in known:
        near = get_close_matches(name, known, 5, 0.4)
        raise ValueError(f"no case {name!r} for the law {law}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return known[name]


def _values(text: str, whole: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if name not in FIELDS or not equals:
            raise ValueError(f"{item!r} in {whole!r} is not FIELD=VALUE with a field of {', '.join(FIELDS)}")
        kind = (_CASE | _RANKS)[name]
        try:
            values[name] = _READ[kind](value)
        except (ValueError, KeyError):
            raise ValueError(f"{name} in {whole!r} is {_KINDS[kind]}: {value!r}") from None
    return values


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _optional(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "none" else read(text)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(":"))


_READ: dict[Any, Callable[[str], Any]] = {
    int: int,
    int | None: _optional(int),
    float: float,
    float | None: _optional(float),
    bool: lambda text: {"true": True, "false": False}[text],
    str: str,
    tuple[int, ...] | None: _optional(_lengths),
}
_KINDS: dict[Any, str] = {
    int: "an integer",
    int | None: "an integer or none",
    float: "a number",
    float | None: "a number or none",
    bool: "true or false",
    str: "a word",
    tuple[int, ...] | None: "lengths such as 4:0:5, or none",
}
