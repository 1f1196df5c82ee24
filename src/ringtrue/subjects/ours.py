"""ringtrue itself: the public call with every backend, and the op pair of every backend under the seam's own functions.

ours/NAME          rt.attention(backend=NAME), through autograd; with several ranks, under a ContextParallel
ours/NAME/pair     rt.op_pair(NAME): forward and backward called directly, and the chunk law
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import ringtrue as rt

from ..audit.subject import Call, Plain, Quantities, Says, Subject, through_autograd, with_leaves

MASKS = {"dense_bool": "bool", "dense_float": "float", "key_keep": "key_bool", "key_bias": "key_float"}
RINGS = frozenset({"ring", "both", "balanced"})
RANKS = frozenset({"ulysses", "uneven", "prefix", "replicated"}) | RINGS


def found(device: str) -> Iterator[Subject]:
    """Every backend that has a kernel for the device, and its pair."""
    for support in rt.backends():
        if support.device == device:
            missing = "" if support.unavailable is None else str(support.unavailable)
            pair = rt.op_pair(support.name, device)  # its claims are those of the release that is here
            says = says_of(pair.claims)
            about = f"ringtrue {rt.__version__}, torch {torch.__version__}"
            yield Public(f"ours/{support.name}", says, about, missing, support.name, pair.claims)
            yield Pair(f"ours/{support.name}/pair", says, about, missing, pair)


def says_of(claims: rt.Claims) -> Says:
    """A pair's claims in the audit's words; what the edge does for every pair is claimed for all."""
    return Says(
        dtypes=frozenset(str(d).removeprefix("torch.") for d in claims.dtypes),
        masks=frozenset(MASKS[kind] for kind in claims.masks if kind in MASKS),
        causal="any" if claims.causal != "none" else "none",
        window="window" in claims.masks,
        segments="segments" in claims.masks,
        gqa=True,
        value_dim=True,
        head_dims=(claims.max_head_dim or 1 << 30, 1),
        dropout=claims.dropout,
        softcap=claims.softcap,
        lse=claims.lse,
        lse_grad=claims.backward,
        backward=claims.backward,
        mask_grad=claims.dbias,
        empty=True,
        blind=True,
        deterministic=claims.deterministic,
        arithmetic=claims.arithmetic,
        ranks=RANKS if claims.backward_from_lse and claims.lse else RANKS - RINGS,
    )


def _beyond(claims: rt.Claims, call: Call) -> str:
    """What the claims refuse that `Says` has no word for."""
    return "; ".join(filter(None, (_rounds(claims, call), _beside(claims, call), _in_parts(claims, call))))


def _rounds(claims: rt.Claims, call: Call) -> str:
    """A float mask in the inputs' dtype would be another mask: refused where the kernel takes no other."""
    bias = call.mask.bias
    if bias is None or claims.bias_dtype != "input":
        return ""
    wider = torch.promote_types(bias.dtype, call.query.dtype) != call.query.dtype
    return f"a {bias.dtype} mask beside {call.query.dtype}" if wider else ""


def _beside(claims: rt.Claims, call: Call) -> str:
    """Masks that the kernel takes, but not together with causal or a window."""
    mask = call.mask
    alone = sorted(claims.alone & mask.kinds)
    return (
        f"{', '.join(alone)} beside causal or a window" if alone and (mask.causal, mask.since) != (None, None) else ""
    )


def _in_parts(claims: rt.Claims, call: Call) -> str:
    """Parts of keys that only an lse could join."""
    causal = call.mask.causal
    parts = causal is not None and 0 < causal < call.key.shape[1] - 1
    return "causal over parts of the keys without an lse" if parts and not claims.lse else ""


class Public(Plain):
    """rt.attention with a backend by name."""

    def __init__(self, name: str, says: Says, about: str, missing: str, backend: str, claims: rt.Claims) -> None:
        super().__init__(name, self.attend_call, says, about, None, missing, self.lines)
        object.__setattr__(self, "backend", backend)
        object.__setattr__(self, "claims", claims)

    backend: str
    claims: rt.Claims

    def against(self, call: Call) -> str:
        return "; ".join(filter(None, (self.says.against(call), _beyond(self.claims, call))))

    def attend_call(self, call: Call) -> tuple[Tensor, Tensor | None]:
        if call.rng is not None:
            torch.manual_seed(int(call.rng[0]))
        result = rt.attention(
            call.query, call.key, call.value, mask_of(call), dropout_p=call.dropout_p, scale=call.scale,
            softcap=call.softcap, enable_gqa=call.group > 1, return_lse=self.claims.lse, backend=self.backend,
            deterministic=call.deterministic or None,
        )  # fmt: skip
        out, lse = result if isinstance(result, tuple) else (result, None)
        return out, lse

    def run(self, call: Call) -> Quantities:
        return (
            through_autograd(self.attend, call)
            if call.ranks.size == 1
            else in_ranks(self.backend, call, lse=self.says.lse)
        )

    def lines(self, call: Call) -> str:
        extra = "".join(
            text
            for text, there in (
                (", attn_mask=attn_mask", bool(call.mask.kinds) or call.mask.causal is not None),
                (f", scale={call.scale!r}", not call.default_scale),
                (f", softcap={call.softcap}", call.softcap),
                (f", dropout_p={call.dropout_p}", call.dropout_p),
                (", enable_gqa=True", call.group > 1),
                (", deterministic=True", call.deterministic),
            )
            if there
        )
        call_line = f"rt.attention(query, key, value{extra}, return_lse=True, backend={self.backend!r})"
        return f"import ringtrue as rt\nout, lse = {call_line}"


class Pair(Plain):
    """The two functions of an op pair, without autograd."""

    def __init__(self, name: str, says: Says, about: str, missing: str, pair: rt.OpPair) -> None:
        super().__init__(name, self.refuse, replace(says, ranks=frozenset()), about, pair, missing, self.lines)

    def refuse(self, call: Call) -> Tensor:
        raise NotImplementedError("a pair is called through its two functions")

    def against(self, call: Call) -> str:
        assert self.pair is not None
        return "; ".join(filter(None, (self.says.against(call), _beyond(self.pair.claims, call))))

    def run(self, call: Call) -> Quantities:
        pair, refusal = self.pair, self.against(call)
        assert pair is not None
        if refusal:  # the seam's functions trust their caller, who asks the claims first
            raise rt.UnsupportedError(f"{pair.name} does not claim {refusal}")
        options = rt.Options(call.scale, call.dropout_p, call.softcap, call.deterministic, True)
        result = pair.forward(call.query, call.key, call.value, call.mask, call.rng, options)
        wanted = rt.Wanted(*(name in call.wanted for name in ("query", "key", "value", "bias")))
        if not any(wanted):
            return Quantities(result.out, result.lse)
        held = (call.query, call.key, call.value) if pair.reads_inputs else (None, None, None)
        ends = (result.out, result.lse) if pair.reads_inputs else (None, None)
        grads = pair.backward(
            call.grad_out, call.grad_lse, *held, call.mask, *ends, result.rng, result.saved, options, wanted
        )
        return Quantities(result.out, result.lse, *grads)

    def lines(self, call: Call) -> str:
        assert self.pair is not None
        return f"import ringtrue as rt\npair = rt.op_pair({self.pair.name!r})  # forward and backward of its seam"


def mask_of(call: Call) -> Any:
    """The mask in the public call's own words, or None."""
    mask = call.mask
    parts: list[Any] = []
    if mask.dense is not None:
        parts.append(rt.Dense(mask.dense))
    if mask.key_keep is not None:
        parts.append(rt.KeyPadding(mask.key_keep))
    if mask.key_bias is not None:
        parts.append(rt.KeyBias(mask.key_bias))
    if mask.q_segments is not None:
        parts.append(rt.Segments(mask.q_segments, mask.k_segments))
    if mask.since is not None or mask.causal is not None:
        parts.append(_places(call))
    joined = parts[0] if parts else None
    for part in parts[1:]:
        joined = joined & part
    return joined


def _places(call: Call) -> rt.Causal | rt.Window:
    mask, ahead = call.mask, call.key.shape[1] - call.query.shape[1]
    if mask.since is None and mask.causal == 0:
        return rt.Causal()
    if mask.since is None and mask.causal == ahead:
        return rt.Causal("bottom_right")
    return rt.Window(None if mask.since is None else -mask.since, mask.causal)


def in_ranks(backend: str | rt.OpPair, call: Call, mesh: object = None, lse: bool = True) -> Quantities:
    """This rank's part of the answer: whole-sized tensors that add up over the ranks (rank 0 alone has out and lse).

    mesh: of the ranks, where they are not those of the default process group
    lse: whether the backend gives one
    """
    ranks, prefix = call.ranks, call.ranks.prefix
    balance = "head_tail" if ranks.balanced else "none"
    config = rt.ContextParallelConfig(ranks.ulysses, ranks.ring, mesh=mesh, load_balance=balance)  # type: ignore[arg-type]
    cp = rt.context_parallel(config) if mesh is None else rt.ContextParallel(config)
    whole, leaves = with_leaves(call)

    def share(x: Tensor, dim: int = 1, keys: bool = False) -> Tensor:
        if keys and ranks.replicated:
            return x
        if ranks.lengths is not None:
            start = sum(ranks.lengths[: cp.rank])
            return x.narrow(dim, start, ranks.lengths[cp.rank])
        first, rest = x.narrow(dim, 0, prefix), x.narrow(dim, prefix, x.shape[dim] - prefix)
        return torch.cat([first, cp.shard(rest, dim)], dim) if prefix else cp.shard(rest, dim)

    mask = whole.mask
    parts = {n: getattr(mask, n) for n in ("key_keep", "key_bias", "q_segments", "k_segments")}
    cut: dict[str, Any] = {n: x if x is None else share(x, 1, not n.startswith("q")) for n, x in parts.items()}
    mine = replace(
        whole, query=share(whole.query), key=share(whole.key, 1, True), value=share(whole.value, 1, True),
        mask=replace(mask, **cut),
    )  # fmt: skip
    if call.rng is not None:
        torch.manual_seed(int(call.rng[0]))
    where = cp.call(joint_prefix=prefix, kv_replicated=ranks.replicated)
    result = rt.attention(
        mine.query, mine.key, mine.value, mask_of(mine), dropout_p=call.dropout_p, scale=call.scale,
        softcap=call.softcap, enable_gqa=call.group > 1, return_lse=lse, backend=backend, parallel=where,
        deterministic=call.deterministic or None,
    )  # fmt: skip
    out, *sums = result if isinstance(result, tuple) else (result,)
    out, sums = cp.gather(out, 1, prefix), [cp.gather(x, 2, prefix) for x in sums]
    first = float(cp.rank == 0)  # the objective of one rank is the whole one: others back-propagate zeros
    outputs, upstream = [out], [call.grad_out * first]
    if call.grad_lse is not None:
        outputs, upstream = [out, *sums], [*upstream, call.grad_lse * first]
    names = [n for n in ("query", "key", "value", "bias") if n in call.wanted]
    found = torch.autograd.grad(outputs, [leaves[n] for n in names], upstream) if names else ()
    grads = dict(zip(names, found, strict=True))
    ends = [x.detach() if cp.rank == 0 else torch.zeros_like(x) for x in (out, *sums)]
    return Quantities(ends[0], ends[1] if sums else None, *(grads.get(n) for n in ("query", "key", "value", "bias")))
