"""`xformers.ops.fmha` of 0.0.35: its two calls outside of autograd, their masks, and what it refuses.

As there: an operator is the first of flash and cutlass that has no reason against the inputs, forward and backward each
for itself; cutlass pads lse with +inf to a multiple of 32 queries, takes a bias in full size, and has no backward for a
bias beside causal.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _eager

TENSOR_CORES = 8  # elements of 16 bits that one load takes


class LowerTriangularMask:
    """Causal from the first query and the first key."""

    def __init__(self, device: torch.device | None = None) -> None: ...

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """The same, and a bias."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias


class LowerTriangularFromBottomRightMask:
    """Causal from the last query and the last key."""


attn_bias = SimpleNamespace(
    LowerTriangularMask=LowerTriangularMask,
    LowerTriangularMaskWithTensorBias=LowerTriangularMaskWithTensorBias,
    LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask,
)


class Inputs:
    """What an operator is asked about."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
        scale: float | None = None, output_dtype: torch.dtype | None = None, is_partial: bool = False,
    ) -> None:  # fmt: skip
        self.query, self.key, self.value, self.attn_bias, self.scale = query, key, value, attn_bias, scale


class _Operator:
    """One of a pair of operators; `forward` and `backward` differ in the masks that they take."""

    def __init__(self, name: str, dtypes: set[torch.dtype], biases: set[type], max_dim: int, other_value_dim: bool):
        self.name, self.dtypes, self.biases = name, dtypes, biases
        self.max_dim, self.other_value_dim = max_dim, other_value_dim

    def not_supported_reasons(self, d: Inputs) -> list[str]:
        dims = (d.query.shape[-1], d.value.shape[-1])
        reasons = [f"max(query.shape[-1], value.shape[-1]) > {self.max_dim}"] * (max(dims) > self.max_dim)
        reasons += ["query.shape[-1] != value.shape[-1]"] * (dims[0] != dims[1] and not self.other_value_dim)
        reasons += [f"dtype={d.query.dtype}"] * (d.query.dtype not in self.dtypes)
        reasons += [f"attn_bias type is {type(d.attn_bias)}"] * (type(d.attn_bias) not in self.biases)
        for name, x in (("query", d.query), ("key", d.key), ("value", d.value)):
            reasons += _alignment(name, x.shape[-1], *x.stride()[-2:])
        if isinstance(d.attn_bias, Tensor):
            for stride in d.attn_bias.stride()[:-1]:
                reasons += _alignment("attn_bias", TENSOR_CORES, stride, d.attn_bias.stride(-1))
        elif type(d.attn_bias) is LowerTriangularMask and self is not CUTLASS_FW and self is not CUTLASS_BW:
            square = d.query.shape[1] == d.key.shape[1]
            reasons += [] if square else ["Only support LowerTriangularMask if equal number of keys and queries"]
        return reasons


def _alignment(name: str, dim: int, stride: int, last: int) -> list[str]:
    aligned = dim % TENSOR_CORES == 0 and stride % TENSOR_CORES == 0 and last <= 1
    return [] if aligned else [f"{name} is not aligned: {stride}, {last}"]


_16 = {torch.float16, torch.bfloat16}
_CAUSAL: set[type] = {type(None), LowerTriangularMask, LowerTriangularFromBottomRightMask}
FLASH = _Operator("fa2", _16, _CAUSAL, 256, other_value_dim=False)
CUTLASS_BW = _Operator("cutlassB-pt", {*_16, torch.float32}, {*_CAUSAL, Tensor}, 65536, other_value_dim=True)
CUTLASS_FW = _Operator(
    "cutlassF-pt", {*_16, torch.float32}, {*_CAUSAL, Tensor, LowerTriangularMaskWithTensorBias}, 65536,
    other_value_dim=True,
)  # fmt: skip
cutlass = SimpleNamespace(FwOp=CUTLASS_FW, BwOp=CUTLASS_BW)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if p != 0.0:
        raise NotImplementedError("dropout is not supported on the non-autograd API.")
    inputs = Inputs(query, key, value, attn_bias, p, scale, output_dtype)
    operator = _dispatch(inputs, (FLASH, CUTLASS_FW))
    out, lse = _eager.forward(query, key, value, _scale(inputs), **_mask(inputs))
    if operator is CUTLASS_FW:
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)
    return out.contiguous(), lse.contiguous()


def memory_efficient_attention_backward(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None,
    p: float = 0.0, scale: float | None = None, *, op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if p != 0.0:
        raise NotImplementedError("dropout is not supported on the non-autograd API.")
    inputs = Inputs(query, key, value, attn_bias, p, scale)
    if lse.dim() != 3 or lse.shape[:2] != (query.shape[0], query.shape[2]) or lse.shape[2] < query.shape[1]:
        raise ValueError("Input tensors have incompatible shapes.")
    if _dispatch(inputs, (FLASH, CUTLASS_BW)) is CUTLASS_BW and not output.is_contiguous():
        raise ValueError("reads out as contiguous")
    lse = lse[:, :, : query.shape[1]]
    return _eager.backward(grad, query, key, value, output, lse, _scale(inputs), **_mask(inputs))[:3]


def _dispatch(inputs: Inputs, operators: tuple[_Operator, ...]) -> _Operator:
    q, k, bias = inputs.query, inputs.key, inputs.attn_bias
    if not q.dim() == k.dim() == inputs.value.dim() == 4 or not q.dtype == k.dtype == inputs.value.dtype:
        raise ValueError("shape or dtype")
    if q.shape[2] != k.shape[2] or q.shape[0] != k.shape[0]:
        raise ValueError("Incompatible shapes for attention inputs")
    tensor = getattr(bias, "_bias", bias)
    if isinstance(tensor, Tensor):
        if tensor.shape != (q.shape[0], q.shape[2], q.shape[1], k.shape[1]):
            raise ValueError(f"Invalid shape for attention bias: {tensor.shape}")
        if tensor.dtype != q.dtype:
            raise RuntimeError("invalid dtype for bias - should match query's dtype")
    reasons = {operator.name: operator.not_supported_reasons(inputs) for operator in operators}
    for operator in operators:
        if not reasons[operator.name]:
            return operator
    raise NotImplementedError(f"No operator found for `memory_efficient_attention`: {reasons}")


def _scale(inputs: Inputs) -> float:
    return inputs.query.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale


def _mask(inputs: Inputs) -> dict[str, Any]:
    """The mask as the arithmetic takes it."""
    mask = inputs.attn_bias
    if isinstance(mask, LowerTriangularFromBottomRightMask):
        return {"causal": True}
    bias = mask if isinstance(mask, Tensor) else getattr(mask, "_bias", None)
    if isinstance(mask, LowerTriangularMask):
        hidden = torch.ones(inputs.query.shape[1], inputs.key.shape[1], dtype=torch.bool).triu(1)
        bias = (0.0 if bias is None else bias) + torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    return {"bias": bias}
