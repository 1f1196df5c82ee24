"""Past bugs, one `OpPair -> OpPair` each: what the demo, the self-test and the tests put under a pair that is right.

Each was found in public dispatchers and gave finite, plausible, wrong gradients. A plant goes around a pair with its
edge, so that it runs for every shape, and counts how often it changed something (`ran`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted, accumulate_dtype


@dataclass
class Count:
    """How many calls a plant changed, over all threads."""

    times: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, changed: bool) -> None:
        with self.lock:
            self.times += changed


@dataclass(frozen=True)
class Planted(OpPair):
    """A pair with a fault in it."""

    count: Count = field(default_factory=Count)


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one backward call that a plant may change; q too, for mutants."""

    grad_out: Tensor
    grad_lse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    out: Tensor
    lse: Tensor
    options: Options


def ran(pair: OpPair) -> int:
    """How many calls of this pair its plant really changed; 0 for a pair without one."""
    return pair.count.times if isinstance(pair, Planted) else 0


def in_backward(pair: OpPair, name: str, change: Callable[[Call], Call]) -> OpPair:
    """The pair whose backward sees changed arguments; forward stays as it is."""
    count = Count()

    def backward(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        out: Tensor,
        lse: Tensor,
        rng: object,
        saved: tuple[Tensor, ...],
        options: Options,
        wanted: Wanted,
    ) -> Grads:
        true = Call(grad_out, grad_lse, q, k, v, mask, out, lse, options)
        c = change(true)
        count.add(any(_differs(a, b) for a, b in zip(vars(c).values(), vars(true).values(), strict=True)))
        return pair.backward(c.grad_out, c.grad_lse, c.q, c.k, c.v, c.mask, c.out, c.lse, rng, saved, c.options, wanted)

    return _planted(pair, name, pair.forward, backward, count)


def kv_transposed_twice(pair: OpPair) -> OpPair:
    """Backward transposes k and v once more, q not. By reshape, so that it runs for any number of heads and tokens."""
    return in_backward(
        pair, "kv-transposed-twice", lambda call: replace(call, k=transposed_again(call.k), v=transposed_again(call.v))
    )


def transposed_again(x: Tensor) -> Tensor:
    """(B, S, H, D) read as if it were (B, H, S, D), in a tensor of the old shape."""
    return x.transpose(1, 2).reshape(x.shape)


def lse_missing(pair: OpPair) -> OpPair:
    """Backward gets an lse that nobody wrote. Memory that nobody wrote is not reproducible; zeros stand in for it."""
    return in_backward(pair, "lse-missing", lambda call: replace(call, lse=torch.zeros_like(call.lse)))


def stale_kv(pair: OpPair) -> OpPair:
    """Backward uses, at every step of a ring, the k and v that its first step saw."""
    return in_backward(pair, "stale-kv", FirstStep())


class FirstStep:
    """Remembers k and v per thread (the ranks of an in-process ring are threads) and per backward pass.

    All steps of one pass share the storage of grad_out, q and lse. The remembered tensors keep theirs alive, so no later
    pass can be given the same memory and be taken for this one.
    """

    def __init__(self) -> None:
        self.memory = threading.local()

    def __call__(self, call: Call) -> Call:
        held = (call.grad_out, call.q, call.lse)
        key = tuple(x.untyped_storage().data_ptr() for x in held)
        if getattr(self.memory, "key", None) != key:
            self.memory.key, self.memory.held = key, held
            self.memory.first = call.k.clone(), call.v.clone()
        first_k, first_v = self.memory.first
        return replace(call, k=_instead(first_k, call.k), v=_instead(first_v, call.v))


def _instead(first: Tensor, now: Tensor) -> Tensor:
    """The first step's tokens in the shape of this step's: shards may be uneven, what is missing stays this step's."""
    return torch.cat([first[:, : now.shape[1]], now[:, first.shape[1] :]], 1)


def mask_as_bias(pair: OpPair) -> OpPair:
    """A boolean mask, dense or per key, goes into an additive slot: 1 where a key may be seen, 0 where it must not."""
    count = Count()

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: object, options: Options) -> ForwardOut:
        count.add(_forbids(mask))
        return pair.forward(q, k, v, added(mask, accumulate_dtype(q.dtype)), rng, options)

    def backward(
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        out: Tensor,
        lse: Tensor,
        rng: object,
        saved: tuple[Tensor, ...],
        options: Options,
        wanted: Wanted,
    ) -> Grads:
        count.add(_forbids(mask))
        bias = added(mask, accumulate_dtype(q.dtype))
        grads = pair.backward(grad_out, grad_lse, q, k, v, bias, out, lse, rng, saved, options, wanted)
        if grads.dbias is None or mask.bias is None or grads.dbias.shape == mask.bias.shape:
            return grads
        return grads._replace(dbias=grads.dbias.sum((1, 2)).to(mask.bias.dtype))  # the float part was per key

    masks = pair.claims.masks | {"dense_bool", "key_keep"}
    return _planted(replace(pair, claims=replace(pair.claims, masks=masks)), "mask-as-bias", forward, backward, count)


def added(mask: Mask, dtype: torch.dtype) -> Mask:
    """The mask with its boolean parts turned into numbers and added."""
    dense, key_bias = mask.dense, mask.key_bias
    if mask.key_keep is not None:
        keep = mask.key_keep.to(dtype)
        key_bias = keep if key_bias is None else (key_bias + keep).to(key_bias.dtype)
    if dense is not None and dense.dtype == torch.bool:
        dense = dense.to(dtype)
        if key_bias is not None:  # at most one float part
            dense, key_bias = dense + key_bias[:, None, None, :], None
    return Mask(dense, None, key_bias, mask.causal)


def _forbids(mask: Mask) -> bool:
    dense = mask.dense is not None and mask.dense.dtype == torch.bool and not bool(mask.dense.all())
    return dense or (mask.key_keep is not None and not bool(mask.key_keep.all()))


def _differs(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is not b and not torch.equal(a, b)
    return a is not b


def _planted(
    pair: OpPair, name: str, forward: Callable[..., ForwardOut], backward: Callable[..., Grads], count: Count
) -> OpPair:
    return Planted(f"{pair.name}+{name}", forward, backward, pair.claims, pair.reads_inputs, count)


PLANTS: dict[str, Callable[[OpPair], OpPair]] = {
    "kv-transposed-twice": kv_transposed_twice,
    "mask-as-bias": mask_as_bias,
    "lse-missing": lse_missing,
    "stale-kv": stale_kv,
}
