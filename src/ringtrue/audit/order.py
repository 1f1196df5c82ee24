"""Order law: a call is right alone, and after other calls of the same shapes, its own and other people's.

Others differ in the strides of every input, of out and of grad_out, in dtype, mask, scale, softcap and dropout. Kernel
caches are keyed by sizes and some strides, so each order is run on a shape of its own, and every call in it is judged.
First known breach: torch's cuDNN backward, whose graph cache leaves the strides of out and grad_out out of its key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..contract import Claims, Mask, OpPair, accumulate_dtype
from .drawn import drawn_mask
from .inputs import Case, Inputs, build, expanded, heads_outermost, inner_strided, misaligned
from .judge import Verdict, judged
from .laws import whole


@dataclass(frozen=True, eq=False)
class Step:
    """One call of an order: of the pair under test, or (`plain`) of torch's own attention, which is not judged."""

    name: str
    inputs: Inputs
    stored: Callable[[Tensor], Tensor] = lambda out: out
    plain: bool = False


def orders(
    claims: Claims, dtype: torch.dtype, device: torch.device | str = "cpu", length: int = 16
) -> Iterator[list[Step]]:
    """Every order, from `length` tokens on, one more in each: another call first, or second, or torch's before both."""
    lengths = count(length)

    def base() -> Inputs:
        n = next(lengths)
        return build(Case(f"order-{n}", n, n, heads=4, head_dim=64, dtype=dtype), device)

    for other in _others(claims, dtype):
        for first in (True, False):
            own = Step("a call", base())
            yield [other(own.inputs), own] if first else [own, other(own.inputs), own]
    if claims.dropout:
        x = base()
        yield [_dropout(x, seed) for seed in (3, 4)]
    for first in (True, False):
        own = Step("a call", base())
        outermost = Step("grad_out outermost", replace(own.inputs, grad_out=_outermost(own.inputs.grad_out)))
        plain = [replace(step, name=f"torch: {step.name}", plain=True) for step in (own, outermost)]
        yield [*plain[:: 1 if first else -1], own, outermost]


ANOTHER = 4  # the seed of a call with dropout, after or before one with 3
# what a subject that is no pair can be put to: it may claim anything, and it cannot be given an `out`
ANYTHING = Claims(
    frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
    frozenset({"dense_bool", "dense_float", "window"}),
    causal="offset",
    softcap=True,
    dropout=True,
)


def named_orders(dtype: torch.dtype, pairs: bool = True) -> dict[str, tuple[int, Callable[[Inputs], Step], bool]]:
    """Orders of a subject's own calls: name -> (its length, what makes the other call, whether that comes first).

    pairs  those too that only an op pair can be put to, whose backward is handed an `out` with other strides
    """
    every = list(_others(ANYTHING, dtype))
    of_pairs = [o for o in every if o.func is _out_stored]  # type: ignore[attr-defined]
    others = [o for o in every if o not in of_pairs]
    others += [partial(_dropout, seed=ANOTHER), *(of_pairs if pairs else ())]  # the last, so that sizes stay
    slugs = [_slug(o) for o in others]
    return {
        f"{slug}-{'first' if first else 'second'}": (17 + 2 * i + first, other, first)
        for i, (slug, other) in enumerate(zip(slugs, others, strict=True))
        for first in (True, False)
    }


def named_order(name: str, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> list[Step]:
    """The calls of the order of that name, on sizes of its own; several heads, head dim 64."""
    _, other, first = named_orders(dtype)[name]
    own = Step("the call", build(base_case(name, dtype, seed), device))
    if name.startswith(f"dropout-{ANOTHER}-"):  # of two calls that drop, each its own places
        own = replace(_dropout(own.inputs, seed=3), name="the call")
    return [other(own.inputs), own] if first else [own, other(own.inputs), own]


def base_case(name: str, dtype: torch.dtype, seed: int = 0) -> Case:
    """What all calls of the order of that name are made of."""
    length = named_orders(dtype)[name][0]
    return Case(f"order-{length}", length, length, heads=4, head_dim=64, dtype=dtype, seed=seed)


def differing(name: str) -> str:
    """In what the other call of the order of that name differs from the call itself, in words."""
    what = name.removesuffix("-first").removesuffix("-second")
    whose, _, how = what.rpartition("-")
    if how in ("outermost", "misaligned"):
        return f"the strides of {whose}"
    if what in ("expanded", "inner_strided", "heads_outermost"):
        return "the strides of its tensors"
    words = {"dense": "the mask", "causal": "the mask", "window": "the mask", "dropout": "the random state"}
    words |= {"scale": "the scale", "softcap": "the softcap", "bfloat": "the dtype", "float": "the dtype"}
    return next((words[word] for word in words if what.startswith(word)), what)


def _slug(other: Any) -> str:
    """Words for what a partial of `_others` changes."""
    heads = {_dropout: "dropout", _out_stored: "out"}
    words = [heads[other.func]] if other.func in heads else []
    for value in other.keywords.values():
        words.append(getattr(value, "__name__", str(value)).strip("_").removeprefix("torch."))
    kept = [w for w in words if w not in ("False", "True")]
    return "-".join([*(k for k in other.keywords if k in ("scale", "softcap")), *kept])


def run(pair: OpPair, order: Sequence[Step]) -> list[tuple[str, list[Verdict]]]:
    """The verdicts on every call of an order, in its order; of torch's own there is none."""
    found = []
    for step in order:
        if step.plain:
            _torchs_own(step.inputs)
            continue
        x = step.inputs
        if x.options.dropout_p:
            x = replace(x, dropout=drawn_mask(pair, x))
        found.append((step.name, judged(whole(pair, x, step.stored), x)))
    return found


def _others(claims: Claims, dtype: torch.dtype) -> Iterator[Callable[[Inputs], Step]]:
    """What makes other calls of the same shapes."""
    for name in ("q", "k", "v", "grad_out"):
        for change in (_outermost, _misaligned):
            yield partial(_stored_one, name=name, change=change)
    for store in (expanded, inner_strided, heads_outermost):
        yield partial(_stored_all, store=store)
    for change in (_outermost, _misaligned):
        yield partial(_out_stored, change=change)
    for other in sorted(claims.dtypes - {dtype}, key=str):
        yield partial(_in_dtype, dtype=other)
    for scale in (0.5, -0.3):
        yield partial(_with, scale=scale)
    able = claims.masks | ({"causal"} if claims.causal != "none" else frozenset())
    for kind in ("dense_bool", "dense_float", "causal", "window"):
        if kind in able:
            yield partial(_masked, kind=kind, rounded=claims.bias_dtype == "input")
    if claims.softcap:
        yield partial(_with, softcap=2.0)
    if claims.dropout:
        yield partial(_dropout, seed=3)


def _stored_one(x: Inputs, name: str, change: Callable[[Tensor], Tensor]) -> Step:
    return Step(f"{name}{change.__name__}", replace(x, **{name: change(getattr(x, name))}))  # type: ignore[arg-type]


def _stored_all(x: Inputs, store: Callable[..., tuple[Tensor, ...]]) -> Step:
    q, k, v, grad_out = store(x.q, x.k, x.v, x.grad_out)
    return Step(f"all {store.__name__}", replace(x, q=q, k=k, v=v, grad_out=grad_out))


def _out_stored(x: Inputs, change: Callable[[Tensor], Tensor]) -> Step:
    return Step(f"out{change.__name__}", x, change)


def _in_dtype(x: Inputs, dtype: torch.dtype) -> Step:
    q, k, v, grad_out = (t.to(dtype) for t in (x.q, x.k, x.v, x.grad_out))
    return Step(str(dtype).removeprefix("torch."), replace(x, q=q, k=k, v=v, grad_out=grad_out))


def _masked(x: Inputs, kind: str, rounded: bool) -> Step:
    bias = torch.randn(x.q.shape[1], x.k.shape[1], generator=torch.Generator().manual_seed(1))[None, None]
    bias = bias.to(x.q.device, x.q.dtype if rounded else accumulate_dtype(x.q.dtype))
    masks = {
        "dense_bool": Mask(dense=bias > -0.5),
        "dense_float": Mask(dense=bias),
        "causal": Mask(causal=0),
        "window": Mask(causal=2, since=-3),
    }
    return Step(f"mask {kind}", replace(x, mask=masks[kind]))


def _with(x: Inputs, **options: Any) -> Step:
    return Step(f"{options}", replace(x, options=replace(x.options, **options)))


def _dropout(x: Inputs, seed: int) -> Step:
    return Step(f"dropout {seed}", replace(_with(x, dropout_p=0.3).inputs, rng=torch.tensor([seed, 0])))


def _misaligned(x: Tensor) -> Tensor:
    return misaligned(x)[0]


def _outermost(x: Tensor) -> Tensor:
    return heads_outermost(x)[0]


def _torchs_own(x: Inputs) -> None:
    """F.scaled_dot_product_attention, forward and backward, on the backend that torch takes."""
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in (x.q, x.k, x.v))
    out = functional.scaled_dot_product_attention(q, k, v, scale=x.options.scale)
    with torch.autograd.set_multithreading_enabled(False):  # in this thread, as the pair: kernel caches are per thread
        torch.autograd.grad(out, (q, k, v), x.grad_out.transpose(1, 2))
