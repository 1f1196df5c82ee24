"""Functions that tests of the audit's processes name: each goes wrong in a way of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional


def right(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)


def dies_of_one_key(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if key.shape[1] == 1:
        os.abort()
    return right(query, key, value)


def hangs_with_one_query(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if query.shape[1] == 1 and key.shape[1] == 33:
        if "TOLD_ASLEEP" in os.environ:
            Path(os.environ["TOLD_ASLEEP"]).touch()
        time.sleep(600)
    return right(query, key, value)


class _Remembers(torch.autograd.Function):
    """Backward reads grad_out through the strides of the first one of its size, as a poor cache does."""

    first: dict[torch.Size, tuple[int, ...]] = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx, out: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return out.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        strides = _Remembers.first.setdefault(grad.shape, grad.stride())
        return grad.as_strided(grad.shape, strides) if grad.storage_offset() == 0 else grad


def remembers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _Remembers.apply(right(query, key, value))
