"""What is refused before anything is chosen: inputs that do not fit together; every error names limit and remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor

from .contract import Wanted
from .errors import ArgumentError, UnsupportedError, message
from .masks import MaskPart, short

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Described:
    """A call as a line for messages, composed only when a message is: shapes, dtypes and what is not a default."""

    def __init__(self, q: object, k: object, v: object, **arguments: object) -> None:
        self.given = {"q": q, "k": k, "v": v, **arguments}

    def __str__(self) -> str:
        said = {n: x for n, x in self.given.items() if n in "qkv" or not _is_default(n, x)}
        return f"attention({', '.join(f'{n}={_brief(x)}' for n, x in said.items())}){_swapped(self.given)}"


def _is_default(name: str, given: object) -> bool:
    """Whether an argument is not worth a mention."""
    default = {"layout": "bshd", "dropout_p": 0.0, "softcap": 0.0, "is_causal": False, "enable_gqa": False}.get(name)
    return given is None or (isinstance(given, (str, Real)) and given == default)


def _swapped(given: dict[str, object]) -> str:
    """A hint for every error of a call whose heads outnumber its tokens: the two may be swapped."""
    q = given["q"]
    bshd = given.get("layout", "bshd") == "bshd"
    if not bshd or not isinstance(q, Tensor) or q.is_nested or q.dim() != 4 or q.shape[2] <= q.shape[1]:
        return ""
    return f"; heads {q.shape[2]} > length {q.shape[1]}: did you pass bhsd?"


def _brief(x: object) -> str:
    if isinstance(x, Tensor):
        return short(x)
    if isinstance(x, (MaskPart, str, Real, type(None))):
        return repr(x)
    return f"a {type(x).__name__}"


class Asks(NamedTuple):
    """What requires grad, whatever the grad mode, and whether that is on."""

    requires_grad: Wanted
    grad_mode: bool

    @property
    def wanted(self) -> Wanted:
        """The gradients that will be asked for."""
        return self.requires_grad if self.grad_mode else Wanted(False, False, False)


@dataclass(frozen=True)
class Checker:
    """The refusals of one call; each raises with the call, the limit, the value and a remedy."""

    text: object
    layout: str
    asks: Asks | None = None  # None: the tensors say themselves

    def fail(
        self,
        problem: str,
        limit: object = "",
        value: object = "",
        remedy: str = "",
        kind: type[ArgumentError] | type[UnsupportedError] = ArgumentError,
    ) -> NoReturn:
        raise kind(message(problem, call=self.text, limit=limit, value=value, remedy=remedy))

    def tensors(self, q: Any, k: Any, v: Any) -> None:
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
        if not q.device == k.device == v.device:
            self.fail(
                "query, key and value are on different devices", "one device", f"{q.device}, {k.device}, {v.device}"
            )

    def dtypes(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if not q.dtype == k.dtype == v.dtype:
            self.fail(
                "query, key and value differ in dtype", "one dtype", f"{q.dtype}, {k.dtype}, {v.dtype}", "cast them"
            )
        if q.dtype not in DTYPES:
            self.fail("dtype is not supported", ", ".join(map(str, DTYPES)), q.dtype)

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

    def kinds(self, **given: object) -> None:
        """That numbers are numbers; their values are looked at where they are known."""
        for name, number in given.items():
            if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
                self.fail(f"{name} is not a number", "a float", _brief(number))

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
        for name, value in backend_options.items():
            if type(value).__hash__ is None:  # a choice is kept by its values
                self.fail(
                    "backend_options is not a dict of plain values", f"{name}: a name, number or flag", _brief(value)
                )


def _finite(x: Any) -> TypeGuard[float]:
    """A plain number (numpy's too) that a float can hold; True and False are flags, and a tensor would hide a sync."""
    if isinstance(x, bool) or not isinstance(x, Real):
        return False
    try:
        return math.isfinite(x)
    except OverflowError:
        return False


# kinds of device that have autocast: asked here, for torch 2.11 cannot trace the question
AUTOCAST = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast casts to on this kind of device; None where it is off."""
    if device not in AUTOCAST or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def check_tokens(given: Tensor, name: str, x: Tensor, side: str, check: Checker) -> None:
    """One value per sample and token of `x`, the queries or the keys (`side`)."""
    if given.shape != x.shape[:2]:
        check.fail(
            f"{name} does not fit the {'keys' if side == 'k' else 'queries'}",
            f"(B, S{side}) = {tuple(x.shape[:2])}",
            tuple(given.shape),
            f"under context parallelism sharded like the {'keys' if side == 'k' else 'queries'}: pass this rank's part"
            + (", cp.shard(ids, dim=1); packed documents have B = 1" if name.startswith("Segments") else ""),
        )
    if given.device != x.device:
        check.fail(f"{name} is on another device", x.device, given.device)


def check_dense(mask: Tensor, full: tuple[int, int, int, int], k: Tensor, check: Checker, sharded: bool) -> Tensor:
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
    asks = check.asks
    wants = torch.is_grad_enabled() and four.requires_grad if asks is None else asks.wanted.bias
    if wants and four.is_floating_point():
        return four  # each place of an expanded dim has a gradient of its own
    for axis in range(4):  # an expanded dim (stride 0) is one row seen many times
        # on another rank it may be another row, and only all ranks together know the number of key columns; one column
        # of no rows has strides 0 of its own where it was made by an index, on a rank without queries
        if four.shape[axis] > 1 and four.stride(axis) == 0 and not (sharded and (axis >= 2 or four.shape[3] < 2)):
            four = four.narrow(axis, 0, 1)
    return four
