"""Faults of a pair that the judgement must find, beside the historical ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..audit.truth import bias_of, visible
from ..contract import ForwardOut, Grads, Mask, OpPair, Options, accumulate_dtype
from .historical import BackwardCall, ForwardCall, changed, transposed_again

MINUS_INF = float("-inf")


def backward_sees(change: Callable[[BackwardCall], BackwardCall]) -> Callable[[OpPair], OpPair]:
    return lambda pair: changed(pair, "mutant", backward=change)


def both_see(
    forward: Callable[[ForwardCall], ForwardCall], backward: Callable[[BackwardCall], BackwardCall]
) -> Callable[[OpPair], OpPair]:
    return lambda pair: changed(pair, "mutant", forward=forward, backward=backward)


def forward_gives(change: Callable[[ForwardOut], ForwardOut]) -> Callable[[OpPair], OpPair]:
    return lambda pair: replace(pair, forward=lambda *args: change(pair.forward(*args)))


def backward_gives(change: Callable[[BackwardCall, Grads], Grads]) -> Callable[[OpPair], OpPair]:
    return lambda pair: replace(pair, backward=lambda *args: change(BackwardCall(*args), pair.backward(*args)))


# Layout


def strides_ignored(x: Tensor) -> Tensor:
    """Memory with heads outermost, read as if tokens were."""
    return transposed_again(x) if x.transpose(1, 2).is_contiguous() else x


# lse


def lse_in_log2_returned(pair: OpPair) -> OpPair:
    """Wrong to the caller only: its own backward turns it back."""
    wrong = forward_gives(lambda r: r._replace(lse=r.lse / math.log(2)))(pair)
    return changed(wrong, "mutant", backward=lambda c: c._replace(lse=c.lse * math.log(2)))


def own_lse(pair: OpPair) -> OpPair:
    """Backward takes out and lse from its own keys, not the ones it is handed."""

    def backward(*args: object) -> Grads:
        call = BackwardCall(*args)  # type: ignore[arg-type]
        own = pair.forward(call.q, call.k, call.v, call.mask, call.rng, call.options)
        return pair.backward(*call._replace(out=own.out, lse=own.lse))

    return replace(pair, backward=backward)


# Masks


def moved(by: Callable[[ForwardCall | BackwardCall], int]) -> Callable[[OpPair], OpPair]:
    """A causal offset that is off."""

    def shift(call):  # type: ignore[no-untyped-def]
        mask = call.mask
        return call if mask.causal is None else call._replace(mask=replace(mask, causal=mask.causal + by(call)))

    return both_see(shift, shift)


def first_sample_mask(call):  # type: ignore[no-untyped-def]
    """The first sample's keys are kept or dropped for all samples."""
    keep = call.mask.key_keep
    return call if keep is None else call._replace(mask=replace(call.mask, key_keep=keep[:1].expand_as(keep)))


def blind_rows_average(pair: OpPair) -> OpPair:
    """A row that sees nothing gets the average of all values, as a softmax of equal numbers gives."""

    def forward(*args: object) -> ForwardOut:
        call, result = ForwardCall(*args), pair.forward(*args)  # type: ignore[arg-type]
        blind = (result.lse == MINUS_INF).transpose(1, 2).unsqueeze(-1)
        v = call.v.repeat_interleave(call.q.shape[2] // call.v.shape[2], 2)
        return result._replace(out=torch.where(blind, v.mean(1, keepdim=True), result.out))

    return replace(pair, forward=forward)


def blind_rows_nan(call: BackwardCall, grads: Grads) -> Grads:
    """dq as exp(-inf - -inf) makes it."""
    assert grads.dq is not None
    blind = (call.lse == MINUS_INF).transpose(1, 2).unsqueeze(-1)
    return grads._replace(dq=grads.dq.masked_fill(blind, float("nan")))


def window_moved(*, first: int = 0, last: int = 0) -> Callable[[OpPair], OpPair]:
    """A window that begins or ends one key away from where it should."""

    def shift(call):  # type: ignore[no-untyped-def]
        mask = call.mask
        if mask.since is None:
            return call
        causal = None if mask.causal is None else mask.causal + last
        return call._replace(mask=replace(mask, since=mask.since + first, causal=causal))

    return both_see(shift, shift)


def key_segments_ignored(call):  # type: ignore[no-untyped-def]
    """The keys are taken to be in the documents of the queries at their places."""
    mask = call.mask
    if mask.q_segments is None:
        return call
    places = torch.arange(call.k.shape[1], device=call.k.device).clamp(max=call.q.shape[1] - 1)
    return call._replace(mask=replace(mask, k_segments=mask.q_segments[:, places]))


# Dropout, softcap


def another_state(call: BackwardCall) -> BackwardCall:
    """The state is not replayed: backward draws again."""
    return call if call.rng is None else call._replace(rng=call.rng + torch.tensor([1, 0]))


def next_parts_state(call: BackwardCall) -> BackwardCall:
    """The offset of the next part of a call, as an edge or a ring counts them."""
    return call if call.rng is None else call._replace(rng=call.rng + torch.tensor([0, 1]))


def dropped_but_not_scaled(call: BackwardCall) -> BackwardCall:
    """Backward drops, but what it keeps is not divided by 1 - p: dP and dv are, rowsum(grad_out out) is not."""
    kept = 1.0 - call.options.dropout_p
    return call._replace(grad_out=call.grad_out * kept, out=call.out / kept)


def dropout_ignored(call: BackwardCall) -> BackwardCall:
    return call._replace(options=replace(call.options, dropout_p=0.0))


def dbias_without_lse(pair: OpPair) -> OpPair:
    """What a gradient of lse adds to the gradient of a float mask is missing."""

    def backward(*args: object) -> Grads:
        call = BackwardCall(*args)  # type: ignore[arg-type]
        return pair.backward(*call)._replace(dbias=pair.backward(*call._replace(grad_lse=None)).dbias)

    return replace(pair, backward=backward)


def softcap_after_mask(pair: OpPair) -> OpPair:
    """c tanh((scale q k + bias) / c): what is hidden comes back at -c, and a bias is squeezed."""

    def heads_first(call: ForwardCall | BackwardCall) -> Iterator[Tensor]:
        group = call.q.shape[2] // call.k.shape[2]
        for x, times in ((call.q, 1), (call.k, group), (call.v, group)):
            yield x.double().transpose(1, 2).repeat_interleave(times, 1)

    def capped(q: Tensor, k: Tensor, mask: Mask, options: Options) -> Tensor:
        like = options.scale * q @ k.mT
        scores = (like + bias_of(mask, like)).masked_fill(~visible(mask, like.shape, like.device), MINUS_INF)
        return options.softcap * torch.tanh(scores / options.softcap)

    def forward(*args: object) -> ForwardOut:
        call = ForwardCall(*args)  # type: ignore[arg-type]
        if not call.options.softcap or not (call.mask.kinds or call.mask.causal is not None):
            return pair.forward(*call)
        q, k, v = heads_first(call)
        scores = capped(q, k, call.mask, call.options)
        out = (scores.softmax(-1) @ v).transpose(1, 2).to(call.q.dtype)
        return ForwardOut(out, scores.logsumexp(-1).to(accumulate_dtype(call.q.dtype)))

    def backward(*args: object) -> Grads:
        call = BackwardCall(*args)  # type: ignore[arg-type]
        if not call.options.softcap or not (call.mask.kinds or call.mask.causal is not None):
            return pair.backward(*call)
        q, k, v = heads_first(call)
        scores, g = capped(q, k, call.mask, call.options), call.grad_out.double().transpose(1, 2)
        weights, d_weights = scores.softmax(-1), g @ v.mT
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        d_scores = call.options.scale * d_scores * (1 - (scores / call.options.softcap) ** 2)
        grads = (d_scores @ k, d_scores.mT @ q, weights.mT @ g)
        return Grads(
            *(
                d.unflatten(1, (x.shape[2], -1)).sum(2).transpose(1, 2).to(x.dtype)
                for d, x in zip(grads, (call.q, call.k, call.v), strict=True)
            )
        )

    return replace(pair, forward=forward, backward=backward)


def no_softcap(call):  # type: ignore[no-untyped-def]
    return call._replace(options=replace(call.options, softcap=0.0))


# Keys and heads


def without_last_key(pair: OpPair) -> OpPair:
    """The last key is left out, as by a loop that stops one tile early."""

    def parts(call):  # type: ignore[no-untyped-def]
        n = call.k.shape[1] - 1
        mask = call.mask.at(slice(0, call.q.shape[1]), slice(0, n))
        return call._replace(k=call.k[:, :n], v=call.v[:, :n], mask=mask)

    def forward(*args: object) -> ForwardOut:
        return pair.forward(*parts(ForwardCall(*args)))  # type: ignore[arg-type]

    def backward(*args: object) -> Grads:
        call = BackwardCall(*args)  # type: ignore[arg-type]
        grads = pair.backward(*parts(call))
        dk, dv = (
            None if g is None else torch.cat([g, torch.zeros_like(x[:, -1:])], 1)
            for g, x in zip(grads[1:3], (call.k, call.v), strict=True)
        )
        return grads._replace(dk=dk, dv=dv)

    return replace(pair, forward=forward, backward=backward)


def groups_not_summed(pair: OpPair) -> OpPair:
    """dk and dv are those of each group's first query head alone."""

    def backward(*args: object) -> Grads:
        call = BackwardCall(*args)  # type: ignore[arg-type]
        group = call.q.shape[2] // call.k.shape[2]
        k, v = (x.repeat_interleave(group, 2) for x in (call.k, call.v))
        grads = pair.backward(*call._replace(k=k, v=v))
        dk, dv = (None if g is None else g[:, :, ::group] for g in grads[1:3])
        return grads._replace(dk=dk, dv=dv)

    return replace(pair, backward=backward)


def groups_interleaved(pair: OpPair) -> OpPair:
    """Query head h reads key head h modulo Hk."""

    def spread(call):  # type: ignore[no-untyped-def]
        group = call.q.shape[2] // call.k.shape[2]
        return call._replace(k=call.k.repeat(1, 1, group, 1), v=call.v.repeat(1, 1, group, 1))

    def backward(*args: object) -> Grads:
        call = BackwardCall(*args)  # type: ignore[arg-type]
        grads = pair.backward(*spread(call))
        dk, dv = (None if g is None else g.unflatten(2, (-1, call.k.shape[2])).sum(2) for g in grads[1:3])
        return grads._replace(dk=dk, dv=dv)

    return replace(
        pair,
        forward=lambda *args: pair.forward(*spread(ForwardCall(*args))),
        backward=backward,
    )


def default_scale(call):  # type: ignore[no-untyped-def]
    return call._replace(options=replace(call.options, scale=call.q.shape[-1] ** -0.5))


def first_sample_keys(call: BackwardCall) -> BackwardCall:
    return call._replace(k=call.k[:1].expand_as(call.k), v=call.v[:1].expand_as(call.v))


def only_causal(mask: Mask) -> Mask:
    return Mask(causal=mask.causal)


def coarse(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def grads_through(change: Callable[[Tensor], Tensor], *names: str) -> Callable[[OpPair], OpPair]:
    """Some gradients are changed on their way out."""

    def of(call: BackwardCall, grads: Grads) -> Grads:
        there: dict[str, Tensor] = {n: getattr(grads, n) for n in names if getattr(grads, n) is not None}
        return grads._replace(**{n: change(g) for n, g in there.items()})

    return backward_gives(of)


def all_transposed_again(call: BackwardCall) -> BackwardCall:
    return call._replace(q=transposed_again(call.q), k=transposed_again(call.k), v=transposed_again(call.v))


def without_scale_in_dq(call: BackwardCall, grads: Grads) -> Grads:
    return grads if grads.dq is None else grads._replace(dq=grads.dq / (call.options.scale or 1.0))
