"""Pairs that remember what an earlier call of the same sizes was given: only the order law can find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..contract import ForwardOut, Grads, OpPair
from .historical import BackwardCall, ForwardCall


def _key(call: ForwardCall | BackwardCall) -> tuple[Any, ...]:
    """Sizes, strides and dtypes of q, k and v, and the parts of the mask, as kernels key their graphs."""
    tensors = (call.q, call.k, call.v)
    return *((x.shape, x.stride(), x.dtype) for x in tensors), call.mask.kinds, call.mask.causal


def first_strides(name: str) -> Callable[[OpPair], OpPair]:
    """The strides that the first call's grad_out (or out) had are baked in, and later ones are read through them."""

    def make(pair: OpPair) -> OpPair:
        first: dict[Any, tuple[int, ...]] = {}

        def backward(*args: Any) -> Grads:
            call = BackwardCall(*args)
            given: Tensor = getattr(call, name)
            strides = first.setdefault(_key(call), given.stride())
            room = given.untyped_storage().nbytes() // given.element_size() - given.storage_offset()
            if sum((n - 1) * s for n, s in zip(given.shape, strides, strict=True)) < room:
                call = call._replace(**{name: given.as_strided(given.shape, strides)})  # type: ignore[arg-type]
            return pair.backward(*call)

        return replace(pair, backward=backward)

    return make


def first_options(name: str) -> Callable[[OpPair], OpPair]:
    """A number of the first call of a key is used for all."""

    def make(pair: OpPair) -> OpPair:
        first: dict[Any, object] = {}

        def remembered(call: Any) -> Any:
            kept = first.setdefault(_key(call), getattr(call.options, name))
            return call._replace(options=replace(call.options, **{name: kept}))

        def forward(*args: Any) -> ForwardOut:
            return pair.forward(*remembered(ForwardCall(*args)))

        def backward(*args: Any) -> Grads:
            return pair.backward(*remembered(BackwardCall(*args)))

        return replace(pair, forward=forward, backward=backward)

    return make


def first_state(pair: OpPair) -> OpPair:
    """Backward uses the random state of the first call of a key."""
    first: dict[Any, Tensor] = {}

    def backward(*args: Any) -> Grads:
        call = BackwardCall(*args)
        if call.rng is not None:
            call = call._replace(rng=first.setdefault(_key(call), call.rng))
        return pair.backward(*call)

    return replace(pair, backward=backward)


def first_lse(pair: OpPair) -> OpPair:
    """lse is written into a buffer that all calls of one size share, and backward reads the buffer."""
    buffers: dict[Any, Tensor] = {}

    def forward(*args: Any) -> ForwardOut:
        result = pair.forward(*args)
        buffers.setdefault(result.lse.shape, result.lse.clone())
        return result

    def backward(*args: Any) -> Grads:
        call = BackwardCall(*args)
        return pair.backward(*call._replace(lse=buffers[call.lse.shape].to(call.lse.dtype)))

    return replace(pair, forward=forward, backward=backward)
