"""Normalise and validate what the user passed -> Call: tensors in the contract's layout, one Mask, Options, Facts.

Nothing here looks at backends or at other ranks. With `sharded` (context parallelism) q, k, v are this rank's shard and
a mask with key columns that only all ranks together can check is left to the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import Asks, Checker, Described, check_dense, check_keys
from .contract import Facts, Mask, Options, Wanted
from .masks import Causal, Dense, KeyBias, KeyPadding, parts_of


@dataclass(frozen=True, eq=False)
class Call:
    """One validated attention call. `alignments` keeps what `mask.causal` was computed from; `text` is for messages."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    options: Options
    facts: Facts
    alignments: frozenset[str]
    text: object


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
) -> Call:
    """Check everything that can be checked on this rank; raise ArgumentError or UnsupportedError with the story.

    `asks` says what requires grad where the tensors themselves cannot: inside an operator.
    """
    text = Described(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        softcap=softcap, layout=layout,
    )  # fmt: skip
    check = Checker(text, layout, asks)
    check.layout_and_tensors(q, k, v)
    check.flags(is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse, deterministic=deterministic or False)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    check.shapes(q, k, v, enable_gqa)
    check.numbers(dropout_p, scale, softcap, backend_options)
    mask, alignments = build_mask(attn_mask, is_causal, q, k, check, sharded)
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
    return Call(q, k, v, mask, options, _facts(q, k, v, mask, options, asks), alignments, text)


def _facts(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options, asks: Asks | None) -> Facts:
    if asks is None:
        inputs = (q, k, v, mask.bias)
        asks = Asks(Wanted(*(x is not None and x.requires_grad for x in inputs)), torch.is_grad_enabled())
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
        bias_dtype=None if mask.bias is None else mask.bias.dtype,
        causal=mask.causal,
        wanted=asks.wanted,
        mask_grad=asks.requires_grad.bias,
        dropout=options.dropout_p > 0,
        softcap=options.softcap > 0,
        deterministic=options.deterministic,
        needs_lse=options.return_lse,
        options=frozenset(name for name, _ in options.extra),
    )


def build_mask(
    attn_mask: object, is_causal: bool, q: Tensor, k: Tensor, check: Checker, sharded: bool
) -> tuple[Mask, frozenset[str]]:
    """All that was passed as one Mask, and the causal alignments asked for (empty = not causal)."""
    batch, q_len, heads, _ = q.shape
    k_len = k.shape[1]
    alignments = {"top_left"} if is_causal else set()
    dense: Tensor | None = None
    keep: Tensor | None = None
    bias: Tensor | None = None
    for part in parts_of(attn_mask):
        if isinstance(part, Causal):
            alignments.add(part.alignment)
        elif isinstance(part, KeyPadding):
            check_keys(part.keep, "KeyPadding", batch, k, check)
            keep = part.keep if keep is None else keep & part.keep
        elif isinstance(part, KeyBias):
            check_keys(part.bias, "KeyBias", batch, k, check)
            if bias is not None:
                check.fail("two float masks", "at most one", "KeyBias & KeyBias", "add them yourself")
            bias = part.bias
        elif isinstance(part, Dense):
            four = check_dense(part.mask, (batch, heads, q_len, k_len), k, check, sharded)
            dense = four if dense is None else _join(dense, four, check)
    if bias is not None and dense is not None and dense.dtype != torch.bool:
        check.fail("two float masks", "at most one", "a float tensor & KeyBias", "add them yourself")
    offsets = [0 if a == "top_left" else k_len - q_len for a in alignments]
    causal = min(offsets) if offsets else None
    return Mask(_in_range(dense, q.dtype), keep, _in_range(bias, q.dtype), causal=causal), frozenset(alignments)


def _in_range(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A float64 bias for narrower inputs in float32, where its lowest number must not become -inf (may not attend)."""
    if mask is None or mask.dtype != torch.float64 or dtype == torch.float64:
        return mask
    lowest = torch.finfo(torch.float32).min
    return mask.masked_fill((mask < lowest) & mask.isfinite(), lowest).to(torch.float32)


def _join(a: Tensor, b: Tensor, check: Checker) -> Tensor:
    if a.dtype == torch.bool and b.dtype == torch.bool:
        return a & b
    if a.dtype != torch.bool and b.dtype != torch.bool:
        check.fail("two float masks", "at most one", "float tensor & float tensor", "add them yourself")
    keep, bias = (a, b) if a.dtype == torch.bool else (b, a)
    return torch.where(keep, bias, torch.full((), float("-inf"), dtype=bias.dtype, device=bias.device))
