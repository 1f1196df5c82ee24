"""From what each rank says of a call to one Plan, by the same rules on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..contract import Choice, Mask, Wanted
from ..errors import ArgumentError, DisagreementError, message
from .config import ContextParallelConfig
from .header import Header
from .plan import Plan

if TYPE_CHECKING:
    from ..call import Call

# mask kinds of a declared call -> kinds of Mask
DECLARED: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "key_bool": frozenset({"key_keep"}),
    "key_float": frozenset({"key_bias"}),
    "rows_bool": frozenset({"dense_bool"}),
    "rows_float": frozenset({"dense_float"}),
}


def same(call: Call, choices: Sequence[Choice]) -> dict[str, object]:
    """What must be equal on all ranks."""
    facts, options = call.facts, call.options
    return {
        "batch": facts.batch,
        "heads": facts.heads,
        "key heads": facts.kv_heads,
        "head dim": facts.head_dim,
        "value dim": facts.value_dim,
        "dtype": _short(facts.dtype),
        "device": facts.device,
        "causal": sorted(call.alignments),
        "scale": options.scale,
        "dropout_p": options.dropout_p,
        "softcap": options.softcap,
        "deterministic": options.deterministic,
        "return_lse": options.return_lse,
        "backend options": [[k, repr(v)] for k, v in options.extra],
        "mask": _form(call.mask),
        "backend": choices[0].asked,
    }


def _form(mask: Mask) -> str:
    """All of a mask that must be alike on all ranks; KeyPadding may be there or not."""
    dense, bias = mask.dense, mask.key_bias
    parts = [] if bias is None else [f"KeyBias {_short(bias.dtype)}"]
    if dense is not None:
        batch, heads, _, _ = dense.shape
        parts.append(f"tensor {_short(dense.dtype)} (batch {batch}, heads {heads}; an expanded dim counts as 1)")
    return " and ".join(parts) or "none, or KeyPadding"


def own(call: Call, choices: Sequence[Choice]) -> dict[str, object]:
    """What may differ: lengths, wanted gradients, the backends that fit here (best first), key masks."""
    dense = call.mask.dense
    return {
        "q": call.facts.q_len,
        "k": call.facts.k_len,
        "kinds": sorted(call.mask.kinds),
        "rows": None if dense is None else dense.shape[2],
        "columns": None if dense is None else dense.shape[3],
        "grad mode": torch.is_grad_enabled(),
        "wanted": [bool(w) for w in call.facts.wanted],
        "fits": [choice.backend for choice in choices],
    }


def settle(config: ContextParallelConfig, rank: int, call: Call, headers: Sequence[Header]) -> tuple[Plan, str]:
    """The plan all ranks reach from the same headers, and the backend: the first that fits everywhere."""
    said = [header.own for header in headers]
    kinds = [frozenset(map(str, s["kinds"])) for s in said]  # type: ignore[call-overload]
    fits: list[list[str]] = [list(s["fits"]) for s in said]  # type: ignore[call-overload]
    common = [name for name in fits[0] if all(name in f for f in fits)]
    if not common:
        seen = "; ".join(f"rank {r}: {', '.join(names)}" for r, names in enumerate(fits))
        text = message(
            "no backend fits on all ranks", call=call.text, value=seen, remedy="pass alike inputs everywhere"
        )
        raise DisagreementError(text)
    wants: list[list[bool]] = [list(s["wanted"]) for s in said]  # type: ignore[call-overload]
    check_grad_mode([any(each) for each in wants], [bool(s["grad mode"]) for s in said], "attention", call.text)
    wanted = Wanted(*(any(each) for each in zip(*wants, strict=True)))
    plan = Plan(
        rank=rank,
        ulysses_degree=config.ulysses_degree,
        ring_degree=config.ring_degree,
        heads=call.facts.heads,
        kv_heads=call.facts.kv_heads,
        q_lengths=tuple(int(s["q"]) for s in said),  # type: ignore[call-overload]
        k_lengths=tuple(int(s["k"]) for s in said),  # type: ignore[call-overload]
        alignments=call.alignments,
        key_kinds=frozenset().union(*kinds) & {"key_keep", "key_bias"},
        mask_rows=_mask_rows([(int(s["q"]), int(s["rows"])) for s in said if s["rows"] is not None]),  # type: ignore[call-overload]
        wanted=wanted,
    )
    _check_columns(call, plan, [int(s["columns"]) for s in said if s["columns"] is not None])  # type: ignore[call-overload]
    return plan, common[0]


def check_grad_mode(wants: Sequence[bool], modes: Sequence[bool], what: str, call: object = "") -> None:
    """A rank without grad mode does not come to backward, where others would wait; from headers, so that all raise."""
    if any(wants) and not all(modes):
        text = message(
            f"ranks disagree about this {what}: gradients are wanted, but not every rank would come to backward",
            call=call,
            limit="grad mode on everywhere, or on no rank that wants a gradient",
            value="; ".join(
                f"rank {r}: grad mode {'on' if on else 'off'}{', wants a gradient' if want else ''}"
                for r, (want, on) in enumerate(zip(wants, modes, strict=True))
            ),
            remedy="enter torch.no_grad() on all ranks or on none",
        )
        raise DisagreementError(text)


def _mask_rows(ranks: Sequence[tuple[int, int]]) -> bool:
    """Whether a mask differs by row, from (queries, mask rows) per rank: one row for many queries is a broadcast."""
    return any(rows != 1 for _, rows in ranks) or (bool(ranks) and all(queries <= 1 for queries, _ in ranks))


def declared(
    config: ContextParallelConfig,
    rank: int,
    call: Call,
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    kind: str,
) -> Plan:
    """The plan of a declared call; what this rank passed is checked against it."""
    expected = DECLARED[kind]
    kinds = call.mask.kinds
    if kinds != expected and not (kind == "key_bool" and not kinds):  # None under "key_bool" keeps all keys
        _fail(
            call,
            "the mask is of another kind than declared",
            kind,
            ", ".join(sorted(kinds)) or "none",
            "cp.call(mask=...)",
        )
    lengths = (call.facts.q_len, call.facts.k_len)
    if lengths != (q_lengths[rank], k_lengths[rank]):
        _fail(
            call,
            f"rank {rank} holds other lengths than declared",
            f"q {q_lengths[rank]}, k {k_lengths[rank]}",
            f"q {lengths[0]}, k {lengths[1]}",
            "declare every rank's lengths in rank order",
        )
    plan = Plan(
        rank=rank,
        ulysses_degree=config.ulysses_degree,
        ring_degree=config.ring_degree,
        heads=call.facts.heads,
        kv_heads=call.facts.kv_heads,
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        alignments=call.alignments,
        key_kinds=expected & {"key_keep", "key_bias"},
        mask_rows=kind.startswith("rows"),
        wanted=call.facts.wanted,
    )
    dense = call.mask.dense
    _check_columns(call, plan, [] if dense is None else [dense.shape[3]])
    return plan


def _check_columns(call: Call, plan: Plan, columns: Sequence[int]) -> None:
    """A tensor mask has the columns of all keys (or 1), on every rank alike; from headers, so that all raise."""
    total = sum(plan.k_lengths)
    if any(n not in (1, total) for n in columns):
        _fail(
            call,
            "a tensor mask under context parallelism has this rank's rows and the columns of all keys",
            f"{total} columns (keys per rank {list(plan.k_lengths)})",
            f"{columns[0]} columns" if len(set(columns)) == 1 else f"columns per rank {list(columns)}",
            "for a key mask that is sharded like the keys pass KeyPadding(bool (B, Sk_local)) or KeyBias",
        )
    if len(set(columns)) > 1:
        text = message("ranks disagree about the columns of this mask", call=call.text, value=list(columns))
        raise DisagreementError(text)


def _fail(call: Call, problem: str, limit: str, value: str, remedy: str) -> None:
    raise ArgumentError(message(problem, call=call.text, limit=limit, value=value, remedy=remedy))


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
