"""What a call costs beside its kernel: tiny tensors on a CPU, several ways to the same kernel, in turn.

The yardstick is diffusers' dispatcher: what most training of diffusion transformers pays today.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ringtrue as rt

from .pair import sdpa
from .timing import Times, Work, in_turn

SHAPE = (1, 16, 4, 32)
DISPATCHER = "diffusers' dispatcher"
OURS = "rt.attention"
TARGETS = {"no grad": 1.5, "forward+backward": 1.6}  # rt.attention / dispatcher, at most
DIFFUSERS = rt.optional.Package(
    "diffusers.models.attention_dispatch",
    "pip install 'ringtrue[diffusers]'",
    distribution="diffusers",
    attributes=("dispatch_attention_fn",),
)
Attention = Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Overhead:
    """Seconds a call of every way, per part (a key of TARGETS); `absent` is why there is no dispatcher, "" if there is.

    `ratio` is None without a dispatcher.
    """

    times: dict[str, dict[str, Times]]
    absent: str

    def ratio(self, part: str, way: str = OURS) -> float | None:
        times = self.times[part]
        return times[way].over(times[DISPATCHER]) if DISPATCHER in times else None


def measure(repetitions: int) -> Overhead:
    """Time every way on one thread, float32, without gradients and with all three."""
    missing = rt.optional.why_not(DIFFUSERS)
    ways = _ways(with_dispatcher=missing is None)
    draw = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(SHAPE, generator=draw) for _ in range(4))
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    with _one_thread():
        with torch.no_grad():
            alone = in_turn({n: _forward(f, (q, k, v)) for n, f in ways.items()}, "cpu", repetitions)
        both = in_turn({n: _both(f, leaves, g) for n, f in ways.items()}, "cpu", repetitions)
    parts = dict(zip(TARGETS, (alone, both), strict=True))
    return Overhead(parts, "" if missing is None else str(missing))


def _ways(with_dispatcher: bool) -> dict[str, Attention]:
    """From the kernel outwards; all take and give (B, S, H, D)."""
    ways: dict[str, Attention] = {
        "the aten op": _aten,
        "F.sdpa": sdpa,
        "a bare autograd.Function": Bare.apply,
    }
    if with_dispatcher:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        ways[DISPATCHER] = dispatch_attention_fn
    return {**ways, OURS: rt.attention}


def _forward(way: Attention, inputs: tuple[Tensor, ...]) -> Work:
    return lambda: way(*inputs)


def _both(way: Attention, inputs: tuple[Tensor, ...], grad_out: Tensor) -> Work:
    return lambda: torch.autograd.grad(way(*inputs), inputs, grad_out)


def _aten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _flash(q, k, v)[0].transpose(1, 2)


class Bare(torch.autograd.Function):
    """The least that a kernel with a backward of its own costs: no checks, no choice, no mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = _flash(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        g, q, k, v = (x.transpose(1, 2) for x in (grads[0], q, k, v))
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, out, lse, 0.0, False)
        return tuple(x.transpose(1, 2) for x in found)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (q, k, v))
    )
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
