"""What is judged on: named cases, and the tensors they stand for.

Numbers are drawn in float32 on the CPU from a seed that follows from the case's id, and then rounded, so that every
device and every dtype sees the same ones. Upstream gradients are random, never ones; no V is constant over the keys.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contract import Arithmetic, Mask, Options, Wanted, accumulate_dtype
from .patterns import Shape, mask_from


@dataclass(frozen=True)
class Case:
    """One call, described. `mask` joins patterns of patterns.py by "+"; `storage` and `values` name the tables below.

    causal and since are the offsets of contract.Mask. splits=False: no merge over keys can be right, because an lse of
    -1e38 cannot hold the logarithm of their number, or because parts draw other dropout masks than the whole.
    wants: which of q, k, v and the bias (b) require a gradient. seed: other numbers for the same case.
    """

    id: str
    q_len: int
    k_len: int
    mask: str = ""
    causal: int | None = None
    since: int | None = None
    storage: str = "plain"
    values: str = "gaussian"
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    batch: int = 2
    heads: int = 3
    kv_heads: int | None = None
    head_dim: int = 16
    value_dim: int | None = None
    grad_lse: bool = False
    splits: bool = True
    wants: str = "qkvb"
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def numbers(self) -> int:
        """What its random numbers follow from."""
        return zlib.crc32((f"{self.id}#{self.seed}" if self.seed else self.id).encode())

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.heads, self.q_len, self.k_len)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of one call, in the layouts of contract.py.

    rng: the random state of dropout; dropout: the mask (B, H, Sq, Sk) that the pair draws for it (drawn.py), or None.
    arithmetic: what the subject claims of its own; that of 8 bits has a yardstick that quantises too (quantised.py).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    options: Options
    grad_out: Tensor
    grad_lse: Tensor | None = None
    wanted: Wanted = Wanted(True, True, True)
    dropout: Tensor | None = None
    rng: Tensor | None = None
    arithmetic: Arithmetic = "float32"

    @property
    def quantised(self) -> bool:
        """Whether the subject quantises, and there is anything to quantise."""
        return self.arithmetic.startswith("8-bit") and bool(self.q.numel() and self.k.numel())


def build(case: Case, device: torch.device | str = "cpu", *, dbias: bool = True) -> Inputs:
    """The tensors of a case. `dbias=False` leaves the gradient of a float mask out of what is wanted."""
    draw = torch.Generator().manual_seed(case.numbers)
    kv_heads, value_dim = case.kv_heads or case.heads, case.value_dim or case.head_dim
    shapes = (
        (case.batch, case.q_len, case.heads, case.head_dim),
        (case.batch, case.k_len, kv_heads, case.head_dim),
        (case.batch, case.k_len, kv_heads, value_dim),
        (case.batch, case.q_len, case.heads, value_dim),
    )
    drawn = VALUES[case.values](*(torch.randn(shape, generator=draw) for shape in (*shapes, *shapes)))
    q, k, v, grad_out = STORAGE[case.storage](*(x.to(device, case.dtype) for x in drawn))
    grad_lse = torch.randn((case.batch, case.heads, case.q_len), generator=draw) if case.grad_lse else None
    mask = replace(mask_from(case.mask, case.shape, case.dtype, draw, device), causal=case.causal, since=case.since)
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    return Inputs(
        q,
        k,
        v,
        mask,
        Options(scale=scale, softcap=case.softcap, dropout_p=case.dropout, return_lse=True),
        grad_out,
        None if grad_lse is None else grad_lse.to(device, accumulate_dtype(case.dtype)),
        Wanted(
            "q" in case.wants,
            "k" in case.wants,
            "v" in case.wants,
            dbias and mask.bias is not None and "b" in case.wants,
        ),
        rng=torch.tensor([case.numbers, 0]) if case.dropout else None,
    )


# Values: eight normal tensors shaped like q, k, v, grad_out twice over -> the four


def gaussian(*normal: Tensor) -> tuple[Tensor, ...]:
    """Independent standard normal numbers."""
    return normal[:4]


def peaked(*normal: Tensor) -> tuple[Tensor, ...]:
    """Scores eight times as wide: most of a row's weight sits on one or two keys."""
    q, k, v, grad_out = normal[:4]
    return 4 * q, 2 * k, v, grad_out


def heavy(*normal: Tensor) -> tuple[Tensor, ...]:
    """A normal number times the exponential of another: heavy tails on both sides, cut at 30 (16-bit range)."""
    return tuple((x * y.exp()).clamp(-30, 30) for x, y in zip(normal[:4], normal[4:], strict=True))


def negative(*normal: Tensor) -> tuple[Tensor, ...]:
    """Every score near -128 before the default scale's spread: q and k point opposite ways (cudnn-frontend#1072)."""
    q, k, v, grad_out = normal[:4]
    size = math.sqrt(128 / math.sqrt(q.shape[3]))
    return size * (1 + q / 16), -size * (1 + k / 16), v, grad_out


def large(*normal: Tensor) -> tuple[Tensor, ...]:
    """q k beyond float16's range before it is scaled, and near it after (pytorch#119320)."""
    q, k, v, grad_out = normal[:4]
    return 60 * q, 60 * k, v, grad_out


VALUES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "gaussian": gaussian,
    "peaked": peaked,
    "heavy": heavy,
    "negative": negative,
    "large": large,
}


# Storage: the same numbers under other strides; what lies between them is NaN, so that reading it shows


def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


def heads_outermost(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, S, H, D) over (B, H, S, D) storage."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)


def fused(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """q, k, v sliced from one (B, S, 3 H D) projection; grad_out from one twice as wide. Needs equal shapes."""
    packed = torch.cat([x.flatten(2) for x in (q, k, v)], -1).split(q.shape[2] * q.shape[3], -1)
    wide = torch.cat([grad_out, torch.full_like(grad_out, math.nan)], 1)
    return (*(x.unflatten(2, q.shape[2:]) for x in packed), wide[:, : grad_out.shape[1]])


def expanded(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """Stride 0: q and grad_out are one sample for all, k and v one head for all."""
    return (
        q[:1].expand_as(q),
        k[:, :, :1].expand_as(k),
        v[:, :, :1].expand_as(v),
        grad_out[:1].expand_as(grad_out),
    )


def misaligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Storage offset 1 and an odd pitch from token to token: no vector load is aligned."""
    return tuple(_odd(x) for x in tensors)


def _odd(x: Tensor) -> Tensor:
    flat = x.new_full((1 + x.shape[0] * x.shape[1] * x.shape[2] * (x.shape[3] + 1),), math.nan)
    view = flat[1:].view(*x.shape[:3], x.shape[3] + 1)[..., : x.shape[3]]
    return view.copy_(x)


def inner_strided(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """Last strides other than 1: every second number (q, grad_out), tokens innermost (k), heads innermost (v)."""
    second = [torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0] for x in (q, grad_out)]
    tokens_last = k.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    heads_last = v.transpose(2, 3).contiguous().transpose(2, 3)
    return second[0], tokens_last, heads_last, second[1]


STORAGE: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "plain": plain,
    "heads_outermost": heads_outermost,
    "fused": fused,
    "expanded": expanded,
    "misaligned": misaligned,
    "inner_strided": inner_strided,
}
