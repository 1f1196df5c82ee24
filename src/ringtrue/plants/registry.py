"""Every fault that can be planted, by name: historical ones, others of one call, memories, and faults between ranks."""

from __future__ import annotations

from .between_ranks import FAULTS
from .historical import PLANTS
from .of_calls import CALLS
from .of_memories import MEMORIES
from .plant import Plant, takes

HISTORICAL: dict[str, Plant] = {
    "kv-transposed-twice": Plant(
        "backward transposes key and value once more, query not",
        "several heads",
        diagnosis="a second transpose of key and value",
        source="huggingface/diffusers#14338",
    ),
    "mask-as-bias": Plant(
        "a bool mask goes into an additive slot and is added as 0 and 1",
        "a bool mask",
        needs=takes("dense_float"),
        diagnosis="a bool mask that is added as 0 and 1",
    ),
    "lse-missing": Plant(
        "backward gets an lse that nobody wrote",
        "ordinary numbers",
        diagnosis="an lse that backward was not given",
    ),
    "stale-kv": Plant(
        "every step of a ring's backward uses the key and value of its first",
        "keys in parts",
        needs=lambda c: c.backward_from_lse,
        diagnosis="the key and value of a backward's first step in all its steps",
    ),
}
HISTORICAL = {
    name: Plant(p.what, p.why, PLANTS[name], None, p.needs, p.dtypes, p.diagnosis, p.source)
    for name, p in HISTORICAL.items()
}
OF_PAIRS: dict[str, Plant] = {**HISTORICAL, **CALLS}

_RANKS: dict[str, tuple[str, ...]] = {  # what, why, and the diagnosis where numbers tell
    "merge without -inf care": ("merging two steps in which a row sees nothing gives NaN", "a ring, hidden keys"),
    "merge in bf16": ("partial results are rounded to bfloat16 at every step", "a ring"),
    "dk/dv summed in bf16": ("contributions to dk and dv are summed in bfloat16", "a ring"),
    "last ring step left out": ("the keys of the rank just ahead are never looked at", "a ring"),
    "whether to talk decided locally": ("a rank without queries does not pass the keys on", "a ring, an empty rank"),
    "lse 0 for an empty row in one ring step": ("a step in which a row sees nothing says lse 0", "a ring, hidden keys"),
    "gather backward missing the sum": ("gather's backward forgets the other ranks' gradients", "several ranks"),
    "key mask of the wrong rank": ("key masks are joined in another rank order than the keys", "a ring, a key mask"),
    "one random state for all ring steps": ("backward replays one state for all steps", "a ring, dropout"),
    "every ring step drops the same places": ("steps share one random state", "a ring, dropout"),
    "every rank drops the same places": ("ranks share one random state", "Ulysses, dropout"),
    "tokens joined in rank order": ("balanced or prefixed tokens are joined rank after rank", "a prefix, causal"),
    "key mask joined in rank order": (
        "masks of balanced shards are joined rank by rank",
        "balanced shards, a key mask",
    ),
    "gather joins in rank order": ("balanced outputs are joined rank after rank", "balanced shards"),
    "prefix gradient not summed": ("each rank's own objective counts alone for the prefix", "a prefix"),
    "prefix counted on every rank": ("text tokens count as often as there are ranks", "a prefix"),
    "replicated dk summed twice": ("dk of keys that every rank holds is summed over ranks", "keys on every rank"),
    "window offset local": ("a window counts from each block's first key", "a ring, a window"),
    "lse gradient dropped under Ulysses": ("the gradient of lse is not exchanged", "Ulysses, a gradient of lse"),
    "dbias of another rank's keys": ("each rank gets the gradient of another's key bias", "a ring, a bias"),
    "segments of the wrong rank": ("documents of keys are joined in another rank order", "a ring, segments"),
    "ring sums the wrong way round": (
        "dk and dv reach another rank where more than two take part",
        "a plain ring of more than two",
        "a ring whose sums travel the wrong way round",
    ),
    "first step in all steps of a ring": (
        "backward reads its first step's keys, out and lse in all steps",
        "a plain ring",
        "stale key and value",
    ),
    "head_tail positions contiguous": ("balanced shards, with positions of contiguous ones", "balanced shards"),
}
OF_RANKS: dict[str, Plant] = {
    name: Plant(what, why, patch=FAULTS[name], diagnosis="".join(said)) for name, (what, why, *said) in _RANKS.items()
}
REGISTRY: dict[str, Plant] = {**OF_PAIRS, **MEMORIES, **OF_RANKS}
