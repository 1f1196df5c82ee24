"""`native` asks torch which of its kernels it would take, and becomes that pair."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import ringtrue as rt
from calls import eager, like, qkv
from ringtrue import native
from ringtrue.backends import REGISTRY
from ringtrue.contract import Mask, Options

OPTIONS = Options(scale=0.3)


def test_every_kernel_of_torch_is_a_backend_here() -> None:
    assert set(native.NAMES.values()) <= {b.name for b in REGISTRY}
    assert native.ANY in native.NAMES.values()


@pytest.mark.parametrize(("number", "name"), [(0, "native_math"), (1, "native_flash"), (2, "native_efficient")])
def test_it_is_what_torch_says(monkeypatch: pytest.MonkeyPatch, number: int, name: str) -> None:
    asked: list[tuple[object, ...]] = []

    class Op:
        _schema = native.SCHEMA

        def __call__(self, *args: object, **options: object) -> int:
            asked.append((*args[3:], options["scale"], options["enable_gqa"]))
            return number

    monkeypatch.setattr(torch.ops.aten, "_fused_sdp_choice", SimpleNamespace(default=Op()), raising=False)
    q, k, v = qkv()
    keep = torch.ones(2, k.shape[1], dtype=torch.bool)
    assert native.torchs_choice(q, k, v, Mask(), OPTIONS) == name
    assert native.torchs_choice(q, k, v, Mask(causal=0), OPTIONS) == name
    assert native.torchs_choice(q, k[:, :, :2], v[:, :, :2], Mask(key_keep=keep, causal=0), OPTIONS) == name
    assert asked[0] == (None, 0.0, False, 0.3, False)
    assert asked[1] == (None, 0.0, True, 0.3, False)
    assert asked[2][0].shape == (2, 1, 1, k.shape[1])  # type: ignore[attr-defined]
    assert asked[2][1:] == (0.0, False, 0.3, True)


def test_a_moved_question_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SCHEMA", "another")
    assert native.torchs_choice(*qkv(), Mask(), OPTIONS) == native.ANY
    assert rt.explain(*qkv(), backend="native").backend == native.ANY


def test_on_a_cpu_torch_takes_flash_and_math_where_flash_cannot() -> None:
    q, k, v = qkv(grad=True)
    assert rt.explain(q, k, v, backend="native").backend == "native_flash"
    assert rt.explain(q, k, v, dropout_p=0.5, backend="_native").backend == "native_math"
    bias = torch.zeros(q.shape[1], k.shape[1], requires_grad=True)
    assert rt.explain(q, k, v, attn_mask=bias, backend="native").backend == "native_math"
    with rt.attention_backend("native"):
        out = rt.attention(q, k, v)
        assert rt.current_backend() == "native"
    assert torch.allclose(out, eager(q, k, v)[0], atol=1e-5)


def test_torchs_switches_are_asked_at_every_call() -> None:
    q, k, v = qkv()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert rt.explain(q, k, v, backend="native").backend == "native_math"
        off = rt.attention(q, k, v, backend="native")
    assert torch.equal(off, rt.attention(q, k, v, backend="native_math"))
    on = rt.attention(q, k, v, backend="native")
    assert torch.equal(on, rt.attention(q, k, v, backend="native_flash"))


def test_compiled_it_is_the_same() -> None:
    q, k, v = qkv(grad=True)
    out = rt.attention(q, k, v, backend="native")
    compiled = torch.compile(lambda *x: rt.attention(*x, backend="native"), fullgraph=True, backend="aot_eager")(
        q, k, v
    )
    assert torch.equal(out, compiled)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), like(x)) for x in (out, compiled)), strict=True):
        assert torch.equal(a, b)


def test_it_answers_for_no_other_device() -> None:
    meta = [x.to("meta", torch.bfloat16) for x in qkv()]
    with pytest.raises(rt.UnsupportedError, match=r"native asks torch(.|\n)*tensors on cuda(.|\n)*meta"):
        rt.explain(*meta, backend="native", device="cuda")
