"""More faults of one call: masks that are misread, keys that nobody looks at, results in another layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..contract import ForwardOut, Grads, Mask, OpPair
from .historical import BackwardCall, ForwardCall
from .pairs import MINUS_INF, both_see, forward_gives


def heads_for_tokens(pair: OpPair) -> OpPair:
    """A kernel of (B, H, S, D) that is handed (B, S, H, D): heads attend to heads, wherever the shapes allow it."""

    def fits(call: Any) -> bool:
        return call.q.shape == call.k.shape and not call.mask.kinds and call.mask.causal is None

    def turned(call: Any, *names: str) -> Any:
        return call._replace(**{n: getattr(call, n).transpose(1, 2) for n in names})

    def forward(*args: Any) -> ForwardOut:
        call = ForwardCall(*args)
        if not fits(call):
            return pair.forward(*call)
        result = pair.forward(*turned(call, "q", "k", "v"))
        return result._replace(out=result.out.transpose(1, 2), lse=result.lse.transpose(1, 2))

    def backward(*args: Any) -> Grads:
        call = BackwardCall(*args)
        if not fits(call):
            return pair.backward(*call)
        call = call._replace(grad_lse=None if call.grad_lse is None else call.grad_lse.transpose(1, 2))
        grads = pair.backward(*turned(call, "q", "k", "v", "grad_out", "out", "lse"))
        return Grads(*(None if g is None else g.transpose(1, 2) for g in grads[:3]))

    return replace(pair, forward=forward, backward=backward)


def with_mask(change: Callable[[Mask], Mask]) -> Callable[[OpPair], OpPair]:
    """Both passes compute with another mask."""

    def of(call: Any) -> Any:
        return call._replace(mask=change(call.mask))

    return both_see(of, of)


def ignored(mask: Mask) -> Mask:
    return Mask(causal=mask.causal, since=mask.since)


def inverted(mask: Mask) -> Mask:
    """Where True means "hidden"."""
    dense = mask.dense
    if dense is not None and dense.dtype == torch.bool:
        dense = ~dense
    return replace(mask, dense=dense, key_keep=None if mask.key_keep is None else ~mask.key_keep)


def float_as_bool(pair: OpPair) -> OpPair:
    """Every number but 0 lets a key be seen, -inf too; the gradient of such a mask is 0."""

    def change(mask: Mask) -> Mask:
        dense, bias, keep = mask.dense, mask.key_bias, mask.key_keep
        if dense is not None and dense.dtype != torch.bool:
            dense = dense.bool()
        if bias is not None:
            keep = bias.bool() if keep is None else keep & bias.bool()
        return replace(mask, dense=dense, key_bias=None, key_keep=keep)

    def backward(*args: Any) -> Grads:
        call = BackwardCall(*args)
        grads = pair.backward(*call._replace(mask=change(call.mask), wanted=call.wanted._replace(bias=False)))
        bias = call.mask.bias
        return grads._replace(dbias=torch.zeros_like(bias) if bias is not None and call.wanted.bias else None)

    def forward(*args: Any) -> ForwardOut:
        call = ForwardCall(*args)
        return pair.forward(*call._replace(mask=change(call.mask)))

    return replace(pair, forward=forward, backward=backward)


def first_of_dense(dim: int) -> Callable[[OpPair], OpPair]:
    """The first sample's (dim 0) or head's (dim 1) dense bool mask is taken for all."""

    def change(mask: Mask) -> Mask:
        dense = mask.dense
        if dense is None or dense.dtype != torch.bool:
            return mask
        return replace(mask, dense=dense.narrow(dim, 0, 1).expand_as(dense))

    return with_mask(change)


def always_causal(mask: Mask) -> Mask:
    return mask if mask.causal is not None or mask.since is not None else replace(mask, causal=0)


def first_half(pair: OpPair) -> OpPair:
    """A rank that looks at the keys it holds and at no others: here the first half."""

    def hidden(call: Any) -> Any:
        keys = call.k.shape[1]
        keep = (torch.arange(keys, device=call.k.device) < (keys + 1) // 2).expand(call.q.shape[0], -1)
        mask = call.mask
        return call._replace(mask=replace(mask, key_keep=keep if mask.key_keep is None else keep & mask.key_keep))

    return both_see(hidden, hidden)(pair)


def zeros_after_the_keys(pair: OpPair) -> OpPair:
    """A mask of keys is taken for one of queries: those beyond the number of keys come back as zeros."""

    def live(call: Any) -> Any:
        return (torch.arange(call.q.shape[1], device=call.q.device) < call.k.shape[1])[None, :, None, None]

    def forward(*args: Any) -> ForwardOut:
        call = ForwardCall(*args)
        result = pair.forward(*call)
        return result._replace(out=result.out * live(call))

    def backward(*args: Any) -> Grads:
        call = BackwardCall(*args)
        return pair.backward(*call._replace(grad_out=call.grad_out * live(call)))

    return replace(pair, forward=forward, backward=backward)


def blind_rows_out_nan(result: ForwardOut) -> ForwardOut:
    blind = (result.lse == MINUS_INF).transpose(1, 2).unsqueeze(-1)
    return result._replace(out=result.out.masked_fill(blind, float("nan")))


def lse_only(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[OpPair], OpPair]:
    """lse goes to the caller in another layout; backward has its own."""

    def make(pair: OpPair) -> OpPair:
        def backward(*args: Any) -> Grads:
            call = BackwardCall(*args)
            return pair.backward(*call._replace(lse=_like(call)))

        def _like(call: BackwardCall) -> torch.Tensor:
            own = pair.forward(call.q, call.k, call.v, call.mask, call.rng, call.options)
            return own.lse

        return replace(forward_gives(lambda r: r._replace(lse=change(r.lse)))(pair), backward=backward)

    return make


def tokens_before_heads(lse: torch.Tensor) -> torch.Tensor:
    return lse.transpose(1, 2)


def padded_to_32(lse: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32))
