"""The audit's seam: what a subject is asked, what it answers, and what it says it can do.

A subject is anything with the attributes of `Subject`. It plugs into the audit here and needs nothing else of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..contract import Arithmetic, Mask, OpPair
from .truth import Quantities

__all__ = ["Call", "Plain", "Quantities", "Ranks", "Says", "Subject", "through_autograd", "with_leaves"]


class Ranks(NamedTuple):
    """How a call is cut over processes. Lengths are tokens per context rank, in rank order; None: as even as can be."""

    ulysses: int = 1
    ring: int = 1
    balanced: bool = False
    prefix: int = 0
    replicated: bool = False
    lengths: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return self.ulysses * self.ring


@dataclass(frozen=True, eq=False)
class Call:
    """One whole call, in the layouts of contract.py: query (B, Sq, H, D), key (B, Sk, Hk, D), value (B, Sk, Hk, Dv).

    mask        contract.Mask: query i sees keys i + mask.since to i + mask.causal (None: no limit)
    rng         (seed, offset) int64 for subjects that take a random state; others call torch.manual_seed(rng[0])
    grad_out    the upstream gradient of out, (B, Sq, H, Dv); grad_lse that of lse, (B, H, Sq), or None
    wanted      which of query, key, value, bias require a gradient
    ranks       how it is cut over processes; every rank is given the whole call
    deterministic  asked for the same bits again, of those who can only be so when asked
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    grad_out: Tensor
    scale: float
    grad_lse: Tensor | None = None
    wanted: frozenset[str] = frozenset({"query", "key", "value"})
    dropout_p: float = 0.0
    softcap: float = 0.0
    rng: Tensor | None = None
    ranks: Ranks = Ranks()
    deterministic: bool = False

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.query.shape[2] // self.key.shape[2] if self.key.shape[2] else 1

    @property
    def default_scale(self) -> bool:
        return math.isclose(self.scale, self.query.shape[3] ** -0.5, rel_tol=1e-12)

    @property
    def blind(self) -> bool:
        """Whether some query may attend to no key at all."""
        mask = self.dense(places=True)
        if mask is None or not self.query.shape[1] or not self.key.shape[1]:
            return False
        seen = mask if mask.dtype == torch.bool else mask != -torch.inf
        return not bool(seen.any(-1).all())

    def dense(self, *, places: bool = False) -> Tensor | None:
        """All parts of the mask as one tensor, (B|1, H|1, Sq|1, Sk|1), for those who take no other form.

        bool where no part is a float, else float with -inf; `places`: causal, window and segments too (Sq x Sk).
        Differentiable in the float part. None where nothing is masked.
        """
        mask, keep, bias = self.mask, None, None
        for part in (mask.dense, mask.key_keep, mask.key_bias):
            if part is not None:
                part = part if part.dim() == 4 else part[:, None, None, :]
                if part.dtype == torch.bool:
                    keep = part if keep is None else keep & part
                else:
                    bias = part
        if places:
            for seen in self._places():
                keep = seen if keep is None else keep & seen
        if bias is None or keep is None:
            return keep if bias is None else bias
        return torch.where(keep, bias, torch.full_like(bias, -torch.inf))

    def _places(self) -> list[Tensor]:
        device, mask = self.query.device, self.mask
        row = torch.arange(self.query.shape[1], device=device).unsqueeze(1)
        col = torch.arange(self.key.shape[1], device=device)
        found = []
        if mask.causal is not None:
            found.append((col <= row + mask.causal)[None, None])
        if mask.since is not None:
            found.append((col >= row + mask.since)[None, None])
        if mask.q_segments is not None and mask.k_segments is not None:
            found.append(mask.q_segments[:, None, :, None] == mask.k_segments[:, None, None, :])
        return found


@dataclass(frozen=True)
class Says:
    """What a subject says it can do: data that decides whether a refusal is in order. The default claims little.

    dtypes     names: "float32", "bfloat16", "float16", "float64"
    masks      "bool" and "float" (dense, broadcast over b, h, q), "key_bool" and "key_float" (one per sample and key)
    causal     "any" offset, "top_left", "bottom_right" (both for Sq != Sk too), "square" (Sq == Sk only) or "none"
    gqa        Hk < H;  cross: Sq != Sk;  value_dim: Dv != D;  scale: one that is not 1 / sqrt(D)
    head_dims  largest D, and what D must be a multiple of
    empty      B, Sq or Sk of 0;  blind: rows that see nothing give out 0, lse -inf and gradients 0
    arithmetic what it computes with, as contract.Claims has it: one that quantises is judged beside one that does too
    ranks      "ulysses", "ring", "both"; "uneven" lengths and heads; "balanced", "prefix", "replicated"
    """

    dtypes: frozenset[str] = frozenset({"float32", "bfloat16", "float16"})
    masks: frozenset[str] = frozenset()
    causal: str = "none"
    window: bool = False
    segments: bool = False
    gqa: bool = False
    cross: bool = True
    value_dim: bool = False
    scale: bool = True
    head_dims: tuple[int, int] = (256, 1)
    dropout: bool = False
    softcap: bool = False
    lse: bool = False
    lse_grad: bool = False
    backward: bool = True
    mask_grad: bool = False
    empty: bool = False
    blind: bool = False
    deterministic: bool = True
    arithmetic: Arithmetic = "float32"
    ranks: frozenset[str] = frozenset()

    def against(self, call: Call) -> str:
        """Why the call is not claimed; empty where it is."""
        return "; ".join(text for text, allowed in self._limits(call) if not allowed)

    def _limits(self, call: Call) -> list[tuple[str, bool]]:
        q, k, v, mask = call.query, call.key, call.value, call.mask
        dtype = str(q.dtype).removeprefix("torch.")
        return [
            (f"dtype {dtype}", dtype in self.dtypes),
            *((f"a mask of kind {kind}", kind in self.masks) for kind in _kinds(mask)),
            (f"causal with offset {mask.causal} at {q.shape[1]} x {k.shape[1]}", self._causal(call)),
            ("a window", self.window or mask.since is None),
            ("segments", self.segments or mask.q_segments is None),
            ("fewer key heads than query heads", self.gqa or q.shape[2] == k.shape[2]),
            ("as many keys as queries only", self.cross or q.shape[1] == k.shape[1]),
            ("a value dim of its own", self.value_dim or q.shape[3] == v.shape[3]),
            ("a scale of its own", self.scale or call.default_scale),
            (f"head dim {q.shape[3]}", max(q.shape[3], v.shape[3]) <= self.head_dims[0]),
            (f"head dim {q.shape[3]}, not a multiple", not (q.shape[3] | v.shape[3]) % self.head_dims[1]),
            ("dropout", self.dropout or not call.dropout_p),
            ("softcap", self.softcap or not call.softcap),
            ("a gradient of lse", self.lse_grad or call.grad_lse is None),
            ("a backward pass", self.backward or not call.wanted),
            ("the gradient of a mask", self.mask_grad or "bias" not in call.wanted),
            ("rows that see nothing", self.blind or not call.blind),
            ("nothing to attend to", self.empty or bool(q.shape[0] and q.shape[1] and k.shape[1])),
            *((f"context parallelism: {need}", need in self.ranks) for need in _needs(call)),
        ]

    def _causal(self, call: Call) -> bool:
        offset, q_len, k_len = call.mask.causal, call.query.shape[1], call.key.shape[1]
        fits = {
            "any": True,
            "top_left": offset == 0,
            "bottom_right": offset == k_len - q_len,
            "square": offset == 0 and q_len == k_len,
        }
        return offset is None or fits.get(self.causal, False)


def _kinds(mask: Mask) -> list[str]:
    names = {"dense_bool": "bool", "dense_float": "float", "key_keep": "key_bool", "key_bias": "key_float"}
    return [names[kind] for kind in sorted(mask.kinds) if kind in names]


def _needs(call: Call) -> list[str]:
    """What of context parallelism a call asks for."""
    ranks, q_len, k_len = call.ranks, call.query.shape[1], call.key.shape[1]
    if ranks.size == 1:
        return []
    mode = "both" if ranks.ulysses > 1 and ranks.ring > 1 else "ulysses" if ranks.ulysses > 1 else "ring"
    heads = call.query.shape[2] % ranks.ulysses or call.key.shape[2] % ranks.ulysses
    uneven = heads or q_len % ranks.size or (k_len % ranks.size and not ranks.replicated)
    uneven = uneven or (ranks.lengths is not None and len(set(ranks.lengths)) > 1)
    words = {"uneven": uneven, "balanced": ranks.balanced, "prefix": ranks.prefix, "replicated": ranks.replicated}
    return [mode, *(word for word, there in words.items() if there)]


class Subject(Protocol):
    """Something that computes attention and its gradients.

    name     "family/which", as it is written on the command line, e.g. "torch/flash"
    says     what it claims; `against` may know better than data can (an empty text: it claims the call)
    about    versions and whatever a reader of a report needs
    pair     its two functions, where it has them in the form of contract.OpPair: they are put to the chunk law
    run      answers a call: out and the wanted gradients, lse (B, H, Sq) in natural log where `says.lse`.
             Any exception is a refusal. Where call.ranks.size > 1 it runs in that many processes with a default
             process group, and gives tensors of the whole call's shapes that add up, over the ranks, to the answer
    source   lines of Python that compute `out` (and `lse`) from query, key, value, attn_mask, is_causal, scale … ;
             what a reader pastes into a bug report (what the lines may name: snippet.py)
    """

    @property
    def name(self) -> str: ...
    @property
    def says(self) -> Says: ...
    @property
    def about(self) -> str: ...
    @property
    def pair(self) -> OpPair | None: ...
    def unavailable(self) -> str: ...
    def against(self, call: Call) -> str: ...
    def run(self, call: Call) -> Quantities: ...
    def source(self, call: Call) -> str: ...


Attend = Callable[[Call], "Tensor | tuple[Tensor, Tensor | None]"]


def through_autograd(attend: Attend, call: Call) -> Quantities:
    """Forward by `attend`, gradients by autograd; the call it is handed holds leaves under the strides of the given."""
    asked, leaves = with_leaves(call)
    result = attend(asked)
    out, lse = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(out, Tensor):
        raise TypeError(f"it gave a {type(out).__name__}, not out or (out, lse)")
    alike = (out.shape, out.dtype) == (call.grad_out.shape, call.query.dtype)
    if not alike or (call.wanted and not out.requires_grad):  # what is there is judged, the rest is missing
        return Quantities(out.detach(), None if lse is None else lse.detach())
    outputs, upstream = [out], [call.grad_out]
    if call.grad_lse is not None and lse is not None:
        outputs.append(lse)
        upstream.append(call.grad_lse)
    names = [name for name in ("query", "key", "value", "bias") if name in call.wanted]
    found: tuple[Tensor | None, ...] = ()
    if names:
        found = torch.autograd.grad(outputs, [leaves[n] for n in names], upstream, allow_unused=True)
    grads = dict(zip(names, found, strict=True))
    return Quantities(
        out.detach(), None if lse is None else lse.detach(), *(grads.get(n) for n in ("query", "key", "value", "bias"))
    )


def with_leaves(call: Call) -> tuple[Call, dict[str, Tensor]]:
    """The same call with tensors that require what is wanted; and those tensors, by name."""

    def leaf(x: Tensor, name: str) -> Tensor:
        return x.detach().requires_grad_(name in call.wanted)

    leaves = {name: leaf(getattr(call, name), name) for name in ("query", "key", "value")}
    mask = call.mask
    if mask.bias is not None:
        leaves["bias"] = leaf(mask.bias, "bias")
        bias = leaves["bias"]
        mask = replace(mask, key_bias=bias) if mask.key_bias is not None else replace(mask, dense=bias)
    asked = replace(call, query=leaves["query"], key=leaves["key"], value=leaves["value"], mask=mask)
    return asked, leaves


@dataclass(frozen=True)
class Plain:
    """A subject made of a function of a call: enough for most."""

    name: str
    attend: Attend
    says: Says = field(default_factory=Says)
    about: str = ""
    pair: OpPair | None = None
    missing: str = ""
    text: Callable[[Call], str] = lambda call: ""

    def unavailable(self) -> str:
        return self.missing

    def against(self, call: Call) -> str:
        return self.says.against(call)

    def run(self, call: Call) -> Quantities:
        return through_autograd(self.attend, call)

    def source(self, call: Call) -> str:
        return self.text(call)
