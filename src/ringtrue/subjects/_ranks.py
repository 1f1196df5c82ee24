"""What subjects of several processes share: one rank's part of a call, and its answer in whole-sized tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..audit.subject import Call, Quantities, with_leaves

Attend = Callable[[Tensor, Tensor, Tensor], "Tensor | tuple[Tensor, Tensor | None]"]


def equal_parts(call: Call) -> None:
    """Raises for what a library that cuts every sequence into equal parts has no word for."""
    ranks = call.ranks
    if ranks.balanced or ranks.prefix or ranks.replicated or ranks.lengths is not None:
        raise NotImplementedError("every sequence is cut into equal parts, in the library's own order")
    if call.query.shape[1] % ranks.size or call.key.shape[1] % ranks.size:
        raise NotImplementedError("every sequence is cut into equal parts")


def answered(call: Call, places: tuple[Tensor, Tensor], attend: Attend) -> Quantities:
    """This rank's answer. places: which queries and which keys are its own; attend: out of its part, and lse if any."""
    whole, leaves = with_leaves(call)
    rows, columns = places
    result = attend(whole.query[:, rows], whole.key[:, columns], whole.value[:, columns])
    out, lse = result if isinstance(result, tuple) else (result, None)
    return in_place(call, leaves, rows, out, lse)


def in_place(call: Call, leaves: Mapping[str, Tensor], rows: Tensor, out: Tensor, lse: Tensor | None) -> Quantities:
    """out (B, S, H, Dv) and lse (B, H, S) of some rows of the whole call, and what they give of its gradients."""
    outputs, upstream = [out], [call.grad_out[:, rows]]
    if lse is not None and call.grad_lse is not None:
        outputs, upstream = [out, lse], [*upstream, call.grad_lse[:, :, rows]]
    names = [name for name in ("query", "key", "value", "bias") if name in call.wanted]
    found: tuple[Tensor | None, ...] = ()
    if names:
        found = torch.autograd.grad(outputs, [leaves[n] for n in names], upstream, allow_unused=True)
    grads = dict(zip(names, found, strict=True))
    batch, length, heads, _ = call.query.shape
    ends = [
        _placed(out, 1, rows, call.grad_out.shape),
        None if lse is None else _placed(lse, 2, rows, (batch, heads, length)),
    ]
    return Quantities(*ends, *(grads.get(n) for n in ("query", "key", "value", "bias")))


def _placed(x: Tensor, dim: int, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x` where it lies in the whole; zero elsewhere."""
    return torch.zeros(shape, dtype=x.dtype, device=x.device).index_copy(dim, places, x.detach())
