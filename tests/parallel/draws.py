"""Random calls under context parallelism: a seed gives the whole problem, `play` runs one rank on any transport."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

import ringtrue as rt
from ringtrue.audit.inputs import Inputs
from ringtrue.audit.truth import Quantities
from ringtrue.contract import Mask, Options, Wanted
from ringtrue.parallel.twin import World


def starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Where each contiguous shard begins: (3, 0, 2) -> (0, 3, 3)."""
    return (0, *accumulate(lengths))[:-1]


DEGREES = ((1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (1, 3), (3, 1))  # (ulysses, ring)
MASKS = ("none", "none", "keep", "bias", "rows_bool", "rows_float", "columns_bool")


@dataclass(frozen=True)
class Draw:
    """One problem: global inputs and how they lie on ranks."""

    degrees: tuple[int, int]
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    inputs: Inputs
    alignment: str | None = None
    backend: str = "auto"

    @property
    def size(self) -> int:
        return self.degrees[0] * self.degrees[1]

    def __str__(self) -> str:
        q, k = self.inputs.q, self.inputs.k
        shape = f"q {list(q.shape)} k {list(k.shape)} on {self.q_lengths} and {self.k_lengths}"
        return (
            f"ulysses x ring {self.degrees}, {shape}, {sorted(self.inputs.mask.kinds)} {self.alignment} {self.backend}"
        )


def draw(seed: int, dtype: torch.dtype = torch.float64, names: tuple[str, ...] = ("auto",), most: int = 5) -> Draw:
    """The problem of a seed: any lengths (0 and 1 among them), any heads on any degree, any mask."""
    pick, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    degrees = pick.choice(DEGREES)
    size = degrees[0] * degrees[1]
    kv_heads, group, dim = pick.choice((1, 2, 3, 4)), pick.choice((1, 1, 2, 3)), pick.choice((4, 8))
    value_dim = pick.choice((dim, dim, 6))
    q_lengths = tuple(pick.randint(0, most) for _ in range(size))
    k_lengths = q_lengths if pick.random() < 0.6 else tuple(pick.randint(0, most) for _ in range(size))
    q_len, k_len = sum(q_lengths), sum(k_lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(dtype)

    alignment = pick.choice((None, None, "top_left", "bottom_right"))
    offset = None if alignment is None else 0 if alignment == "top_left" else k_len - q_len
    heads = kv_heads * group
    mask = _mask(pick.choice(MASKS), (2, heads, q_len, k_len), dtype, offset, pick, numbers)
    return Draw(
        degrees,
        q_lengths,
        k_lengths,
        Inputs(
            q=normal(2, q_len, heads, dim),
            k=normal(2, k_len, kv_heads, dim),
            v=normal(2, k_len, kv_heads, value_dim),
            mask=mask,
            options=Options(scale=dim**-0.5, return_lse=True),
            grad_out=normal(2, q_len, heads, value_dim),
            wanted=Wanted(True, True, True),
        ),
        alignment,
        pick.choice(names),
    )


def _mask(
    kind: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    causal: int | None,
    pick: random.Random,
    numbers: torch.Generator,
) -> Mask:
    batch, heads, q_len, k_len = shape
    some = (pick.choice((1, batch)), pick.choice((1, heads)), q_len, k_len)
    if kind == "keep":
        return Mask(key_keep=torch.rand((batch, k_len), generator=numbers) > 0.5, causal=causal)
    if kind == "bias":
        return Mask(key_bias=torch.randn((batch, k_len), generator=numbers).to(dtype), causal=causal)
    if kind == "rows_bool":
        return Mask(dense=torch.rand(some, generator=numbers) > 0.5, causal=causal)
    if kind == "rows_float":
        blocked = torch.rand(some, generator=numbers) > 0.7
        return Mask(torch.randn(some, generator=numbers).to(dtype).masked_fill(blocked, -torch.inf), causal=causal)
    if kind == "columns_bool":
        return Mask(dense=torch.rand((batch, 1, 1, k_len), generator=numbers) > 0.5, causal=causal)
    return Mask(causal=causal)


def context(problem: Draw, mesh: object = None, **options: object) -> rt.ContextParallel:
    ulysses, ring = problem.degrees
    return rt.ContextParallel(rt.ContextParallelConfig(ulysses, ring, mesh=mesh, timeout=20.0, **options))  # type: ignore[arg-type]


def shard_of(problem: Draw, rank: int) -> tuple[Tensor, Tensor, Tensor, object, Tensor]:
    """What a rank holds: q, k, v, what it passes as attn_mask, grad_out."""
    q_start, k_start = starts(problem.q_lengths)[rank], starts(problem.k_lengths)[rank]
    rows = slice(q_start, q_start + problem.q_lengths[rank])
    cols = slice(k_start, k_start + problem.k_lengths[rank])
    x, mask = problem.inputs, problem.inputs.mask
    parts: list[object] = []
    if mask.dense is not None:
        with_rows = mask.dense.shape[2] == sum(problem.q_lengths)  # broadcast over one query looks the same
        parts.append(rt.Dense(mask.dense[:, :, rows] if with_rows else mask.dense))
    if mask.key_keep is not None:
        parts.append(rt.KeyPadding(mask.key_keep[:, cols]))
    if mask.key_bias is not None:
        parts.append(rt.KeyBias(mask.key_bias[:, cols]))
    if problem.alignment is not None:
        parts.append(rt.Causal(problem.alignment))  # type: ignore[arg-type]
    joined = None
    for part in parts:
        joined = part if joined is None else joined & part  # type: ignore[operator]
    return x.q[:, rows], x.k[:, cols], x.v[:, cols], joined, x.grad_out[:, rows]


def play(mesh: object, problem: Draw, backend: object = None) -> tuple[Tensor, ...]:
    """One rank: out, lse, dq, dk, dv of its shard."""
    cp = context(problem, mesh)
    q, k, v, mask, grad_out = shard_of(problem, cp.rank)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    with cp:
        out, lse = rt.attention(
            q, k, v, mask, return_lse=True, enable_gqa=True, scale=problem.inputs.options.scale,
            backend=problem.backend if backend is None else backend,
        )  # fmt: skip
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad_out))


def joined(results: list[tuple[Tensor, ...]]) -> Quantities:
    """The ranks' results as one."""
    return Quantities(*(torch.cat(parts, 2 if i == 1 else 1) for i, parts in enumerate(zip(*results, strict=True))))


def on_twin(problem: Draw, backend: object = None) -> Quantities:
    return joined(World(problem.size).run(play, problem, backend))


__all__ = ["Draw", "context", "draw", "joined", "on_twin", "play", "shard_of"]
