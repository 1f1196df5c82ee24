"""What users pass as `attn_mask`, and how a Mask becomes a dense bias or names the rows that see nothing.

`Causal`, `KeyPadding`, `KeyBias` and `Dense` join with `&`; `call.py` turns the result into one contract.Mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .contract import Mask
from .errors import ArgumentError, message


class MaskPart:
    """Anything that can be joined with `&`."""

    def __and__(self, other: object) -> MaskSet:
        return MaskSet((*parts_of(self), *parts_of(other)))

    def __rand__(self, other: object) -> MaskSet:
        return MaskSet((*parts_of(other), *parts_of(self)))


@dataclass(frozen=True, eq=False)
class MaskSet(MaskPart):
    """Several masks joined by `&`: all of them apply."""

    parts: tuple[MaskPart, ...]

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Causal(MaskPart):
    """Query i sees keys j <= i (`top_left`, torch's meaning of is_causal) or j <= i + Sk - Sq (`bottom_right`).

    Positions are global token positions, also under context parallelism.
    """

    alignment: Literal["top_left", "bottom_right"] = "top_left"

    def __post_init__(self) -> None:
        if self.alignment not in ("top_left", "bottom_right"):
            raise ArgumentError(
                message(
                    "Causal: unknown alignment",
                    limit='"top_left" or "bottom_right"',
                    value=repr(self.alignment),
                    remedy='"top_left" is torch\'s is_causal, "bottom_right" is for decoding with a cache',
                )
            )


@dataclass(frozen=True, eq=False)
class KeyPadding(MaskPart):
    """Which keys are real, per sample: bool (B, Sk), True = may be attended to. Sharded like the keys."""

    keep: Tensor

    def __repr__(self) -> str:
        return f"KeyPadding({short(self.keep)})"

    def __post_init__(self) -> None:
        _require(self.keep, "KeyPadding", "bool (B, Sk)", want_bool=True)


@dataclass(frozen=True, eq=False)
class KeyBias(MaskPart):
    """A bias per key and sample: float (B, Sk), added to the scaled scores. Sharded like the keys."""

    bias: Tensor

    def __repr__(self) -> str:
        return f"KeyBias({short(self.bias)})"

    def __post_init__(self) -> None:
        _require(self.bias, "KeyBias", "float (B, Sk)", want_bool=False)


@dataclass(frozen=True, eq=False)
class Dense(MaskPart):
    """A plain tensor mask, bool (True = may attend) or float (added), that broadcasts to (B, H, Sq, Sk)."""

    mask: Tensor

    def __repr__(self) -> str:
        return short(self.mask)


def short(x: Tensor) -> str:
    """dtype and shape: what messages show of a tensor, whose content is nobody's business (and costs a copy to CPU)."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape) if not x.is_nested else '[nested]'}"


def parts_of(mask: object) -> tuple[MaskPart, ...]:
    """The parts of anything that may be passed as attn_mask."""
    if mask is None:
        return ()
    if isinstance(mask, MaskSet):
        return mask.parts
    if isinstance(mask, MaskPart):
        return (mask,)
    if isinstance(mask, Tensor):
        return (Dense(mask),)
    raise ArgumentError(
        message(
            "attn_mask is neither a tensor nor a mask object",
            limit="a tensor, Causal, KeyPadding, KeyBias, or several joined by &",
            value=type(mask).__name__,
            remedy="wrap a per-sample key mask as KeyPadding(bool_tensor)",
        )
    )


def taken_apart(mask: object) -> tuple[str, list[Tensor], list[int]]:
    """Anything that may be passed as attn_mask as plain words, tensors and numbers, for the schema of an operator.

    A word is `Name:fields`, one letter a field (t a tensor, n a number, - None), or the field's own text after a "=".
    """
    words: list[str] = []
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for part in parts_of(mask):
        word = type(part).__name__
        for name in type(part).__match_args__:  # type: ignore[attr-defined]
            value = getattr(part, name)
            if isinstance(value, Tensor):
                tensors.append(value)
                word += ":t"
            elif isinstance(value, str):
                word += ":=" + value
            elif value is None:
                word += ":-"
            else:
                numbers.append(value)
                word += ":n"
        words.append(word)
    return " ".join(words), tensors, numbers


def put_together(mask: str, tensors: list[Tensor], numbers: list[int]) -> MaskPart | None:
    """What `taken_apart` took apart."""
    left, counts = iter(tensors), iter(numbers)
    parts = []
    for word in mask.split():
        name, *fields = word.split(":")
        kind = next(part for part in MaskPart.__subclasses__() if part.__name__ == name)
        given = {"t": lambda: next(left), "n": lambda: next(counts), "-": lambda: None}
        parts.append(kind(*(given[field]() if field in given else field[1:] for field in fields)))
    return MaskSet(tuple(parts)) if len(parts) > 1 else next(iter(parts), None)


def _require(tensor: object, name: str, form: str, *, want_bool: bool) -> None:
    fits = isinstance(tensor, Tensor) and tensor.dim() == 2
    if fits and isinstance(tensor, Tensor):
        fits = tensor.dtype == torch.bool if want_bool else tensor.dtype.is_floating_point
    if not fits:
        value = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ArgumentError(
            message(
                f"{name} takes a {form} tensor",
                limit=form,
                value=value,
                remedy="one row per sample; a mask with query rows is passed as a plain (B, H, Sq, Sk) tensor",
            )
        )


def allowed(mask: Mask, q_len: int, k_len: int, device: torch.device) -> Tensor | None:
    """Where attention is allowed, bool, broadcastable to (B, H, Sq, Sk); None = everywhere. -inf biases count as not.

    Has the user's mask's size at most, but for causal: then it is (.., Sq, Sk). For exact maths and the truth only.
    """
    parts = []
    if mask.dense is not None:
        parts.append(mask.dense if mask.dense.dtype == torch.bool else mask.dense != float("-inf"))
    if mask.key_keep is not None:
        parts.append(mask.key_keep[:, None, None, :])
    if mask.key_bias is not None:
        parts.append((mask.key_bias != float("-inf"))[:, None, None, :])
    if mask.causal is not None:
        parts.append(torch.ones(q_len, k_len, dtype=torch.bool, device=device).tril(mask.causal)[None, None])
    result = None
    for part in parts:
        result = part if result is None else result & part
    return result


def dense_bias(mask: Mask, dtype: torch.dtype) -> Tensor | None:
    """All of a mask but its causal part, as one additive bias of `dtype`; -inf where attention is not allowed."""
    bias = None
    for part in (mask.dense, _rows(mask.key_keep), _rows(mask.key_bias)):
        if part is None:
            continue
        if part.dtype == torch.bool:
            part = torch.zeros(part.shape, dtype=dtype, device=part.device).masked_fill(
                part.logical_not(), float("-inf")
            )
        bias = part.to(dtype) if bias is None else bias + part.to(dtype)
    return bias


def live_rows(mask: Mask, q_len: int, k_len: int, device: torch.device) -> Tensor | None:
    """Which queries may attend to at least one key: bool, broadcastable to (B, H, Sq); None = all of them.

    Cheap: nothing of size Sq x Sk is made unless the user passed a mask with rows.
    """
    causal = mask.causal
    keys = allowed(Mask(mask.dense, mask.key_keep, mask.key_bias), q_len, k_len, device)
    if causal is None:
        return None if keys is None else keys.any(-1)
    reach = torch.arange(q_len, device=device) + causal  # the last key a query may see
    if keys is None:
        return None if causal >= 0 else (reach >= 0)[None, None]
    # argmax finds the first key that the other parts allow (0 where keys broadcast, or where there is none)
    return keys.any(-1) & (keys.to(torch.uint8).argmax(-1) <= reach)


def _rows(keys: Tensor | None) -> Tensor | None:
    return None if keys is None else keys[:, None, None, :]
