"""Normalise and validate what the user passed -> Call: tensors in the contract's layout, one Mask, Options, Facts.

Under autocast q, k, v and a float mask are cast here, so that all below sees one dtype. Nothing here looks at backends
or at other ranks. With `sharded` (context parallelism) q, k, v are this rank's shard and
a mask with key columns that only all ranks together can check is left to the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import DTYPES, Asks, Checker, Described, autocast_dtype, check_dense, check_tokens
from .contract import Facts, Mask, Options, Wanted
from .masks import Causal, Dense, KeyBias, KeyPadding, MaskPart, Segments, Window, parts_of

Bounds = tuple[int | None, int | None]
UNPROMOTED = {torch.uint16, torch.uint32, torch.uint64}  # torch compares them with their own kind only


@dataclass(frozen=True, eq=False)
class Call:
    """One validated attention call. `alignments` and `window` (its first and last key, from the query's own place) keep
    what `mask.causal` and `mask.since` were computed from; `text` is for messages; `place` is where in compiled
    code it is."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    options: Options
    facts: Facts
    alignments: frozenset[str]
    window: Bounds
    text: object
    grad_mode: bool = True
    place: tuple[str, int] | None = None


def normalise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: object = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    return_lse: bool = False,
    layout: str = "bshd",
    deterministic: bool | None = None,
    backend_options: dict[str, object] | None = None,
    sharded: bool = False,
    asks: Asks | None = None,
    place: tuple[str, int] | None = None,
) -> Call:
    """Check everything that can be checked on this rank; raise ArgumentError or UnsupportedError with the story.

    `asks` says what requires grad where the tensors themselves cannot: inside an operator. `place`, for an operator in
    which ranks talk: the function that was compiled with it, and which of its calls this is.
    """
    text = Described(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        softcap=softcap, layout=layout,
    )  # fmt: skip
    check = Checker(text, layout, asks)
    check.tensors(q, k, v)
    q, k, v = autocast(q, k, v)
    check.dtypes(q, k, v)
    check.flags(is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse, deterministic=deterministic or False)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check.shapes(q, k, v, enable_gqa)
    check.numbers(dropout_p, scale, softcap, backend_options)
    mask, alignments, window = build_mask(attn_mask, is_causal, q, k, check, sharded)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = Options(
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        dropout_p=float(dropout_p),
        softcap=float(softcap),
        deterministic=deterministic,
        return_lse=return_lse,
        extra=tuple(sorted((backend_options or {}).items(), key=lambda option: option[0])),
    )
    facts = _facts(q, k, v, mask, options, asks)
    grad_mode = torch.is_grad_enabled() if asks is None else asks.grad_mode
    return Call(q, k, v, mask, options, facts, alignments, window, text, grad_mode, place)


def random_state() -> Tensor:
    """(seed, offset 0) of one call with dropout, int64 on the CPU, from torch's default CPU generator.

    So torch.manual_seed decides it, and activation checkpointing, which restores that generator, draws it again.
    """
    return torch.nn.functional.pad(torch.randint(2**63 - 1, (1,), device="cpu"), (0, 1))


def autocast(*tensors: Tensor) -> list[Tensor]:
    """Tensors as torch's SDPA casts them under autocast, each for itself: any float dtype but float64."""
    to = autocast_dtype(tensors[0].device.type)
    return [x if to is None or x.dtype not in DTYPES[1:] else x.to(to) for x in tensors]


def _facts(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options, asks: Asks | None) -> Facts:
    bias = mask.bias
    if asks is None:
        requires_grad = Wanted(*(x is not None and x.requires_grad for x in (q, k, v, bias)))
        asks = Asks(requires_grad, torch.is_grad_enabled())
    return Facts(
        device=q.device.type,
        dtype=q.dtype,
        batch=q.shape[0],
        q_len=q.shape[1],
        k_len=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        mask_kinds=mask.kinds,
        bias_dtype=None if bias is None else bias.dtype,
        causal=mask.causal,
        wanted=asks.wanted,
        mask_grad=asks.requires_grad.bias,
        dropout=options.dropout_p > 0,
        softcap=options.softcap > 0,
        deterministic=options.deterministic,
        deterministic_switch=torch.are_deterministic_algorithms_enabled(),
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        needs_lse=options.return_lse,
        options=options.extra,
    )


def build_mask(
    attn_mask: object, is_causal: bool, q: Tensor, k: Tensor, check: Checker, sharded: bool
) -> tuple[Mask, frozenset[str], Bounds]:
    """All that was passed as one Mask, the causal alignments asked for (empty = not causal), and the window's ends."""
    if attn_mask is None and not is_causal:
        return _NO_MASK
    joined = _Joined(q, k, check, sharded)
    if is_causal:
        joined.alignments.add("top_left")
    for part in parts_of(attn_mask):
        joined.add(part)
    dense, bias, (q_len, k_len) = joined.dense, joined.bias, (q.shape[1], k.shape[1])
    if bias is not None and dense is not None and dense.dtype != torch.bool:
        check.fail("two float masks", "at most one", "a float tensor & KeyBias", "add them yourself")
    since, upto = joined.since, joined.upto
    ends = [0 if a == "top_left" else k_len - q_len for a in joined.alignments] + ([] if upto is None else [upto])
    causal = min(ends) if ends else None
    mask = Mask(
        _in_range(dense, q), joined.keep, _in_range(bias, q), *joined.segments,
        causal if causal is None else max(min(causal, k_len), -q_len),  # beyond, they hide no more and no less
        since if since is None else max(min(since, k_len), -q_len),
    )  # fmt: skip
    return mask, frozenset(joined.alignments), (since, upto)


_NO_MASK: tuple[Mask, frozenset[str], Bounds] = (Mask(), frozenset(), (None, None))


class _Joined:
    """The masks of one call, joined part by part."""

    def __init__(self, q: Tensor, k: Tensor, check: Checker, sharded: bool) -> None:
        self.q, self.k, self.check, self.sharded = q, k, check, sharded
        self.alignments: set[str] = set()
        self.dense: Tensor | None = None
        self.keep: Tensor | None = None
        self.bias: Tensor | None = None
        self.segments: tuple[Tensor | None, Tensor | None] = (None, None)
        self.since: int | None = None
        self.upto: int | None = None

    def add(self, part: MaskPart) -> None:
        if isinstance(part, Causal):
            self.alignments.add(part.alignment)
        elif isinstance(part, Window):
            self._window(part)
        elif isinstance(part, Segments):
            self._segments(part)
        elif isinstance(part, KeyPadding):
            check_tokens(part.keep, "KeyPadding", self.k, "k", self.check)
            self.keep = part.keep if self.keep is None else self.keep & part.keep
        elif isinstance(part, KeyBias):
            check_tokens(part.bias, "KeyBias", self.k, "k", self.check)
            if self.bias is not None:
                self.check.fail("two float masks", "at most one", "KeyBias & KeyBias", "add them yourself")
            self.bias = part.bias
        elif isinstance(part, Dense):
            full = (self.q.shape[0], self.q.shape[2], self.q.shape[1], self.k.shape[1])
            four = check_dense(part.mask, full, self.k, self.check, self.sharded)
            self.dense = four if self.dense is None else _join(self.dense, four, self.check)

    def _window(self, part: Window) -> None:
        if part.left is not None:
            self.since = -part.left if self.since is None else max(self.since, -part.left)
        if part.right is not None:
            self.upto = part.right if self.upto is None else min(self.upto, part.right)

    def _segments(self, part: Segments) -> None:
        q_ids, k_ids = part.q_ids, part.q_ids if part.k_ids is None else part.k_ids
        check_tokens(q_ids, "Segments", self.q, "q", self.check)
        name = "Segments (k_ids=None means q_ids)" if k_ids is q_ids else "Segments"
        check_tokens(k_ids, name, self.k, "k", self.check)
        if q_ids.dtype != k_ids.dtype and {q_ids.dtype, k_ids.dtype} & UNPROMOTED:
            seen = f"{q_ids.dtype}, {k_ids.dtype}"
            self.check.fail("Segments: torch cannot compare ids of these dtypes", "one dtype", seen, "cast them")
        if self.segments[0] is not None:
            self.check.fail("two Segments", "at most one", "Segments & Segments", "one id for each pair of ids")
        self.segments = (q_ids, k_ids)


def autocast_bias(bias: Tensor, q: Tensor) -> Tensor:
    """A float mask as torch's SDPA casts it under autocast: beside q that was cast, unless it is float64."""
    if bias.dtype in (torch.bool, torch.float64):
        return bias
    to = autocast_dtype(q.device.type)
    return bias if to is None or q.dtype != to else _narrowed(bias, to)


def _in_range(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask as autocast casts it; a float64 bias for narrower inputs in float32."""
    if bias is None:
        return None
    bias = autocast_bias(bias, q)
    if bias.dtype != torch.float64 or q.dtype == torch.float64:
        return bias
    return _narrowed(bias, torch.float32)


def _narrowed(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in another dtype, where its lowest number must not become -inf (may not attend)."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(bias.dtype).min >= lowest:
        return bias.to(dtype)
    return bias.masked_fill((bias < lowest) & bias.isfinite(), lowest).to(dtype)


def _join(a: Tensor, b: Tensor, check: Checker) -> Tensor:
    if a.dtype == torch.bool and b.dtype == torch.bool:
        return a & b
    if a.dtype != torch.bool and b.dtype != torch.bool:
        check.fail("two float masks", "at most one", "float tensor & float tensor", "add them yourself")
    keep, bias = (a, b) if a.dtype == torch.bool else (b, a)
    return torch.where(keep, bias, torch.full((), float("-inf"), dtype=bias.dtype, device=bias.device))
