"""The bridge of compiled calls around any pair, without compiling: its operators are called as a traced graph would.

The operators are of this file's own namespace; their resolver hands out the pair that the test put there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ringtrue.audit.inputs import Inputs
from ringtrue.audit.truth import Quantities
from ringtrue.compiled import Operators, Plain
from ringtrue.contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted
from ringtrue.masks import MaskPart, put_together, taken_apart


@dataclass(frozen=True, eq=False)
class Exact(MaskPart):
    """A mask of the seam, whatever its offsets, as something that may be passed as attn_mask."""

    dense: Tensor | None
    key_keep: Tensor | None
    key_bias: Tensor | None
    q_segments: Tensor | None
    k_segments: Tensor | None
    causal: int | None
    since: int | None

    @classmethod
    def of(cls, mask: Mask) -> Exact:
        return cls(**{f.name: getattr(mask, f.name) for f in fields(cls)})


class Planted:
    """A resolver that checks nothing and always chooses the pair that was put in."""

    def __init__(self) -> None:
        self.inside: OpPair | None = None

    def normalise(self, q: Tensor, k: Tensor, v: Tensor, parts: list[Tensor], plain: Plain) -> Any:
        exact = put_together(plain.mask, parts, plain.numbers)
        mask = Mask(**{f.name: getattr(exact, f.name) for f in fields(Exact)})
        assert plain.scale is not None
        options = Options(plain.scale, plain.dropout_p, plain.softcap, plain.deterministic, plain.return_lse)
        wanted = Wanted(*plain.requires_grad)
        facts = SimpleNamespace(wanted=wanted, training=any(wanted))
        return SimpleNamespace(q=q, k=k, v=v, mask=mask, options=options, facts=facts, text="")

    def choose(self, call: Any, plain: Plain, traced: bool) -> tuple[int, OpPair]:
        return 7, self.pair(7, call)

    def pair(self, chosen: int, call: Any) -> OpPair:
        assert chosen == 7
        assert self.inside is not None
        return self.inside


_resolver = Planted()
OPERATORS = Operators("ringtrue_contract", _resolver)


@contextmanager
def around(pair: OpPair) -> Iterator[None]:
    """The operators run this pair."""
    _resolver.inside = pair
    try:
        yield
    finally:
        _resolver.inside = None


def _flat(mask: Mask, options: Options, requires_grad: Wanted) -> tuple[list[Tensor], Plain]:
    words, parts, numbers = taken_apart(Exact.of(mask))
    plain = Plain(
        mask=words, numbers=numbers, requires_grad=list(requires_grad), grad_mode=True, dropout_p=options.dropout_p,
        is_causal=False, scale=options.scale, enable_gqa=True, softcap=options.softcap, return_lse=True, layout="bshd",
        deterministic=options.deterministic, options="{}", asked="", outside=False, alone=True,
    )  # fmt: skip
    return parts, plain


def through_autograd(pair: OpPair, inputs: Inputs) -> Quantities:
    """One call and its gradients, as `audit.laws.whole` makes them, but by autograd through the operators."""
    x, wanted = inputs, inputs.wanted
    q, k, v = (t.detach().requires_grad_(w) for t, w in zip((x.q, x.k, x.v), wanted[:3], strict=True))
    mask = x.mask
    if wanted.bias:
        name = "key_bias" if mask.key_bias is not None else "dense"
        mask = Mask(**{**vars(mask), name: getattr(mask, name).detach().requires_grad_()})
    asking = [t for t, w in zip((q, k, v, mask.bias), wanted, strict=True) if w and t is not None]
    parts, plain = _flat(mask, x.options, wanted)
    with around(pair):
        out, lse = OPERATORS(q, k, v, parts, x.rng, plain)
        outputs, upstream = ((out,), (x.grad_out,)) if x.grad_lse is None else ((out, lse), (x.grad_out, x.grad_lse))
        found = iter(torch.autograd.grad(outputs, asking, upstream))
    grads = (next(found) if w else None for w in wanted)
    return Quantities(out.detach(), lse.detach(), *grads)


def operator_pair(pair: OpPair) -> OpPair:
    """The two operators as a pair, for laws that call forward and backward themselves."""

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: Tensor | None, options: Options) -> ForwardOut:
        parts, plain = _flat(mask, options, Wanted(True, True, True))
        with around(pair):
            out, lse, _, saved = OPERATORS.attention(q, k, v, parts, rng, *plain)
        return ForwardOut(out, lse, rng, tuple(saved))

    def backward(
        grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Mask, out: Tensor,
        lse: Tensor, rng: Tensor | None, saved: tuple[Tensor, ...], options: Options, wanted: Wanted,
    ) -> Grads:  # fmt: skip
        parts, plain = _flat(mask, options, wanted)
        with around(pair):
            grads = OPERATORS.attention_backward(
                grad_out, grad_lse, q, k, v, parts, out, lse, torch.tensor(7), rng, list(saved), *plain
            )
        return Grads(*(g if w else None for g, w in zip(grads, wanted, strict=True)))

    return OpPair(f"{pair.name} as operators", forward, backward, pair.claims)
