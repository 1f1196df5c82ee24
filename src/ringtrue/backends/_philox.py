"""Dropout of torch's CUDA kernels: they draw their mask from the device's default generator and say nothing of ours.

A call's (seed, offset) becomes one number, which is the kernel's seed and its Philox offset alike. It is a hash: masks
of neighbouring Philox offsets overlap, and callers count offsets up for the parts of one call. The generator is lent
that state for the time of one launch, which only touches numbers on the host, and has its own back after; code of
another thread that draws from the same generator in between would draw from the lent one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock

import torch
from torch import Tensor

from ..errors import UnsupportedError, message
from ._mixed import mixed

_turn = Lock()
_nothing: AbstractContextManager[None] = nullcontext()


def drawing(rng: Tensor | None, p: float, device: torch.device) -> AbstractContextManager[None]:
    """For the time of one forward call: the device's default generator in the state that `rng` stands for."""
    return _lent(kernel_state(rng), device) if p else _nothing


def replayed(rng: Tensor | None, p: float, device: torch.device, *shape: int) -> Tensor:
    """That state as a backward reads it, int64; unwritten memory where nothing is dropped, which nobody reads."""
    if not p:
        return torch.empty(shape, dtype=torch.int64, device=device)
    return torch.full(shape, kernel_state(rng), dtype=torch.int64, device=device)  # no copy, nothing to wait for


def kernel_state(rng: Tensor | None) -> int:
    """(seed, offset) int64 on the CPU -> one number below 2**62, a multiple of 4 as Philox offsets of torch are."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            message(
                "dropout while a stream is captured: every replay would drop the same weights",
                limit="random states are drawn on the host, once a call",
                remedy="dropout_p=0, or leave attention out of the captured graph",
            )
        )
    assert rng is not None, "dropout without a random state"
    return mixed(*rng.tolist()) >> 4 << 2


@contextmanager
def _lent(state: int, device: torch.device) -> Iterator[None]:
    if device.type == "cpu":  # a generator without offsets: what has a kernel's arguments and computes on the CPU
        with _turn, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(state)
            yield
        return
    generator = torch.cuda.default_generators[device.index]
    with _turn:
        seed, offset = generator.initial_seed(), generator.get_offset()
        try:
            generator.manual_seed(state)
            generator.set_offset(state)
            yield
        finally:
            generator.manual_seed(seed)
            generator.set_offset(offset)
