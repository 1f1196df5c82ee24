"""The problem of a recipe: global tensors, and how they lie on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from recipes import Recipe
from torch import Tensor

from ringtrue.audit.inputs import Inputs
from ringtrue.contract import Mask, Options, Wanted, accumulate_dtype


@dataclass(frozen=True)
class Draw:
    """One problem: global inputs and how they lie on ranks; lengths are own tokens per rank, the prefix not counted.

    wants, uses   per rank, or one for all: see Recipe
    """

    degrees: tuple[int, int]
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    inputs: Inputs
    alignment: str | None = None
    backend: str = "auto"
    window: tuple[int | None, int | None] = (None, None)
    prefix: int = 0
    replicated: bool = False
    balanced: bool = False
    keep_or_none: bool = False
    expanded: bool = False
    wants: tuple[str, ...] = ("qkv",)
    uses: tuple[str, ...] = ("out",)
    declared: str = ""
    seeds: str = "same"
    recipe: Recipe | None = None

    @property
    def size(self) -> int:
        return self.degrees[0] * self.degrees[1]

    def __str__(self) -> str:
        q, k = self.inputs.q, self.inputs.k
        shape = f"q {list(q.shape)} k {list(k.shape)} on {self.q_lengths} and {self.k_lengths}"
        masks = f"{sorted(self.inputs.mask.kinds)} {self.alignment}"
        return str(self.recipe or f"ulysses x ring {self.degrees}, {shape}, {masks}")

    def wanted(self, rank: int, name: str) -> bool:
        return name in self.wants[rank % len(self.wants)]

    def used(self, rank: int) -> str:
        return self.uses[rank % len(self.uses)]


# where tokens lie: written down once more, so that the library's own idea of it is judged too


def cut(length: int, parts: int) -> list[Tensor]:
    return list(torch.arange(length).tensor_split(parts))


def owned(lengths: Sequence[int], degrees: tuple[int, int], balanced: bool) -> list[Tensor]:
    """The places of each rank's own tokens in the sequence without the prefix."""
    if not balanced:
        return list(torch.arange(sum(lengths)).split(list(lengths)))
    ulysses, ring = degrees
    chunks = cut(sum(lengths), 2 * ring)
    pairs = [torch.cat([chunks[r], chunks[2 * ring - 1 - r]]) for r in range(ring)]
    return [part for pair in pairs for part in pair.tensor_split(ulysses)]


def places(problem: Draw, rank: int) -> tuple[Tensor, Tensor]:
    """The global positions of a rank's queries and keys, in its local order."""
    prefix = torch.arange(problem.prefix)

    def of(lengths: tuple[int, ...]) -> Tensor:
        return torch.cat([prefix, owned(lengths, problem.degrees, problem.balanced)[rank] + problem.prefix])

    whole = torch.arange(problem.inputs.k.shape[1])
    return of(problem.q_lengths), whole if problem.replicated else of(problem.k_lengths)


def build(told: Recipe) -> Draw:
    """The problem of a recipe, on the CPU."""
    numbers, dtype = torch.Generator().manual_seed(told.seed), getattr(torch, told.dtype)
    q_own, k_own = told.q, told.k or told.q
    if told.balanced:
        q_own = k_own = tuple(len(x) for x in owned(told.q, (told.ulysses, told.ring), True))
    q_len, k_len = sum(q_own) + told.prefix, sum(k_own) + told.prefix
    heads = told.kv_heads * told.group
    alignment = told.causal or None
    problem = Draw(
        (told.ulysses, told.ring), q_own, k_own, Inputs(*(None,) * 6),  # type: ignore[arg-type]
        alignment, told.backend, told.window, told.prefix, told.replicated, told.balanced, told.key == "some",
        told.expanded, told.wants, told.uses, seeds=told.seeds, recipe=told,
    )  # fmt: skip

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(dtype)

    shape = (told.batch, heads, q_len, k_len)
    inputs = Inputs(
        q=normal(told.batch, q_len, heads, told.dim),
        k=normal(told.batch, k_len, told.kv_heads, told.dim),
        v=normal(told.batch, k_len, told.kv_heads, told.value_dim),
        mask=Mask(),
        options=Options(
            scale=told.dim**-0.5 if told.scale is None else told.scale,
            softcap=told.softcap,
            dropout_p=told.dropout,
            return_lse=told.lse,
        ),
        grad_out=normal(told.batch, q_len, heads, told.value_dim),
        grad_lse=torch.randn(shape[:3], generator=numbers).to(accumulate_dtype(dtype)),
    )
    problem = replace(problem, inputs=inputs)
    mask = _mask(told, problem, shape, numbers)
    grad_out, grad_lse = _upstream(told, problem, numbers)
    every = [set(told.wants[r % len(told.wants)]) for r in range(told.size)]
    wanted = Wanted(*(any(name in some for some in every) for name in "qkvb"))
    inputs = replace(inputs, mask=mask, grad_out=grad_out, grad_lse=grad_lse, wanted=wanted)
    return replace(problem, inputs=inputs, declared=_declared(mask) if told.declared else "")


def _mask(told: Recipe, problem: Draw, shape: tuple[int, int, int, int], numbers: torch.Generator) -> Mask:
    batch, _, q_len, k_len = shape
    uniform = lambda *some: torch.rand(some, generator=numbers)
    parts: dict[str, Any] = {}
    bias_dtype = torch.float32 if told.wide else getattr(torch, told.dtype)
    if told.dense:
        dims = [n if name in told.dims else 1 for n, name in zip(shape, "bhqk", strict=True)]
        hidden = uniform(*dims) > 0.6
        bias = torch.randn(dims, generator=numbers).to(bias_dtype)
        parts["dense"] = ~hidden if told.dense == "bool" else bias.masked_fill(hidden, -torch.inf)
    if "keep" in told.key or told.key == "some":
        keep = uniform(batch, k_len) > 0.5
        if told.key == "some":
            for rank in range(0, told.size, 2):
                keep[:, places(problem, rank)[1]] = True
        parts["key_keep"] = keep
    if "bias" in told.key:
        bias = torch.randn((batch, k_len), generator=numbers).to(bias_dtype)
        parts["key_bias"] = bias.masked_fill(uniform(batch, k_len) > 0.8, -torch.inf)
    if told.segments:
        ids = [torch.randint(3, (batch, n), generator=numbers).sort(-1).values for n in (q_len, k_len)]
        parts["q_segments"], parts["k_segments"] = (ids[0], ids[0] if told.segments == "q" else ids[1])
    left, right = told.window
    ends = [] if right is None else [right]
    ends += {"": [], "top_left": [0], "bottom_right": [k_len - q_len]}[told.causal]
    return Mask(**parts, causal=min(ends, default=None), since=None if left is None else -left)


def _upstream(told: Recipe, problem: Draw, numbers: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Global gradients of out and lse: zero where the owner's objective does not look."""
    grad_out, grad_lse = problem.inputs.grad_out.clone(), problem.inputs.grad_lse
    assert grad_lse is not None
    for rank in range(problem.size):
        rows = places(problem, rank)[0]
        if problem.used(rank) == "lse":
            grad_out[:, rows] = 0
        if problem.used(rank) == "out":
            grad_lse[:, :, rows] = 0
    for grad, dim in ((grad_out, 1), (grad_lse, 2)):  # shares of these add up without rounding
        first = grad.narrow(dim, 0, told.prefix)
        first.mul_(4).round_().div_(4).clamp_(-3, 3)
    return grad_out, grad_lse if told.lse and any(use != "out" for use in told.uses) else None


def _declared(mask: Mask) -> str:
    """The mask kind of a declaration."""
    kinds = {"dense_bool": "rows_bool", "dense_float": "rows_float", "key_keep": "key_bool", "key_bias": "key_float"}
    kinds["segments"] = "segments"
    return next((kinds[kind] for kind in sorted(mask.kinds) if kind in kinds), "none")
