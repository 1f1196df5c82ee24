"""Faults of one call, as data; what they do is in pairs.py and calls.py."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from . import calls
from .historical import transposed_again
from .pairs import (
    MINUS_INF,
    all_transposed_again,
    another_state,
    backward_gives,
    backward_sees,
    blind_rows_average,
    blind_rows_nan,
    both_see,
    coarse,
    dbias_without_lse,
    default_scale,
    dropout_ignored,
    dropped_but_not_scaled,
    first_sample_keys,
    first_sample_mask,
    forward_gives,
    grads_through,
    groups_interleaved,
    groups_not_summed,
    key_segments_ignored,
    lse_in_log2_returned,
    moved,
    next_parts_state,
    no_softcap,
    only_causal,
    own_lse,
    softcap_after_mask,
    strides_ignored,
    window_moved,
    without_last_key,
    without_scale_in_dq,
)
from .plant import NOT_BFLOAT16, SIXTEEN, Plant, takes

LAYOUT: dict[str, Plant] = {
    "q-transposed-twice": Plant(
        "backward transposes query once more",
        "several heads",
        backward_sees(lambda c: c._replace(q=transposed_again(c.q))),
        diagnosis="a second transpose of query",
    ),
    "all-transposed-twice": Plant(
        "backward transposes query, key and value once more, grad_out not",
        "several heads",
        backward_sees(all_transposed_again),
        diagnosis="a second transpose of query, key and value",
    ),
    "strides-of-k-ignored": Plant(
        "key's memory is read as contiguous",
        "heads outermost in memory",
        both_see(lambda c: c._replace(k=strides_ignored(c.k)), lambda c: c._replace(k=strides_ignored(c.k))),
        diagnosis="key read through other strides",
    ),
    "strides-of-grad-out-ignored": Plant(
        "grad_out's memory is read as contiguous",
        "heads outermost in memory",
        backward_sees(lambda c: c._replace(grad_out=strides_ignored(c.grad_out))),
        diagnosis="grad_out read through other strides",
        source="Dao-AILab/flash-attention#355",
    ),
    "dk-and-dv-swapped": Plant(
        "dk comes back as dv and dv as dk",
        "ordinary numbers",
        backward_gives(lambda c, g: g._replace(dk=g.dv, dv=g.dk)),
        diagnosis="a swap of dk and dv",
    ),
    "heads-for-tokens": Plant(
        "heads attend to heads, as if (B, S, H, D) were (B, H, S, D)",
        "several heads",
        calls.heads_for_tokens,
        diagnosis="heads that attend to heads in place of tokens",
    ),
    "lse-tokens-before-heads": Plant(
        "lse comes back as (B, Sq, H)",
        "ordinary numbers",
        calls.lse_only(calls.tokens_before_heads),
        diagnosis="lse is laid out as (B, Sq, H)",
    ),
    "lse-padded": Plant(
        "lse comes back padded to a multiple of 32 queries",
        "ordinary numbers",
        calls.lse_only(calls.padded_to_32),
        diagnosis="lse is padded",
    ),
}
HANDED: dict[str, Plant] = {
    "lse-in-log2-returned": Plant(
        "lse comes back in base 2", "ordinary numbers", lse_in_log2_returned, diagnosis="base 2"
    ),
    "lse-in-log2-in-backward": Plant(
        "backward takes an lse in base 2 for a natural one",
        "ordinary numbers",
        backward_sees(lambda c: c._replace(lse=c.lse / math.log(2))),
        diagnosis="an lse in base 2",
    ),
    "lse-in-bf16-returned": Plant(
        "lse is rounded to bfloat16",
        "ordinary numbers",
        forward_gives(lambda r: r._replace(lse=coarse(r.lse))),
        diagnosis="an lse rounded to bfloat16",
    ),
    "lse-in-bf16-in-backward": Plant(
        "backward's lse is rounded to bfloat16",
        "ordinary numbers",
        backward_sees(lambda c: c._replace(lse=coarse(c.lse))),
        diagnosis="an lse rounded to bfloat16",
    ),
    "own-lse-in-backward": Plant(
        "backward takes out and lse of its own keys, not the global ones",
        "keys in parts",
        own_lse,
        needs=lambda c: c.backward_from_lse,
        diagnosis="an out and an lse of each step's own keys",
    ),
    "out-ignored-in-backward": Plant(
        "rowsum(grad_out out) is left out",
        "ordinary numbers",
        backward_sees(lambda c: c._replace(out=torch.zeros_like(c.out))),
        diagnosis="an out that backward was not given",
    ),
    "upstream-gradient-ignored": Plant(
        "the upstream gradient is taken as ones",
        "ordinary numbers",
        backward_sees(lambda c: c._replace(grad_out=torch.ones_like(c.grad_out))),
        diagnosis="an upstream gradient taken as ones",
    ),
    "upstream-gradient-of-lse-ignored": Plant(
        "the gradient of lse is dropped",
        "a gradient of lse",
        backward_sees(lambda c: c._replace(grad_lse=None)),
        needs=lambda c: c.dlse,
        diagnosis="ignoring the gradient of lse",
    ),
    "dbias-of-lse-missing": Plant(
        "what the gradient of lse adds to dbias is missing",
        "a gradient of lse and of a mask",
        dbias_without_lse,
        needs=lambda c: c.dbias and c.dlse,
        diagnosis="ignoring the gradient of lse in dbias",
    ),
}
SCALES: dict[str, Plant] = {
    "scale-ignored": Plant(
        "the default scale in place of the given one",
        "a scale of its own",
        both_see(default_scale, default_scale),
        diagnosis="the default scale in place of the given one",
        source="pytorch/pytorch#174361",
    ),
    "scale-ignored-in-backward": Plant(
        "backward takes the default scale",
        "a scale of its own",
        backward_sees(default_scale),
        diagnosis="the default scale in place of the given one in backward",
    ),
    "scale-missing-in-dq": Plant(
        "dq is not multiplied by the scale",
        "ordinary numbers",
        backward_gives(without_scale_in_dq),
        diagnosis="the scale is missing",
    ),
    "softcap-ignored": Plant(
        "softcap is dropped",
        "softcap",
        both_see(no_softcap, no_softcap),
        needs=lambda c: c.softcap,
        diagnosis="a softcap that is ignored",
    ),
    "softcap-ignored-in-backward": Plant(
        "backward drops softcap",
        "softcap",
        backward_sees(no_softcap),
        needs=lambda c: c.softcap,
        diagnosis="a softcap that is ignored in backward",
    ),
    "softcap-after-the-mask": Plant(
        "scores are capped after the mask was added",
        "softcap and a mask",
        softcap_after_mask,
        needs=lambda c: c.softcap and "dense_float" in c.masks,
        diagnosis="a softcap that is applied after the mask",
    ),
    **{
        f"{name}-1-percent-off": Plant(
            f"{name} is 1 % too large",
            "a float mask" if name == "dbias" else "ordinary numbers",
            forward_gives(lambda r: r._replace(out=r.out * 1.01))
            if name == "out"
            else grads_through(lambda g: g * 1.01, name),
            needs=lambda c, n=name: c.dbias or n != "dbias",  # type: ignore[misc]
            diagnosis="1.01 times",
        )
        for name in ("out", "dq", "dk", "dv", "dbias")
    },
    "gradients-of-two-ranks": Plant(
        "gradients are summed over ranks that each have them whole",
        "ordinary numbers",
        grads_through(lambda g: g * 2, "dq", "dk", "dv", "dbias"),
        diagnosis="the number of ranks",
    ),
}
SHARED: dict[str, Plant] = {
    "groups-not-summed": Plant(
        "dk and dv are those of each group's first query head",
        "fewer key heads",
        groups_not_summed,
        diagnosis="the first head of each group",
        source="marin-community/levanter#449",
    ),
    "groups-interleaved": Plant(
        "query head h reads key head h % Hk", "fewer key heads", groups_interleaved, diagnosis="key head h % Hk"
    ),
    "last-key-left-out": Plant(
        "a loop stops before the last key",
        "ordinary numbers",
        without_last_key,
        diagnosis="leaving out the last key",
    ),
    "first-half-of-keys": Plant(
        "only the keys of the own shard are seen",
        "ordinary numbers",
        calls.first_half,
        needs=takes("key_keep"),
        diagnosis="seeing the first of 2 parts of the keys alone",
    ),
    "first-sample-keys-in-backward": Plant(
        "backward reads the first sample's key and value for all",
        "several samples",
        backward_sees(first_sample_keys),
        diagnosis="the first sample's key and value",
    ),
    "queries-after-the-keys": Plant(
        "queries beyond the number of keys come back as zeros",
        "more queries than keys",
        calls.zeros_after_the_keys,
        diagnosis="zeros for queries beyond the number of keys",
        source="vllm-project/vllm-omni#5865",
    ),
}
MASKS: dict[str, Plant] = {
    "mask-ignored": Plant(
        "every mask is dropped",
        "a mask",
        calls.with_mask(calls.ignored),
        needs=takes("dense_bool", "dense_float", "key_keep", "key_bias"),
        diagnosis="ignor",
        source="huggingface/diffusers#12605",
    ),
    "mask-ignored-in-backward": Plant(
        "backward drops every mask but causal",
        "a mask",
        backward_sees(lambda c: c._replace(mask=only_causal(c.mask))),
        needs=lambda c: bool(c.masks),
        diagnosis="ignor",
        source="NVIDIA/TransformerEngine#3333",
    ),
    "mask-inverted": Plant(
        "True is taken to hide",
        "a bool mask",
        calls.with_mask(calls.inverted),
        needs=takes("dense_bool", "key_keep"),
        diagnosis="an inverted",
    ),
    "mask-of-floats-as-bool": Plant(
        "a float mask is turned into a bool one",
        "a float mask",
        calls.float_as_bool,
        needs=takes("dense_float"),
        diagnosis="a float mask that is turned into a bool one",
        source="huggingface/transformers#38094",
    ),
    "first-sample-mask": Plant(
        "the first sample's key mask is taken for all",
        "a key mask per sample",
        both_see(first_sample_mask, first_sample_mask),
        needs=takes("key_keep"),
        diagnosis="the first sample's mask",
    ),
    "first-sample-dense-mask": Plant(
        "the first sample's mask is taken for all",
        "a mask per sample",
        calls.first_of_dense(0),
        needs=takes("dense_bool"),
        diagnosis="the first sample's mask",
    ),
    "first-head-mask": Plant(
        "the first head's mask is taken for all",
        "a mask per head",
        calls.first_of_dense(1),
        needs=takes("dense_bool"),
        diagnosis="the first head's mask",
        source="pytorch/pytorch#184180",
    ),
    "causal-always": Plant(
        "a call without a mask is causal",
        "no mask",
        calls.with_mask(calls.always_causal),
        needs=lambda c: c.causal != "none",
        diagnosis="a causal mask that nobody asked for",
        source="pytorch/torchtitan#2297",
    ),
    "causal-ignored-in-backward": Plant(
        "backward is not causal",
        "causal",
        backward_sees(lambda c: c._replace(mask=replace(c.mask, causal=None))),
        needs=lambda c: c.causal != "none",
        diagnosis="ignoring causal in backward",
    ),
    "causal-bottom-right": Plant(
        "causal counts from the last key",
        "causal, other lengths",
        moved(lambda c: c.k.shape[1] - c.q.shape[1]),
        needs=lambda c: c.causal != "none",
        diagnosis="aligned bottom-right",
    ),
    "causal-off-by-one": Plant(
        "a query does not see the key at its own place",
        "causal",
        moved(lambda c: -1),
        needs=lambda c: c.causal != "none",
        diagnosis="a causal limit one key early",
    ),
    **{
        f"window-{does}-{when}": Plant(
            f"a window {does} one key {when}",
            "a window",
            window_moved(**{which: by}),
            needs=lambda c: "window" in c.masks,
            diagnosis=f"a window that {does} one key {when}",
        )
        for does, which in (("begins", "first"), ("ends", "last"))
        for when, by in (("early", -1), ("late", 1))
    },
    "segments-of-keys-ignored": Plant(
        "keys are taken to be in the documents of the queries at their places",
        "segments",
        both_see(key_segments_ignored, key_segments_ignored),
        needs=lambda c: "segments" in c.masks,
        diagnosis="the queries' segments for the keys",
    ),
    "blind-rows-average": Plant(
        "rows that see nothing come back with the average value",
        "rows that see nothing",
        blind_rows_average,
        needs=lambda c: bool(c.masks),
        diagnosis="an average of all values",
    ),
    "blind-rows-lse-zero": Plant(
        "rows that see nothing come back with lse 0",
        "rows that see nothing",
        forward_gives(lambda r: r._replace(lse=r.lse.masked_fill(r.lse == MINUS_INF, 0.0))),
        needs=lambda c: bool(c.masks),
        diagnosis="an lse of 0 for rows that see nothing",
    ),
    "blind-rows-nan": Plant(
        "dq is NaN in rows that see nothing",
        "rows that see nothing",
        backward_gives(blind_rows_nan),
        needs=lambda c: bool(c.masks),
        diagnosis="NaN in the rows that see nothing",
    ),
    "blind-rows-out-nan": Plant(
        "out is NaN in rows that see nothing",
        "rows that see nothing",
        forward_gives(calls.blind_rows_out_nan),
        needs=lambda c: bool(c.masks),
        diagnosis="out and dq are NaN in the rows that see nothing",
    ),
}
DROPOUT: dict[str, Plant] = {
    "random-state-not-replayed": Plant(
        "backward draws again",
        "dropout",
        backward_sees(another_state),
        needs=lambda c: c.dropout,
        diagnosis="another dropout mask than forward's",
    ),
    "random-state-of-the-next-part": Plant(
        "backward uses the offset of the next part of a call",
        "dropout",
        backward_sees(next_parts_state),
        needs=lambda c: c.dropout,
        diagnosis="another dropout mask than forward's",
    ),
    "dropout-scale-missing-in-backward": Plant(
        "what backward keeps is not divided by 1 - p",
        "dropout",
        backward_sees(dropped_but_not_scaled),
        needs=lambda c: c.dropout,
        diagnosis="dropout whose weights are not divided by 1 - p in backward",
    ),
    "dropout-ignored-in-backward": Plant(
        "backward does not drop",
        "dropout",
        backward_sees(dropout_ignored),
        needs=lambda c: c.dropout,
        diagnosis="dropout that is ignored in backward",
    ),
}
FORM: dict[str, Plant] = {
    "out-in-bf16": Plant(
        "out is rounded to bfloat16",
        "ordinary numbers",
        forward_gives(lambda r: r._replace(out=coarse(r.out))),
        dtypes=NOT_BFLOAT16,
        diagnosis="an out rounded to bfloat16",
    ),
    "dk-in-bf16": Plant(
        "dk is rounded to bfloat16",
        "ordinary numbers",
        grads_through(coarse, "dk"),
        dtypes=NOT_BFLOAT16,
        diagnosis="rounding to bfloat16",
    ),
    "gradients-in-float32": Plant(
        "dq and dk come back in float32 for 16-bit inputs",
        "ordinary numbers",
        grads_through(lambda g: g.float(), "dq", "dk"),
        dtypes=SIXTEEN,
        diagnosis="returned in float32",
    ),
    "dk-missing": Plant(
        "dk does not come back",
        "ordinary numbers",
        backward_gives(lambda c, g: g._replace(dk=None)),
        diagnosis="dk is missing",
    ),
    "dbias-missing": Plant(
        "dbias does not come back",
        "a float mask",
        backward_gives(lambda c, g: g._replace(dbias=None)),
        needs=lambda c: c.dbias,
        diagnosis="dbias is missing",
    ),
}
CALLS: dict[str, Plant] = {**LAYOUT, **HANDED, **SCALES, **SHARED, **MASKS, **DROPOUT, **FORM}
