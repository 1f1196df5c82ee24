"""Its context-parallel templates alone, around a right pair: what is wrong here is no fault of a pair of its own.

diffusers/templates   _templated_context_parallel_attention with written-out attention, on every device
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffusers.models import attention_dispatch as theirs
from torch import Tensor

from ...audit.subject import Call, Plain, Quantities, Says, Subject
from .. import _stand_in as written_out
from . import parallel
from .dispatcher import SHARDED, arguments, expressible, under_context_parallelism
from .stand_in import beyond

SAYS = Says(
    frozenset({"float32", "float64", "bfloat16", "float16"}), frozenset({"float", "key_float"}), head_dims=(1 << 30, 1),
    ranks=SHARDED,
)  # fmt: skip


def found(device: str, about: str) -> Iterator[Subject]:
    """The one subject."""
    yield Templates("diffusers/templates", f"{about}; around written-out attention")


class Templates(Plain):
    """_templated_context_parallel_attention with a pair that follows its protocol."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__(name, self.attend_call, SAYS, about)

    def against(self, call: Call) -> str:
        limits = [self.says.against(call), "one process" if call.ranks.size == 1 else "", beyond(call.dense())]
        return "; ".join(filter(None, [*limits, *under_context_parallelism(call)]))

    def run(self, call: Call) -> Quantities:
        expressible(call)
        if call.ranks.size == 1 or call.dropout_p:
            raise NotImplementedError("templates are for several processes, and dropout is a pair's own")
        return parallel.run(call, self.attend_call)

    def attend_call(self, call: Call, config: Any = None) -> Tensor:
        """This rank's part of a call."""
        return theirs._templated_context_parallel_attention(
            *arguments(call), is_causal=call.mask.causal is not None, scale=call.scale, enable_gqa=call.group > 1,
            forward_op=_forward_op, backward_op=_backward_op, _parallel_config=config,
        )  # fmt: skip


def _forward_op(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float, enable_gqa: bool, return_lse: bool, _save_ctx: bool = True, _parallel_config: Any = None,
) -> Any:  # fmt: skip
    if problem := beyond(attn_mask):
        raise NotImplementedError(problem)
    asked = written_out.Asked(scale, attn_mask)
    out, lse = written_out.forward(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), asked)
    out, lse = out.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.asked = asked
    return (out, lse) if return_lse else out


def _backward_op(ctx: Any, grad_out: Tensor, *args: Any, **given: Tensor) -> tuple[Tensor, ...]:
    """From what forward saved, and from what the template hands over in its place (since 0.40)."""
    names = ("query", "key", "value", "out", "lse")
    read = dict(zip(names, ctx.saved_tensors, strict=True)) | given
    query, key, value, out, lse = (read[name].transpose(1, 2) for name in names)
    grads = written_out.backward(grad_out.transpose(1, 2), query, key, value, out, lse, ctx.asked)
    return tuple(x.transpose(1, 2).contiguous() for x in grads)
