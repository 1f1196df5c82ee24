"""SageAttention around stand-ins of its two releases: what the kernel is handed, lse, what is refused, mutants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringtrue as rt
from calls import refused
from contract.subjects import inputs_for, verdicts
from ringtrue import exact, select
from ringtrue.audit.cases import CASES, case
from ringtrue.audit.inputs import Case, build
from ringtrue.audit.judge import judge, truth_of
from ringtrue.audit.laws import chunk_law, whole
from ringtrue.audit.yardstick import yardstick
from ringtrue.backends import REGISTRY, _hub, sage
from ringtrue.contract import Backend, Facts, ForwardOut, Mask, OpPair, Options, Wanted
from ringtrue.edge import edge
from standins import sageattention_1, sageattention_2

BF16 = torch.bfloat16
PAIR = sage.make_pair("sage", lambda: sageattention_2)
OLDER = sage.make_pair("sage", lambda: sageattention_1, claims=sage.RELEASE_1_CLAIMS)
BY_TRITON = sage.make_pair("triton", lambda: sageattention_2, sage.TRITON, sage.HALF_CLAIMS)
(MATH,) = (b for b in REGISTRY if b.name == "native_math")
TRAINED = exact.with_backward(edge(PAIR), edge(MATH.pairs["cpu"]))

RELEASED = {
    (sageattention_1, "sageattn"): """
        q k v tensor_layout=HND is_causal=False sm_scale=None smooth_k=True kwargs""",
    (sageattention_2, "sageattn"): """
        q k v tensor_layout=HND is_causal=False sm_scale=None return_lse=False kwargs""",
    (sageattention_1, "sageattn_varlen"): """
        q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k is_causal=False sm_scale=None smooth_k=True kwargs""",
    (sageattention_2, "sageattn_varlen"): """
        q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k is_causal=False sm_scale=None smooth_k=True kwargs""",
    (sageattention_2, sage.TRITON): """
        q k v tensor_layout=HND quantization_backend=triton is_causal=False sm_scale=None smooth_k=True
        return_lse=False kwargs""",
    (sageattention_2, sage.HALF): """
        q k v tensor_layout=HND is_causal=False qk_quant_gran=per_thread sm_scale=None pv_accum_dtype=fp32
        smooth_k=True smooth_v=False return_lse=False kwargs""",
    (sageattention_2, sage.FLOAT8): """
        q k v tensor_layout=HND is_causal=False qk_quant_gran=per_thread sm_scale=None pv_accum_dtype=fp32+fp16
        smooth_k=True smooth_v=False return_lse=False kwargs""",
    (sageattention_2, sage.HOPPER): """
        q k v tensor_layout=HND is_causal=False qk_quant_gran=per_thread sm_scale=None pv_accum_dtype=fp32+fp32
        smooth_k=True return_lse=False kwargs""",
}


@pytest.mark.parametrize(("module", "name"), RELEASED)
def test_the_stand_ins_have_the_arguments_of_their_releases(module: Any, name: str) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    own = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert own == RELEASED[module, name].split()


def pushed(x: Any) -> Any:
    """The same with keys whose mean is far from 0: what smoothing is for."""
    return replace(x, k=x.k + 3 * torch.ones_like(x.k))


def judged_as(pair: OpPair, x: Any, cuts: list[int] | None = None) -> list[bool]:
    result = whole(pair, x) if cuts is None else chunk_law(pair, x, cuts)
    return [v.ok for v in judge(result, truth_of(x), yardstick(x), x)]


def asked(pair: OpPair, name: str) -> Any:
    return inputs_for(pair, replace(case(name), dtype=BF16))


@pytest.mark.parametrize("name", ["length-129", "cross-longer-keys", "causal-tall", "one-query", "gqa"])
def test_keys_far_from_zero_are_right_in_one_call_and_in_parts(name: str) -> None:
    x = pushed(asked(edge(PAIR), name))
    assert all(judged_as(edge(PAIR), x))
    assert all(judged_as(edge(PAIR), x, [x.k.shape[1] // 2]))


def of_kernel(change: Callable[..., Any]) -> OpPair:
    """The pair, changed around each forward."""
    return edge(replace(PAIR, forward=lambda *given: change(*given)))


def uncorrected(q: Any, k: Any, v: Any, mask: Mask, rng: None, options: Options) -> ForwardOut:
    found = PAIR.forward(q, k, v, mask, rng, options)
    off = options.scale * torch.einsum("bqhd,bhd->bhq", q.float(), k.float().mean(1))
    return found._replace(lse=found.lse - off)


def over_channels(q: Any, k: Any, v: Any, *rest: Any) -> ForwardOut:
    return PAIR.forward(q, k - k.mean(-1, keepdim=True), v, *rest)


def in_base_2(*given: Any) -> ForwardOut:
    found = PAIR.forward(*given)
    return found._replace(lse=found.lse * 1.44269504)


def of_four_bits(q: Any, k: Any, v: Any, *rest: Any) -> ForwardOut:
    step = k.abs().amax((1, 3), keepdim=True) / 7
    return PAIR.forward(q, (k / step).round() * step, v, *rest)


def top_left_of_all(q: Any, k: Any, v: Any, mask: Mask, rng: None, options: Options) -> ForwardOut:
    return PAIR.forward(q, k, v, Mask(), rng, options)


MUTANTS = {
    "lse of keys without their mean": ("length-33", uncorrected),
    "the mean over the channels": ("length-33", over_channels),
    "lse to base 2": ("length-33", in_base_2),
    "four bits": ("length-129", of_four_bits),
    "no causal": ("causal", top_left_of_all),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str) -> None:
    name, change = MUTANTS[mutant]
    x = asked(edge(PAIR), name)
    middle = [x.k.shape[1] // 2]
    assert not all(judged_as(of_kernel(change), x, middle)), mutant
    assert all(judged_as(edge(PAIR), x, middle))


# The option: quantised forward, exact backward

TRAINED_CASES = [c for c in CASES if not c.mask and c.since is None and not c.softcap and not c.dropout]


@pytest.mark.parametrize("name", [c.id for c in TRAINED_CASES if c.q_len <= 70])
def test_gradients_of_the_option_are_exact_by_the_ordinary_rule(name: str) -> None:
    x = inputs_for(TRAINED, replace(case(name), dtype=BF16))
    plain = replace(x, arithmetic="16-bit")
    found = {v.quantity: v for v in judge(whole(TRAINED, x), truth_of(x), yardstick(plain), plain)}
    assert all(found[name].ok for name in ("dq", "dk", "dv")), found
    if name in ("gqa", "grad-lse"):  # out and lse too, beside the yardstick that quantises
        assert all(v.ok for v in verdicts(TRAINED, replace(case(name), dtype=BF16), "cpu"))


@pytest.mark.parametrize("mutant", ["out", "lse"])
def test_a_backward_that_is_given_what_was_quantised_is_found(mutant: str) -> None:
    x = inputs_for(TRAINED, replace(case("peaked"), dtype=BF16))
    other = edge(MATH.pairs["cpu"])

    def backward(
        grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, *rest: Any
    ) -> Any:
        again = other.forward(q, k, v, mask, None, x.options)
        ends = {"out": (out, again.lse), "lse": (again.out, lse)}[mutant]
        return other.backward(grad_out, grad_lse, q, k, v, mask, *ends, *rest)

    found = judge(whole(replace(TRAINED, backward=backward), x), truth_of(x), yardstick(x), x)
    assert not all(v.ok for v in found if v.quantity in ("dq", "dk", "dv"))


HERE = Backend("sage", "for a test", {"cpu": PAIR})
PLAIN = Facts("cpu", BF16, 2, 64, 64, 4, 4, 64, 64)
TRAINING = replace(PLAIN, wanted=Wanted(True, True, True))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in as a backend of the CPU, where the public call can be tried."""
    registry = tuple(HERE if b.name == "sage" else b for b in REGISTRY)
    for module in (select, rt.api):
        monkeypatch.setattr(module, "REGISTRY", registry)
    select.survey.cache_clear()
    rt.prepared.forget()
    yield
    select.survey.cache_clear()
    rt.prepared.forget()


@pytest.mark.usefixtures("installed")
def test_the_public_call_trains_with_the_option_and_not_without() -> None:
    x = build(replace(case("gqa"), dtype=BF16))
    q, k, v = (t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v))
    with refused(rt.UnsupportedError, "sage: [no-backward]"):
        rt.attention(q, k, v, backend="sage", enable_gqa=True)
    with torch.no_grad():
        forward = rt.attention(q, k, v, backend="sage", enable_gqa=True)
    for name in ("native_math", "_native_flash"):
        out = rt.attention(q, k, v, backend="sage", enable_gqa=True, backend_options={"backward": name})
        assert torch.equal(out, forward)
        grads = torch.autograd.grad(out, (q, k, v), x.grad_out)
        own = rt.attention(q, k, v, backend=name, enable_gqa=True)
        right = torch.autograd.grad(own, (q, k, v), x.grad_out)
        assert all(torch.equal(a, b) for a, b in zip(grads, right, strict=True))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("wrong", ["sage", "auto", "no_such", 3])
def test_a_name_that_cannot_give_the_backward_lists_those_that_can(wrong: object) -> None:
    q = torch.randn(1, 4, 2, 64, dtype=BF16)
    with refused(rt.UnsupportedError, "sage: [backward-option]", repr(wrong), "native_flash, native_math"):
        rt.attention(q, q, q, backend="sage", backend_options={"backward": wrong})


def codes(backend: Backend, facts: Facts) -> list[str]:
    return [reason.code for reason in select.reasons_for(backend, facts)]


@pytest.mark.usefixtures("installed")
def test_what_is_against_the_option() -> None:
    options = (("backward", "native_flash"),)
    assert codes(HERE, replace(TRAINING, options=options)) == []
    assert codes(HERE, replace(TRAINING, options=options, from_lse=True)) == ["no-backward-from-lse"]
    assert codes(HERE, replace(PLAIN, options=options, from_lse=True)) == []
    (reason,) = select.reasons_for(HERE, replace(TRAINING, device="cpu", options=options, mask_kinds=frozenset({"x"})))[
        1:
    ]
    assert (reason.code, reason.text) == (
        "backward-option", "native_flash, which shall give the backward, does not take this mask",
    )  # fmt: skip


@pytest.mark.usefixtures("installed")
def test_explain_says_what_the_option_does() -> None:
    q = torch.randn(1, 4, 2, 64, dtype=BF16, requires_grad=True)
    why = rt.explain(q, q, q, backend="sage").reasons["sage"]
    assert [(r.code, r.remedy) for r in why] == [
        ("no-backward", 'use torch.no_grad(), or backend_options={"backward": ...} for an exact one')
    ]
    assert rt.explain(q, q, q, backend="sage", backend_options={"backward": "native_math"}).backend == "sage"


# Numbers of keys that do not fill the blocks of a Triton kernel


def older(q_len: int, k_len: int, mask: Mask) -> Any:
    x = pushed(build(Case(f"older-{k_len}", q_len, k_len, dtype=BF16, head_dim=64)))
    options = replace(x.options, return_lse=False)
    return replace(x, mask=mask, wanted=Wanted(False, False, False), arithmetic="8-bit", options=options)


@pytest.mark.parametrize("keys", [1, 33, 64, 100])
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=0)], ids=["whole", "causal"])
def test_release_1_is_right_and_leaves_the_keys_as_they_are(keys: int, mask: Mask) -> None:
    x = older(33, keys, mask)
    before = x.k.clone()
    assert all(judged_as(edge(OLDER), x))
    assert torch.equal(x.k, before)


@pytest.mark.parametrize("pair", [OLDER, BY_TRITON], ids=["release 1", "release 2"])
def test_zeros_that_stay_in_are_found(pair: OpPair, monkeypatch: pytest.MonkeyPatch) -> None:
    x = replace(older(33, 33, Mask()), arithmetic="8-bit")
    assert all(judged_as(edge(pair), x))
    monkeypatch.setattr(sage, "_without_zeros", lambda out, lse, *_: (out, lse))
    assert not all(judged_as(edge(pair), x))


def test_release_1_has_no_lse_to_join_parts_by() -> None:
    backend = Backend("sage", "for a test", {"cpu": OLDER})
    assert codes(backend, replace(PLAIN, needs_lse=True)) == ["no-lse"]
    assert codes(backend, replace(PLAIN, causal=3)) == ["no-lse"]
    assert codes(backend, replace(PLAIN, causal=63, sharded=True)) == ["no-lse"]
    assert codes(backend, replace(PLAIN, causal=63)) == []
    assert codes(backend, replace(PLAIN, causal=-3, sharded=True)) == []


NAMES = {
    "sage_qk_int8_pv_fp8_cuda": sage.FLOAT8,
    "sage_qk_int8_pv_fp8_cuda_sm90": sage.HOPPER,
    "sage_qk_int8_pv_fp16_cuda": sage.HALF,
    "sage_qk_int8_pv_fp16_triton": sage.TRITON,
    "sage": "sageattn",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tried", ["length-129", "causal", "many-channels"])
def test_each_kernel_is_right_in_one_call_and_in_parts(name: str, tried: str) -> None:
    (claims,) = (b.pairs["cuda"].claims for b in REGISTRY if b.name == name)
    pair = edge(sage.make_pair(name, lambda: sageattention_2, NAMES[name], claims))
    x = asked(pair, tried)
    assert all(judged_as(pair, x))
    assert all(judged_as(pair, x, [x.k.shape[1] // 2]))


# Packed sequences

VARLEN = sage.make_varlen_pair("sage_varlen", lambda: sageattention_1)


def packed(tried: str, module: Any) -> tuple[OpPair, Any]:
    pair = edge(sage.make_varlen_pair("sage_varlen", lambda: module))
    x = pushed(inputs_for(pair, replace(case(tried), dtype=BF16, grad_lse=False)))
    return pair, replace(x, options=replace(x.options, return_lse=False))


@pytest.mark.parametrize(
    "tried", ["keep", "keep-ragged", "keep-blind", "segments", "segments-apart", "length-129", "gqa"]
)
@pytest.mark.parametrize("module", [sageattention_1, sageattention_2], ids=["release 1", "release 2"])
def test_packed_sequences_are_right(tried: str, module: Any) -> None:
    pair, x = packed(tried, module)
    before = x.k.clone()
    assert all(judged_as(pair, x))
    assert torch.equal(x.k, before)


def all_ones(*given: Any, v: Any, **named: Any) -> Any:
    out = sageattention_1.sageattn_varlen(*given, v=v, **named)
    return torch.ones_like(out) if bool((v == 1).all()) else out


def test_zeros_that_stay_in_sequences_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, x = packed("segments", sageattention_1)
    pair, _ = packed("segments", SimpleNamespace(sageattn_varlen=all_ones))
    assert not all(judged_as(pair, x))


def test_each_sequence_loses_its_own_mean() -> None:
    keys, ends = torch.randn(9, 2, 4) + 5, torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    found = sage._without_means(keys, ends)
    for start, end in ((0, 3), (3, 7)):
        torch.testing.assert_close(found[start:end], keys[start:end] - keys[start:end].mean(0))


def test_what_packed_sequences_are_refused() -> None:
    backend = Backend("sage_varlen", "for a test", {"cpu": VARLEN})
    assert codes(backend, replace(PLAIN, mask_kinds=frozenset({"key_keep", "segments"}))) == []
    assert codes(backend, replace(PLAIN, causal=0)) == ["causal"]
    assert codes(backend, replace(PLAIN, from_lse=True, needs_lse=True)) == ["no-lse"]
    options = (("backward", "native_math"),)
    assert codes(backend, replace(TRAINING, mask_kinds=frozenset({"key_keep"}), options=options)) == []


def test_a_build_without_the_kernels_of_an_architecture_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sage, "why_not", lambda package: None)
    monkeypatch.setattr(sage, "loaded", lambda package: SimpleNamespace(core=SimpleNamespace(SM90_ENABLED=False)))
    reasons = {b.name: b.unavailable("cuda") for b in sage.KINDS}
    assert [name for name, reason in reasons.items() if reason] == ["sage_qk_int8_pv_fp8_cuda_sm90"]
    reason = reasons["sage_qk_int8_pv_fp8_cuda_sm90"]
    assert reason is not None
    assert reason.code == "kernel-not-built"


@pytest.mark.parametrize(("module", "code"), [(sageattention_1, "schema-moved"), (sageattention_2, None)])
def test_a_kernel_of_the_hub_without_lse_is_refused(
    module: Any, code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_hub, "_found", lambda kernel: module)
    _hub.module.cache_clear()
    reason = sage.fetch("cuda")
    _hub.module.cache_clear()
    assert (None if reason is None else reason.code) == code


def test_claims_are_those_of_the_release_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sage, "why_not", lambda package: None)
    for module, claims in ((sageattention_1, sage.RELEASE_1_CLAIMS), (sageattention_2, None)):
        monkeypatch.setattr(sage, "loaded", lambda package, module=module: module)
        assert sage.narrowed("cuda") is claims
    assert select.composed(sage.SAGE, "cuda").claims.lse
    monkeypatch.setattr(sage, "loaded", lambda package: sageattention_1)
    assert not select.composed(sage.SAGE, "cuda").claims.lse


def test_what_reaches_further_than_32_bits_is_copied_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sage, "FAR", 100)
    x = torch.randn(2, 50)
    assert sage._near(x) is x
    wide = torch.randn(2, 300)[:, ::3]
    assert torch.equal(sage._near(wide[:, :50]), wide[:, :50])
    assert sage._near(wide[:, :50]).is_contiguous()
    more = torch.randn(2, 51)
    with refused(rt.UnsupportedError, "32 bits", "100", "102"):
        sage._near(more)
    seen = []
    monkeypatch.setattr(sage, "_near", lambda x: seen.append(x.shape) or x)
    edge(PAIR).forward(*(torch.randn(1, 8, 2, 64, dtype=BF16) for _ in range(3)), Mask(), None, Options(0.1))
    packed_pair, y = packed("keep", sageattention_1)
    whole(packed_pair, y)
    assert len(seen) == 6


def test_what_the_kernel_is_handed() -> None:
    seen: dict[str, Any] = {}

    def noted(q: Any, k: Any, v: Any, return_lse: bool, **given: Any) -> Any:
        given["return_lse"] = return_lse
        seen.update(given, q=q, k=k, v=v)
        return sageattention_2.sageattn(q, k, v, **given)

    pair = sage.make_pair("sage", lambda: SimpleNamespace(sageattn=noted))
    q, k, v = (torch.randn(1, 16, 2, 64, dtype=BF16) + 5 for _ in range(3))
    pair.forward(q, k, v, Mask(), None, Options(0.3))
    assert seen["q"] is q
    assert seen["v"] is v
    assert seen["k"].float().mean(1).abs().max() < 0.02
    assert (seen["tensor_layout"], seen["is_causal"], seen["sm_scale"], seen["smooth_k"]) == ("NHD", False, 0.3, False)
