"""What a user declares of one call under a context: lengths, the kind of mask, a joint prefix, replicated keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import ArgumentError, message
from .config import ContextParallelConfig

MaskKind = Literal["none", "key_bool", "key_float", "rows_bool", "rows_float", "segments"]

# mask kinds of a declared call -> kinds of Mask
KINDS: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "key_bool": frozenset({"key_keep"}),
    "key_float": frozenset({"key_bias"}),
    "rows_bool": frozenset({"dense_bool"}),
    "rows_float": frozenset({"dense_float"}),
    "segments": frozenset({"segments"}),
}


@dataclass(frozen=True)
class Declaration:
    """Checked values; lengths None: those of a header, or with lengths="equal" this rank's for all."""

    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    mask: MaskKind = "none"
    joint_prefix: int = 0
    kv_replicated: bool = False


NOTHING = Declaration()


def declare(
    config: ContextParallelConfig,
    q_lengths: Sequence[int] | None,
    k_lengths: Sequence[int] | None,
    mask: MaskKind,
    joint_prefix: int,
    kv_replicated: bool,
) -> Declaration:
    """The checked declaration; ArgumentError for one that says nothing sensible."""
    if type(joint_prefix) is not int or joint_prefix < 0:
        limit = "0, 1, 2, ... tokens"
        raise ArgumentError(message("call: no such joint_prefix", limit=limit, value=repr(joint_prefix)))
    if type(kv_replicated) is not bool:
        raise ArgumentError(message("call: kv_replicated is not a bool", value=repr(kv_replicated)))
    if mask not in tuple(KINDS):  # whatever it is, it need not have a hash
        limit = ", ".join(KINDS)
        raise ArgumentError(message("call: unknown mask kind", limit=limit, value=repr(mask)))
    missing = [lengths is None for lengths in (q_lengths, k_lengths)]
    if any(missing) != all(missing) or (all(missing) and mask != "none" and config.lengths != "equal"):
        raise ArgumentError(
            message(
                "call: lengths are not declared",
                limit=f"q_lengths and k_lengths, {config.size} numbers each",
                value=f"q_lengths={q_lengths}, k_lengths={k_lengths}",
                remedy='give both, or configure lengths="equal"',
            )
        )
    if q_lengths is None or k_lengths is None:
        return Declaration(None, None, mask, joint_prefix, kv_replicated)
    q, k = check_lengths(config, "call: q_lengths", q_lengths), check_lengths(config, "call: k_lengths", k_lengths)
    return Declaration(q, k, mask, joint_prefix, kv_replicated)


def check_lengths(config: ContextParallelConfig, name: str, given: object) -> tuple[int, ...]:
    """Tokens per rank as they were passed; ArgumentError for anything but one whole number a rank."""
    fits = isinstance(given, Sequence) and len(given) == config.size
    if not fits or not all(type(n) is int and n >= 0 for n in given):  # type: ignore[attr-defined]
        raise ArgumentError(
            message(
                f"{name} does not fit",
                limit=f"{config.size} lengths",
                value=repr(given),
                remedy="a list or tuple of ints, one for each rank, in rank order",
            )
        )
    return tuple(given)  # type: ignore[arg-type]
