"""What a pair does not claim is refused before any kernel: a call beyond every limit of every registered pair.

The pairs of all devices are judged here, by their claims, with both of their functions replaced by ones that must not
run; so the tensors may be anywhere, and a CUDA pair's limits are tested on a machine without CUDA too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import ringtrue as rt
from calls import WIDEST, qkv, reached, refused, unreachable
from ringtrue import select
from ringtrue.backends import REGISTRY
from ringtrue.contract import Claims, Facts, Mask, OpPair, Options, Wanted
from ringtrue.edge import widened

Attempt = Callable[[OpPair], object]


def call(
    *,
    heads_dim: int = 8,
    grad: bool | str = False,
    dtype: torch.dtype | None = None,
    widest: bool = True,
    **arguments: Any,
) -> Attempt:
    """One public call of small tensors, in the widest (or narrowest) dtype that the pair claims unless one is given."""

    def attempt(pair: OpPair) -> object:
        claimed = [d for d in WIDEST if d in pair.claims.dtypes]
        kind = dtype or claimed[0 if widest else -1]
        return rt.attention(*qkv(6, dim=heads_dim, dtype=kind, grad=grad), backend=pair, **arguments)

    return attempt


def in_a_ring(pair: OpPair) -> object:
    """What `attention` does with a pair once its plan has a ring: choose by facts that say so, then run the choice."""
    q, k, v = qkv(6, dtype=next(d for d in WIDEST if d in pair.claims.dtypes))
    facts = Facts("cpu", q.dtype, 2, 6, 6, 4, 4, 8, 8, wanted=Wanted(True, True, True), from_lse=True)
    (choice,) = select.fitting_pair(pair, facts)
    return choice.pair.forward(q, k, v, Mask(), None, Options(scale=1.0))


MASKS: dict[str, Callable[[], Any]] = {
    "dense_bool": lambda: torch.ones(6, 6, dtype=torch.bool),
    "dense_float": lambda: torch.zeros(6, 6),
    "key_keep": lambda: rt.KeyPadding(torch.ones(2, 6, dtype=torch.bool)),
    "key_bias": lambda: rt.KeyBias(torch.zeros(2, 6)),
    "segments": lambda: rt.Segments(torch.zeros(2, 6, dtype=torch.int)),
    "window": lambda: rt.Window(1, 1),
}


WIDE_MASK = torch.zeros(6, 6)


def no(claimed: object, attempt: Attempt) -> list[Attempt]:
    """The attempt, if this is not claimed."""
    return [] if claimed else [attempt]


# claim -> the code of its reason, and calls beyond what these claims allow (none, where they allow everything)
BEYOND: dict[str, tuple[str, Callable[[Claims], list[Attempt]]]] = {
    "dtypes": ("dtype", lambda c: [call(dtype=d) for d in WIDEST if d not in c.dtypes]),
    "masks": ("mask", lambda c: [call(attn_mask=made()) for kind, made in MASKS.items() if kind not in c.masks]),
    "bias_dtype": ("mask-dtype", lambda c: no(c.bias_dtype != "input", call(widest=False, attn_mask=WIDE_MASK))),
    "causal": ("causal", lambda c: no(c.causal != "none", call(is_causal=True))),
    "alone": ("mask-causal", lambda c: [call(attn_mask=MASKS[kind](), is_causal=True) for kind in c.alone & c.masks]),
    "max_head_dim": ("head-dim", lambda c: no(c.max_head_dim is None, call(heads_dim=(c.max_head_dim or 0) + 8))),
    "max_dropout_head_dim": (
        "head-dim-dropout",
        lambda c: no(c.max_dropout_head_dim is None, call(heads_dim=(c.max_dropout_head_dim or 0) + 8, dropout_p=0.5)),
    ),
    "max_deterministic_head_dim": (
        "not-deterministic",
        lambda c: no(
            c.max_deterministic_head_dim is None,
            call(heads_dim=(c.max_deterministic_head_dim or 0) + 8, grad=True, deterministic=True),
        ),
    ),
    "dropout": ("no-dropout", lambda c: no(c.dropout, call(dropout_p=0.5))),
    "softcap_dropout": ("softcap-dropout", lambda c: no(c.softcap_dropout, call(softcap=2.0, dropout_p=0.5))),
    "softcap": ("no-softcap", lambda c: no(c.softcap, call(softcap=2.0))),
    "lse": ("no-lse", lambda c: no(c.lse, call(return_lse=True))),
    "backward": ("no-backward", lambda c: no(c.backward, call(grad="k"))),
    "backward_from_lse": ("no-backward-from-lse", lambda c: no(c.backward_from_lse, in_a_ring)),
    "dbias": (
        "no-dbias",
        lambda c: no(c.dbias or "dense_float" not in c.masks, call(attn_mask=torch.zeros(6, 6, requires_grad=True))),
    ),
    "deterministic": ("not-deterministic", lambda c: no(c.deterministic, call(grad=True, deterministic=True))),
    "options": ("unknown-option", lambda c: [call(backend_options={"no_such_option": 1})]),
}
NOT_REFUSED = {
    "functions": "says what some options are: tests/backends/test_flex.py",
    "head_dim_multiple": "the edge pads",
    "head_dims": "the edge pads up to the next; beyond the last it is max_head_dim",
    "stride_multiple": "the edge copies",
    "key_tile": "the edge splits the keys",
    "dropout_tile": "the edge cuts the queries",
    "any_scale": "the edge moves the sign into q",
    "gqa": "the edge repeats the heads",
    "value_dim": "the edge pads the narrower one",
    "min_capability": "a matter of the device, see test_select.py",
    "max_capability": "the same",
    "deterministic_by_switch": "widens `deterministic`, see below",
    "any_strides": "the edge makes it contiguous",
    "dlse": "known only in backward, when somebody asks for it: an error there",
    "double_backward": "known only in the backward of backward: an error there",
    "arithmetic": "says how it computes, not what it takes",
}
NARROWEST = Claims(
    frozenset({torch.bfloat16}),
    bias_dtype="input",
    max_head_dim=8,
    max_dropout_head_dim=8,
    max_deterministic_head_dim=8,
    softcap_dropout=False,
    alone=frozenset({"key_keep", "segments"}),
    lse=False,
    backward=False,
    backward_from_lse=False,
    deterministic=False,
)

# what else a pair must lack for that limit to show
NEEDS: dict[str, dict[str, object]] = {"alone": {"masks": frozenset(MASKS) - {"dense_float"}}}


def attempts() -> Iterator[object]:
    for backend in REGISTRY:
        for device, pair in backend.pairs.items():
            silent = replace(pair, forward=reached, backward=reached)
            for claim, (code, beyond) in BEYOND.items():
                for i, attempt in enumerate(beyond(widened(pair.claims))):
                    yield pytest.param(silent, attempt, code, id=f"{backend.name}-{device}-{claim}-{i}")


@pytest.mark.parametrize(("pair", "attempt", "code"), list(attempts()))
def test_what_is_not_claimed_is_refused_before_any_kernel(pair: OpPair, attempt: Attempt, code: str) -> None:
    with refused(rt.UnsupportedError, f"backend {pair.name!r} cannot take this call", f"{pair.name}: [{code}]"):
        attempt(pair)


def test_every_claim_has_its_refusal() -> None:
    """A new field of Claims comes with a call beyond it, or with why there is none."""
    assert {field.name for field in dataclasses.fields(Claims)} == BEYOND.keys() | NOT_REFUSED.keys()
    assert not BEYOND.keys() & NOT_REFUSED.keys()


def test_every_kind_of_mask_is_tried() -> None:
    assert {kind for b in REGISTRY for pair in b.pairs.values() for kind in widened(pair.claims).masks} == MASKS.keys()


@pytest.mark.parametrize("claim", BEYOND)
def test_each_limit_is_tried_and_can_be_seen_to_fail(claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair with this one limit is refused what is beyond it; where choosing drops the reason, its kernel runs."""
    code, beyond = BEYOND[claim]
    pair = unreachable("narrow", **{claim: getattr(NARROWEST, claim)}, **NEEDS.get(claim, {}))
    found = beyond(widened(pair.claims))
    assert found
    for attempt in found:
        with refused(rt.UnsupportedError, f"narrow: [{code}]"):
            attempt(pair)
    right = select.reasons_against
    monkeypatch.setattr(select, "reasons_against", lambda c, f: tuple(r for r in right(c, f) if r.code != code))
    for attempt in found:
        with pytest.raises(pytest.fail.Exception, match="a kernel ran"):
            attempt(pair)


def test_a_kernel_that_torchs_switch_makes_deterministic_is_taken_under_it() -> None:
    attempt = call(grad=True, deterministic=True)
    never = unreachable("never", deterministic=False)
    switched = unreachable("switched", deterministic=False, deterministic_by_switch=True)
    for pair, remedy in ((never, ""), (switched, "torch.use_deterministic_algorithms(True)")):
        with refused(rt.UnsupportedError, f"{pair.name}: [not-deterministic]", remedy):
            attempt(pair)
    torch.use_deterministic_algorithms(True)
    try:
        with refused(rt.UnsupportedError, "never: [not-deterministic]"):
            attempt(never)
        with pytest.raises(pytest.fail.Exception, match="a kernel ran"):
            attempt(switched)
    finally:
        torch.use_deterministic_algorithms(False)
