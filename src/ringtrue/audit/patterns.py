"""Mask patterns of the cases: "name:axes" or "name", joined by "+", to one contract.Mask.

`axes` are those of (b, h, q, k) that the dense tensor has in full; the others have size 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import Mask


class Shape(NamedTuple):
    """Batch, query heads, query length, key length."""

    batch: int
    heads: int
    q_len: int
    k_len: int

    def at(self, axes: str) -> tuple[int, int, int, int]:
        b, h, q, k = (size if axis in axes else 1 for axis, size in zip("bhqk", self, strict=True))
        return b, h, q, k


def mask_from(text: str, shape: Shape, dtype: torch.dtype, draw: torch.Generator, device: torch.device | str) -> Mask:
    """The tensors of a case's mask. Float patterns are float32, those that end in "_input" of the inputs' `dtype`."""
    parts: dict[str, Tensor] = {}
    for pattern in filter(None, text.split("+")):
        name, _, axes = pattern.partition(":")
        kind, of_input = name.removesuffix("_input"), name.endswith("_input")
        bias_dtype = dtype if of_input else torch.float32
        if axes:
            parts["dense"] = DENSE[kind](shape.at(axes), bias_dtype, draw).to(device)
        elif kind in SEGMENTS:
            q_ids, k_ids = SEGMENTS[kind](shape, draw)
            parts |= {"q_segments": q_ids.to(device), "k_segments": k_ids.to(device)}
        else:
            field, make = KEYS[kind]
            parts[field] = make((shape.batch, shape.k_len), bias_dtype, draw).to(device)
    return Mask(**parts)  # type: ignore[arg-type]


def _keep(size: tuple[int, ...], draw: torch.Generator, share: float = 0.6) -> Tensor:
    """A random choice in which every row keeps at least one key: a different one from row to row."""
    keep = torch.rand(size, generator=draw) < share
    if keep.numel():
        rows = torch.arange(keep[..., 0].numel()).view(keep.shape[:-1])
        keep.scatter_(-1, (rows % keep.shape[-1]).unsqueeze(-1), True)
    return keep


def some(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Bool: a random 60 % of the keys, at least one in each row."""
    return _keep(size, draw)


def everything(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    return torch.ones(size, dtype=torch.bool)


def single(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Bool: exactly one key in each row, so that dq and dk are exactly zero."""
    return _keep(size, draw, share=-1.0)


def blind(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Bool: as `some`, and every third row (or the first sample, where there are no rows) sees nothing."""
    return _keep(size, draw) & ~_blind_rows(size)


def strided(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Bool: as `some`, keys outermost in storage."""
    return _keep(size, draw).mT.contiguous().mT


def normal(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    return torch.randn(size, generator=draw).to(dtype)


def normal_strided(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Float, sliced: every second number of a tensor twice as wide, NaN between."""
    wide = torch.full((*size, 2), torch.nan)
    wide[..., 0] = torch.randn(size, generator=draw)
    return wide.to(dtype)[..., 0]


def infinite(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Float: -inf on about 40 % of the keys, never on all of a row."""
    return normal(size, dtype, draw).masked_fill(~_keep(size, draw), -torch.inf)


def infinite_blind(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Float: as `infinite`, and some whole rows are -inf."""
    return infinite(size, dtype, draw).masked_fill(_blind_rows(size), -torch.inf)


def lowest(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Float: padding written as the dtype's lowest number, with live keys in every row."""
    return torch.zeros(size, dtype=dtype).masked_fill(~_keep(size, draw), torch.finfo(dtype).min)


def lowest_rows(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Float: as `lowest`, and some whole rows are lowest: finite, so ordinary rows whose weights sum to 1."""
    return lowest(size, dtype, draw).masked_fill(_blind_rows(size), torch.finfo(dtype).min)


def ten_thousand(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Float: padding written as -10000, with live keys in every row."""
    return torch.zeros(size, dtype=dtype).masked_fill(~_keep(size, draw), -1e4)


def ragged(size: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Bool (B, Sk): sample b keeps a leading part, shorter from sample to sample, never empty."""
    lengths = torch.tensor([max(1, size[1] - b * (size[1] // 3) - 1) for b in range(size[0])])
    return torch.arange(size[1]) < lengths.unsqueeze(1)


def documents(shape: Shape, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """int32 ids of documents, packed one after the other, other lengths in each sample; the same for keys."""
    lasts = torch.rand(shape.batch, max(shape.q_len, shape.k_len), generator=draw) < 0.2
    ids = lasts.cumsum(1).int()
    return ids[:, : shape.q_len], ids[:, : shape.k_len]


def apart(shape: Shape, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """int64 ids in no order, of queries and of keys; no key has the id of the first query of the first sample."""
    q_ids, k_ids = (torch.randint(-1, 3, (shape.batch, n), generator=draw) for n in (shape.q_len, shape.k_len))
    return q_ids.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(7)), k_ids


def _blind_rows(size: tuple[int, ...]) -> Tensor:
    blind = torch.zeros(*size[:-1], 1, dtype=torch.bool)
    if len(size) == 4 and size[2] > 1:
        blind[:, :, 1::3] = True
    else:
        blind[:1] = True
    return blind


Maker = Callable[[tuple[int, ...], torch.dtype, torch.Generator], Tensor]
DENSE: dict[str, Maker] = {
    "some": some,
    "all": everything,
    "single": single,
    "blind": blind,
    "strided": strided,
    "float": normal,
    "float_strided": normal_strided,
    "float_infinite": infinite,
    "float_blind": infinite_blind,
    "float_lowest": lowest,
    "float_lowest_rows": lowest_rows,
    "float_padding": ten_thousand,
}
SEGMENTS: dict[str, Callable[[Shape, torch.Generator], tuple[Tensor, Tensor]]] = {
    "documents": documents,
    "apart": apart,
}
KEYS: dict[str, tuple[str, Maker]] = {
    "keep": ("key_keep", some),
    "keep_ragged": ("key_keep", ragged),
    "keep_blind": ("key_keep", blind),
    "bias": ("key_bias", normal),
    "bias_infinite": ("key_bias", infinite),
    "bias_blind": ("key_bias", infinite_blind),
    "bias_lowest": ("key_bias", lowest),
    "bias_padding": ("key_bias", ten_thousand),
}
