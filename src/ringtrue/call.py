"""Normalise and validate what the user passed -> Call: tensors in the contract's layout, one Mask, Options, Facts.

Nothing here looks at backends or at other ranks. With `sharded` (context parallelism) q, k, v are this rank's shard and
a mask with key columns that only all ranks together can check is left to the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .contract import Facts, Mask, Options, Wanted
from .errors import ArgumentError, UnsupportedError, message
from .masks import Causal, Dense, KeyBias, KeyPadding, MaskPart, parts_of, short

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    text: str


def describe(q: object, k: object, v: object, **arguments: object) -> str:
    """The call as a line for messages: shapes, dtypes and every argument that is not None; never a tensor's content."""
    given = {"q": q, "k": k, "v": v, **{n: x for n, x in arguments.items() if x is not None}}
    return f"attention({', '.join(f'{n}={_brief(x)}' for n, x in given.items())})"


def _unless(default: object, given: object) -> object:
    """What was given, or None where it is the default and not worth a mention."""
    return None if isinstance(given, (str, Real)) and given == default else given


def _swapped(q: object, layout: str) -> str:
    """A hint for every error of a call whose heads outnumber its tokens: the two may be swapped."""
    if layout != "bshd" or not isinstance(q, Tensor) or q.is_nested or q.dim() != 4 or q.shape[2] <= q.shape[1]:
        return ""
    return f"; heads {q.shape[2]} > length {q.shape[1]}: did you pass bhsd?"


def _brief(x: object) -> str:
    if isinstance(x, Tensor):
        return short(x)
    if isinstance(x, (MaskPart, str, Real, type(None))):
        return repr(x)
    return f"a {type(x).__name__}"


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
) -> Call:
    """Check everything that can be checked on this rank; raise ArgumentError or UnsupportedError with the story."""
    text = describe(
        q,
        k,
        v,
        attn_mask=attn_mask,
        dropout_p=_unless(0.0, dropout_p),
        is_causal=_unless(False, is_causal),
        scale=scale,
        enable_gqa=_unless(False, enable_gqa),
        softcap=_unless(0.0, softcap),
        layout=_unless("bshd", layout),
    )
    text += _swapped(q, layout)
    check = Checker(text, layout)
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
    return Call(q, k, v, mask, options, _facts(q, k, v, mask, options), alignments, text)


def _facts(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Facts:
    grad = torch.is_grad_enabled()
    bias = mask.bias
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
        causal=mask.causal,
        wanted=Wanted(*(grad and x is not None and x.requires_grad for x in (q, k, v, bias))),
        dropout=options.dropout_p > 0,
        softcap=options.softcap > 0,
        deterministic=options.deterministic,
        needs_lse=options.return_lse,
        options=frozenset(name for name, _ in options.extra),
    )


@dataclass(frozen=True)
class Checker:
    """The refusals of one call; each raises with the call, the limit, the value and a remedy."""

    text: str
    layout: str

    def fail(
        self,
        problem: str,
        limit: object = "",
        value: object = "",
        remedy: str = "",
        kind: type[ArgumentError] | type[UnsupportedError] = ArgumentError,
    ) -> None:
        raise kind(message(problem, call=self.text, limit=limit, value=value, remedy=remedy))

    def layout_and_tensors(self, q: Any, k: Any, v: Any) -> None:
        if self.layout not in ("bshd", "bhsd"):
            self.fail("unknown layout", '"bshd" or "bhsd"', repr(self.layout), "pass (B, S, H, D) tensors")
        for name, x in (("query", q), ("key", k), ("value", v)):
            if not isinstance(x, Tensor):
                self.fail(f"{name} is not a tensor", "torch.Tensor", type(x).__name__)
            elif x.is_nested or x.layout != torch.strided:
                self.fail(
                    f"{name} is not a plain strided tensor", "torch.strided", x.layout, "pad it, and mask the padding"
                )
            elif x.dim() != 4:
                self.fail(f"{name} has {x.dim()} dims", "(B, S, H, D)", tuple(x.shape), "split heads from head_dim")
        if not q.dtype == k.dtype == v.dtype:
            self.fail(
                "query, key and value differ in dtype", "one dtype", f"{q.dtype}, {k.dtype}, {v.dtype}", "cast them"
            )
        if q.dtype not in DTYPES:
            self.fail("dtype is not supported", ", ".join(map(str, DTYPES)), q.dtype)
        if not q.device == k.device == v.device:
            self.fail(
                "query, key and value are on different devices", "one device", f"{q.device}, {k.device}, {v.device}"
            )
        if torch.amp.is_autocast_available(q.device.type) and torch.is_autocast_enabled(q.device.type):
            self.fail(
                "autocast is on, and this release does not cast for it",
                value=f"autocast to {torch.get_autocast_dtype(q.device.type)}",
                remedy="call attention under torch.autocast(..., enabled=False) with q, k, v cast by hand",
                kind=UnsupportedError,
            )

    def shapes(self, q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
        (b, _, h, d), (bk, sk, hk, dk), (bv, sv, hv, dv) = q.shape, k.shape, v.shape
        if not b == bk == bv:
            self.fail("query, key and value differ in batch", "one batch size", f"{b}, {bk}, {bv}", "expand them")
        if sk != sv:
            self.fail("key and value differ in length", "one length", f"key {sk}, value {sv}")
        if d != dk:
            self.fail("query and key differ in head dim", "one head dim", f"query {d}, key {dk}")
        if d == 0 or dv == 0:
            self.fail("head dim is 0", "at least 1", f"query and key {d}, value {dv}")
        if hk != hv:
            self.fail("key and value differ in heads", "one number of heads", f"key {hk}, value {hv}")
        if h != hk and not enable_gqa:
            self.fail(
                "query and key differ in heads, and enable_gqa is False",
                "equal heads",
                f"query heads {h}, key heads {hk}",
                "pass enable_gqa=True for grouped-query attention",
            )
        if h != hk and (hk == 0 or h % hk):
            self.fail("query heads are not a multiple of key heads", "key heads divide query heads", f"{h} and {hk}")

    def flags(self, **given: object) -> None:
        for name, flag in given.items():
            if not isinstance(flag, bool):
                self.fail(f"{name} is not a bool", "True or False", _brief(flag), "a mask is passed as attn_mask")

    def numbers(self, dropout_p: object, scale: object, softcap: object, backend_options: object) -> None:
        if not _finite(dropout_p) or not 0.0 <= dropout_p < 1.0:
            self.fail("dropout_p is not a probability below 1", "0 <= dropout_p < 1", _brief(dropout_p))
        if scale is not None and not _finite(scale):
            self.fail("scale is not a finite number", "a float, or None for 1/sqrt(head_dim)", _brief(scale))
        if not _finite(softcap) or softcap < 0.0:
            self.fail("softcap is not a finite number >= 0", "0 (off) or positive", _brief(softcap))
        if backend_options is None:
            return
        if not isinstance(backend_options, dict) or not all(isinstance(name, str) for name in backend_options):
            self.fail("backend_options is not a dict", "dict of option name to value", _brief(backend_options))


def _finite(x: Any) -> TypeGuard[float]:
    """A plain number (numpy's too) that a float can hold; True and False are flags, and a tensor would hide a sync."""
    if isinstance(x, bool) or not isinstance(x, Real):
        return False
    try:
        return math.isfinite(x)
    except OverflowError:
        return False


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
            _check_keys(part.keep, "KeyPadding", batch, k, check)
            keep = part.keep if keep is None else keep & part.keep
        elif isinstance(part, KeyBias):
            _check_keys(part.bias, "KeyBias", batch, k, check)
            if bias is not None:
                check.fail("two float masks", "at most one", "KeyBias & KeyBias", "add them yourself")
            bias = part.bias
        elif isinstance(part, Dense):
            four = _check_dense(part.mask, (batch, heads, q_len, k_len), k, check, sharded)
            dense = four if dense is None else _join(dense, four, check)
    if bias is not None and dense is not None and dense.dtype != torch.bool:
        check.fail("two float masks", "at most one", "a float tensor & KeyBias", "add them yourself")
    offsets = [0 if a == "top_left" else k_len - q_len for a in alignments]
    causal = min(offsets) if offsets else None
    return Mask(_in_range(dense, q.dtype), keep, _in_range(bias, q.dtype), causal), frozenset(alignments)


def _in_range(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A float64 bias for narrower inputs in float32, where its lowest number must not become -inf (may not attend)."""
    if mask is None or mask.dtype != torch.float64 or dtype == torch.float64:
        return mask
    lowest = torch.finfo(torch.float32).min
    return mask.masked_fill((mask < lowest) & mask.isfinite(), lowest).to(torch.float32)


def _check_keys(keys: Tensor, name: str, batch: int, k: Tensor, check: Checker) -> None:
    if keys.shape != (batch, k.shape[1]):
        check.fail(
            f"{name} does not fit the keys",
            f"(B, Sk) = {(batch, k.shape[1])}",
            tuple(keys.shape),
            "under context parallelism it is sharded like the keys: pass this rank's part",
        )
    if keys.device != k.device:
        check.fail(f"{name} is on another device", k.device, keys.device)


def _check_dense(mask: Tensor, full: tuple[int, int, int, int], k: Tensor, check: Checker, sharded: bool) -> Tensor:
    """The mask as (b, h, q, k), each dim full or 1, never expanded."""
    if mask.layout != torch.strided or mask.is_nested:
        check.fail("attn_mask is not a plain strided tensor", "torch.strided", mask.layout, "mask.to_dense()")
    shape = tuple(mask.shape)
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        check.fail(
            "attn_mask is neither bool nor float", "bool or a float dtype", mask.dtype, "mask.bool(): True = may attend"
        )
    if mask.device != k.device:
        check.fail("attn_mask is on another device", k.device, mask.device)
    four = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    # under context parallelism only all ranks together know the number of key columns
    fits = four.dim() == 4 and all(
        have in (1, want) or (sharded and axis == 3)
        for axis, (have, want) in enumerate(zip(four.shape, full, strict=True))
    )
    if not fits:
        batch, _, _, k_len = full
        per_sample = shape in ((batch, k_len), (batch, 1, k_len))
        check.fail(
            "attn_mask does not broadcast to (B, H, Sq, Sk)",
            f"(B, H, Sq, Sk) = {full}, right-aligned",
            f"mask {shape}",
            f"for a key mask per sample pass KeyPadding(mask) with a bool {(batch, k_len)} tensor"
            if per_sample
            else "a 2-D mask is (Sq, Sk); a key mask per sample is KeyPadding(bool (B, Sk))",
        )
    if torch.is_grad_enabled() and four.requires_grad:
        return four  # each place of an expanded dim has a gradient of its own
    for axis in range(4):  # an expanded dim (stride 0) is one row seen many times
        if four.shape[axis] > 1 and four.stride(axis) == 0 and not (sharded and axis == 3):
            four = four.narrow(axis, 0, 1)
    return four


def _join(a: Tensor, b: Tensor, check: Checker) -> Tensor:
    if a.dtype == torch.bool and b.dtype == torch.bool:
        return a & b
    if a.dtype != torch.bool and b.dtype != torch.bool:
        check.fail("two float masks", "at most one", "float tensor & float tensor", "add them yourself")
    keep, bias = (a, b) if a.dtype == torch.bool else (b, a)
    return torch.where(keep, bias, torch.full((), float("-inf"), dtype=bias.dtype, device=bias.device))
