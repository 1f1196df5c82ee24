"""The bridge under torch.compile for a call under a context: two opaque operators in which the ranks talk.

They go an eager call's way when they run: agree, compose, exchange. What forward keeps for backward has sizes that
other ranks decide, unknown while torch traces: it leaves as bytes, of a size that is a symbol, and a description.
Nothing is refused while torch traces, for the other ranks would wait: the operator refuses as it runs, with all ranks.

The order of a graph's operators is torch's to choose, and it looks at sizes, which differ between ranks. Backwards
depend on each other through a tensor that says nothing; a forward tells its place in the code to the other ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .autograd import as_it_is, refuse_lse_gradient
from .compiled import (
    BACKWARD,
    FORWARD,
    RANKS_TALK,
    Normalised,
    Plain,
    backward_shapes,
    handed_back,
    last_backward,
    next_follows,
    register,
    to_inputs,
    told,
    unknown_size,
)  # fmt: skip
from .contract import ForwardOut, OpPair, accumulate_dtype
from .parallel.parcel import Template, pack, unpack

SHARED = "str context, bool entered, str kind, bool kv_replicated, SymInt[] lengths, str root, int number"
# all that torch has: a mask may keep segments or biases of any of them
DTYPES = tuple(sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str))


class Shared(NamedTuple):
    """What a call under a context says besides `Plain`, in the order of both schemas."""

    context: str  # the context's name in this process
    entered: bool  # it was found outside of the compiled code
    kind: str  # of mask, as declared
    kv_replicated: bool
    lengths: list[int]  # the joint prefix, then the declared lengths of q and of k, if they are declared
    root: str  # the function that was compiled with this call in it
    number: int  # which of its calls this is


class Agreed(NamedTuple):
    """A checked call, the composed pair, and the numbers that both can be found by again."""

    call: Normalised
    pair: OpPair
    numbers: tuple[int, ...]


class Ranks(Protocol):
    """What the operators need of the rooms above them."""

    def agree(self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], plain: Plain, shared: Shared) -> Agreed:
        """What all ranks agree on; raises like an eager call, on all of them."""

    def again(
        self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], plain: Plain, shared: Shared, numbers: list[int]
    ) -> tuple[Normalised, OpPair]:
        """The same in backward, without talking to anybody."""

    def count(self, shared: Shared) -> int:
        """How many numbers `agree` gives."""


class Together:
    """`<namespace>::attention_together` and its backward, registered once; called, it is a traced call."""

    def __init__(self, namespace: str, ranks: Ranks) -> None:
        self.ranks = ranks
        self.attention, self.attention_backward = register(
            namespace,
            "attention_together",
            (FORWARD.replace(") ->", f", {SHARED}) ->"), self._forward, self._forward_shapes),
            (
                BACKWARD.replace(") ->", f", {SHARED}, Tensor? after) ->").replace("-> (", "-> (Tensor, "),
                self._backward,
                _backward_shapes,
            ),
            self._gradients,
            tags=RANKS_TALK,
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], rng: Tensor | None, plain: Plain, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        """out (B, Sq, H, Dv) and lse (empty if it was not asked for); torch traces this."""
        out, lse, _, _ = self.attention(q, k, v, parts, rng, *plain, *shared)
        return out, lse

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], rng: Tensor | None, *values: Any
    ) -> tuple[Any, ...]:
        plain, shared = _read(values)
        with as_it_is(q), torch.no_grad():
            call, pair, numbers = self.ranks.agree(q, k, v, parts, plain, shared)
            result = pair.forward(call.q, call.k, call.v, call.mask, rng, call.options)
            return _given(result, pair, numbers, plain)

    def _forward_shapes(
        self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], rng: Tensor | None, *values: Any
    ) -> tuple[Any, ...]:
        plain, shared = _read(values)
        out, lse = _result_shapes(q, v, plain)
        if not _trains(plain):
            return out, lse, out.new_empty(0, dtype=torch.int64), []
        chosen = torch.empty(self.ranks.count(shared), dtype=torch.int64, device="cpu")
        forms = torch.empty(unknown_size(), dtype=torch.int64, device="cpu")
        there = torch.empty(unknown_size(), dtype=torch.uint8, device="cpu")
        return out, lse, chosen, [forms, q.new_empty(unknown_size(), dtype=torch.uint8), there]

    def _backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: list[Tensor],
        out: Tensor,
        lse: Tensor,
        chosen: Tensor,
        rng: Tensor | None,
        saved: list[Tensor],
        *values: Any,
    ) -> tuple[Tensor, ...]:
        plain, shared = _read(values[:-1])
        with as_it_is(q), torch.no_grad():
            call, pair = self.ranks.again(q, k, v, parts, plain, shared, chosen.tolist())
            refuse_lse_gradient(pair, grad_lse)
            kept = _unpacked(*saved)
            held: tuple[Tensor | None, ...] = (None,) * 5
            if pair.reads_inputs:
                held = (call.q, call.k, call.v, out, lse if plain.return_lse else kept.pop(0))
            grads = pair.backward(
                grad_out, grad_lse, *held[:3], call.mask, *held[3:], rng, tuple(kept), call.options, call.facts.wanted
            )
        return torch.zeros((), device="cpu"), *handed_back(grads, call, pair, parts, plain)

    def _gradients(self, ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
        plain, _ = _read(ctx.values)
        tensors, parts = told(ctx, grad_out, grad_lse, plain)
        done, *grads = self.attention_backward(*tensors, *ctx.values, last_backward())
        next_follows(done)
        return to_inputs(grads, parts, plain, ctx.values)


def _read(values: Any) -> tuple[Plain, Shared]:
    count = len(Plain._fields)
    return Plain(*values[:count]), Shared(*values[count:])


def _trains(plain: Plain) -> bool:
    return plain.grad_mode and any(plain.requires_grad)


def _given(result: ForwardOut, pair: OpPair, numbers: tuple[int, ...], plain: Plain) -> tuple[Any, ...]:
    """What the forward operator returns; without a backward to come, nothing for it, and nothing on the CPU."""
    out, lse = result.out.contiguous(), result.lse.contiguous()
    asked = lse if plain.return_lse else lse.new_empty(0)
    if not _trains(plain):
        return out, asked, out.new_empty(0, dtype=torch.int64), []
    kept = [*([lse] if pair.reads_inputs and not plain.return_lse else []), *result.saved]
    return out, asked, torch.tensor(numbers, dtype=torch.int64, device="cpu"), _packed(kept, out.device)


def _packed(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors as what describes them (int64), the bytes of those on `device`, and the bytes of those on the CPU."""
    forms: list[int] = []
    for x in tensors:
        forms += [x.device == device, DTYPES.index(x.dtype), x.dim(), *x.shape]
    here, there = ([x for x in tensors if (x.device == device) == both] for both in (True, False))
    cpu = torch.device("cpu")
    return [torch.tensor(forms, dtype=torch.int64, device=cpu), pack([here], device)[0], pack([there], cpu)[0]]


def _unpacked(forms: Tensor, here: Tensor, there: Tensor) -> list[Tensor]:
    """What `_packed` packed."""
    described, left = [], forms.tolist()
    while left:
        near, dtype, dims, *left = left
        described.append((bool(near), Template(tuple(left[:dims]), DTYPES[dtype])))
        left = left[dims:]
    found = {
        near: iter(unpack(buffer, [[form for where, form in described if where == near]])[0])
        for near, buffer in ((True, here), (False, there))
    }
    return [next(found[near]) for near, _ in described]


def _result_shapes(q: Tensor, v: Tensor, plain: Plain) -> tuple[Tensor, Tensor]:
    """out and lse without numbers, also for inputs that will be refused."""
    if q.dim() != 4 or v.dim() != 4:
        return q.new_empty(q.shape), q.new_empty(0)
    batch, length, heads = q.shape[:3] if plain.layout == "bshd" else (q.shape[0], q.shape[2], q.shape[1])
    lse = (batch, heads, length) if plain.return_lse else (0,)
    return q.new_empty(batch, length, heads, v.shape[-1]), q.new_empty(lse, dtype=accumulate_dtype(q.dtype))


def _backward_shapes(*values: Any) -> tuple[Tensor, ...]:
    return torch.empty((), device="cpu"), *backward_shapes(*values[:11], *values[11 : 11 + len(Plain._fields)])
