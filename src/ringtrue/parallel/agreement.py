"""From what each rank says of a call to one Plan, by the same rules on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..contract import Choice, Mask, Wanted
from ..errors import ArgumentError, DisagreementError, UnsupportedError, message
from . import traced
from .config import ContextParallelConfig
from .declaration import KINDS, Declaration
from .header import Header
from .plan import KEY_KINDS, Plan, balanced_lengths

if TYPE_CHECKING:
    from ..call import Call

# in how many rounds heads go under Ulysses: where transfers run beside kernels, more than one hides them
ROUNDS = {"cuda": 2}


def same(config: ContextParallelConfig, said: Declaration, call: Call, choices: Sequence[Choice]) -> dict[str, object]:
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
        "window": call.window,
        "scale": options.scale,
        "dropout_p": options.dropout_p,
        "softcap": options.softcap,
        "deterministic": options.deterministic,
        "return_lse": options.return_lse,
        "backend options": [[k, repr(v)] for k, v in options.extra],
        "mask": _form(call.mask),
        "backend": choices[0].asked,
        "joint_prefix": said.joint_prefix,
        "kv_replicated": said.kv_replicated,
        "load_balance": config.load_balance,
    }


def _form(mask: Mask) -> str:
    """All of a mask that must be alike on all ranks; KeyPadding may be there or not."""
    dense, bias, ids = mask.dense, mask.key_bias, mask.k_segments
    parts = [] if bias is None else [f"KeyBias {_short(bias.dtype)}"]
    if ids is not None and mask.q_segments is not None:
        parts.append(f"Segments {_short(mask.q_segments.dtype)} {_short(ids.dtype)}")
    if dense is not None:
        parts.append(f"tensor {_short(dense.dtype)}")
    return " and ".join(parts) or "none, or KeyPadding"


def own(call: Call, choices: Sequence[Choice]) -> dict[str, object]:
    """What may differ: lengths, wanted gradients, the backends that fit here (best first), key masks."""
    dense = call.mask.dense
    return {
        "q": call.facts.q_len,
        "k": call.facts.k_len,
        "kinds": sorted(call.mask.kinds),
        "tensor mask": None if dense is None else list(dense.shape),
        "grad mode": call.grad_mode,
        "place": call.place,
        "wanted": [bool(w) for w in call.facts.wanted],
        "fits": [choice.backend for choice in choices],
    }


def settle(
    config: ContextParallelConfig, rank: int, declared: Declaration, call: Call, headers: Sequence[Header]
) -> tuple[Plan, str]:
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
    traced.check([s["place"] for s in said], [any(each) for each in wants], "attention", call.text)
    q_lengths, k_lengths = (tuple(int(s[side]) for s in said) for side in ("q", "k"))  # type: ignore[call-overload]
    shapes: list[list[int] | None] = [s["tensor mask"] for s in said]  # type: ignore[misc]
    rows = [(length, shape[2]) for length, shape in zip(q_lengths, shapes, strict=True) if shape is not None]
    plan = replace(
        _plan(config, rank, declared, call),
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        key_kinds=_key_kinds(frozenset().union(*kinds)),
        mask_rows=_mask_rows(rows),
        mask_shape=_mask_shape([shape for shape in shapes if shape is not None]),
        wanted=Wanted(*(any(each) for each in zip(*wants, strict=True))),
    )
    _check_lengths(call, plan)
    _check_columns(call, plan, [shape[3] for shape in shapes if shape is not None])
    return plan, common[0]


def _plan(config: ContextParallelConfig, rank: int, declared: Declaration, call: Call) -> Plan:
    """What this rank knows by itself."""
    facts = call.facts
    return Plan(
        rank=rank,
        config=config,
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        q_lengths=(facts.q_len,) * config.size,
        k_lengths=(facts.k_len,) * config.size,
        joint_prefix=declared.joint_prefix,
        kv_replicated=declared.kv_replicated,
        alignments=call.alignments,
        window=call.window,
        wanted=facts.wanted,
        most_rounds=ROUNDS.get(facts.device, 1),
    )


def _key_kinds(kinds: frozenset[str]) -> frozenset[str]:
    names = {"key_keep": "key_keep", "key_bias": "key_bias", "segments": "k_segments"}
    return frozenset(name for kind, name in names.items() if kind in kinds)


def again(config: ContextParallelConfig, rank: int, declared: Declaration, call: Call, numbers: Sequence[int]) -> Plan:
    """The plan of a call that was agreed on before, from its `numbers`."""
    size, left = config.size, list(numbers)
    q_lengths, k_lengths, left = left[:size], left[size : 2 * size], left[2 * size :]
    (mask_rows, *mask_shape), left = left[:4], left[4:]
    kinds, wanted = left[: len(KEY_KINDS)], left[len(KEY_KINDS) :]
    return replace(
        _plan(config, rank, declared, call),
        q_lengths=tuple(q_lengths),
        k_lengths=tuple(k_lengths),
        key_kinds=frozenset(name for name, there in zip(KEY_KINDS, kinds, strict=True) if there),
        mask_rows=bool(mask_rows),
        mask_shape=tuple(mask_shape),  # type: ignore[arg-type]
        wanted=Wanted(*map(bool, wanted)),
    )


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


def _mask_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Batch, heads and columns of a tensor mask on all ranks: one that is expanded there may be broadcast here."""
    sizes = ([shape[axis] for shape in shapes] for axis in (0, 1, 3))
    return tuple(0 if 0 in found else max(found, default=1) for found in sizes)  # type: ignore[return-value]


def settled_alone(config: ContextParallelConfig, rank: int, declared: Declaration, call: Call) -> Plan:
    """The plan of a call that exchanges nothing; what this rank passed is checked against what was declared."""
    expected, kinds, kind = KINDS[declared.mask], call.mask.kinds - {"window"}, declared.mask
    if kinds != expected and not (kind == "key_bool" and not kinds):  # None under "key_bool" keeps all keys
        _fail(
            call,
            "the mask is of another kind than declared",
            kind,
            ", ".join(sorted(kinds)) or "none",
            "cp.call(mask=...)",
        )
    mine, plan = (call.facts.q_len, call.facts.k_len), _plan(config, rank, declared, call)
    q_lengths, k_lengths = declared.q_lengths or plan.q_lengths, declared.k_lengths or plan.k_lengths
    if mine != (q_lengths[plan.rank], k_lengths[plan.rank]):
        _fail(
            call,
            f"rank {plan.rank} holds other lengths than declared",
            f"q {q_lengths[plan.rank]}, k {k_lengths[plan.rank]}",
            f"q {mine[0]}, k {mine[1]}",
            "declare every rank's lengths in rank order",
        )
    dense, rows = call.mask.dense, declared.mask.startswith("rows")
    plan = replace(
        plan,
        q_lengths=q_lengths,
        k_lengths=k_lengths,
        key_kinds=_key_kinds(expected),
        mask_rows=rows,
        mask_shape=_mask_shape([] if dense is None else [dense.shape]),
    )
    _check_lengths(call, plan)
    _check_columns(call, plan, [] if dense is None else [dense.shape[3]])
    return plan


def _check_lengths(call: Call, plan: Plan) -> None:
    """What lengths per rank must be for a joint prefix, replicated keys, and balanced shards; the same on all ranks."""
    prefix, sides = plan.joint_prefix, [("q", plan.q_lengths), ("k", plan.k_lengths)]
    if plan.kv_replicated:
        sides.pop()
        if len(set(plan.k_lengths)) > 1:
            keys = f"keys per rank {list(plan.k_lengths)}"
            _fail(call, "kv_replicated=True, but ranks hold other keys", "all keys on every rank", keys, "shard them")
    for name, lengths in sides:
        if prefix > min(lengths):
            seen = f"{name} per rank {list(lengths)}"
            _fail(
                call, "joint_prefix is longer than what some rank holds", f"{prefix} tokens", seen, "pass [text | own]"
            )
    if plan.config.load_balance != "head_tail":
        return
    if plan.kv_replicated or plan.q_lengths != plan.k_lengths:
        raise UnsupportedError(
            message(
                'load_balance="head_tail" is for self-attention: queries and keys are balanced alike',
                call=call.text,
                limit="k and v sharded as q is",
                value=f"q per rank {list(plan.q_lengths)}, k per rank {list(plan.k_lengths)}"
                + (", kv_replicated=True" if plan.kv_replicated else ""),
                remedy='use a context with load_balance="none" for cross attention',
            )
        )
    lengths = tuple(length - prefix for length in plan.q_lengths)
    balanced = balanced_lengths(plan.config, sum(lengths))
    if lengths != balanced:
        _fail(
            call,
            'these are no shards of load_balance="head_tail"',
            f"tokens per rank {list(balanced)}",
            f"{list(lengths)}",
            "cut tensors with cp.shard",
        )


def _check_columns(call: Call, plan: Plan, columns: Sequence[int]) -> None:
    """A tensor mask has the columns of all keys (or 1), on every rank alike; from headers, so that all raise."""
    _, total = plan.totals
    if any(n not in (1, total) for n in columns):
        _fail(
            call,
            "a tensor mask under context parallelism has this rank's rows and the columns of all keys",
            f"{total} columns (keys per rank {list(plan.k_lengths)})",
            f"{columns[0]} columns" if len(set(columns)) == 1 else f"columns per rank {list(columns)}",
            "cut its rows only; a key mask that is sharded like the keys is KeyPadding(bool (B, Sk_local)) or KeyBias",
        )


def _fail(call: Call, problem: str, limit: str, value: str, remedy: str) -> None:
    raise ArgumentError(message(problem, call=call.text, limit=limit, value=value, remedy=remedy))


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
