"""aiter's glue around a module with its arguments, and why it cannot be used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contract.subjects import verdicts
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case
from ringtrue.backends import amd_aiter
from ringtrue.contract import Mask, Options, Reason, Wanted
from ringtrue.edge import edge
from standins import aiter_mha

FORWARD = """q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1,0) bias=None alibi_slopes=None
    deterministic=True return_lse=False return_attn_probs=False how_v3_bf16_cvt=1 cu_seqlens_q=None
    cu_seqlens_kv=None"""
BACKWARD = """dout q k v out softmax_lse dq dk dv dbias dropout_p softmax_scale causal window_size_left
    window_size_right bias alibi_slopes deterministic rng_state=None is_v3_atomic_fp32=True how_v3_bf16_cvt=1"""
forward, backward = aiter_mha.flash_attn_func, aiter_mha._flash_attn_backward
Broken = Callable[..., Any]


@pytest.mark.parametrize(("function", "read"), [(forward, FORWARD), (backward, BACKWARD)])
def test_the_stand_in_has_the_arguments_that_were_read(function: Broken, read: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    own = [p.name if p.default is p.empty else f"{p.name}={str(p.default).replace(' ', '')}" for p in parameters]
    assert own == read.split()


def top_left(q: Any, k: Any, v: Any, *, causal: bool, **given: Any) -> Any:
    keys = slice(0, q.shape[1] if causal else None)
    return forward(q, k[:, keys], v[:, keys], causal=causal, **given)


def lse_changed(change: Broken) -> Broken:
    def broken(*args: Any, **given: Any) -> Any:
        out, lse = forward(*args, **given)
        return out, change(lse)

    return broken


def without_dk(**given: Any) -> Any:
    return backward(**{**given, "dk": torch.empty_like(given["dk"])})


MUTANTS: dict[str, tuple[str, Broken, Broken]] = {
    "lse of another layout": ("length-33", lse_changed(lambda x: x.transpose(1, 2).reshape(x.shape)), backward),
    "lse in log2": ("length-33", lse_changed(lambda x: x * 1.4427), backward),
    "causal from the first key": ("causal-bottom-right", top_left, backward),
    "the other causal in backward": ("causal", forward, lambda **g: backward(**{**g, "causal": False})),
    "the default scale": ("scale-one", forward, lambda **g: backward(**{**g, "softmax_scale": 0.25})),
    "dk not written": ("gqa", forward, without_dk),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_finds_a_broken_module(mutant: str) -> None:
    name, first, second = MUTANTS[mutant]
    assert not all(judged_with(case(name), first, second)), mutant
    assert all(judged_with(case(name), forward, backward))


def module(first: Broken = forward, second: Broken = backward) -> Any:
    return SimpleNamespace(flash_attn_func=first, _flash_attn_backward=second)


def judged_with(tried: Case, first: Broken, second: Broken) -> list[bool]:
    there = module(first, second)
    pair = edge(amd_aiter.make_pair("aiter", lambda: there))
    return [v.ok for v in verdicts(pair, replace(tried, dtype=torch.bfloat16), "cpu")]


def test_what_the_kernel_is_handed() -> None:
    """grad_out stored like out, whatever its strides; `deterministic` as it was asked for; no graph of its own."""
    seen: dict[str, Any] = {}

    def noted(**given: Any) -> Any:
        seen.update(given)
        return backward(**given)

    def graphless(*args: Any, **given: Any) -> Any:
        assert not torch.is_grad_enabled()
        return forward(*args, **given)

    there = module(graphless, noted)
    pair = amd_aiter.make_pair("aiter", lambda: there)
    q, k, v = (torch.randn(2, 9, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    g, options = torch.randn(2, 2, 9, 8, dtype=torch.bfloat16).transpose(1, 2), Options(0.5, deterministic=True)
    out, lse, *_ = pair.forward(q, k, v, Mask(causal=0), None, options)
    with torch.no_grad():
        grads = pair.backward(g, None, q, k, v, Mask(causal=0), out, lse, None, (), options, Wanted(True, False, True))
    assert [x is None for x in grads] == [False, True, False, True]
    assert seen["dout"].stride() == seen["out"].stride()
    assert (seen["softmax_scale"], seen["causal"], seen["deterministic"]) == (0.5, True, True)


def test_another_kind_of_gpu_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    reason = amd_aiter.unavailable("cuda")
    assert reason is not None
    assert reason.code == "not-rocm"


def test_on_rocm_the_package_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Reason("package-missing", "it is not installed")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(amd_aiter, "why_not", lambda package: missing)
    assert amd_aiter.unavailable("cuda") is missing
    monkeypatch.setattr(amd_aiter, "why_not", lambda package: None)
    monkeypatch.setattr(amd_aiter, "loaded", lambda package: aiter_mha)
    assert amd_aiter.unavailable("cuda") is None


def test_other_arguments_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of an operator, whose wrapper takes anything."""
    reason = amd_aiter.unlike(module(second=lambda dout, q, k, v, out, softmax_lse: None))
    assert reason is not None
    assert reason.code == "schema-moved"
    assert reason.value.startswith("without alibi_slopes, bias, causal")

    names = [SimpleNamespace(name=name) for name in amd_aiter.ARGUMENTS["_flash_attn_backward"]]
    operator = SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=names)))
    monkeypatch.setattr(torch.ops, "aiter", SimpleNamespace(_flash_attn_backward=operator), raising=False)
    assert amd_aiter.unlike(module(second=lambda *args, **given: None)) is None
    names.pop()
    reason = amd_aiter.unlike(module(second=lambda *args, **given: None))
    assert reason is not None
    assert reason.value == "without deterministic"
