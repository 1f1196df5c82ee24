"""A backend's pair against the same kernel called through torch: same tensors, same run, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringtrue as rt

from .timing import Times, Work, extra_peak, in_turn

# Our names of the kernels that F.scaled_dot_product_attention can be made to take; native_math is code of our own.
TORCH = {
    "native_flash": SDPBackend.FLASH_ATTENTION,
    "native_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "native_cudnn": SDPBackend.CUDNN_ATTENTION,
}
FORWARD, BOTH = "forward", "forward+backward"
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: seconds a call, and bytes at the peak of one call (None: not measured)."""

    times: Times
    extra_peak: int | None


@dataclass(frozen=True)
class Measured:
    """One backend on one shape, forward alone or with backward."""

    backend: str
    shape: Shape
    part: str
    ours: Side
    torch: Side

    @property
    def time_ratio(self) -> float:
        return self.ours.times.over(self.torch.times)

    @property
    def memory_ratio(self) -> float | None:
        if not self.torch.extra_peak or self.ours.extra_peak is None:
            return None
        return self.ours.extra_peak / self.torch.extra_peak


def backends(device: str) -> dict[str, str]:
    """Every backend of this kind of device, and why it cannot be compared here ("" when it can)."""
    return {
        support.name: (
            str(support.unavailable)
            if support.unavailable is not None
            else "" if support.name in TORCH else "F.scaled_dot_product_attention has no such kernel"
        )
        for support in rt.backends()
        if support.device == device
    }  # fmt: skip


def compare(
    backend: str, shapes: Sequence[Shape], dtype: torch.dtype, device: str, repetitions: int
) -> tuple[Measured, ...]:
    """`rt.attention(backend=...)` against torch on the same (B, S, H, D) tensors, per shape, forward and with backward.

    Raises what either side raises for a call that it cannot take.
    """
    found = []
    for shape in shapes:
        draw = torch.Generator().manual_seed(0)
        q, k, v, g = (torch.randn(shape, generator=draw).to(device, dtype) for _ in range(4))
        for x in (q, k, v):
            x.requires_grad_()
        calls: dict[str, Work] = {
            "ours": partial(rt.attention, q, k, v, backend=backend, parallel=False),
            "torch": partial(sdpa, q, k, v),
        }
        for part in (FORWARD, BOTH):
            work = {name: _work(call, part, (q, k, v), g) for name, call in calls.items()}
            with sdpa_kernel([TORCH[backend]]):  # out here, so that neither side pays for entering it
                times = in_turn(work, device, repetitions)
                sides = {name: Side(times[name], extra_peak(work[name], device)) for name in work}
            found.append(Measured(backend, shape, part, sides["ours"], sides["torch"]))
    return tuple(found)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's call, (B, S, H, D) in and out: views only."""
    return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _work(call: Work, part: str, inputs: tuple[Tensor, ...], grad_out: Tensor) -> Work:
    """What is measured: the call without grad, or with, its gradients taken for `grad_out`."""

    def forward() -> object:
        with torch.no_grad():
            return call()

    def both() -> object:
        out = call()
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out, inputs, grad_out)

    return forward if part == FORWARD else both
