"""Claims against facts -> Choice. A backend is data here; every reason against it is returned, never only the first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from inspect import getclosurevars
from types import FunctionType

import torch
from torch import Tensor

from . import exact, faults, native, order, tuned
from .backends import REGISTRY
from .contract import Backend, Choice, Claims, Facts, Mask, OpPair, Options, Reason
from .edge import edge, widened
from .errors import ArgumentError, UnsupportedError, message

AUTO = "auto"
NATIVE = "native"
OPTION_REMEDY = f', or backend_options={{"{exact.OPTION}": ...}} for an exact one'


def names() -> tuple[str, ...]:
    """The names that may be passed as backend: every registered one, and the two that choose: "native" and "auto"."""
    return (*(b.name for b in REGISTRY), NATIVE, AUTO)


def known(name: object, where: str = "") -> str:
    """The canonical name (diffusers' names carry a leading underscore), or an error that lists the known ones."""
    plain = str(name).removeprefix("_")
    if plain not in names():
        problem = f"unknown backend in {where}" if where else "unknown backend"
        raise ArgumentError(message(problem, limit=", ".join(names()), value=repr(name), remedy="pick one of those"))
    return plain


# Read once, at import; an empty value counts as unset.
DEFAULT = known(os.environ.get("RINGTRUE_BACKEND") or AUTO, "RINGTRUE_BACKEND")


def reasons_against(claims: Claims, facts: Facts) -> tuple[Reason, ...]:
    """Every reason why a pair with these claims, edge included, cannot take a call with these facts."""
    claims = widened(claims)
    training = facts.training
    unknown = frozenset(name for name, _ in facts.options) - claims.options
    masks = facts.mask_kinds - claims.masks
    table = (
        (facts.dtype not in claims.dtypes, "dtype", "does not take it", _list(claims.dtypes), facts.dtype, "cast"),
        (bool(masks), "mask", "does not take this mask", _list(claims.masks), _list(masks), "choose another backend"),
        (
            claims.bias_dtype == "input" and _rounds(facts),
            "mask-dtype", "would round the float mask", f"a mask that {facts.dtype} holds", facts.bias_dtype,
            f"cast the mask to {facts.dtype} if its numbers may be rounded",
        ),
        (
            facts.causal is not None and claims.causal == "none",
            "causal", "has no causal attention", "not causal", "causal", "choose another backend",
        ),
        (
            bool(facts.mask_kinds & claims.alone) and (facts.causal is not None or "window" in facts.mask_kinds),
            "mask-causal", "does not take this mask together with causal or a window",
            f"{_list(claims.alone)} alone", _list(facts.mask_kinds | {"causal"}), "choose another backend",
        ),
        (
            _too_wide(facts, claims.max_head_dim),
            "head-dim", "head dim is too large", claims.max_head_dim, _widest(facts), "",
        ),
        (
            facts.capability is not None and not _first(claims) <= facts.capability <= _last(claims),
            "compute-capability", "does not run on this GPU", _gpus(claims), facts.capability, "",
        ),
        *_of_dropout_and_softcap(claims, facts),
        (
            training and not claims.backward,
            "no-backward", "has no backward", "no input requires grad", _wanted(facts), _without_backward(claims),
        ),
        (
            facts.wanted.bias and not claims.dbias,
            "no-dbias", "gives no gradient of a float mask", "mask does not require grad", "it does",
            "mask.detach(), or a backend that gives it",
        ),
        (
            not claims.lse and (facts.needs_lse or _joins(facts)), "no-lse", "returns no lse",
            "return_lse=False, no ring, causal from the first key", "lse needed", "",
        ),
        (
            facts.from_lse and training and not claims.backward_from_lse,
            "no-backward-from-lse", "its backward needs its own forward's lse", "no ring", "ring", "use Ulysses",
        ),
        (
            facts.deterministic and training and not _deterministic(claims, facts),
            "not-deterministic", "its backward is not deterministic", _until(claims), "deterministic=True",
            "torch.use_deterministic_algorithms(True)" if claims.deterministic_by_switch else "",
        ),
        (bool(unknown), "unknown-option", "has no such option", _list(claims.options) or "none", _list(unknown), ""),
        *_of_functions(claims, facts),
    )  # fmt: skip
    return tuple(
        Reason(code, text, str(limit), str(value), remedy) for hit, code, text, limit, value, remedy in table if hit
    )


Row = tuple[bool, str, str, object, object, str]


def _of_dropout_and_softcap(claims: Claims, facts: Facts) -> tuple[Row, ...]:
    """Rows of the table above, of what is done to scores and weights."""
    return (
        (facts.dropout and not claims.dropout, "no-dropout", "has no dropout", "dropout_p = 0", "> 0", "dropout_p=0"),
        (
            facts.dropout and claims.dropout and _too_wide(facts, claims.max_dropout_head_dim),
            "head-dim-dropout", "head dim is too large for dropout", claims.max_dropout_head_dim, _widest(facts),
            "dropout_p=0",
        ),
        (
            facts.softcap and facts.dropout and claims.softcap and not claims.softcap_dropout,
            "softcap-dropout", "does not take softcap together with dropout", "one of them", "both", "dropout_p=0",
        ),
        (facts.softcap and not claims.softcap, "no-softcap", "has no softcap", "softcap = 0", "> 0", "softcap=0"),
    )  # fmt: skip


def _of_functions(claims: Claims, facts: Facts) -> tuple[Row, ...]:
    """Rows of the table above, of options that are functions of places."""
    given = {name: value for name, value in facts.options if name in claims.functions}
    wrong = [name for name, value in given.items() if not callable(value)]
    seen = [getclosurevars(value) for value in given.values() if isinstance(value, FunctionType)]
    tensors = (x for v in seen for x in (*v.nonlocals.values(), *v.globals.values()) if isinstance(x, Tensor))
    learns = any(x.requires_grad for x in tensors)
    return (
        (bool(wrong), "option-value", "takes a function there", "callable", _list(wrong), ""),
        (
            bool(given) and facts.sharded,
            "option-sharded", "would count batch, heads and places per rank", "no context parallelism", _list(given),
            "parallel=False, or Causal, Window, Segments, KeyPadding, KeyBias",
        ),
        (
            learns, "option-grad", "gives no gradient of what a function captures", "no captured tensor requires grad",
            "one does", "detach() it",
        ),
    )  # fmt: skip


def reasons_for(backend: Backend, facts: Facts) -> tuple[Reason, ...]:
    """Every reason why a backend cannot take a call here: its device, its availability, then its claims."""
    pair = backend.pairs.get(facts.device)
    if pair is None:
        return (
            Reason("device", "has no kernel for this device", _list(backend.pairs), facts.device, "move the tensors"),
        )
    missing = backend.unavailable(facts.device)
    if missing is not None:
        return missing, *_against(pair.claims, facts)
    return _against(backend.narrowed(facts.device) or pair.claims, facts)


def _against(claims: Claims, facts: Facts) -> tuple[Reason, ...]:
    """As `reasons_against`, with the option that has another backend give the backward."""
    name = exact.named(claims, facts.options)
    if name is None:
        return reasons_against(claims, facts)
    other = _giving(name, facts.device)
    if other is None:
        names = [b.name for b in REGISTRY if _giving(b.name, facts.device) is not None]
        return *reasons_against(claims, facts), exact.unknown(name, names)
    both = exact.claimed(widened(claims), widened(other.pairs[facts.device].claims))
    found = reasons_for(other, exact.facts_of(facts)) if facts.training else ()
    return *reasons_against(both, facts), *(exact.against(other.name, reason) for reason in found)


def _giving(name: object, device: str) -> Backend | None:
    """The backend of that name, where it can give the backward of a quantised one on that device."""
    plain = str(name).removeprefix("_")
    found = next((b for b in REGISTRY if b.name == plain and device in b.pairs), None)
    return found if found is not None and exact.exact(found.pairs[device].claims) else None


def _first_reasons(backend: Backend, facts: Facts, named: bool) -> tuple[Reason, ...]:
    """As `reasons_for`, but nothing is imported for a call that the claims refuse, nor downloaded unless `named`."""
    pair = backend.pairs.get(facts.device)
    if pair is not None and exact.named(pair.claims, facts.options) is None:
        found = reasons_against(pair.claims, facts)
        if found:
            return found
    found = reasons_for(backend, facts)
    failed = backend.fetch(facts.device) if named and backend.fetch is not None and not found else None
    return found if failed is None else (failed,)


Trace = tuple[tuple[str, tuple[Reason, ...]], ...]


def composed(backend: Backend, device: str, options: tuple[tuple[str, object], ...] = ()) -> OpPair:
    """The backend's pair for a device with what its known faults need and the edge around it.

    With the option "backward" of `options`, that backend's backward in place of its own."""
    pair, narrowed = backend.pairs[device], backend.narrowed(device)
    pair = pair if narrowed is None else replace(pair, claims=narrowed)
    judge = _exact(backend, device) if faults.has(backend.name, device, "guard") else None
    made = edge(faults.mended(pair, device, judge))
    name = exact.named(pair.claims, options)
    other = None if name is None else _giving(name, device)
    return made if other is None else exact.with_backward(made, composed(other, device))


def _exact(backend: Backend, device: str) -> OpPair | None:
    """Another pair that takes all masks that the backend's takes, edge included; it needs no optional package."""
    masks = backend.pairs[device].claims.masks
    for b in REGISTRY:
        if b is not backend and not b.packages and device in b.pairs and not b.unavailable(device):
            pair = edge(b.pairs[device])
            if masks <= pair.claims.masks:
                return pair
    return None


def preference(facts: Facts, alike: bool = False) -> order.Order:
    """What `auto` tries for a call, best first, and where that comes from.

    `alike`: the same where lengths and masks differ; they may be symbols, or those of ranks that exchange nothing. No
    file is read then: torch may be tracing, and other ranks may have another one.
    """
    return order.declared(order.blind(facts)) if alike else tuned.order(facts, order.declared(facts))


def fitting(
    name: str, facts: Facts, call: object = "", traced: bool = False, alike: bool = False
) -> tuple[Choice, ...]:
    """Every backend that fits, best first, edge included. With a name, only that one; none fits: UnsupportedError.

    `traced`: the sizes may be symbols, which no cache can hold. `alike`: see `preference`.
    """
    found = preference(facts, alike) if name == AUTO else order.Order((name,), "")
    choices, trace = (survey.__wrapped__ if traced else survey)(name, facts, found.names)
    if not choices:
        others = [b.name for b in REGISTRY if not (b.packages or reasons_for(b, facts))]
        raise refusal(name, trace, others, call, found.notes)
    return choices


@lru_cache(maxsize=4096)
def survey(name: str, facts: Facts, names: tuple[str, ...]) -> tuple[tuple[Choice, ...], Trace]:
    """What `fitting` finds, and every reason against each of `names`, which it may become; alike for alike facts."""
    backends = [b for b in REGISTRY if b.name in names]
    reasons = {b.name: _first_reasons(b, facts, named=name != AUTO) for b in backends}
    chosen = among(name, facts, reasons, names)
    if not chosen:  # then every reason is told
        reasons = {b.name: reasons_for(b, facts) or reasons[b.name] for b in backends}
    trace = tuple(reasons.items())
    return tuple(Choice(b.name, name, composed(b, facts.device, facts.options), trace) for b in chosen), trace


def among(
    name: str, facts: Facts, reasons: Mapping[str, tuple[Reason, ...]], names: Sequence[str]
) -> tuple[Backend, ...]:
    """What a name, or "auto" in the order of `names`, may become where these are the reasons against each backend."""
    fits = {b.name: b for b in REGISTRY if b.name in reasons and not reasons[b.name]}
    if name != AUTO:
        return (fits[name],) if name in fits else ()
    # auto ignores grad mode: a reentrant checkpoint's first pass has it off
    ordered = [fits[n] for n in names if n in fits]
    return tuple(b for b in ordered if _trains(b.pairs[facts.device].claims, facts))


def meant(name: str, facts: Facts, q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> str:
    """The name itself; for "native" the backend whose kernel torch would take, or the one that takes everything."""
    if name != NATIVE:
        return name
    taken = native.torchs_choice(q, k, v, mask, options)
    backend = next((b for b in REGISTRY if b.name == taken), None)
    return taken if backend is not None and not reasons_for(backend, facts) else native.ANY


def fitting_pair(pair: OpPair, facts: Facts, call: object = "") -> tuple[Choice, ...]:
    """A pair handed in by the caller, judged by its own claims."""
    trace = ((pair.name, reasons_against(pair.claims, facts)),)
    if trace[0][1]:
        raise refusal(pair.name, trace, [b.name for b in REGISTRY if not reasons_for(b, facts)], call)
    return (Choice(pair.name, pair.name, edge(pair), trace),)


def refusal(name: str, trace: Trace, others: list[str], call: object, notes: tuple[str, ...] = ()) -> UnsupportedError:
    """The error of a call that nothing, or not the backend asked for, can take: every reason, and who could. `notes`:
    what there is to know of the order, such as that a backend was left out."""
    asked = [(n, reasons) for n, reasons in trace if name in (AUTO, n)]
    lines = [*(f"{n}: {reason}" for n, reasons in asked for reason in reasons), *notes]
    problem = "no backend can take this call" if name == AUTO else f"backend {name!r} cannot take this call"
    remedy = f"these can: {', '.join(others)}" if others else "no registered backend can"
    return UnsupportedError(message(problem + "".join(f"\n  - {line}" for line in lines), call=call, remedy=remedy))


def _trains(claims: Claims, facts: Facts) -> bool:
    """Whether the pair could take the call's backward too, were grad mode on."""
    return (
        claims.backward
        and (claims.dbias or not facts.mask_grad)
        and (_deterministic(claims, facts) or not facts.deterministic)
    )


def _deterministic(claims: Claims, facts: Facts) -> bool:
    if _too_wide(facts, claims.max_deterministic_head_dim):
        return False
    return claims.deterministic or (claims.deterministic_by_switch and facts.deterministic_switch)


def _joins(facts: Facts) -> bool:
    """Whether the edge may cut a causal call into parts of the keys: keys that all queries see, and the rest."""
    return facts.causal is not None and facts.causal > 0 and (facts.sharded or facts.causal < facts.k_len - 1)


def _until(claims: Claims) -> str:
    """What a backward that is not deterministic is fine with."""
    most = claims.max_deterministic_head_dim
    return "deterministic=False" + ("" if most is None else f", or head dims up to {most}")


def _too_wide(facts: Facts, most: int | None) -> bool:
    return most is not None and _widest(facts) > most


def _widest(facts: Facts) -> int:
    return max(facts.head_dim, facts.value_dim)


def _rounds(facts: Facts) -> bool:
    """Whether a float mask in the inputs' dtype would be another mask."""
    return facts.bias_dtype is not None and torch.promote_types(facts.bias_dtype, facts.dtype) != facts.dtype


def _gpus(claims: Claims) -> str:
    return f"{_first(claims)} to {_last(claims)}"


def _first(claims: Claims) -> tuple[int, int]:
    return claims.min_capability or (0, 0)


def _last(claims: Claims) -> tuple[int, int]:
    return claims.max_capability or (99, 9)


def _without_backward(claims: Claims) -> str:
    return "use torch.no_grad()" + OPTION_REMEDY * (exact.OPTION in claims.options)


def _wanted(facts: Facts) -> str:
    return ", ".join(n for n, w in zip(("query", "key", "value", "mask"), facts.wanted, strict=True) if w)


def _list(items: object) -> str:
    return ", ".join(sorted(str(i) for i in items))  # type: ignore[attr-defined]
