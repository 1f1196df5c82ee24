"""Parcels: lists of tensors of any shape, dtype and strides, packed in one buffer of bytes and viewed out of it again.

Every tensor starts at a multiple of 16 bytes, so that its slice of the buffer can be viewed in its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN = 16


class Template(NamedTuple):
    """One tensor that will be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


Parcel = Sequence[Tensor]
Form = Sequence[Template]


def describe(parcel: Parcel) -> tuple[Template, ...]:
    """The templates of a parcel."""
    return tuple(Template(tuple(tensor.shape), tensor.dtype) for tensor in parcel)


def show(form: Form) -> str:
    """Templates as error messages show them."""
    return "[" + ", ".join(str(template) for template in form) + "]"


def payload(form: Form) -> int:
    """Bytes of the tensors alone."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in form)


def room(form: Form) -> int:
    """Bytes of the packed parcel, gaps included: a multiple of 16, and 0 only if there is no payload."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN for shape, dtype in form)


def pack(parcels: Sequence[Parcel], device: torch.device) -> tuple[Tensor, list[int]]:
    """A new buffer (bytes,) uint8 on `device` that holds the parcels one after another, and the bytes of each."""
    forms = [describe(parcel) for parcel in parcels]
    sizes = [room(form) for form in forms]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    with torch.no_grad():
        for parcel, slots in zip(parcels, unpack(buffer, forms), strict=True):
            for tensor, slot in zip(parcel, slots, strict=True):
                slot.copy_(tensor)
    return buffer, sizes


def unpack(buffer: Tensor, forms: Sequence[Form]) -> list[list[Tensor]]:
    """The tensors of the parcels in `buffer`, as views of it."""
    parcels, start = [], 0
    for form in forms:
        tensors = []
        for template in form:
            end = start + payload([template])
            tensors.append(buffer[start:end].view(template.dtype).view(template.shape))
            start += room([template])
        parcels.append(tensors)
    return parcels
