"""flex's glue: what the contract would not let through, and that a torch with other private functions is a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contract.subjects import verdicts
from ringtrue.audit.cases import case
from ringtrue.backends import _flex_mods, flex
from ringtrue.edge import edge

Broken = Callable[..., Any]
OPS = flex.ops()
LSE, GRAD_LSE = 4, 6  # places among the arguments of backward


def before(**change: Callable[[Any], Any]) -> Broken:
    """The backward op with arguments changed by place."""

    def broken(*args: Any) -> Any:
        return OPS.flex_attention_backward(*(change.get(f"a{i}", lambda x: x)(x) for i, x in enumerate(args)))

    return broken


def of_its_own(*args: Any) -> Any:
    """Backward from an out and lse that it computes again, of the keys it is given."""
    q, k, v, _, _, g, g_lse, score, back, places, *rest = args
    out, lse, _ = OPS.flex_attention(q, k, v, score, places, *rest)
    return OPS.flex_attention_backward(q, k, v, out, lse, g, g_lse, score, back, places, *rest)


def unchanged(kind: Any) -> Broken:
    return lambda score, b, h, i, j, grad, *tensors: [grad, *(None,) * (4 + len(tensors))]


def without(**parts: Any) -> Broken:
    right = flex.mods_of

    def broken(mask: Any, options: Any, device: Any) -> Any:
        return right(replace(mask, **parts), options, device)

    return broken


# case, whether in parts, the module, what is broken there
MUTANTS: dict[str, tuple[str, bool, Any, str, Any]] = {
    "lse in base 2": ("length-33", False, flex, "LN2", 1.0),
    "lse of its own keys": ("length-33", True, OPS, "flex_attention_backward", of_its_own),
    "a natural lse in backward": ("length-33", False, OPS, "flex_attention_backward", before(a4=lambda x: x * 0.6931)),
    "no gradient of lse": ("grad-lse", False, OPS, "flex_attention_backward", before(a6=lambda x: None)),
    "its gradient in base 2": ("grad-lse", False, OPS, "flex_attention_backward", before(a6=lambda x: x / 0.6931)),
    "softcap without a slope": ("softcap", False, _flex_mods, "slope", unchanged),
    "no causal limit": ("causal", False, flex, "mods_of", without(causal=None)),
    "no window": ("window", False, flex, "mods_of", without(since=None)),
    "no segments": ("segments", False, flex, "mods_of", without(q_segments=None, k_segments=None)),
    "no key padding": ("keep", False, flex, "mods_of", without(key_keep=None)),
    "no bias": ("bias", False, flex, "mods_of", without(key_bias=None)),
    "no mask": ("bool-bhqk", False, flex, "mods_of", without(dense=None)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_contract_finds_broken_glue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, in_parts, where, what, broken = MUTANTS[name]
    pair = edge(flex.BACKEND.pairs["cpu"])

    def judged() -> list[bool]:
        typed = replace(case(tried), dtype=torch.float32)
        return [v.ok for v in verdicts(pair, typed, "cpu", in_parts=in_parts)]

    assert all(judged())
    if where is OPS:
        changed = SimpleNamespace(**{**vars(OPS), what: broken})
        monkeypatch.setattr(flex, "ops", lambda: changed)
    else:
        monkeypatch.setattr(where, what, broken)
    assert not all(judged())


@pytest.mark.parametrize("name", flex.ARGUMENTS)
@pytest.mark.parametrize("found", [None, lambda query, key: None], ids=["absent", "other arguments"])
def test_a_private_function_that_moved_is_a_reason(name: str, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flex.BACKEND.unavailable("cpu") is None
    changed = SimpleNamespace(**{**vars(OPS), name: found})
    monkeypatch.setattr(flex, "ops", lambda: changed)
    reason = flex.BACKEND.unavailable("cpu")
    assert reason is not None
    assert (reason.code, reason.limit) == ("schema-moved", ", ".join(flex.ARGUMENTS[name]))
    assert reason.value == ("absent" if found is None else "query, key")
