"""Past bugs, one `OpPair -> OpPair` each: what the demo, the self-test and the tests put under a pair that is right.

Each was found in public dispatchers and gave finite, plausible, wrong gradients. A plant goes around a pair with its
edge, so that it runs for every shape, and counts the calls in which it changed something (`ran`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype


class ForwardCall(NamedTuple):
    """The arguments of a pair's forward, in the seam's order."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    rng: Tensor | None
    options: Options


class BackwardCall(NamedTuple):
    """The arguments of a pair's backward, in the seam's order."""

    grad_out: Tensor
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    out: Tensor
    lse: Tensor
    rng: Tensor | None
    saved: tuple[Tensor, ...]
    options: Options
    wanted: Wanted


@dataclass
class Count:
    """How many calls were changed, over all threads."""

    times: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, before: tuple[object, ...], after: tuple[object, ...]) -> None:
        if any(_differs(a, b) for a, b in zip(before, after, strict=True)):
            with self.lock:
                self.times += 1


@dataclass(frozen=True)
class Planted(OpPair):
    """A pair with a fault in it."""

    count: Count = field(default_factory=Count)


def ran(pair: OpPair) -> int:
    """In how many calls the plant of this pair really changed something; 0 for a pair without one."""
    return pair.count.times if isinstance(pair, Planted) else 0


def changed(
    pair: OpPair,
    name: str,
    *,
    forward: Callable[[ForwardCall], ForwardCall] = lambda call: call,
    backward: Callable[[BackwardCall], BackwardCall] = lambda call: call,
) -> Planted:
    """The pair with other arguments than it was given; its backward is left alone where it is given none to read."""
    count = Count()

    def changed_forward(*args: object, **kwargs: object) -> ForwardOut:
        before = ForwardCall(*args, **kwargs)  # type: ignore[arg-type]
        after = forward(before)
        count.add(before, after)
        return pair.forward(*after)

    def changed_backward(*args: object, **kwargs: object) -> Grads:
        before = BackwardCall(*args, **kwargs)  # type: ignore[arg-type]
        after = backward(before) if pair.reads_inputs else before
        count.add(before, after)
        return pair.backward(*after)

    name = f"{pair.name}+{name}"
    return Planted(name, changed_forward, changed_backward, pair.claims, pair.reads_inputs, pair.shapes, count)


def kv_transposed_twice(pair: OpPair) -> Planted:
    """Backward transposes k and v once more, q not. By reshape, so that it runs for any number of heads and tokens."""
    return changed(
        pair,
        "kv-transposed-twice",
        backward=lambda call: call._replace(k=transposed_again(call.k), v=transposed_again(call.v)),
    )


def transposed_again(x: Tensor) -> Tensor:
    """(B, S, H, D) read as if it were (B, H, S, D), in a tensor of the old shape."""
    return x.transpose(1, 2).reshape(x.shape)


def mask_as_bias(pair: OpPair) -> Planted:
    """A boolean mask, dense or per key, goes into an additive slot: 1 where a key may be seen, 0 where it must not."""
    claims = replace(pair.claims, masks=pair.claims.masks | {"dense_bool", "key_keep"})
    return changed(
        replace(pair, claims=claims),
        "mask-as-bias",
        forward=lambda call: call._replace(mask=added(call.mask, accumulate_dtype(call.q.dtype))),
        backward=lambda call: call._replace(mask=added(call.mask, accumulate_dtype(call.q.dtype))),
    )


def added(mask: Mask, dtype: torch.dtype) -> Mask:
    """The mask with its boolean parts as numbers; the same object where that changes nothing but a constant.

    A dense one beside a bias per key stays boolean, so that the float part and the shape of its gradient stay the same.
    """
    dense, keep, key_bias = mask.dense, mask.key_keep, mask.key_bias
    if dense is not None and dense.dtype == torch.bool and key_bias is None and not dense.all():
        dense = dense.to(dtype)
    if keep is not None and not keep.all():
        key_bias = keep.to(dtype) if key_bias is None else (key_bias + keep).to(key_bias.dtype)
        keep = None
    if dense is mask.dense and keep is mask.key_keep:
        return mask
    return replace(mask, dense=dense, key_keep=keep, key_bias=key_bias)


def lse_missing(pair: OpPair) -> Planted:
    """Backward gets an lse that nobody wrote. Memory that nobody wrote is not reproducible; zeros stand in for it."""
    return changed(pair, "lse-missing", backward=lambda call: call._replace(lse=torch.zeros_like(call.lse)))


def stale_kv(pair: OpPair) -> Planted:
    """Backward uses, at every step of a ring, the k and v that its first step saw."""
    return changed(pair, "stale-kv", backward=FirstStep())


class FirstStep:
    """Remembers k and v per thread (the ranks of an in-process ring are threads) and per backward pass.

    All steps of one pass share the storage of q and out (grad_out and lse may be copied on their way), and passes that
    share it begin with the same k and v. What is remembered keeps that storage alive, so no other pass can be given the
    same memory and be taken for this one.
    """

    def __init__(self) -> None:
        self.memory = threading.local()

    def __call__(self, call: BackwardCall) -> BackwardCall:
        if call.q.numel() == 0:  # no memory to tell passes apart by, and nothing to get wrong
            return call
        held = (call.q, call.out)
        key = tuple(x.untyped_storage().data_ptr() for x in held)
        if getattr(self.memory, "key", None) != key:
            self.memory.key, self.memory.held = key, held
            self.memory.first = call.k.clone(), call.v.clone()
        first_k, first_v = self.memory.first
        return call._replace(k=_instead(first_k, call.k), v=_instead(first_v, call.v))


def _instead(first: Tensor, now: Tensor) -> Tensor:
    """The first step's tokens in the shape of this step's: shards may be uneven, what is missing stays this step's."""
    return torch.cat([first[:, : now.shape[1]], now[:, first.shape[1] :]], 1)


def _differs(a: object, b: object) -> bool:
    if a is b:
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return not torch.equal(a, b)
    return isinstance(a, Tensor) or isinstance(b, Tensor) or a != b


PLANTS: dict[str, Callable[[OpPair], OpPair]] = {
    "kv-transposed-twice": kv_transposed_twice,
    "mask-as-bias": mask_as_bias,
    "lse-missing": lse_missing,
    "stale-kv": stale_kv,
}
