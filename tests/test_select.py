"""Choosing is data against data: every reason is given, a named backend never falls back, auto takes the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import ringtrue as rt
from calls import EVERYTHING, HERE, backend_of, qkv, refused, unreachable
from calls import one_thread as one_thread
from ringtrue import api, order, prepared, select
from ringtrue.contract import Backend, Claims, Facts, OpPair, Package, Reason, Wanted

PLAIN = Facts("cpu", torch.float32, batch=2, q_len=6, k_len=5, heads=4, kv_heads=4, head_dim=8, value_dim=8)
Q, K, V = qkv(6, 5)
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the registry by what is given, for one test."""

    def registry(*backends: Backend | OpPair) -> None:
        found = tuple(backend_of(b) if isinstance(b, OpPair) else b for b in backends)
        for module in (select, api):
            monkeypatch.setattr(module, "REGISTRY", found)
        monkeypatch.setattr(order, "ROWS", (order.Row("cpu", tuple(b.name for b in found), "", ""),))
        select.survey.cache_clear()
        prepared.forget()

    yield registry
    select.survey.cache_clear()
    prepared.forget()


LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    "dtype": ({"dtypes": frozenset({torch.bfloat16})}, {}, ("torch.bfloat16", "torch.float32")),
    "mask": ({"masks": frozenset({"key_keep"})}, {"mask_kinds": frozenset({"key_bias"})}, ("key_keep", "key_bias")),
    "causal": ({"causal": "none"}, {"causal": 3}, ("not causal", "causal")),
    "head-dim": ({"max_head_dim": 8}, {"value_dim": 9}, ("8", "9")),
    "no-dropout": ({"dropout": False}, {"dropout": True}, ("dropout_p = 0", "> 0")),
    "no-softcap": ({"softcap": False}, {"softcap": True}, ("softcap = 0", "> 0")),
    "no-backward": ({"backward": False}, {"wanted": Wanted(False, True, True)}, ("requires grad", "key, value")),
    "no-dbias": ({"dbias": False}, {"wanted": Wanted(False, False, False, True)}, ("does not require grad", "it does")),
    "no-lse": ({"lse": False}, {"needs_lse": True}, ("return_lse=False", "lse needed")),
    "no-backward-from-lse": (
        {"backward_from_lse": False}, {"from_lse": True, "wanted": Wanted(True, False, False)}, ("no ring", "ring"),
    ),
    "not-deterministic": (
        {"deterministic": False}, {"deterministic": True, "wanted": Wanted(True, False, False)}, ("=False", "=True"),
    ),
    "unknown-option": (
        {"options": frozenset({"fast"})}, {"options": (("fast", 1), ("slow", 2))}, ("fast", "slow"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", LIMITS)
def test_each_limit_is_a_reason_of_its_own(code: str) -> None:
    claims, facts, (limit, value) = LIMITS[code]
    pair = replace(EVERYTHING, **claims)
    (reason,) = select.reasons_against(pair, replace(PLAIN, **facts))
    assert reason.code == code
    assert limit in reason.limit
    assert value in reason.value
    assert select.reasons_against(pair, PLAIN) == () or code == "dtype"
    assert "no-d" not in code or reason.remedy


def test_all_reasons_are_given_at_once() -> None:
    claims = {name: value for c, _, _ in LIMITS.values() for name, value in c.items()}
    facts: dict[str, Any] = {name: value for _, f, _ in LIMITS.values() for name, value in f.items()}
    facts["wanted"] = Wanted(True, True, True, True)
    reasons = select.reasons_against(replace(EVERYTHING, **claims), replace(PLAIN, **facts))
    assert [r.code for r in reasons] == list(LIMITS)


def test_what_the_edge_adds_is_no_reason() -> None:
    poor = replace(EVERYTHING, masks=frozenset({"dense_float"}), causal="top_left", gqa=False, value_dim=False)
    every = frozenset({"dense_bool", "dense_float", "key_keep", "key_bias"})
    assert select.reasons_against(poor, replace(PLAIN, mask_kinds=every, causal=-3, kv_heads=2, value_dim=3)) == ()


def test_a_backend_on_another_device_or_absent_says_so(install: Install) -> None:
    gone = Reason("missing", "its library is not installed", remedy="install it")
    cuda = Backend("cuda_only", "", {"cuda": unreachable()})
    absent = replace(backend_of(unreachable("absent", masks=frozenset())), unavailable=lambda device: gone)
    install(cuda, absent)
    assert [r.code for r in select.reasons_for(cuda, PLAIN)] == ["device"]
    masked = replace(PLAIN, mask_kinds=frozenset({"key_keep"}))
    assert [r.code for r in select.reasons_for(absent, masked)] == ["missing", "mask"]
    with refused(rt.UnsupportedError, "no backend can", "cuda_only: [device]", "absent: [missing]", "install it"):
        rt.attention(Q, K, V)


@pytest.mark.parametrize("name", [b.name for b in HERE])
def test_a_named_backend_is_that_backend(name: str) -> None:
    for asked in (name, f"_{name}"):
        (choice,) = select.fitting(select.known(asked), PLAIN)
        assert (choice.backend, choice.asked, choice.pair.name) == (name, name, name)


@pytest.mark.parametrize("wrong", ["", "flash_5", "AUTO", "__auto", "native_math ", None, 3, ["auto"], torch.float32])
def test_an_unknown_name_lists_the_known_ones(wrong: object) -> None:
    known = (*(b.name for b in HERE), "auto")
    with refused(rt.ArgumentError, "unknown backend", repr(wrong), *known):
        select.known(wrong)
    if wrong is not None:
        with refused(rt.ArgumentError, "unknown backend", repr(wrong), *known, unchanged=(Q, K, V)):
            rt.attention(Q, K, V, backend=wrong)  # type: ignore[arg-type]


def test_a_named_backend_never_falls_back(install: Install) -> None:
    poor = unreachable("poor", masks=frozenset({"key_keep"}), softcap=False, causal="none")
    install(poor, unreachable("rich"), unreachable("maskless", masks=frozenset()))
    mask = rt.KeyBias(torch.zeros(2, 5)) & rt.Causal()
    with pytest.raises(rt.UnsupportedError) as caught:
        rt.attention(Q, K, V, mask, backend="poor", softcap=2.0)
    text = str(caught.value)
    assert [line.split("]")[0] for line in text.splitlines() if "- " in line] == [
        f"  - poor: [{code}" for code in ("mask", "causal", "no-softcap")
    ]
    assert text.startswith("backend 'poor' cannot take this call")
    assert text.endswith("remedy: these can: rich")
    assert "KeyBias(float32[2, 5]) & Causal(alignment='top_left'), softcap=2.0)" in text
    with rt.attention_backend("poor"), refused(rt.UnsupportedError, "backend 'poor' cannot", "these can: rich"):
        rt.attention(Q, K, V, mask)


def test_where_nobody_can_the_error_says_that(install: Install) -> None:
    install(unreachable("a", dropout=False), unreachable("b", dropout=False, softcap=False))
    with refused(rt.UnsupportedError, "a: [no-dropout]", "b: [no-dropout]", "b: [no-softcap]", "dropout_p=0.5"):
        rt.attention(Q, K, V, dropout_p=0.5, softcap=1.0)
    with refused(rt.UnsupportedError, "backend 'a' cannot", "a: [no-dropout]", "no registered backend can"):
        rt.attention(Q, K, V, dropout_p=0.5, backend="a")


def test_auto_is_the_first_that_fits_and_keeps_the_reasons_against_the_others(install: Install) -> None:
    install(unreachable("a", gqa=False, masks=frozenset()), unreachable("b", causal="none"), unreachable("c"))
    masked = replace(PLAIN, mask_kinds=frozenset({"key_keep"}))
    assert [c.backend for c in select.fitting("auto", PLAIN)] == ["a", "b", "c"]
    choices = select.fitting("auto", replace(masked, causal=0))
    assert [c.backend for c in choices] == ["c"]
    assert [(name, [r.code for r in why]) for name, why in choices[0].trace] == [
        ("a", ["mask"]),
        ("b", ["causal"]),
        ("c", []),
    ]


def test_auto_takes_no_pair_without_backward_whatever_grad_mode_is(install: Install) -> None:
    install(unreachable("forward_only", backward=False), unreachable("both"))
    assert [c.backend for c in select.fitting("auto", PLAIN)] == ["both"]
    assert [c.backend for c in select.fitting("forward_only", PLAIN)] == ["forward_only"]
    with torch.no_grad():
        assert rt.explain(Q, K, V).backend == "both"
    assert rt.explain(Q, K, V, backend="forward_only").backend == "forward_only"


@pytest.mark.parametrize("wants", ["q", "k", "v", "kv", "qkv"])
def test_training_through_a_pair_without_backward(wants: str, install: Install) -> None:
    pair = unreachable("forward_only", backward=False)
    install(pair, unreachable("both"))
    tensors = qkv(6, 5, grad=wants)
    named = ", ".join(name for name in ("query", "key", "value") if name[0] in wants)
    parts = ("'forward_only' cannot", "[no-backward]", f"value {named})", "use torch.no_grad()")
    for backend in (pair, "forward_only"):
        with refused(rt.UnsupportedError, *parts, "these can: both", unchanged=tensors):
            rt.attention(*tensors, backend=backend)


def test_a_pair_without_backward_runs_where_no_gradient_is_wanted() -> None:
    pair = replace(HERE[0].pairs["cpu"], claims=replace(HERE[0].pairs["cpu"].claims, backward=False))
    expected = rt.attention(Q, K, V, backend=HERE[0].name)
    assert torch.equal(rt.attention(Q, K, V, backend=pair), expected)
    with torch.no_grad():
        assert torch.equal(rt.attention(*qkv(6, 5, grad=True), backend=pair), expected)


def test_the_second_identical_call_looks_nothing_up(install: Install) -> None:
    asked = []
    here = HERE[0].pairs["cpu"]
    install(replace(backend_of(here), unavailable=lambda device: asked.append(device)))
    first = rt.attention(Q, K, V)
    assert asked == ["cpu"]
    assert torch.equal(rt.attention(Q, K, V), first)
    assert asked == ["cpu"]
    rt.attention(Q.double(), K.double(), V.double())
    assert asked == ["cpu", "cpu"]


@pytest.mark.parametrize(("seen", "codes"), [((7, 5), ["compute-capability"]), ((8, 0), []), ((9, 0), []), (None, [])])
def test_an_older_gpu_is_a_reason(seen: tuple[int, int] | None, codes: list[str]) -> None:
    facts = Facts("cuda", torch.bfloat16, 1, 4, 4, 2, 2, 8, 8, capability=seen)
    claims = Claims(frozenset({torch.bfloat16}), min_capability=(8, 0))
    assert [reason.code for reason in select.reasons_against(claims, facts)] == codes


@pytest.mark.parametrize(("seen", "codes"), [((9, 0), []), ((9, 1), ["compute-capability"]), (None, [])])
def test_a_newer_gpu_is_a_reason(seen: tuple[int, int] | None, codes: list[str]) -> None:
    facts = Facts("cuda", torch.bfloat16, 1, 4, 4, 2, 2, 8, 8, capability=seen)
    claims = Claims(frozenset({torch.bfloat16}), max_capability=(9, 0))
    assert [reason.code for reason in select.reasons_against(claims, facts)] == codes


def test_nothing_is_looked_for_that_a_call_cannot_become(install: Install) -> None:
    """Looking imports an optional package; only the one that was named may download."""
    asked: list[str] = []
    failed = Reason("not-fetched", "no network")

    def optional(name: str, **claims: Any) -> Backend:
        pair = unreachable(name, **claims)
        look, fetch = (partial(_noted, asked, f"{name}{what}", said) for what, said in (("", None), (" down", failed)))
        return replace(backend_of(pair), unavailable=look, packages=(Package("nowhere", ""),), fetch=fetch)

    install(unreachable("here"), optional("hub"), optional("poor", softcap=False))
    rt.explain(Q, K, V, backend="here")
    asked.clear()
    select.fitting("here", PLAIN)
    assert asked == []
    assert [c.backend for c in select.fitting("auto", replace(PLAIN, softcap=True))] == ["here", "hub"]
    assert asked == ["hub"]
    with refused(rt.UnsupportedError, "backend 'hub' cannot take this call", "hub: [not-fetched] no network"):
        rt.attention(Q, K, V, backend="hub")
    assert asked.count("hub down") == 1


def _noted(asked: list[str], name: str, said: Reason | None, device: str) -> Reason | None:
    asked.append(name)
    return said


@pytest.mark.parametrize("wanted", [Wanted(True, True, True), Wanted(False, False, False)])
def test_auto_takes_a_deterministic_pair_whatever_the_grad_mode(wanted: Wanted) -> None:
    """A reentrant checkpoint's first pass has grad mode off, and its recompute has not: both take one kernel."""
    facts = Facts("cuda", torch.bfloat16, 1, 4, 4, 2, 2, 8, 8, wanted=wanted, deterministic=True)
    reasons = {b.name: select.reasons_for(b, facts) for b in select.REGISTRY}
    fits = select.among("auto", facts, reasons, select.preference(facts).names)
    assert fits
    assert all(b.pairs["cuda"].claims.deterministic for b in fits)
