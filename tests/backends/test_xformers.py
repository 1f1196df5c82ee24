"""xformers' glue around a module with the arguments of 0.0.35, and what is told of one that refuses every input."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from contract.subjects import verdicts
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case
from ringtrue.backends import xformers
from ringtrue.contract import Mask, Options, Reason, Wanted
from ringtrue.edge import edge
from ringtrue.optional import anew
from standins import xformers_fmha

RELEASED = {
    "memory_efficient_attention_forward_requires_grad": (
        "query key value attn_bias=None p=0.0 scale=None * op=None output_dtype=None"
    ),
    "memory_efficient_attention_backward": (
        "grad output lse query key value attn_bias=None p=0.0 scale=None * op=None"
    ),
    "Inputs": "query key value attn_bias=None p=0.0 scale=None output_dtype=None is_partial=False",
}
Broken = Callable[..., Any]
forward = xformers_fmha.memory_efficient_attention_forward_requires_grad
backward = xformers_fmha.memory_efficient_attention_backward


@pytest.mark.parametrize("name", RELEASED)
def test_the_stand_in_has_the_arguments_of_0_0_35(name: str) -> None:
    own, keyword = [], False
    for p in inspect.signature(getattr(xformers_fmha, name)).parameters.values():
        own += ["*"] * (p.kind is p.KEYWORD_ONLY and not keyword)
        keyword = keyword or p.kind is p.KEYWORD_ONLY
        own.append(p.name if p.default is p.empty else f"{p.name}={p.default}")
    assert own == RELEASED[name].split()


def module(first: Broken = forward, second: Broken = backward, **others: Any) -> Any:
    return SimpleNamespace(
        memory_efficient_attention_forward_requires_grad=first, memory_efficient_attention_backward=second,
        **{"attn_bias": xformers_fmha.attn_bias, **others},
    )  # fmt: skip


def tokens_first(*args: Any, **given: Any) -> Any:
    out, lse = forward(*args, **given)
    return out, lse.transpose(1, 2).reshape(lse.shape)


def on_lse(change: Broken) -> Broken:
    def broken(grad: Any, output: Any, lse: Any, *args: Any, **given: Any) -> Any:
        return backward(grad, output, change(lse), *args, **given)

    return broken


TOP_LEFT = SimpleNamespace(LowerTriangularFromBottomRightMask=xformers_fmha.LowerTriangularMask)
MUTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lse of another layout": ("length-33", {"first": tokens_first}),
    "lse in log2": ("length-33", {"first": lambda *a, **g: (lambda o, s: (o, s * 1.4427))(*forward(*a, **g))}),
    "causal from the first key": ("causal-bottom-right", {"attn_bias": TOP_LEFT}),
    "no mask in backward": ("float-bhqk", {"second": lambda *a, **g: backward(*a[:6], **g)}),
    "the default scale": ("scale-one", {"second": lambda *a, scale: backward(*a)}),
    "lse that is rounded": ("length-33", {"second": on_lse(lambda lse: lse.bfloat16().float())}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_finds_a_broken_module(mutant: str) -> None:
    name, broken = MUTANTS[mutant]
    assert not all(judged_with(case(name), **broken)), mutant
    assert all(judged_with(case(name)))


def judged_with(tried: Case, **broken: Any) -> list[bool]:
    fmha = module(**broken)
    pair = edge(xformers.make_pair("xformers", lambda: fmha))
    return [v.ok for v in verdicts(pair, replace(tried, dtype=torch.bfloat16), "cpu")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mask", "kind"),  # a bias beside causal has no backward there
    [
        (Mask(), type(None)),
        (Mask(causal=0), xformers_fmha.LowerTriangularFromBottomRightMask),
        (Mask(key_keep=torch.tensor([[True] * 8 + [False]] * 2)), torch.Tensor),
        (Mask(key_keep=torch.tensor([[True] * 8 + [False]] * 2), causal=0), torch.Tensor),
        (Mask(since=-3, causal=0), torch.Tensor),
    ],
    ids=["none", "causal", "keys", "keys-causal", "window"],
)  # fmt: skip
def test_what_the_kernel_is_handed(mask: Mask, kind: type, dtype: torch.dtype) -> None:
    seen: list[Any] = []

    def noted(*args: Any, **given: Any) -> Any:
        seen.append((args[6], given))
        return backward(*args, **given)

    fmha = module(second=noted)
    pair = edge(xformers.make_pair("xformers", lambda: fmha))
    q, k, v, g = (torch.randn(2, 9, 2, 8, dtype=dtype) for _ in range(4))
    out, lse, *_ = pair.forward(q, k, v, mask, None, Options(0.5))
    grads = pair.backward(g, None, q, k, v, mask, out, lse, None, (), Options(0.5), Wanted(True, False, True))
    assert [x is None for x in grads] == [False, True, False, True]
    assert [(type(bias), given) for bias, given in seen] == [(kind, {"scale": 0.5})]


def test_a_dim_of_one_with_an_odd_stride_is_taken() -> None:
    """Operators ask all strides to be multiples of 8, also those of dims of 1, which `edge` leaves as they are."""
    pair = edge(xformers.make_pair("xformers", lambda: xformers_fmha))
    q, k, v = (torch.randn(1, 9, 3, 8).as_strided((1, 9, 1, 8), (1, 8, 3, 1)) for _ in range(3))
    bias = torch.randn(9).view(1, 1, 1, 9)
    out, lse, *_ = pair.forward(q, k, v, Mask(dense=bias), None, Options(0.5))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.5 + bias
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v))


LOADING = (
    "xFormers can't load C++/CUDA extensions. xFormers was built for:\n    PyTorch 2.10.0+cu128\n  Please reinstall"
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An xformers that imports: its private `_cpp_lib` says whether its library was loaded."""
    library = ModuleType("xformers._cpp_lib")
    top = ModuleType("xformers")
    top.__version__ = "0.0.35"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xformers", top)
    monkeypatch.setitem(sys.modules, "xformers._cpp_lib", library)
    monkeypatch.setattr(xformers, "why_not", lambda package: None)
    monkeypatch.setattr(xformers, "loaded", lambda package: xformers_fmha)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    xformers.refused.cache_clear()
    yield library
    xformers.refused.cache_clear()


def test_a_working_one_has_no_reason(installed: ModuleType) -> None:
    installed._cpp_library_load_exception = None  # type: ignore[attr-defined]
    assert xformers.unavailable("cuda") is None


def test_a_library_for_another_torch_is_told_in_its_words(installed: ModuleType) -> None:
    installed._cpp_library_load_exception = RuntimeError(LOADING)  # type: ignore[attr-defined]
    reason = xformers.unavailable("cuda")
    assert reason is not None
    assert reason.code == "package-broken"
    assert reason.text.endswith("extensions. xFormers was built for: PyTorch 2.10.0+cu128")
    assert reason.value == f"xformers 0.0.35, torch {torch.__version__}"
    assert reason.remedy == anew(xformers.PACKAGE.install)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("capability", "said", "code"),
    [((9, 0), [], None), ((9, 0), ["wasn't build"], "package-broken"), ((10, 0), ["too new"], None)],
)
def test_operators_are_asked_at_a_tiny_shape(
    capability: tuple[int, int], said: list[str], code: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; one that the claims leave out is their matter. The kernels are not run."""
    asked: list[Any] = []
    empty = torch.empty
    operator = SimpleNamespace(not_supported_reasons=lambda inputs: asked.append(inputs) or said)
    there = module(cutlass=SimpleNamespace(FwOp=operator, BwOp=operator), Inputs=xformers_fmha.Inputs)
    monkeypatch.setattr(xformers, "loaded", lambda package: there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch, "empty", lambda *size, device, **words: empty(*size, **words))
    reason = xformers.unavailable("cuda")
    assert (None if reason is None else reason.code) == code
    assert reason is None or reason.text.endswith("input: wasn't build")
    assert {tuple(i.query.shape) for i in asked} <= {(1, 8, 1, 8)}


def test_other_arguments_are_told() -> None:
    assert xformers.unlike(xformers_fmha) is None
    reason: Reason | None = xformers.unlike(module(second=lambda grad, output, lse, query, key, value: None))
    assert reason is not None
    assert (reason.code, reason.value) == ("schema-moved", "without attn_bias, scale")
