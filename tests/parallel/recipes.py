"""What a random call under context parallelism is made of: plain values, so that a failure can be said in one line.

python tests/parallel/draws.py --replay '{"ulysses": 2, "q": [3, 0], "causal": "top_left"}'
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from random import Random
from typing import Any

import torch

import ringtrue as rt
from ringtrue.contract import Claims

SPLITS = {  # world -> (ulysses, ring)
    1: ((1, 1),),
    2: ((1, 2), (2, 1)),
    3: ((1, 3), (3, 1)),
    4: ((1, 4), (4, 1), (2, 2)),
    8: ((1, 8), (8, 1), (2, 4), (4, 2)),
}
WORLDS = (1, 2, 2, 2, 3, 3, 4, 4, 4, 4)  # more of what can go wrong
DTYPES = ("float64", "float64", "float32", "bfloat16")
DENSE = ("", "", "", "bool", "float")
BROADCAST = ("bhqk", "bhqk", "hqk", "bqk", "qk", "bk", "k", "hk", "bhq", "q", "")
EVERYTHING = Claims(
    dtypes=frozenset(),
    masks=frozenset({"dense_bool", "dense_float", "key_keep", "key_bias", "segments", "window"}),
    dropout=True,
    softcap=True,
    dbias=True,
    dlse=True,
    bias_dtype="any",
)


@dataclass(frozen=True)
class Recipe:
    """One problem. Every field but `seed` says what the call is; all of them together give every number of it.

    seed        of the numbers
    q, k        own tokens per context rank, the prefix not counted; empty k = as q. `replicated`: k = (all keys,)
    balanced    load_balance="head_tail" (q then follow from their sum)
    key         "" | "keep" | "some" (KeyPadding, None on ranks that hide nothing) | "bias" | "keep+bias"
    dense       "" | "bool" | "float", `dims` = which of "bhqk" the tensor mask has; `wide`: a float mask is float32;
                `expanded`: it is passed in full size with strides 0
    segments    "" | "q" (k_ids=None) | "qk"
    wants       per rank (one for all), which of q, k, v and b (the float mask) require grad
    uses        per rank (one for all), what the objective looks at: "out", "lse", "both"
    declared    lengths and mask kind are declared, no header
    seeds       "same" or "own": what each rank's generator is set to
    """

    seed: int = 0
    ulysses: int = 1
    ring: int = 1
    q: tuple[int, ...] = (4,)
    k: tuple[int, ...] = ()
    balanced: bool = False
    prefix: int = 0
    replicated: bool = False
    batch: int = 2
    kv_heads: int = 2
    group: int = 1
    dim: int = 4
    value_dim: int = 4
    dtype: str = "float64"
    key: str = ""
    dense: str = ""
    dims: str = "bhqk"
    wide: bool = False
    expanded: bool = False
    causal: str = ""
    window: tuple[int | None, int | None] = (None, None)
    segments: str = ""
    softcap: float = 0.0
    scale: float | None = None
    dropout: float = 0.0
    lse: bool = True
    wants: tuple[str, ...] = ("qkv",)
    uses: tuple[str, ...] = ("both",)
    declared: bool = False
    seeds: str = "same"
    backend: str = "auto"

    def __str__(self) -> str:
        told = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return json.dumps(told)

    @property
    def size(self) -> int:
        return self.ulysses * self.ring


def replayed(text: str) -> Recipe:
    """The recipe that str() wrote."""
    told: dict[str, Any] = json.loads(text)
    return Recipe(**{name: tuple(value) if isinstance(value, list) else value for name, value in told.items()})


def reduced(told: Recipe, fails: Callable[[Recipe], bool]) -> Recipe:
    """A simpler recipe that still fails: field by field its default, fewer ranks' wishes, fewer tokens."""
    simpler = True
    while simpler:
        simpler = False
        for name, value in _simpler(told):
            tried = _with(told, **{name: value})
            if fails(tried):
                told, simpler = tried, True
                break
    return told


def _simpler(told: Recipe) -> Iterator[tuple[str, object]]:
    for f in fields(told):
        value = getattr(told, f.name)
        if value != f.default and f.name not in ("ulysses", "ring", "q", "k", "prefix"):
            yield f.name, f.default
    for name in ("q", "k"):
        lengths = getattr(told, name)
        for rank, n in enumerate(lengths):
            for fewer in {0, n // 2, n - 1} - {n, -1}:
                yield name, (*lengths[:rank], fewer, *lengths[rank + 1 :])
    for fewer in range(told.prefix):
        yield "prefix", fewer


def recipe(
    pick: Random,
    worlds: Sequence[int] = WORLDS,
    backends: Sequence[str] = ("auto",),
    dtypes: Sequence[str] = DTYPES,
    claims: Claims = EVERYTHING,
    most: int = 5,
) -> Recipe:
    """Any problem that the contract allows and a backend with these claims can take."""
    ulysses, ring = pick.choice(SPLITS[pick.choice(worlds)])
    size = ulysses * ring
    lengths = lambda: tuple(pick.choice((0, 1, *range(most + 1))) for _ in range(size))
    layout = pick.choice(("self", "self", "self", "cross", "cross", "replicated", "balanced", "balanced", "prefix"))
    q = lengths()
    k = {"cross": lengths(), "replicated": (pick.randint(0, 2 * most),), "prefix": pick.choice((q, lengths()))}
    dim = pick.choice((4, 8))
    chosen = Recipe(
        seed=pick.randrange(2**16),
        ulysses=ulysses,
        ring=ring,
        q=q,
        k=k.get(layout, q),
        balanced=layout == "balanced",
        prefix=pick.randint(1, 4) if layout == "prefix" or (layout != "self" and pick.random() < 0.3) else 0,
        replicated=layout == "replicated",
        batch=pick.choice((1, 2)),
        kv_heads=pick.choice((1, 1, 2, 2, 3, 4)),
        group=pick.choice((1, 1, 2, 3)),
        dim=dim,
        value_dim=pick.choice((dim, dim, 6)),
        dtype=pick.choice(dtypes),
        softcap=pick.choice((0.0, 0.0, 0.0, 1.5)) if claims.softcap else 0.0,
        scale=pick.choice((None, None, None, 0.3, -0.5, 0.0)),
        dropout=pick.choice((0.0, 0.0, 0.0, 0.3)) if claims.dropout else 0.0,
        lse=pick.random() < 0.75,
        seeds=pick.choice(("same", "own")),
    )
    if chosen.scale == 0 and chosen.dtype not in ("float64", "float32"):
        chosen = _with(chosen, scale=None)  # an lse that is exactly 0 leaves no room for 16-bit kernels' own exp
    chosen = _masked(chosen, pick, claims)
    chosen = _asked(chosen, pick, claims, like_everywhere=chosen.prefix > 0 or chosen.replicated)
    plain = not (chosen.dropout or chosen.softcap or "b" in "".join(chosen.wants))
    able = [name for name in backends if len(backends) == 1 or _takes(name, chosen.dtype)]
    return _with(chosen, backend=pick.choice(able) if plain else "auto" if len(backends) > 1 else backends[0])


@cache
def _takes(name: str, dtype: str) -> bool:
    """Whether what a name may become on a CPU takes a dtype."""
    claims = [s.claims for s in rt.backends() if s.device == "cpu" and name in (s.name, "auto")]
    return any(getattr(torch, dtype) in c.dtypes for c in claims)


def _masked(chosen: Recipe, pick: Random, claims: Claims) -> Recipe:
    """Masks of every kind and mix; at most one of them is float."""
    kinds = claims.masks
    dense = pick.choice([d for d in DENSE if not d or f"dense_{d}" in kinds])
    bias = dense != "float" and "key_bias" in kinds
    keys = ["", "", "", *(["keep", "some"] if "key_keep" in kinds else []), *(["bias", "bias"] if bias else [])]
    keys += ["keep+bias"] if bias and "key_keep" in kinds else []
    left = pick.choice((None, None, None, 0, 2, 5))
    right = pick.choice((None, None, 0, 3, -1 if left else None))
    ids = ("", "", "", "q" if chosen.k == chosen.q else "qk", "qk") if "segments" in kinds else ("",)
    return _with(
        chosen,
        dense=dense,
        dims=pick.choice(BROADCAST),
        key=pick.choice(keys),
        causal=pick.choice(("", "", "top_left", "top_left", "bottom_right")),
        window=(left, right) if "window" in kinds and pick.random() < 0.5 else (None, None),
        segments=pick.choice(ids),
        expanded=(chosen.dtype not in ("bfloat16", "float16") or dense == "bool") and pick.random() < 0.3,
        wide=chosen.dtype in ("bfloat16", "float16") and claims.bias_dtype != "input" and pick.random() < 0.3,
    )


def _asked(chosen: Recipe, pick: Random, claims: Claims, like_everywhere: bool) -> Recipe:
    """Which gradients each rank wants, what its objective looks at, and whether the call is declared."""
    size = chosen.size
    has_bias = claims.dbias and (chosen.dense == "float" or "bias" in chosen.key)
    one_kind = sum(map(bool, (chosen.segments, chosen.dense, chosen.key))) < 2 and "+" not in chosen.key
    declared = one_kind and pick.random() < 0.2
    # what several ranks hold a part of is only whole when all of them want it
    shared = like_everywhere or declared or (chosen.dense == "float" and "q" not in chosen.dims)

    def some() -> str:
        wanted = "".join(name for name in "qkv" if pick.random() < 0.75)
        return wanted + ("b" if has_bias and pick.random() < 0.8 else "")

    alike = shared or pick.random() < 0.6
    wants = (some(),) if alike else tuple(some() for _ in range(size))
    looks = ("out", "both", "both", "lse") if chosen.lse and claims.dlse else ("out",)
    uses = (pick.choice(looks),) if alike else tuple(pick.choice(looks) for _ in range(size))
    seeds = "same" if declared and chosen.prefix else chosen.seeds  # nobody could tell the others
    return _with(chosen, wants=wants, uses=uses, declared=declared, seeds=seeds)


def _with(chosen: Recipe, **changes: object) -> Recipe:
    return Recipe(**{**asdict(chosen), **changes})  # type: ignore[arg-type]
