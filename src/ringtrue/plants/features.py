"""What a check must have for a fault to be caught by it for the right reason: words, and what they ask of the check."""

from __future__ import annotations

from collections.abc import Callable

from ..audit.checks import Check
from ..audit.inputs import Case

BOOL = ("some", "blind", "single", "strided", "keep")


def _masked(case: Case, *patterns: str) -> bool:
    names = [part.partition(":")[0] for part in case.mask.split("+")]
    return any(name == p or name.startswith(f"{p}_") for name in names for p in patterns)


def _blind(case: Case) -> bool:
    """Some row, in some sample, sees nothing."""
    if "blind" in case.mask or "apart" in case.mask:
        return True
    return case.causal is not None and case.causal < 0


def _bool(case: Case) -> bool:
    return _masked(case, *BOOL) or "all" in case.mask.split(":")


def _dense(case: Case, axis: str) -> bool:
    """A bool mask that differs along an axis of b, h, q, k."""
    parts = [part.partition(":") for part in case.mask.split("+")]
    return any(axis in axes and name in (*BOOL[:4], "all") for name, _, axes in parts)


def _marked(case: Case) -> bool:
    """Something but query, key and value decides what is seen."""
    return bool(case.mask) or case.causal is not None or case.since is not None or case.dropout > 0 or case.grad_lse


def _even(check: Check) -> bool:
    """All ranks hold as many queries, and as many keys."""
    lengths = (check.case.q_len, check.case.k_len)
    return check.ranks.lengths is None and not any(n % check.ranks.size for n in lengths) and not check.ranks.prefix


FEATURES: dict[str, Callable[[Check], bool]] = {
    "ordinary numbers": lambda c: c.law == "call" and c.case.q_len > 1 and c.case.k_len > 1,
    "several heads": lambda c: c.law == "call" and c.case.heads > 1 and c.case.q_len > 1 and c.case.k_len > 1,
    "several samples": lambda c: c.law == "call" and c.case.batch > 1 and c.case.k_len > 1,
    "keys in parts": lambda c: c.law == "chunk",
    "a bool mask": lambda c: c.law == "call" and _bool(c.case),
    "a float mask": lambda c: c.law == "call" and _masked(c.case, "float", "bias"),
    "a mask": lambda c: c.law == "call" and (_bool(c.case) or _masked(c.case, "float", "bias")),
    "a key mask per sample": lambda c: c.law == "call" and _masked(c.case, "keep"),
    "a mask per sample": lambda c: c.law == "call" and _dense(c.case, "b"),
    "a mask per head": lambda c: c.law == "call" and _dense(c.case, "h"),
    "rows that see nothing": lambda c: c.law == "call" and _blind(c.case),
    "no mask": lambda c: c.law == "call" and not c.case.mask and c.case.causal is None and c.case.k_len > 1,
    "causal": lambda c: c.law == "call" and c.case.causal is not None and c.case.since is None,
    "causal, other lengths": lambda c: (
        c.law == "call" and c.case.causal is not None and c.case.since is None and c.case.q_len != c.case.k_len
    ),
    "a window": lambda c: c.law == "call" and c.case.since is not None,
    "segments": lambda c: c.law == "call" and _masked(c.case, "documents", "apart"),
    "a scale of its own": lambda c: c.law == "call" and c.case.scale is not None,
    "heads outermost in memory": lambda c: c.law == "call" and c.case.storage == "heads_outermost",
    "fewer key heads": lambda c: c.law == "call" and (c.case.kv_heads or c.case.heads) < c.case.heads,
    "more queries than keys": lambda c: c.law == "call" and c.case.q_len > c.case.k_len > 0,
    "a gradient of lse": lambda c: c.law == "call" and c.case.grad_lse,
    "a gradient of lse and of a mask": lambda c: (
        c.law == "call" and c.case.grad_lse and _masked(c.case, "float", "bias")
    ),
    "dropout": lambda c: c.law == "call" and c.case.dropout > 0,
    "softcap": lambda c: c.law == "call" and c.case.softcap > 0,
    "softcap and a mask": lambda c: c.law == "call" and c.case.softcap > 0 and bool(c.case.mask),
    "another call before": lambda c: c.law == "order",
    **{
        f"another call before, with {words}": lambda c, start=start: c.law == "order" and c.case.id.startswith(start)  # type: ignore[misc]
        for words, start in (
            ("grad_out stored otherwise", "grad_out-"),
            ("out stored otherwise", "out-"),
            ("another scale", "scale-"),
            ("a softcap", "softcap-"),
            ("another random state", "dropout-4-"),
        )
    },
    "a ring": lambda c: c.law == "ranks" and c.ranks.ring > 1,
    "a plain ring": lambda c: c.law == "ranks" and c.ranks.ulysses == 1 and not _marked(c.case) and _even(c),
    "a plain ring of more than two": lambda c: (
        c.law == "ranks" and c.ranks.ulysses == 1 and c.ranks.ring > 2 and not _marked(c.case) and _even(c)
    ),
    "a ring, hidden keys": lambda c: c.law == "ranks" and c.ranks.ring > 1 and "blind" in c.case.mask,
    "a ring, an empty rank": lambda c: c.law == "ranks" and 0 in (c.ranks.lengths or ()),
    "a ring, a key mask": lambda c: c.law == "ranks" and c.ranks.ring > 1 and _masked(c.case, "keep"),
    "a ring, dropout": lambda c: c.law == "ranks" and c.ranks.ring > 1 and c.case.dropout > 0,
    "Ulysses, dropout": lambda c: c.law == "ranks" and c.ranks.ulysses > 1 and c.case.dropout > 0,
    "a ring, a window": lambda c: c.law == "ranks" and c.ranks.ring > 1 and c.case.since is not None,
    "a ring, segments": lambda c: c.law == "ranks" and c.ranks.ring > 1 and _masked(c.case, "documents"),
    "a ring, a bias": lambda c: c.law == "ranks" and c.ranks.ring > 1 and _masked(c.case, "bias"),
    "balanced shards": lambda c: c.law == "ranks" and c.ranks.balanced,
    "balanced shards, a key mask": lambda c: c.law == "ranks" and c.ranks.balanced and _masked(c.case, "keep"),
    "a prefix": lambda c: c.law == "ranks" and c.ranks.prefix > 0,
    "a prefix, causal": lambda c: c.law == "ranks" and c.ranks.prefix > 0 and c.case.causal is not None,
    "keys on every rank": lambda c: c.law == "ranks" and c.ranks.replicated,
    "Ulysses, a gradient of lse": lambda c: c.law == "ranks" and c.ranks.ulysses > 1 and c.case.grad_lse,
    "several ranks": lambda c: c.law == "ranks",
}
