"""The seam: an attention backend is two pure functions over one declared layout.

    forward(q, k, v, mask, rng, options)                                                     -> ForwardOut
    backward(grad_out, grad_lse, q, k, v, mask, out, lse, rng, saved, options, wanted)       -> Grads

Layout rule, everywhere below `call.py`:

    q (B, Sq, H, D)   k (B, Sk, Hk, D)   v (B, Sk, Hk, Dv)   out (B, Sq, H, Dv)   lse (B, H, Sq)

any strides, any storage offset; lse is float32 (float64 for float64 inputs), the natural logarithm of the sum of the
exponentials of the scaled and masked scores. `Hk` divides `H`; query head h reads key head h // (H / Hk).

Pure means: no autograd ctx, no globals, no in-place writes to arguments. `backward` must accept an `out` and `lse` that
came from *more* keys than it is given (a step of a ring is exactly that), unless its claims say it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query may attend to, as one frozen value; every part applies (biases add, the rest is "and").

    dense     (b, h, q, k), each dim full or 1, never expanded. bool: True = may attend. float: added to scaled scores.
    key_keep  (B, Sk) bool, True = may be attended to by every query of that sample.
    key_bias  (B, Sk) float, added to the scaled scores of every query of that sample.
    q_segments, k_segments  (B, Sq) and (B, Sk) integers: only equal ids attend; both or neither.
    causal    offset: query i sees keys j <= i + causal; None = not causal.
    since     offset: query i sees keys j >= i + since (the left end of a window); None = from the first key on.
    """

    dense: Tensor | None = None
    key_keep: Tensor | None = None
    key_bias: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    causal: int | None = None
    since: int | None = None

    def at(self, rows: slice, cols: slice, heads: slice = slice(None), moved: int = 0) -> Mask:
        """The same mask for queries `rows` (start and stop given), keys `cols` (likewise) and query heads `heads`.

        `moved` is how far the queries' positions are ahead of their places in the mask."""
        dense = self.dense
        if dense is not None:
            dense = dense[
                :,
                heads if dense.shape[1] > 1 else slice(None),
                rows if dense.shape[2] > 1 else slice(None),
                cols if dense.shape[3] > 1 else slice(None),
            ]
        causal = self.causal
        if causal is not None:
            causal += rows.start - cols.start + moved
            if causal >= cols.stop - cols.start - 1:  # already the first query sees every key of the block
                causal = None
        since = self.since
        if since is not None:
            since += rows.start - cols.start + moved
            if since <= rows.start - rows.stop + 1:  # even the last query sees every key of the block
                since = None
        keep, bias, k_ids = (None if x is None else x[:, cols] for x in (self.key_keep, self.key_bias, self.k_segments))
        q_ids = None if self.q_segments is None else self.q_segments[:, rows]
        return Mask(dense, keep, bias, q_ids, k_ids, causal, since)

    @property
    def bias(self) -> Tensor | None:
        """The float part, the only one that can have a gradient."""
        if self.dense is not None and self.dense.dtype != torch.bool:
            return self.dense
        return self.key_bias

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Its five tensors, in the order of the fields; causal and since are its two numbers."""
        return self.dense, self.key_keep, self.key_bias, self.q_segments, self.k_segments

    @property
    def hides_nothing(self) -> bool:
        """Whether no part is there: every query sees every key, and nothing is added."""
        return (
            self.causal is None
            and self.since is None
            and self.dense is None
            and self.key_keep is None
            and self.key_bias is None
            and self.q_segments is None
        )

    @property
    def kinds(self) -> frozenset[str]:
        """Which parts are there, `causal` left out: dense_bool, dense_float, key_keep, key_bias, segments, window."""
        parts = (
            ("dense_bool", self.dense is not None and self.dense.dtype == torch.bool),
            ("dense_float", self.dense is not None and self.dense.dtype != torch.bool),
            ("key_keep", self.key_keep is not None),
            ("key_bias", self.key_bias is not None),
            ("segments", self.q_segments is not None),
            ("window", self.since is not None),
        )
        return frozenset(kind for kind, there in parts if there)


@dataclass(frozen=True)
class Options:
    """What a kernel is told besides tensors; plain values, hashable. `extra` is backend_options as sorted pairs;
    `levelled` says that rows of the float mask at a huge level were moved already (level.py), once is enough."""

    scale: float
    dropout_p: float = 0.0
    softcap: float = 0.0
    deterministic: bool = False
    return_lse: bool = False
    levelled: bool = False
    extra: tuple[tuple[str, object], ...] = ()


class Wanted(NamedTuple):
    """Which gradients the caller needs."""

    q: bool
    k: bool
    v: bool
    bias: bool = False


class ForwardOut(NamedTuple):
    """out in q's dtype; lse; the random state that was used (None without dropout); tensors for backward.

    A random state is (seed, offset) as an int64 tensor on the CPU, so that a compiled graph can draw and carry it."""

    out: Tensor
    lse: Tensor
    rng: Tensor | None = None
    saved: tuple[Tensor, ...] = ()


class Grads(NamedTuple):
    """Gradients in the dtype and shape of their inputs; None where not wanted. dbias has the shape of Mask.bias."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None = None


Arithmetic = Literal["float32", "16-bit", "8-bit", "8-bit values"]


@dataclass(frozen=True)
class Claims:
    """What a pair says it can do on one kind of device: data, judged against the facts of a call by `select.py`.

    masks              kinds it takes as they are (see Mask.kinds); `edge` lowers the others if it takes dense_float
    bias_dtype         dtype of a float mask it is handed: "accumulate" (float32; float64 for float64), "input" (a mask
                       that would be rounded to it is refused) or "any"
    causal             "offset" (any offset), "ahead" (0 or more), "top_left" (0, any Sq and Sk), "bottom_right"
                       (Sk - Sq) or "none"; `edge` splits the others. A pair that takes windows is handed their ends as
                       they are
    alone              kinds of mask that it does not take together with causal, a window or a dense mask; `edge` lowers
                       them there if it takes dense_float (with dense_float among them, causal becomes part of a bias)
    min_capability, max_capability  the first and last compute capability of a CUDA device it runs on; None = any
    head_dim_multiple  D and Dv are multiples of this, else `edge` pads them with zeros
    head_dims          D and Dv are among these, else `edge` pads them up to the next; None = any multiple
    max_dropout_head_dim, max_deterministic_head_dim  as `max_head_dim`, with dropout / where deterministic is asked for
    gqa, value_dim     takes Hk < H / Dv != D; else `edge` expands heads / pads the narrower one
    key_tile           cannot take an odd multiple of this many keys; `edge` splits them
    dropout_tile       with dropout, how many weights (B H Sq Sk) one call takes; `edge` cuts the queries of larger ones
    softcap_dropout    takes softcap and dropout in one call
    any_scale          takes a scale of 0 or less; else `edge` moves its sign into q
    any_strides        takes a last dim whose stride is not 1; else `edge` makes it contiguous
    stride_multiple    all other strides and the start, of a float mask too, are multiples of this many elements, else
                       `edge` copies (a kernel that loads 16 bytes at a time dies of a misaligned address)
    backward_from_lse  backward is right for an out and lse that came from more keys
    dbias, dlse        gives the gradient of the float mask / takes a gradient of lse
    deterministic_by_switch  backward is deterministic where torch.use_deterministic_algorithms(True) is on
    double_backward    backward is itself differentiable by autograd
    lse                gives it; what `edge` would cut into parts of the keys is refused without it
    arithmetic         "float32" (weights stay in float32 or wider), "16-bit" (weights are rounded to q's dtype),
                       "8-bit" (query and key are quantised to int8) or "8-bit values" (weights and value too, to fp8)
    options            names of `backend_options` that it knows
    functions          those of them that are functions of places (batch, head, query, key): a rank of a context, which
                       counts its own, refuses them, and so does a compiled call
    """

    dtypes: frozenset[torch.dtype]
    masks: frozenset[str] = frozenset()
    bias_dtype: Literal["accumulate", "input", "any"] = "accumulate"
    causal: Literal["offset", "ahead", "top_left", "bottom_right", "none"] = "none"
    alone: frozenset[str] = frozenset()
    min_capability: tuple[int, int] | None = None
    max_capability: tuple[int, int] | None = None
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    head_dims: frozenset[int] | None = None
    max_dropout_head_dim: int | None = None
    max_deterministic_head_dim: int | None = None
    gqa: bool = False
    value_dim: bool = False
    key_tile: int | None = None
    any_scale: bool = True
    any_strides: bool = False
    stride_multiple: int = 1
    dropout: bool = False
    dropout_tile: int | None = None
    softcap: bool = False
    softcap_dropout: bool = True
    lse: bool = True
    backward: bool = True
    backward_from_lse: bool = True
    dbias: bool = False
    dlse: bool = False
    double_backward: bool = False
    deterministic: bool = True
    deterministic_by_switch: bool = False
    arithmetic: Arithmetic = "float32"
    options: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()


def shapes_only(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
    """What a forward that keeps nothing gives, without its numbers."""
    batch, q_len, heads, _ = q.shape
    lse = q.new_empty(batch, heads, q_len, dtype=accumulate_dtype(q.dtype))
    return ForwardOut(q.new_empty(batch, q_len, heads, v.shape[-1]), lse)


@dataclass(frozen=True)
class OpPair:
    """Two pure functions and what they claim. A pair that keeps what its backward needs in `saved` sets
    `reads_inputs=False` and is handed None for q, k, v, out and lse there. `shapes` is forward without the numbers, for
    tensors that have none while torch traces: a pair that keeps tensors in `saved` must bring its own."""

    name: str
    forward: Callable[..., ForwardOut]
    backward: Callable[..., Grads]
    claims: Claims
    reads_inputs: bool = True
    shapes: Callable[..., ForwardOut] = shapes_only


@dataclass(frozen=True)
class Package:
    """An optional package, as a backend or an integration needs it.

    module        what is imported; dotted where only a part is needed ("flash_attn.cute")
    install       what to do when it cannot be used
    distribution  its name for pip, where that is not the first part of `module`
    at_least      the first release that will do, "" = any
    below         the first release that will not, its pre-releases included, "" = none
    pre           pre-releases between the two will do
    attributes    what the module must have, dotted below it; several packages load these only when they are looked at
    """

    module: str
    install: str
    distribution: str = ""
    at_least: str = ""
    below: str = ""
    pre: bool = False
    attributes: tuple[str, ...] = ()


STAND_IN = "stand-in"


@dataclass(frozen=True)
class Backend:
    """A named backend: one pair per device type ("cpu", "cuda", ...), and why it cannot run here (None when it can).

    unavailable  asked for a device type; imports what it needs when it is asked, and never downloads
    packages     the optional packages that it needs
    verified     per device type how the kernel was proven: a path of this repository with what was run, or `STAND_IN`,
                 where only the glue was, around a module with the same signatures; not there = not at all. CPU pairs
                 are proven by every run of the tests.
    fetch        downloads what it needs: asked when a call names this very backend and nothing else is against it
    narrowed     asked for a device type: what the release that is here claims, where that is less than `pairs` does
    """

    name: str
    summary: str
    pairs: Mapping[str, OpPair]
    unavailable: Callable[[str], Reason | None] = lambda device: None
    packages: tuple[Package, ...] = ()
    verified: Mapping[str, str] = field(default_factory=dict)
    fetch: Callable[[str], Reason | None] | None = None
    narrowed: Callable[[str], Claims | None] = lambda device: None


@dataclass(frozen=True)
class Facts:
    """All that choosing a backend may look at: hashable, no tensors. Lengths and heads as the kernel will see them."""

    device: str
    dtype: torch.dtype
    batch: int
    q_len: int
    k_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    mask_kinds: frozenset[str] = frozenset()
    bias_dtype: torch.dtype | None = None  # of the float mask
    causal: int | None = None
    wanted: Wanted = Wanted(False, False, False, False)
    mask_grad: bool = False  # the float mask requires grad, whatever the grad mode
    dropout: bool = False
    softcap: bool = False
    deterministic: bool = False
    deterministic_switch: bool = False
    capability: tuple[int, int] | None = None  # of the CUDA device, where there is one
    needs_lse: bool = False
    from_lse: bool = False
    sharded: bool = False  # a context splits the call: lengths are this rank's share
    options: tuple[tuple[str, object], ...] = ()  # backend_options, sorted by name

    @property
    def training(self) -> bool:
        return any(self.wanted)


@dataclass(frozen=True)
class Reason:
    """Why a backend cannot take a call: a stable code, the limit, the value seen, and what to do instead."""

    code: str
    text: str
    limit: str = ""
    value: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        detail = "; ".join(f"{n} {x}" for n, x in (("limit", self.limit), ("value", self.value)) if x)
        return (
            f"[{self.code}] {self.text}"
            + (f" ({detail})" if detail else "")
            + (f": {self.remedy}" if self.remedy else "")
        )


@dataclass(frozen=True)
class Choice:
    """What was chosen, what had been asked for, and the reasons against every backend that was looked at."""

    backend: str
    asked: str
    pair: OpPair
    trace: tuple[tuple[str, tuple[Reason, ...]], ...] = field(default=())


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, of sums and of merged partial results for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
