"""The cases: what every pair and every subject of an audit is judged on, dtype by dtype, as far as its claims go."""

from __future__ import annotations

from .inputs import Case
from .subject import Ranks

LENGTHS = (
    *(Case(f"length-{s}", s, s) for s in (1, 5, 16, 33, 129)),
    Case("heads-equal-length", 16, 16, heads=16, head_dim=8),
    Case("one-key", 7, 1),
    Case("one-key-gqa", 5, 1, heads=4, kv_heads=2),
    Case("one-query", 1, 33),
    Case("cross-longer-keys", 9, 70),
    Case("cross-longer-queries", 70, 9),
    Case("empty-batch", 5, 7, batch=0),
    Case("empty-queries", 0, 7),
    Case("empty-keys", 5, 0),
    Case("empty-both", 0, 0),
    Case("empty-keys-masked", 5, 0, mask="keep", causal=0),
)
HEADS = (
    Case("gqa", 33, 21, heads=6, kv_heads=2),
    Case("mqa", 16, 16, heads=4, kv_heads=1),
    Case("wide-values", 17, 19, head_dim=16, value_dim=40),
    Case("narrow-values", 17, 19, head_dim=40, value_dim=8),
    Case("gqa-narrow-values-causal", 19, 19, heads=4, kv_heads=2, head_dim=24, value_dim=9, causal=0),
    Case("one-channel", 12, 12, head_dim=1),
    Case("odd-channels", 20, 24, head_dim=37),
    Case("few-channels", 20, 24, head_dim=5, value_dim=11),
    Case("many-channels", 20, 24, head_dim=128),
    Case("three-samples-one-head", 20, 24, batch=3, heads=1),
)
SCALES = (
    Case("scale-zero", 9, 16, scale=0.0),
    Case("scale-negative", 9, 16, scale=-0.3),
    Case("scale-one", 9, 16, scale=1.0),
    Case("scale-zero-causal", 16, 16, scale=0.0, causal=0),
    Case("scale-negative-causal", 16, 16, scale=-0.3, causal=0),
    Case("scale-negative-masked", 9, 16, mask="some:bqk", scale=-0.3, causal=2),
)
STORED = (
    Case("heads-outermost", 33, 21, storage="heads_outermost"),
    Case("heads-outermost-heads-equal-length", 8, 8, heads=8, storage="heads_outermost"),
    Case("fused", 33, 33, storage="fused"),
    Case("expanded", 17, 33, storage="expanded"),
    Case("expanded-gqa", 17, 33, heads=4, kv_heads=2, storage="expanded"),
    Case("misaligned", 17, 33, storage="misaligned"),
    Case("misaligned-masked", 17, 33, mask="keep_ragged", causal=16, storage="misaligned"),
    Case("inner-strided", 17, 33, storage="inner_strided"),
    Case("inner-strided-wide-values", 17, 33, head_dim=8, value_dim=24, storage="inner_strided"),
)
DISTRIBUTIONS = (
    Case("peaked", 33, 65, values="peaked"),
    Case("peaked-causal", 65, 65, values="peaked", causal=0),
    Case("heavy-tailed", 33, 65, values="heavy"),
    Case("heavy-tailed-masked", 33, 65, values="heavy", mask="keep_ragged"),
)
BOOLS = (
    *(Case(f"bool-{axes}", 13, 18, mask=f"some:{axes}") for axes in ("k", "q", "bk", "hk", "qk", "bqk", "hqk", "bhqk")),
    Case("bool-all", 13, 18, mask="all:qk"),
    Case("bool-strided", 13, 18, mask="strided:bqk"),
    Case("bool-single", 13, 18, mask="single:bqk"),
    Case("bool-blind", 13, 18, mask="blind:bqk"),
    Case("bool-blind-per-head", 13, 18, mask="blind:hqk"),
    Case("bool-blind-sample", 13, 18, mask="blind:bk"),
    Case("bool-blind-rows", 13, 18, mask="blind:q"),
    Case("bool-gqa", 13, 18, mask="some:hqk", heads=4, kv_heads=2),
    Case("keep", 33, 21, mask="keep"),
    Case("keep-ragged", 33, 70, mask="keep_ragged"),
    Case("keep-blind", 13, 18, mask="keep_blind"),
)
FLOATS = (
    *(Case(f"float-{axes}", 13, 18, mask=f"float:{axes}") for axes in ("k", "bk", "qk", "hqk", "bhqk")),
    Case("float-q", 13, 18, mask="float_input:q"),
    Case("float-of-input", 13, 18, mask="float_input:hqk"),
    Case("float-strided", 13, 18, mask="float_strided:bqk"),
    Case("float-infinite", 13, 18, mask="float_infinite:bqk"),
    Case("float-blind", 13, 18, mask="float_blind:bhqk"),
    Case("float-lowest", 13, 18, mask="float_lowest:bqk"),
    Case("float-lowest-rows", 13, 18, mask="float_lowest_rows_input:bqk", splits=False),
    Case("float-padding", 13, 18, mask="float_padding_input:bk"),
    Case("float-gqa", 13, 18, mask="float:hqk", heads=4, kv_heads=2),
    Case("bias", 33, 21, mask="bias"),
    Case("bias-of-input", 33, 21, mask="bias_input"),
    Case("bias-infinite", 13, 18, mask="bias_infinite"),
    Case("bias-blind", 13, 18, mask="bias_blind"),
    Case("bias-lowest", 13, 18, mask="bias_lowest"),
    Case("bias-padding", 13, 18, mask="bias_padding"),
)
CAUSAL = (
    Case("causal", 33, 33, causal=0),
    Case("causal-wide", 9, 20, causal=0),
    Case("causal-tall", 20, 9, causal=0),
    Case("causal-bottom-right", 9, 20, causal=11),
    Case("causal-bottom-right-blind", 20, 9, causal=-11),
    Case("causal-negative", 16, 16, causal=-3),
    Case("causal-all-blind", 5, 9, causal=-20),
    Case("causal-last-row-only", 6, 9, causal=-5),
    Case("causal-positive", 16, 16, causal=5),
    Case("causal-beyond", 9, 20, causal=40),
    Case("causal-one-query", 1, 20, causal=7),
    Case("causal-one-key", 20, 1, causal=-4),
)
COMBINED = (
    Case("causal-keep", 20, 20, mask="keep", causal=0),
    Case("causal-keep-blind", 20, 20, mask="keep_blind", causal=-2),
    Case("causal-bool", 20, 20, mask="some:bqk", causal=1),
    Case("causal-float", 20, 20, mask="float:hqk", causal=0),
    Case("causal-bias", 20, 24, mask="bias", causal=4),
    Case("bool-keep", 13, 18, mask="some:hqk+keep"),
    Case("float-keep", 13, 18, mask="float:qk+keep"),
    Case("bool-bias", 13, 18, mask="some:bqk+bias"),
    Case("bias-keep-causal", 20, 20, mask="bias+keep_ragged", causal=-1),
    Case("all-of-them", 40, 40, mask="blind:bqk+keep_ragged+bias_infinite", causal=2, heads=4, kv_heads=2),
)
PLACES = (
    Case("window", 20, 20, causal=2, since=-3),
    Case("window-past", 40, 33, causal=0, since=-6, heads=4, kv_heads=2),
    Case("window-from", 9, 20, since=4),
    Case("window-to-none", 20, 9, causal=1, since=-1),
    Case("window-bias", 20, 24, mask="bias+keep_ragged", causal=5, since=-4),
    Case("segments", 33, 33, mask="documents"),
    Case("segments-apart", 13, 18, mask="apart", grad_lse=True),
    Case("segments-window-float", 20, 20, mask="documents+float:hqk", causal=0, since=-6),
)
DEEPER = (
    Case("softcap", 17, 33, values="peaked", softcap=3.0),
    Case("softcap-saturated", 17, 33, values="peaked", softcap=0.4),
    Case("softcap-masked", 20, 20, mask="float:hqk+keep_ragged", causal=0, softcap=2.0),
    Case("dropout", 17, 33, dropout=0.3, splits=False),
    Case("dropout-gqa-masked", 20, 20, mask="float:hqk", causal=1, heads=4, kv_heads=2, dropout=0.5, splits=False),
    Case("dropout-grad-lse", 13, 18, mask="blind:bqk", dropout=0.2, grad_lse=True, splits=False),
    Case("grad-lse", 17, 33, grad_lse=True),
    Case("grad-lse-one-key", 7, 1, grad_lse=True),
    Case("grad-lse-blind", 13, 18, mask="blind:bqk", grad_lse=True),
    Case("grad-lse-causal-gqa-bias", 20, 20, mask="bias_input", causal=-2, heads=4, kv_heads=2, grad_lse=True),
)
CASES: tuple[Case, ...] = (
    *LENGTHS, *HEADS, *SCALES, *STORED, *DISTRIBUTIONS, *BOOLS, *FLOATS, *CAUSAL, *COMBINED, *PLACES, *DEEPER,
)  # fmt: skip
# larger ones, for a full audit alone
SIZES = tuple(
    Case(f"size-{s}-dim-{d}", s, s, heads=2, head_dim=d, batch=2)
    for s, d in ((127, 64), (128, 64), (129, 64), (192, 128), (255, 128), (256, 40), (257, 72), (128, 256), (191, 80))
)
CROSSED = (
    Case("size-causal-191-on-257", 191, 257, causal=0, head_dim=64, heads=2),
    Case("size-bottom-right-127-on-256", 127, 256, causal=129, head_dim=64, heads=2),
    Case("size-masked-193", 193, 193, mask="some:bqk", head_dim=64, heads=2),
    Case("size-ragged-320", 320, 320, mask="keep_ragged", head_dim=64, heads=4, kv_heads=2),
    Case("size-window-256", 256, 256, causal=0, since=-31, head_dim=64, heads=2),
    Case("size-heads-outermost-130", 130, 130, head_dim=64, heads=2, storage="heads_outermost"),
    Case("size-fused-256", 256, 256, head_dim=64, heads=2, storage="fused"),
    Case("heads-equal-length-64", 16, 16, heads=16, head_dim=64),
    Case("one-query-negative-scores", 1, 128, heads=1, head_dim=64, values="negative"),
    Case("one-query-negative-scores-128", 1, 128, heads=4, head_dim=128, values="negative"),
    Case("large-scores", 16, 16, heads=2, head_dim=64, values="large"),
)
SUBSETS = tuple(
    Case(f"only-{wants}", 19, 23, wants=wants.replace("bias", "b").replace("none", ""), mask="float_input:hqk")
    for wants in ("q", "k", "v", "qk", "qv", "kv", "bias", "vbias", "none")
)
# for those who take no mask, or not with the rest
PLAIN_SUBSETS = tuple(Case(f"only-{wants}-plain", 19, 23, wants=wants) for wants in ("q", "k", "v", "qk", "qv", "kv"))
PAIRED = (
    Case("gqa-scale", 17, 19, heads=4, kv_heads=2, scale=0.3),
    Case("gqa-causal", 19, 19, heads=4, kv_heads=2, causal=0),
    Case("one-query-causal", 1, 20, causal=0),
    Case("one-query-gqa", 1, 20, heads=4, kv_heads=2),
    Case("dim-96", 33, 40, head_dim=96),
)
MORE: tuple[Case, ...] = (*SIZES, *CROSSED, *SUBSETS, *PLAIN_SUBSETS, *PAIRED)

# calls of several processes; lengths that do not divide, heads that do not divide, and what only some can do
PARALLEL: tuple[tuple[Case, Ranks], ...] = (
    (Case("ulysses-2", 16, 16, heads=4), Ranks(ulysses=2)),
    (Case("ring-2", 16, 16, heads=4), Ranks(ring=2)),
    (Case("both-2-2", 32, 32, heads=4), Ranks(ulysses=2, ring=2)),
    (Case("ring-4", 32, 32, heads=2), Ranks(ring=4)),
    (Case("ulysses-2-heads-equal-length", 16, 16, heads=32), Ranks(ulysses=2)),
    (Case("ring-2-heads-equal-length", 16, 16, heads=8), Ranks(ring=2)),
    (Case("ulysses-2-gqa", 16, 16, heads=4, kv_heads=2), Ranks(ulysses=2)),
    (Case("ring-2-gqa", 16, 16, heads=4, kv_heads=2), Ranks(ring=2)),
    (Case("ulysses-2-causal", 16, 16, heads=4, causal=0), Ranks(ulysses=2)),
    (Case("ring-2-causal", 16, 16, heads=4, causal=0), Ranks(ring=2)),
    (Case("ring-2-cross", 12, 20, heads=4), Ranks(ring=2)),
    (Case("ulysses-2-keep", 16, 16, heads=4, mask="keep_ragged"), Ranks(ulysses=2)),
    (Case("ring-2-keep", 16, 16, heads=4, mask="keep_ragged"), Ranks(ring=2)),
    (Case("ring-2-peaked", 32, 32, heads=4, values="peaked"), Ranks(ring=2)),
    (Case("ulysses-2-scale", 16, 16, heads=4, scale=0.5), Ranks(ulysses=2)),
    (Case("ring-2-scale", 16, 16, heads=4, scale=0.5), Ranks(ring=2)),
    (Case("ring-2-dropout", 16, 16, heads=2, dropout=0.3), Ranks(ring=2)),
    (Case("ulysses-2-dropout", 16, 16, heads=2, dropout=0.3), Ranks(ulysses=2)),
    (Case("ulysses-2-lse", 16, 16, heads=4, grad_lse=True), Ranks(ulysses=2)),
    (Case("ring-2-lse", 16, 16, heads=4, grad_lse=True), Ranks(ring=2)),
    (Case("ulysses-2-uneven-heads", 16, 16, heads=3), Ranks(ulysses=2)),
    (Case("ulysses-2-uneven", 9, 9, heads=4), Ranks(ulysses=2)),
    (Case("ring-2-uneven", 9, 9, heads=4), Ranks(ring=2)),
    (Case("ring-4-empty-shard", 10, 10, heads=2), Ranks(ring=4, lengths=(4, 0, 5, 1))),
    (Case("ring-4-hidden", 16, 16, heads=2, mask="keep_blind"), Ranks(ring=4, lengths=(3, 2, 6, 5))),
    (Case("ring-2-balanced-causal", 20, 20, heads=2, causal=0), Ranks(ring=2, balanced=True)),
    (Case("both-2-2-balanced-keep", 20, 20, heads=4, mask="keep"), Ranks(ulysses=2, ring=2, balanced=True)),
    (Case("ring-2-window", 24, 24, heads=2, causal=0, since=-5), Ranks(ring=2)),
    (Case("ring-2-segments", 24, 24, heads=2, mask="documents"), Ranks(ring=2)),
    (Case("ring-2-bias", 16, 16, heads=2, mask="bias"), Ranks(ring=2)),
    (Case("both-2-2-prefix", 20, 20, heads=4), Ranks(ulysses=2, ring=2, prefix=4)),
    (Case("ulysses-2-prefix-causal", 20, 20, heads=4, causal=0), Ranks(ulysses=2, prefix=4)),
    (Case("ulysses-2-replicated", 14, 5, heads=4), Ranks(ulysses=2, replicated=True)),
    (Case("ulysses-2-cross", 12, 20, heads=4), Ranks(ulysses=2)),
)  # fmt: skip


def case(name: str) -> Case:
    """The case of that id."""
    return next(c for c in (*CASES, *MORE) if c.id == name)
