"""The public call: choose, compose, run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from . import autograd, prepared, scope, select, tracing
from . import call as calls
from .backends import REGISTRY
from .checks import Described
from .contract import Backend, Choice, Claims, Facts, OpPair, Package, Reason
from .edge import widened
from .errors import ArgumentError, UnsupportedError, message
from .masks import MaskPart

if TYPE_CHECKING:
    from .parallel.context import ContextParallel, DeclaredCall


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: MaskPart | Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., softcap: float = ...,
    return_lse: Literal[False] = ..., layout: Literal["bshd", "bhsd"] = ..., backend: str | OpPair | None = ...,
    deterministic: bool | None = ..., parallel: ContextParallel | DeclaredCall | Literal[False] | None = ...,
    backend_options: dict[str, object] | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: MaskPart | Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., softcap: float = ...,
    *, return_lse: Literal[True], layout: Literal["bshd", "bhsd"] = ..., backend: str | OpPair | None = ...,
    deterministic: bool | None = ..., parallel: ContextParallel | DeclaredCall | Literal[False] | None = ...,
    backend_options: dict[str, object] | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: MaskPart | Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., softcap: float = ...,
    return_lse: bool = ..., layout: Literal["bshd", "bhsd"] = ..., backend: str | OpPair | None = ...,
    deterministic: bool | None = ..., parallel: ContextParallel | DeclaredCall | Literal[False] | None = ...,
    backend_options: dict[str, object] | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    query: Float[Tensor, "B Sq H D"],
    key: Float[Tensor, "B Sk Hk D"],
    value: Float[Tensor, "B Sk Hk Dv"],
    attn_mask: MaskPart | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    return_lse: bool = False,
    layout: Literal["bshd", "bhsd"] = "bshd",
    backend: str | OpPair | None = None,
    deterministic: bool | None = None,
    parallel: ContextParallel | DeclaredCall | Literal[False] | None = None,
    backend_options: dict[str, object] | None = None,
) -> Float[Tensor, "B Sq H Dv"] | tuple[Float[Tensor, "B Sq H Dv"], Float[Tensor, "B H Sq"]]:
    """Scaled dot-product attention with true gradients, on one device or across the ranks of a context.

    query (B, Sq, H, D), key (B, Sk, Hk, D), value (B, Sk, Hk, Dv), any strides; float64, float32, bfloat16 or float16,
    all three alike. Returns out (B, Sq, H, Dv) in that dtype, and with `return_lse` also lse (B, H, Sq), float32
    (float64 for float64), the natural log-sum-exp of the scaled and masked scores. `layout="bhsd"` swaps S and H of
    the inputs and of out. Under torch.autocast the three and a float mask are cast as torch's own attention casts them.

    attn_mask   bool tensor (True = may attend) or float tensor (added to the scaled scores), right-aligned broadcast to
                (B, H, Sq, Sk), or Causal, Window, Segments, KeyPadding, KeyBias, or several joined by `&`; at most one
                float mask. A query that may attend to nothing gives out 0, lse -inf and zero gradients. Under a
                context a tensor has this rank's rows (or one row, the same on all ranks) and the columns of all keys;
                KeyPadding and KeyBias are sharded like the keys.
    dropout_p   of the weights, as in FlashAttention; lse knows nothing of it. Drawn by torch's default CPU generator
                (which torch.manual_seed sets and checkpointing restores); gradients belong to the mask that was drawn.
    softcap     c > 0: scores are c tanh(scale q k / c), before mask and bias.
    is_causal   query i sees keys j <= i (top-left, as torch documents), in global token order under a context.
    scale       default 1/sqrt(D); 0.0 and negative values are values.
    enable_gqa  allows Hk < H when Hk divides H.
    backend     a name of `backends()`, "auto" (the fastest that fits), "native" (what torch's own attention would
                take, or native_math where that cannot honour the call), or an OpPair; None = the scope's, else
                RINGTRUE_BACKEND, else "auto". An explicit backend never falls back.
    parallel    a ContextParallel or `cp.call(...)`; None = the scope's; False = this device alone.
    backend_options  what the backend knows by name, see docs/backends.md; {"backward": name} has another one, which is
                exact, give the gradients of one that quantises and has none.

    Raises ArgumentError for inputs that do not fit together, UnsupportedError (with every reason) for a call that
    cannot be honoured, DisagreementError or PeerError on all ranks when ranks differ or one of them refuses.
    """
    arguments = {
        "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
        "enable_gqa": enable_gqa, "softcap": softcap, "return_lse": return_lse, "layout": layout,
        "deterministic": deterministic, "backend_options": backend_options,
    }  # fmt: skip
    run = tracing.run if torch.compiler.is_compiling() and tracing.compilable(backend, parallel) else _run
    out, lse = run(query, key, value, backend, parallel, arguments)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    return (out, lse) if return_lse else out


# after a graph break the frames below would be compiled, where nothing guards them
@torch.compiler.disable(reason="ringtrue.attention under a context, or with an OpPair as backend, is not compiled yet")
def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    backend: str | OpPair | None,
    parallel: object,
    arguments: Mapping[str, object],
) -> tuple[Tensor, Tensor | None]:
    context = _context(parallel, query, key, value)
    if context is None:
        asked = _asked(backend, query, key, value)
        known = prepared.key_of(query, key, value, asked, arguments)
        ready = None if asked == select.NATIVE else prepared.find(known)  # torch's switches are in no key
        if ready is not None:
            if arguments["layout"] == "bhsd":
                query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            return autograd.run(ready.pair, query, key, value, ready.mask, ready.options, ready.wanted)
        call, choices = _prepare(query, key, value, asked, arguments)
        pair, anchored = choices[0].pair, False
        if asked != select.NATIVE:
            prepared.keep(known, prepared.Prepared(pair, call.mask, call.options, call.facts.wanted))
    else:
        with context.refusing_together():
            call, choices = _prepare(query, key, value, _asked(backend, query, key, value), arguments, context)
        pair, _, anchored, _ = context.plan(call, choices)
    rng = calls.random_state() if call.facts.dropout else None
    return autograd.run(pair, call.q, call.k, call.v, call.mask, call.options, call.facts.wanted, anchored, rng)


def _context(
    parallel: object, q: Tensor, k: Tensor, v: Tensor, alone: bool = False
) -> ContextParallel | DeclaredCall | None:
    """What the call runs under: a context or a declared call of one, or None for this device alone.

    What is neither is refused, and the ranks of the context in scope are told, unless `alone`.
    """
    if parallel is None:
        return scope.current_context(partial(Described, q, k, v))  # type: ignore[return-value]
    if parallel is False:
        return None
    if isinstance(parallel, type) or not hasattr(parallel, "refusing_together"):
        text = message(
            "parallel is not a context",
            call=Described(q, k, v),
            limit="a ContextParallel, cp.call(...), False for this device alone, None for the scope's",
            value=repr(parallel),
        )
        waiting: ContextParallel | None = None if alone else scope.current_context()  # type: ignore[assignment]
        with contextlib.nullcontext() if waiting is None else waiting.refusing_together():
            raise ArgumentError(text)
    return parallel  # type: ignore[return-value]


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    asked: str | OpPair,
    arguments: Mapping[str, object],
    context: ContextParallel | DeclaredCall | None = None,
) -> tuple[calls.Call, tuple[Choice, ...]]:
    """The validated call, and the backends that can take it as its plan needs them, best first."""
    call = calls.normalise(q, k, v, **arguments, sharded=context is not None)  # type: ignore[arg-type]
    facts = call.facts if context is None else context.facts(call)
    if isinstance(asked, OpPair):
        return call, select.fitting_pair(asked, facts, call.text)
    alike = context is not None and context.silent
    return call, select.fitting(_meant(asked, facts, call), facts, call.text, alike=alike)


def _meant(asked: str, facts: Facts, call: calls.Call) -> str:
    return select.meant(asked, facts, call.q, call.k, call.v, call.mask, call.options)


def _asked(backend: object, q: Tensor, k: Tensor, v: Tensor) -> str | OpPair:
    """The backend of a call: the one passed, else the scope's, else RINGTRUE_BACKEND, else "auto"."""
    if backend is None:  # what is in scope was looked at when it was entered
        return scope.current_backend(partial(Described, q, k, v)) or select.DEFAULT
    return backend if isinstance(backend, OpPair) else select.known(backend)


@contextlib.contextmanager
def attention_backend(backend: str | OpPair) -> Iterator[None]:
    """Choose the backend of the calls inside that name none themselves: a name of `backends()`, "auto" or an OpPair.

    Nests, restores on exceptions, is per thread and per asyncio task. ArgumentError for an unknown name.
    """
    with scope.backend_scope(backend if isinstance(backend, OpPair) else select.known(backend, "attention_backend")):
        yield


def current_backend() -> str | OpPair:
    """What a call that names no backend would take here: the one in scope, else RINGTRUE_BACKEND, else "auto"."""
    return scope.current_backend() or select.DEFAULT


@dataclass(frozen=True)
class Support:
    """One backend on one kind of device: what it claims, and why it cannot run here (None when it can).

    verified  how its kernel was proven there: "every test run", the path of a page in this repository with what was
              run and on which machine, "stand-in" where only our code around it was, "" where nothing was
    packages  the optional packages it needs
    fetches   a call that names it may download its kernel
    """

    name: str
    device: str
    summary: str
    claims: Claims
    unavailable: Reason | None
    verified: str = ""
    packages: tuple[Package, ...] = ()
    fetches: bool = False


def backends() -> tuple[Support, ...]:
    """Every backend on every device it has a kernel for, best first; `claims` with the edge included, and those of the
    release that is installed."""
    return tuple(_support(b, device, pair.claims) for b in REGISTRY for device, pair in b.pairs.items())


def _support(b: Backend, device: str, claims: Claims) -> Support:
    missing, verified, fetches = _missing(b, device), _verified(b, device), b.fetch is not None
    claims = claims if missing is not None else b.narrowed(device) or claims
    return Support(b.name, device, b.summary, widened(claims), missing, verified, b.packages, fetches)


def _verified(backend: Backend, device: str) -> str:
    """How a pair was proven; those of the CPU are by every run of the tests."""
    return backend.verified.get(device, "every test run" if device == "cpu" else "")


def _missing(backend: Backend, device: str) -> Reason | None:
    # torch knows an "xla" device only through a package, for which the backend itself asks
    module = getattr(torch, device, None)
    if device not in ("cpu", "xla") and not (module is not None and module.is_available()):
        return Reason("device", f"this machine has no {device.upper()} device", device, "cpu")
    return backend.unavailable(device)


def op_pair(name: str, device: str | None = None) -> OpPair:
    """The two pure functions of a backend, edge included, for "cpu", "cuda", ... (default: the first it has).

    ArgumentError for an unknown name or device.
    """
    plain = str(name).removeprefix("_")
    for backend in REGISTRY:
        if backend.name == plain:
            device = device or next(iter(backend.pairs))
            if device not in backend.pairs:
                raise ArgumentError(
                    message(f"{plain} has no kernel for this device", limit=", ".join(backend.pairs), value=device)
                )
            return select.composed(backend, device)
    raise ArgumentError(message("unknown op pair", limit=", ".join(b.name for b in REGISTRY), value=repr(name)))


def _kind(device: str | torch.device) -> str:
    """The type of a device; torch knows the name of one that a package brings only once that is imported."""
    kind = str(device).partition(":")[0]
    return kind if any(kind in b.pairs for b in REGISTRY) else torch.device(device).type


@dataclass(frozen=True)
class Explanation:
    """Which backend would run a call, and for each other one every reason against it.

    order       what "auto" tries for this call, best first, where that was asked for
    order_from  where that order comes from
    """

    call: str
    backend: str | None
    reasons: dict[str, tuple[Reason, ...]]
    order: tuple[str, ...] = ()
    order_from: str = ""

    def __str__(self) -> str:
        lines = [self.call, f"  runs: {self.backend or 'nothing'}"]
        lines += [f"  auto tries: {', '.join(self.order) or 'nothing'} ({self.order_from})"] if self.order_from else []
        for name, reasons in self.reasons.items():
            lines += [f"  {name}: {reason}" for reason in reasons] or [f"  {name}: fits"]
        return "\n".join(lines)


_OF_RANK_0 = ("this is this rank's; under this context that of rank 0 counts",)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: MaskPart | Tensor | None = None,
    *,
    backend: str | OpPair | None = None,
    parallel: ContextParallel | DeclaredCall | Literal[False] | None = None,
    device: str | torch.device | None = None,
    **arguments: object,
) -> Explanation:
    """What `attention` with the same arguments would choose, and why not the others; runs nothing.

    Under a context it tells what fits on this rank, and talks to no other; a call takes what fits on all of them.
    `device` ("cuda", or "cuda:1") judges the call as one of tensors there; those passed may then be on "meta".
    """
    context = _context(parallel, query, key, value, alone=True)
    asked = _asked(backend, query, key, value)
    sharded = context is not None
    call = calls.normalise(query, key, value, attn_mask=attn_mask, **arguments, sharded=sharded)  # type: ignore[arg-type]
    facts = call.facts if context is None else context.facts(call)
    facts = facts if device is None else replace(facts, device=_kind(device))
    reasons = {b.name: select.reasons_for(b, facts) for b in REGISTRY}
    if isinstance(asked, OpPair):
        against = select.reasons_against(asked.claims, facts)
        return Explanation(str(call.text), None if against else asked.name, {**reasons, asked.name: against})
    if asked == select.NATIVE and facts.device != call.q.device.type:
        raise UnsupportedError(
            message(
                "native asks torch which kernel it would take, and torch answers for tensors where they are",
                call=call.text,
                limit=f"tensors on {facts.device}",
                value=str(call.q.device),
                remedy="run explain where that device is, or name a backend",
            )
        )
    found = select.preference(facts, alike=context is not None and context.silent)
    fits = select.among(_meant(asked, facts, call), facts, reasons, found.names)
    notes = (found.source, *found.notes, *_OF_RANK_0[: context is not None and not context.silent])
    told = (found.names, "; ".join(notes)) if asked == select.AUTO else ()
    return Explanation(str(call.text), fits[0].name if fits else None, reasons, *told)
