"""Its pairs of a forward and a backward op, as its context-parallel templates call them.

The templates hand over tensors that do not require grad and a config of several ranks, and read the answer from `ctx`.
A ring asks for the lse and, since 0.40, hands keys, values, out and lse to backward again; Ulysses does neither.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from diffusers.models import attention_dispatch as theirs
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import Tensor

from ...audit.subject import Call, Plain, Says, Subject, through_autograd
from .._torch_calls import given, other_dtype, seeded
from .dispatcher import KNOWN, PLACES, arguments, expressible, missing_for
from .stand_in import STANDS_IN, beyond, standing_in, within_stand_in

MASKED = ("native_attention", "cudnn_attention")  # the pairs that do not drop a mask


def found(device: str, about: str) -> Iterator[Subject]:
    """Every pair that the release has, by the names of its functions."""
    for stem in stems():
        backend = backend_of(stem)
        value = stem if backend is None else backend.value
        known, name = KNOWN.get(value), f"diffusers/{value.removeprefix('_')}"
        missing = "no backend of the registry uses it" if backend is None else missing_for(backend, known, device)
        missing = missing or ("" if device == "cuda" or value == "native" else f"{device} lacks the kernel it calls")
        says = Says() if known is None else pair_says(value, known.says)
        for lse in (False, True):
            variant, claims = "pair-lse" if lse else "pair", replace(says, lse=lse)
            yield Pair(f"{name}/{variant}", stem, claims, about, missing)
            if device == "cpu" and value in STANDS_IN:
                told = f"{about}; {STANDS_IN[value]}"
                yield Pair(f"{name}/{variant}/stand-in", stem, within_stand_in(claims), told, stand_in=value)


def stems() -> list[str]:
    """x of every `_x_forward_op` that has a `_x_backward_op`."""
    named = (re.fullmatch(r"_(\w+)_forward_op", name) for name in vars(theirs))
    return [m[1] for m in named if m and hasattr(theirs, f"_{m[1]}_backward_op")]


def backend_of(stem: str) -> Any:
    """The backend whose function has the pair among the names that it uses."""
    backends = theirs._AttentionBackendRegistry._backends
    return next((b for b, call in backends.items() if f"_{stem}_forward_op" in call.__code__.co_names), None)


def pair_says(backend: str, says: Says) -> Says:
    """What a pair takes: less than its backend, for the kernels are called as they are."""
    says = replace(says, causal="square", mask_grad=False, ranks=frozenset())
    if backend == "native":
        return says
    return replace(says, gqa=False, head_dims=(min(says.head_dims[0], 256), 8))


class Pair(Plain):
    """One pair through an autograd ctx."""

    def __init__(self, name: str, stem: str, says: Says, about: str, missing: str = "", stand_in: str = "") -> None:
        super().__init__(name, self.attend_call, says, about, None, missing, self.lines)
        object.__setattr__(self, "stem", stem)
        object.__setattr__(self, "stand_in", stand_in)

    stem: str
    stand_in: str

    def against(self, call: Call) -> str:
        limits = [self.says.against(call), other_dtype(call)]
        if self.stem == "native_attention" and self.says.lse:
            limits.append("return_lse: its own error says that it has none")
        if call.mask.causal is not None and call.mask.kinds - PLACES:
            limits.append("a mask beside is_causal")
        if self.stand_in:
            limits.append(beyond(call.dense()))
        return "; ".join(filter(None, limits))

    def attend_call(self, call: Call) -> tuple[Tensor, Tensor | None]:
        expressible(call)
        if self.stem not in MASKED and call.mask.kinds - PLACES:
            raise NotImplementedError("its backend refuses every mask")
        if call.mask.causal is not None and call.query.shape[1] != call.key.shape[1]:
            raise NotImplementedError("the op says nothing of causal with another number of keys")
        seeded(call)
        query, key, value, attn_mask = arguments(call)
        options = {
            "attn_mask": attn_mask, "dropout_p": call.dropout_p, "is_causal": call.mask.causal is not None,
            "scale": None if call.default_scale else call.scale, "enable_gqa": call.group > 1,
            "return_lse": self.says.lse, "_parallel_config": config(),
        }  # fmt: skip
        out, lse = _ThroughCtx.apply(query, key, value, self._ops(), options, self.stand_in)
        return out, None if lse is None else (lse.squeeze(-1) if lse.dim() == 4 else lse).transpose(1, 2)

    def run(self, call: Call) -> Any:
        if call.ranks.size > 1:
            raise NotImplementedError("a pair runs on one device")
        return through_autograd(self.attend, call)

    def lines(self, call: Call) -> str:
        if self.stand_in:
            return ""
        options = given(
            [
                ("attn_mask=attn_mask", bool(call.mask.kinds - PLACES)),
                (f"dropout_p={call.dropout_p}", bool(call.dropout_p)),
                ("is_causal=True", call.mask.causal is not None),
                (f"scale={call.scale!r}", not call.default_scale),
                ("enable_gqa=True", call.group > 1),
                ("return_lse=True", self.says.lse),
            ]
        )
        again = ", **ctx.inputs" if self.says.lse and _takes(self._ops()[1], "lse") else ""
        return (LINES_LSE if self.says.lse else LINES).format(stem=self.stem, options=options, again=again)

    def _ops(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        forward, backward = (getattr(theirs, f"_{self.stem}_{way}_op") for way in ("forward", "backward"))
        return forward, backward


LINES = """\
from types import SimpleNamespace
import torch
from diffusers.models import attention_dispatch

class Pair(torch.autograd.Function):  # as TemplatedUlyssesAttention calls the two ops
    @staticmethod
    def forward(ctx, *inputs):
        config = SimpleNamespace(context_parallel_config=SimpleNamespace(_world_size=2))
        given = [x.detach() for x in inputs]
        return attention_dispatch._{stem}_forward_op(ctx, *given{options}, _save_ctx=True, _parallel_config=config)

    @staticmethod
    def backward(ctx, grad_out):
        return attention_dispatch._{stem}_backward_op(ctx, grad_out)[:3]

out = Pair.apply(query, key, value)"""
LINES_LSE = """\
from types import SimpleNamespace
import torch
from diffusers.models import attention_dispatch

class Pair(torch.autograd.Function):  # as TemplatedRingAttention calls the two ops
    @staticmethod
    def forward(ctx, *inputs):
        config = SimpleNamespace(context_parallel_config=SimpleNamespace(_world_size=2))
        given = [x.detach() for x in inputs]
        out, lse = attention_dispatch._{stem}_forward_op(
            ctx, *given{options}, _save_ctx=True, _parallel_config=config
        )
        ctx.inputs = dict(zip(("query", "key", "value", "out", "lse"), (*given, out.detach(), lse)))
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        return attention_dispatch._{stem}_backward_op(ctx, grad_out{again})[:3]

out, lse = Pair.apply(query, key, value)
lse = (lse.squeeze(-1) if lse.dim() == 4 else lse).transpose(1, 2)"""


def config() -> Any:
    """A config of two ranks that nobody sets up: a pair reads no more of it than their number."""
    inner = ContextParallelConfig(ulysses_degree=2)
    inner._world_size = 2
    return ParallelConfig(context_parallel_config=inner)


class _ThroughCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ops: Any, options: Any, stand_in: str) -> Any:
        ctx.ops, ctx.stand_in, ctx.lse, ctx.inputs = ops, stand_in, options["return_lse"], None
        handed = [x.detach() for x in (query, key, value)]
        with standing_in(stand_in):
            result = ops[0](ctx, *handed, _save_ctx=True, **options)
        out, lse = result if ctx.lse else (result, None)
        if ctx.lse and _takes(ops[1], "lse"):
            ctx.inputs = dict(zip(("query", "key", "value", "out", "lse"), (*handed, out.detach(), lse), strict=True))
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> Any:
        with standing_in(ctx.stand_in):
            grads = ctx.ops[1](ctx, grad_out, **(ctx.inputs or {}))
        return (*grads[:3], None, None, None)


def _takes(op: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(op).parameters
