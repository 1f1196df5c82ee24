"""native_npu's glue around a module with the arguments of torch_npu 2.11.0."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from contract.subjects import verdicts
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case
from ringtrue.backends import native_npu
from ringtrue.contract import Mask, Options, Wanted
from ringtrue.edge import edge
from standins import torch_npu

FORWARD = """query key value head_num input_layout pse=None padding_mask=None atten_mask=None scale=1.0 keep_prob=1.0
    pre_tockens=2147483647 next_tockens=2147483647 inner_precise=0 prefix=None actual_seq_qlen=None
    actual_seq_kvlen=None sparse_mode=0 gen_mask_parallel=True sync=False softmax_layout= sink=None dropout_mask=None
    seed=0 offset=0"""
BACKWARD = """query key value dy head_num input_layout * pse=None padding_mask=None atten_mask=None softmax_max=None
    softmax_sum=None softmax_in=None attention_in=None scale_value=1.0 keep_prob=1.0 pre_tockens=2147483647
    next_tockens=2147483647 inner_precise=0 seed=0 offset=0 numels=0 prefix=None actual_seq_qlen=None
    actual_seq_kvlen=None sparse_mode=0 gen_mask_parallel=True sync=False softmax_layout= sink=None"""
forward, backward = torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_grad
Broken = Callable[..., Any]


@pytest.mark.parametrize(("function", "released"), [(forward, FORWARD), (backward, BACKWARD)])
def test_the_stand_in_has_the_arguments_of_2_11_0(function: Broken, released: str) -> None:
    own, keyword = [], False
    for p in inspect.signature(function).parameters.values():
        own += ["*"] * (p.kind is p.KEYWORD_ONLY and not keyword)
        keyword = keyword or p.kind is p.KEYWORD_ONLY
        own.append(p.name if p.default is p.empty else f"{p.name}={p.default}")
    assert own == released.split()


def with_sums(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Broken:
    def broken(*args: Any, **given: Any) -> Any:
        out, top, total, *rest = forward(*args, **given)
        return out, *change(top, total), *rest

    return broken


def without(function: Broken, *names: str) -> Broken:
    return lambda *args, **given: function(*args, **{n: x for n, x in given.items() if n not in names})


def top_left(*args: Any, **given: Any) -> Any:
    """As sparse_mode 2 counts: from the first query and the first key."""
    if given.get("sparse_mode") == 3:
        q_len, k_len = args[0].shape[1], args[1].shape[1]
        hidden = torch.ones(1, 1, q_len, k_len, dtype=torch.bool).triu(1)
        given = {**given, "atten_mask": hidden, "sparse_mode": 1}
    return forward(*args, **given)


def inverted(*args: Any, **given: Any) -> Any:
    hidden = given.get("atten_mask")
    return forward(*args, **({**given, "atten_mask": ~hidden} if hidden is not None else given))


def on_backward(**change: Callable[[Any], Any]) -> Broken:
    def broken(*args: Any, **given: Any) -> Any:
        return backward(*args, **{n: change[n](x) if n in change else x for n, x in given.items()})

    return broken


MUTANTS: dict[str, tuple[str, Broken, Broken]] = {
    "the sum without its maximum": ("length-33", with_sums(lambda t, s: (torch.zeros_like(t), s)), backward),
    "a maximum of all queries": ("length-33", with_sums(lambda t, s: (t.amax(2, True).expand(t.shape), s)), backward),
    "maximum and sum exchanged": ("length-33", with_sums(lambda t, s: (s, t.abs() + 1e-3)), backward),
    "the sum in base 2": ("length-33", with_sums(lambda t, s: (t, s**1.4427)), backward),
    "lse of another layout": ("length-33", with_sums(lambda t, s: (t.transpose(1, 2).reshape(t.shape), s)), backward),
    "causal from the first key": ("causal-bottom-right", top_left, backward),
    "True is allowed": ("keep-ragged", inverted, backward),
    "no mask in backward": ("keep-ragged", forward, without(backward, "atten_mask", "sparse_mode")),
    "the default scale": ("length-33", forward, without(backward, "scale_value")),
    "a sum that is doubled": ("length-33", forward, on_backward(softmax_sum=lambda x: 2 * x)),
    "out of zeros": ("length-33", forward, on_backward(attention_in=torch.zeros_like)),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_finds_a_broken_module(mutant: str) -> None:
    name, first, second = MUTANTS[mutant]
    assert not all(judged_with(case(name), first, second)), mutant
    assert all(judged_with(case(name), forward, backward))


def judged_with(tried: Case, first: Broken, second: Broken) -> list[bool]:
    module = SimpleNamespace(npu_fusion_attention=first, npu_fusion_attention_grad=second)
    pair = edge(native_npu.make_pair("native_npu", lambda: module))
    return [v.ok for v in verdicts(pair, replace(tried, dtype=torch.bfloat16), "cpu")]


KEEP = torch.tensor([[True] * 8 + [False]] * 2)
ROWS = torch.rand(1, 2, 9, 9) > 0.1


@pytest.mark.parametrize(
    ("mask", "shape", "mode"),
    [
        (Mask(), None, None),
        (Mask(causal=0), (2048, 2048), 3),
        (Mask(key_keep=KEEP), (2, 1, 9, 9), 1),
        (Mask(key_keep=KEEP, causal=0), (2, 1, 9, 9), 1),
        (Mask(dense=ROWS), (2, 2, 9, 9), 1),  # a mask with heads for all samples alike is not among its shapes
        (Mask(dense=ROWS[:, :1, :1]), (1, 1, 9, 9), 1),
        (Mask(since=-2, causal=1), (1, 1, 9, 9), 1),
    ],
    ids=["none", "causal", "keys", "keys-causal", "heads", "row", "window"],
)
def test_what_the_kernel_is_handed(mask: Mask, shape: tuple[int, ...] | None, mode: int | None) -> None:
    seen: dict[str, Any] = {}

    def noted(*args: Any, **given: Any) -> Any:
        seen.update(given)
        return backward(*args, **given)

    module = SimpleNamespace(npu_fusion_attention=forward, npu_fusion_attention_grad=noted)
    pair = native_npu.make_pair("native_npu", lambda: module)
    q, k, v, g = (torch.randn(2, 9, 2, 16, dtype=torch.bfloat16) for _ in range(4))
    out, lse, *_ = pair.forward(q, k, v, mask, None, Options(0.5))
    grads = pair.backward(g, None, q, k, v, mask, out, lse, None, (), Options(0.5), Wanted(True, False, True))
    assert [x is None for x in grads] == [False, True, False, True]
    assert seen["scale_value"] == 0.5
    assert seen.get("sparse_mode") == mode
    assert (None if mode is None else tuple(seen["atten_mask"].shape)) == shape


def test_a_device_that_torch_does_not_know_is_explained() -> None:
    meta = torch.empty(1, 64, 2, 64, device="meta", dtype=torch.bfloat16)
    for device in ("npu", "npu:1"):
        found = rt.explain(meta, meta, meta, device=device, parallel=False)
        assert [r.code for r in found.reasons["native_npu"]] == ["package-missing"]
        assert [r.code for r in found.reasons["native_math"]] == ["device"]
    with pytest.raises(RuntimeError, match="nonsense"):
        rt.explain(meta, meta, meta, device="nonsense", parallel=False)
