"""Faults of a pair that the judgement must find, beside the historical ones in ringtrue.plants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringtrue.audit.truth import bias_of, visible
from ringtrue.contract import Claims, ForwardOut, Grads, Mask, OpPair, Options, accumulate_dtype
from ringtrue.plants import BackwardCall, ForwardCall, changed, transposed_again

MINUS_INF = float("-inf")


@dataclass(frozen=True)
class Mutant:
    """A fault, and what a pair must claim and which dtypes its inputs must have for it to be one.

    where: a word in the ids of the cases that are tried first, which saves time and nothing else.
    """

    make: Callable[[OpPair], OpPair]
    needs: Callable[[Claims], bool] = lambda claims: True
    dtypes: frozenset[torch.dtype] = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
    where: str = ""


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
            torch.cat([g, torch.zeros_like(x[:, -1:])], 1) for g, x in zip(grads[1:3], (call.k, call.v), strict=True)
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
        return grads._replace(dk=grads.dk[:, :, ::group], dv=grads.dv[:, :, ::group])

    return replace(pair, backward=backward)


def groups_interleaved(pair: OpPair) -> OpPair:
    """Query head h reads key head h modulo Hk."""

    def spread(call):  # type: ignore[no-untyped-def]
        group = call.q.shape[2] // call.k.shape[2]
        return call._replace(k=call.k.repeat(1, 1, group, 1), v=call.v.repeat(1, 1, group, 1))

    def backward(*args: object) -> Grads:
        call = BackwardCall(*args)  # type: ignore[arg-type]
        grads = pair.backward(*spread(call))
        dk, dv = (g.unflatten(2, (-1, call.k.shape[2])).sum(2) for g in (grads.dk, grads.dv))
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


def scaled(name: str, by: float) -> Callable[[OpPair], OpPair]:
    return backward_gives(
        lambda call, grads: grads._replace(
            **{name: None if getattr(grads, name) is None else getattr(grads, name) * by}
        )
    )


def only_causal(mask: Mask) -> Mask:
    return Mask(causal=mask.causal)


def coarse(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


NOT_BFLOAT16 = frozenset({torch.float64, torch.float32, torch.float16})
SIXTEEN = frozenset({torch.bfloat16, torch.float16})

MUTANTS: dict[str, Mutant] = {
    "q-transposed-twice": Mutant(backward_sees(lambda c: c._replace(q=transposed_again(c.q)))),
    "all-transposed-twice": Mutant(
        backward_sees(lambda c: c._replace(**{n: transposed_again(getattr(c, n)) for n in ("q", "k", "v")}))
    ),
    "strides-of-k-ignored": Mutant(
        both_see(lambda c: c._replace(k=strides_ignored(c.k)), lambda c: c._replace(k=strides_ignored(c.k))),
        where="outermost",
    ),
    "strides-of-grad-out-ignored": Mutant(
        backward_sees(lambda c: c._replace(grad_out=strides_ignored(c.grad_out))), where="outermost"
    ),
    "lse-in-log2-returned": Mutant(lse_in_log2_returned),
    "lse-in-log2-in-backward": Mutant(backward_sees(lambda c: c._replace(lse=c.lse / math.log(2)))),
    "lse-in-bf16-returned": Mutant(forward_gives(lambda r: r._replace(lse=coarse(r.lse)))),
    "lse-in-bf16-in-backward": Mutant(backward_sees(lambda c: c._replace(lse=coarse(c.lse)))),
    "own-lse-in-backward": Mutant(own_lse),
    "out-ignored-in-backward": Mutant(backward_sees(lambda c: c._replace(out=torch.zeros_like(c.out)))),
    "dk-and-dv-swapped": Mutant(backward_gives(lambda c, g: g._replace(dk=g.dv, dv=g.dk))),
    "upstream-gradient-ignored": Mutant(backward_sees(lambda c: c._replace(grad_out=torch.ones_like(c.grad_out)))),
    "upstream-gradient-of-lse-ignored": Mutant(
        backward_sees(lambda c: c._replace(grad_lse=None)), lambda c: c.dlse, where="lse"
    ),
    "scale-ignored": Mutant(both_see(default_scale, default_scale), where="scale"),
    "scale-ignored-in-backward": Mutant(backward_sees(default_scale), where="scale"),
    "scale-missing-in-dq": Mutant(backward_gives(lambda c, g: g._replace(dq=g.dq / (c.options.scale or 1)))),
    "groups-not-summed": Mutant(groups_not_summed, where="gqa"),
    "groups-interleaved": Mutant(groups_interleaved, where="gqa"),
    "last-key-left-out": Mutant(without_last_key),
    "first-sample-keys-in-backward": Mutant(backward_sees(first_sample_keys)),
    "first-sample-mask": Mutant(both_see(first_sample_mask, first_sample_mask), where="keep"),
    "mask-ignored-in-backward": Mutant(backward_sees(lambda c: c._replace(mask=only_causal(c.mask))), where="bool"),
    "causal-ignored-in-backward": Mutant(
        backward_sees(lambda c: c._replace(mask=replace(c.mask, causal=None))), where="causal"
    ),
    "causal-bottom-right": Mutant(moved(lambda c: c.k.shape[1] - c.q.shape[1]), where="causal"),
    "causal-off-by-one": Mutant(moved(lambda c: -1), where="causal"),
    "window-begins-early": Mutant(window_moved(first=-1), lambda c: "window" in c.masks, where="window"),
    "window-begins-late": Mutant(window_moved(first=1), lambda c: "window" in c.masks, where="window"),
    "window-ends-early": Mutant(window_moved(last=-1), lambda c: "window" in c.masks, where="window"),
    "window-ends-late": Mutant(window_moved(last=1), lambda c: "window" in c.masks, where="window"),
    "segments-of-keys-ignored": Mutant(
        both_see(key_segments_ignored, key_segments_ignored), lambda c: "segments" in c.masks, where="segments"
    ),
    "random-state-not-replayed": Mutant(backward_sees(another_state), lambda c: c.dropout, where="dropout"),
    "random-state-of-the-next-part": Mutant(backward_sees(next_parts_state), lambda c: c.dropout, where="dropout"),
    "dropout-scale-missing-in-backward": Mutant(
        backward_sees(dropped_but_not_scaled), lambda c: c.dropout, where="dropout"
    ),
    "dropout-ignored-in-backward": Mutant(backward_sees(dropout_ignored), lambda c: c.dropout, where="dropout"),
    "softcap-ignored": Mutant(both_see(no_softcap, no_softcap), lambda c: c.softcap, where="softcap"),
    "softcap-ignored-in-backward": Mutant(backward_sees(no_softcap), lambda c: c.softcap, where="softcap"),
    "softcap-after-the-mask": Mutant(softcap_after_mask, lambda c: c.softcap, where="softcap"),
    "blind-rows-average": Mutant(blind_rows_average, where="blind"),
    "blind-rows-lse-zero": Mutant(
        forward_gives(lambda r: r._replace(lse=r.lse.masked_fill(r.lse == MINUS_INF, 0.0))), where="blind"
    ),
    "blind-rows-nan": Mutant(backward_gives(blind_rows_nan), where="blind"),
    "out-1-percent-off": Mutant(forward_gives(lambda r: r._replace(out=r.out * 1.01))),
    "dq-1-percent-off": Mutant(scaled("dq", 1.01)),
    "dk-1-percent-off": Mutant(scaled("dk", 1.01)),
    "dv-1-percent-off": Mutant(scaled("dv", 1.01)),
    "dbias-1-percent-off": Mutant(scaled("dbias", 1.01), lambda c: c.dbias, where="float"),
    "out-in-bf16": Mutant(forward_gives(lambda r: r._replace(out=coarse(r.out))), dtypes=NOT_BFLOAT16),
    "dk-in-bf16": Mutant(backward_gives(lambda c, g: g._replace(dk=coarse(g.dk))), dtypes=NOT_BFLOAT16),
    "gradients-in-float32": Mutant(
        backward_gives(lambda c, g: g._replace(dq=g.dq.float(), dk=g.dk.float())), dtypes=SIXTEEN
    ),
    "dk-missing": Mutant(backward_gives(lambda c, g: g._replace(dk=None))),
    "dbias-of-lse-missing": Mutant(dbias_without_lse, lambda c: c.dbias and c.dlse, where="lse"),
    "dbias-missing": Mutant(backward_gives(lambda c, g: g._replace(dbias=None)), lambda c: c.dbias, where="float"),
}
