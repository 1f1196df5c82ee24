"""What users pass as `attn_mask`, and how a Mask becomes a dense bias or names the rows that see nothing.

`Causal`, `Window`, `Segments`, `KeyPadding`, `KeyBias` and `Dense` join with `&`; `call.py` makes one contract.Mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .contract import Mask
from .errors import ArgumentError, message

BLOCK = 1024  # rows of a mask that are written out at a time


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


@dataclass(frozen=True)
class Window(MaskPart):
    """Query i sees keys i - left to i + right, both included; None = no limit on that side.

    Positions are token positions from the first query and key on, as for `Causal()`. A negative number moves that end
    to the other side: Window(5, -2) sees i - 5 to i - 2. Joined with `Causal()` no later key is seen, whatever right.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        ends: tuple[object, object] = (self.left, self.right)
        whole = all(n is None or (isinstance(n, int) and not isinstance(n, bool)) for n in ends)
        if not whole or (self.left is not None and self.right is not None and self.left + self.right < 0):
            raise ArgumentError(
                message(
                    "Window: no such window",
                    limit="left and right are ints or None, left + right >= 0",
                    value=f"left={self.left!r}, right={self.right!r}",
                    remedy="Window(0, 0) is each token alone; None is no limit",
                )
            )


@dataclass(frozen=True, eq=False)
class Segments(MaskPart):
    """Which document each token belongs to: integers (B, Sq) and (B, Sk); only equal ids attend. k_ids None = q_ids."""

    q_ids: Tensor
    k_ids: Tensor | None = None

    def __repr__(self) -> str:
        return f"Segments({short(self.q_ids)}{'' if self.k_ids is None else f', {short(self.k_ids)}'})"

    def __post_init__(self) -> None:
        for ids in (self.q_ids, *(() if self.k_ids is None else (self.k_ids,))):
            _require(ids, "Segments", "integer (B, S)", _is_integer)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, length: int | None = None) -> Segments:
        """Documents packed into one sequence (B = 1), from where each begins and the last one ends: [0, a, b, .., S].

        On the CPU the numbers are checked. On a device nothing is read back where `length` (S) is given, and nothing
        checked: tokens past the last end are one more document. Without `length` both happen, at the cost of a wait.
        """
        _require(cu_seqlens, "Segments.from_cu_seqlens", "integer (documents + 1,)", _is_integer, dims=1)
        if length is None or cu_seqlens.device.type == "cpu":
            ends = cu_seqlens.tolist()
            if len(ends) < 2 or ends[0] != 0 or ends != sorted(ends) or length not in (None, ends[-1]):
                raise ArgumentError(
                    message(
                        "Segments.from_cu_seqlens: these are no ends of documents",
                        limit=f"[0, ..., {'S' if length is None else length}], ascending",
                        value=f"{len(ends)} numbers, from {ends[:1]} to {ends[-1:]}",
                    )
                )
            length = ends[-1]
        tokens = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        return cls(torch.bucketize(tokens, cu_seqlens, right=True, out_int32=True).unsqueeze(0))


@dataclass(frozen=True, eq=False)
class KeyPadding(MaskPart):
    """Which keys are real, per sample: bool (B, Sk), True = may be attended to. Sharded like the keys."""

    keep: Tensor

    def __repr__(self) -> str:
        return f"KeyPadding({short(self.keep)})"

    def __post_init__(self) -> None:
        _require(self.keep, "KeyPadding", "bool (B, Sk)", lambda dtype: dtype == torch.bool)


@dataclass(frozen=True, eq=False)
class KeyBias(MaskPart):
    """A bias per key and sample: float (B, Sk), added to the scaled scores. Sharded like the keys."""

    bias: Tensor

    def __repr__(self) -> str:
        return f"KeyBias({short(self.bias)})"

    def __post_init__(self) -> None:
        _require(self.bias, "KeyBias", "float (B, Sk)", lambda dtype: dtype.is_floating_point)


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
            limit="a tensor, Causal, Window, Segments, KeyPadding, KeyBias, or several joined by &",
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


def _require(tensor: object, name: str, form: str, fits: Callable[[torch.dtype], bool], dims: int = 2) -> None:
    if not isinstance(tensor, Tensor) or tensor.dim() != dims or not fits(tensor.dtype):
        value = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ArgumentError(
            message(
                f"{name} takes a {form} tensor",
                limit=form,
                value=value,
                remedy="one row per sample; a mask with query rows is passed as a plain (B, H, Sq, Sk) tensor",
            )
        )


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not dtype.is_floating_point and not dtype.is_complex


def allowed(mask: Mask, q_len: int, k_len: int, device: torch.device) -> Tensor | None:
    """Where attention is allowed, bool, broadcastable to (B, H, Sq, Sk); None = everywhere. -inf biases count as not.

    Has the user's mask's size at most, but for causal, windows and segments: then it is (.., Sq, Sk).
    """
    parts = []
    if mask.dense is not None:
        parts.append(mask.dense if mask.dense.dtype == torch.bool else mask.dense != float("-inf"))
    if mask.key_keep is not None:
        parts.append(mask.key_keep[:, None, None, :])
    if mask.key_bias is not None:
        parts.append((mask.key_bias != float("-inf"))[:, None, None, :])
    if mask.q_segments is not None and mask.k_segments is not None:
        parts.append((mask.q_segments.unsqueeze(2) == mask.k_segments.unsqueeze(1)).unsqueeze(1))
    if mask.causal is not None or mask.since is not None:
        band = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
        band = band if mask.causal is None else band.tril(mask.causal)
        parts.append((band if mask.since is None else band.triu(mask.since))[None, None])
    result = None
    for part in parts:
        result = part if result is None else result & part
    return result


def dense_bias(mask: Mask, dtype: torch.dtype) -> Tensor | None:
    """The tensors of a mask, segments left out, as one additive bias of `dtype`; -inf where they do not allow."""
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


def whole_bias(mask: Mask, dtype: torch.dtype, q_len: int, k_len: int, device: torch.device) -> Tensor:
    """All of a mask as one additive bias of `dtype`, (.., Sq, Sk): for a block of rows, never for all of them."""
    bias = dense_bias(mask, dtype)
    places = allowed(replace(mask, dense=None, key_keep=None, key_bias=None), q_len, k_len, device)
    bias = torch.zeros(1, 1, q_len, k_len, dtype=dtype, device=device) if bias is None else bias
    return bias if places is None else torch.where(places, bias, float("-inf"))


def part_of_bias(d_bias: Tensor, rows: slice, cols: slice) -> Tensor:
    """The part of a float mask's gradient, dense or per key, that belongs to some queries and keys: a view."""
    mask = Mask(dense=d_bias) if d_bias.dim() == 4 else Mask(key_bias=d_bias)
    part = mask.at(rows, cols).bias
    assert part is not None
    return part


def row_blocks(q_len: int) -> list[slice]:
    """All rows, a block at a time."""
    return [slice(start, min(start + BLOCK, q_len)) for start in range(0, q_len, BLOCK)]


def live_rows(mask: Mask, q_len: int, k_len: int, device: torch.device) -> Tensor | None:
    """Which queries may attend to at least one key: bool, broadcastable to (B, H, Sq); None = all of them.

    Cheap: nothing of size Sq x Sk is made unless the user passed a mask with rows; segments beside other parts than
    `key_keep` are compared with all keys for a block of rows at a time.
    """
    if mask.hides_nothing:
        return None
    if mask.q_segments is not None:
        if mask.dense is None and mask.key_bias is None and mask.causal is None and mask.since is None:
            return _rows_of_ids(mask)
        found = []
        for rows in row_blocks(q_len):
            seen = allowed(mask.at(rows, slice(0, k_len)), rows.stop - rows.start, k_len, device)
            found.append(seen.any(-1))  # type: ignore[union-attr]
        return torch.cat(found, -1)
    keys = allowed(Mask(mask.dense, mask.key_keep, mask.key_bias), q_len, k_len, device)
    if mask.causal is None and mask.since is None:
        return None if keys is None else keys.any(-1)
    if keys is None and _all_see(mask, q_len, k_len):
        return None
    row = torch.arange(q_len, device=device)
    # the first key a query may see, and the one after the last
    first = torch.zeros_like(row) if mask.since is None else (row + mask.since).clamp(0, k_len)
    last = torch.full_like(row, k_len) if mask.causal is None else (row + mask.causal + 1).clamp(0, k_len)
    if keys is None:
        return (first < last)[None, None]
    if keys.shape[-1] == 1:
        return keys.squeeze(-1) & (first < last)
    if mask.since is None:  # argmax finds the first key that the other parts allow, or 0 where there is none
        return keys.any(-1) & (keys.to(torch.uint8).argmax(-1) < last)
    before = torch.nn.functional.pad(keys.cumsum(-1, dtype=torch.int32), (1, 0))  # allowed keys before each key
    until_last, until_first = (before.take_along_dim(key[None, None, :, None], -1) for key in (last, first))
    return (until_last > until_first).squeeze(-1)


def _rows_of_ids(mask: Mask) -> Tensor:
    """Which queries have a key of their id that is kept, (B, 1, Sq): found among the sorted ids of the keys."""
    assert mask.q_segments is not None
    assert mask.k_segments is not None
    k_ids, order = mask.k_segments.long().sort(1)
    keep = torch.ones_like(k_ids) if mask.key_keep is None else mask.key_keep.long().gather(1, order)
    before = torch.nn.functional.pad(keep.cumsum(1), (1, 0))  # kept keys before each place
    q_ids = mask.q_segments.long().contiguous()
    first, last = (before.gather(1, torch.searchsorted(k_ids, q_ids, right=right)) for right in (False, True))
    return (last > first).unsqueeze(1)


def _all_see(mask: Mask, q_len: int, k_len: int) -> bool:
    """Whether every query sees a key between its causal limit and the left end of its window."""
    starts = mask.since is None or mask.since < k_len - q_len + 1
    ends = mask.causal is None or mask.causal >= 0
    return starts and ends and (mask.since is None or mask.causal is None or mask.since <= mask.causal)


def _rows(keys: Tensor | None) -> Tensor | None:
    return None if keys is None else keys[:, None, None, :]
