"""native_xla's glue around a module with the operators of torch_xla 2.9.0, and why that cannot be used."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from contract.subjects import verdicts
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case
from ringtrue.backends import native_xla
from ringtrue.contract import Mask, Options, Reason, Wanted
from ringtrue.edge import edge
from standins import torch_xla_kernel

FORWARD = "q k v causal q_segment_ids kv_segment_ids sm_scale ab partition_spec mesh ctx_grad"
BACKWARD = """grad_output q k v o l m q_segment_ids kv_segment_ids ab causal sm_scale partition_spec mesh q_full_shape
    kv_full_shape ab_full_shape ctx_grad"""
forward, backward = torch_xla_kernel.fa_custom_forward, torch_xla_kernel.fa_custom_backward
Broken = Callable[..., Any]


@pytest.mark.parametrize(("function", "released"), [(forward, FORWARD), (backward, BACKWARD)])
def test_the_stand_in_has_the_arguments_of_2_9_0(function: Broken, released: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert all(p.default is p.empty for p in parameters)
    assert [p.name for p in parameters] == released.split()


def with_sums(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Broken:
    def broken(*args: Any) -> Any:
        found = forward(*args)
        assert found[4] is not None
        assert found[5] is not None
        return *found[:4], *change(found[4], found[5]), None

    return broken


def changed(function: Broken, place: int, change: Callable[[Any], Any]) -> Broken:
    return lambda *args: function(*args[:place], change(args[place]), *args[place + 1 :])


def bottom_right(q: Any, k: Any, v: Any, causal: Any, *args: Any) -> Any:
    """Causal as most kernels count it: the result for queries that lie at the end of the keys."""
    ahead = k.shape[2] - q.shape[2] if causal else 0
    if ahead <= 0:
        return forward(q, k, v, causal, *args)
    longer = torch.cat([torch.zeros_like(k[:, :, :ahead]), q], 2)
    ids = None if args[0] is None else torch.zeros(k.shape[0], k.shape[2], dtype=torch.int32)
    found = forward(longer, k, v, causal, ids, *args[1:])
    cut = [x[:, :, ahead:] if isinstance(x, Tensor) else x for x in (found[0], found[4], found[5])]
    return cut[0], q, k, v, cut[1], cut[2], None


MUTANTS: dict[str, tuple[str, Broken, Broken]] = {
    "maximum and sum exchanged": ("length-33", with_sums(lambda s, m: (m.abs() + 1e-3, s)), backward),
    "the sum without its maximum": ("length-33", with_sums(lambda s, m: (s, torch.zeros_like(m))), backward),
    "lse in log2": ("length-33", with_sums(lambda s, m: (s**1.4427, m * 1.4427)), backward),
    "causal from the last key": ("causal-wide-200", bottom_right, backward),
    "added keys are seen": ("length-33", changed(forward, 5, torch.zeros_like), changed(backward, 8, torch.zeros_like)),
    "no mask in backward": ("keep-ragged", forward, changed(backward, 8, torch.zeros_like)),
    "not causal in backward": ("causal", forward, changed(backward, 10, lambda causal: False)),
    "the default scale": ("scale-one", forward, changed(backward, 11, lambda scale: 0.125)),
    "out of zeros": ("length-33", forward, changed(backward, 4, torch.zeros_like)),
}  # fmt: skip
OWN = {"causal-wide-200": Case("causal-wide-200", q_len=100, k_len=200, causal=0)}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_finds_a_broken_module(mutant: str) -> None:
    name, first, second = MUTANTS[mutant]
    tried = OWN.get(name) or case(name)
    assert not all(judged_with(tried, first, second)), mutant
    assert all(judged_with(tried, forward, backward))


def module(first: Broken = forward, second: Broken = backward) -> Any:
    return SimpleNamespace(
        fa_custom_forward=first, fa_custom_backward=second, requires_jax=torch_xla_kernel.requires_jax
    )


def judged_with(tried: Case, first: Broken, second: Broken) -> list[bool]:
    there = module(first, second)
    pair = edge(native_xla.make_pair("native_xla", lambda: there))
    return [v.ok for v in verdicts(pair, replace(tried, dtype=torch.bfloat16), "cpu")]


@pytest.mark.parametrize(
    ("length", "queries", "keys"),
    [(1, 128, 128), (128, 128, 128), (130, 256, 256), (300, 384, 512), (512, 512, 512), (513, 1024, 1024),
     (1100, 2048, 1536)],
)  # fmt: skip
def test_lengths_are_those_that_blocks_divide(length: int, queries: int, keys: int) -> None:
    assert native_xla._up(length, *native_xla.QUERIES) == queries
    assert native_xla._up(length, *native_xla.KEYS) == keys


@pytest.mark.parametrize("wanted", [Wanted(True, True, True), Wanted(False, True, False)], ids=str)
@pytest.mark.parametrize("length", [300, 600])
def test_keys_that_were_added_are_hidden(length: int, wanted: Wanted) -> None:
    """As the module pads them itself, beyond 512, they are seen."""
    torch.manual_seed(0)
    pair, right = edge(native_xla.make_pair("native_xla", module)), rt.op_pair("native_math")
    q, k, v, g = (torch.randn(1, length, 1, 64, dtype=torch.bfloat16) for _ in range(4))
    found = [run(p, q, k, v, g, wanted) for p in (pair, right)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)
    whole = (x.transpose(1, 2) for x in (q, k, v))
    out = forward(*whole, False, None, None, 0.125, None, "None", "None", [True] * 10)[0].transpose(1, 2)
    assert torch.allclose(out, found[1][0], rtol=0.05, atol=0.02) == (length <= 512)


def run(pair: rt.OpPair, q: Tensor, k: Tensor, v: Tensor, g: Tensor, wanted: Wanted) -> list[Tensor]:
    out, lse, _, saved = pair.forward(q, k, v, Mask(), None, Options(0.125))
    grads = pair.backward(g, None, q, k, v, Mask(), out, lse, None, saved, Options(0.125), wanted)
    assert [x is not None for x in grads[:3]] == list(wanted[:3])
    return [out, lse, *(x for x in grads[:3] if x is not None)]


@pytest.mark.parametrize(
    ("mask", "length", "ids"),
    [
        (Mask(), 128, None),
        (Mask(causal=0), 256, None),
        (Mask(), 9, [0] * 9 + [1] * 119),
        (Mask(key_keep=torch.tensor([[True] * 8 + [False]])), 9, [0] * 8 + [1] * 120),
    ],
    ids=["none", "causal", "added", "keys"],
)
def test_what_the_kernel_is_handed(mask: Mask, length: int, ids: list[int] | None) -> None:
    seen: list[Any] = []

    def noted(*args: Any) -> Any:
        seen.extend(args)
        return backward(*args)

    pair = native_xla.make_pair("native_xla", lambda: module(second=noted))
    q, k, v, g = (torch.randn(1, length, 2, 64, dtype=torch.bfloat16) for _ in range(4))
    out, lse, *_ = pair.forward(q, k, v, mask, None, Options(0.5))
    assert out.shape == q.shape
    grads = pair.backward(g, None, q, k, v, mask, out, lse, None, (), Options(0.5), Wanted(False, True, True))
    assert [None if x is None else x.shape for x in grads[:3]] == [None, k.shape, v.shape]
    given = dict(zip(BACKWARD.split(), seen, strict=True))
    assert (given["causal"], given["sm_scale"]) == (mask.causal is not None, 0.5)
    assert given["ctx_grad"][0]  # dk and dv come only where dq is asked for
    assert (None if ids is None else given["kv_segment_ids"].tolist()) == (None if ids is None else [ids])
    assert torch.isinf(given["m"][:, :, length:]).all()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A torch_xla that imports, on a TPU, and jax."""
    runtime = ModuleType("torch_xla.runtime")
    runtime.device_type = lambda: "TPU"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    monkeypatch.setattr(native_xla, "why_not", lambda package: None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.1")
    return runtime


def test_on_a_tpu_it_can_run(installed: ModuleType) -> None:
    assert native_xla.unavailable("xla") is None


def test_another_device_is_a_reason(installed: ModuleType) -> None:
    installed.device_type = lambda: "CPU"  # type: ignore[attr-defined]
    reason = native_xla.unavailable("xla")
    assert reason is not None
    assert (reason.code, reason.value) == ("not-tpu", "CPU")


@pytest.mark.usefixtures("installed")
def test_what_it_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    reason = native_xla.unavailable("xla")
    assert reason is not None
    assert (reason.code, reason.limit) == ("package-missing", "jax")
    broken = Reason("package-broken", "torch_xla cannot be imported: ImportError: undefined symbol")
    monkeypatch.setattr(native_xla, "why_not", lambda package: broken)
    assert native_xla.unavailable("xla") is broken
