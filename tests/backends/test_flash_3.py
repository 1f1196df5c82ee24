"""flash-attn 3's glue around a module with the arguments of its two functions, dense and packed."""

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
from calls import qkv, refused
from contract.subjects import verdicts
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case, build
from ringtrue.audit.laws import whole
from ringtrue.backends import _hub, flash_3
from ringtrue.contract import Mask, Options, Wanted
from ringtrue.edge import edge
from standins import flash_attn_3

FORWARD = """q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None cu_seqlens_k_new=None
    seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None page_table=None kv_batch_idx=None leftpad_k=None
    rotary_cos=None rotary_sin=None seqlens_rotary=None q_descale=None k_descale=None v_descale=None
    softmax_scale=None causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0
    rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0"""
BACKWARD = """dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None sequed_k=None
    max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None softmax_scale=None is_causal=False
    window_size_left=-1 window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0"""


@pytest.mark.parametrize(("name", "released"), [(flash_3.FUNCTIONS[0], FORWARD), (flash_3.FUNCTIONS[1], BACKWARD)])
def test_the_stand_in_has_the_arguments_that_were_read(name: str, released: str) -> None:
    """hopper/flash_attn_interface.py at 01afd16, and kernels-community/flash-attn3 (custom operators)."""
    parameters = inspect.signature(getattr(flash_attn_3, name)).parameters.values()
    own = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert own == released.split()


forward, backward = flash_attn_3._flash_attn_forward, flash_attn_3._flash_attn_backward
Broken = Callable[..., Any]
Make = Callable[..., Any]


def with_arguments(function: Broken, **change: Callable[[Any], Any]) -> Broken:
    def broken(*args: Any, **given: Any) -> Any:
        return function(*args, **{name: change[name](x) if name in change else x for name, x in given.items()})

    return broken


def top_left(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
    keys = slice(0, q.shape[1] if given["causal"] else None)
    return forward(q, k[:, keys], v[:, keys], **given)


def lse_changed(change: Callable[[Tensor], Tensor]) -> Broken:
    def broken(*args: Any, **given: Any) -> Any:
        out, lse, *rest = forward(*args, **given)
        return out, change(lse), *rest

    return broken


def no_end(end: int) -> int:
    return -1


MUTANTS: dict[str, tuple[str, Broken, Broken]] = {
    "lse of another layout": ("length-33", lse_changed(lambda s: s.transpose(1, 2).reshape(s.shape)), backward),
    "lse in log2": ("length-33", lse_changed(lambda s: s * 1.4427), backward),
    "causal from the first key": ("causal-bottom-right", top_left, backward),
    "not causal in backward": ("causal-bottom-right", forward, with_arguments(backward, is_causal=lambda c: False)),
    "window without a beginning": ("window", with_arguments(forward, window_size_left=no_end), backward),
    "window without an end": ("window", with_arguments(forward, window_size_right=no_end), backward),
    "no window in backward": ("window", forward, with_arguments(backward, window_size_left=no_end)),
    "no softcap": ("softcap", with_arguments(forward, softcap=lambda c: 0.0), backward),
    "no softcap in backward": ("softcap", forward, with_arguments(backward, softcap=lambda c: 0.0)),
    "the default scale": ("scale-one", forward, with_arguments(backward, softmax_scale=lambda s: None)),
    "dk into dv": ("gqa", forward, lambda *a, dk, dv, **g: backward(*a, dk=dv, dv=dk, **g)),
}
PACKED: dict[str, tuple[str, Broken, Broken]] = {
    "sums of another head": ("segments-apart", lse_changed(lambda s: s.roll(1, 0)), backward),
    "keys end where queries do": (
        "keep-ragged", lambda *a, **g: forward(*a, **{**g, "cu_seqlens_k": g["cu_seqlens_q"].clamp(max=a[1].shape[0])}),
        backward,
    ),
    "sequences one token late": (
        "segments", forward, with_arguments(backward, cu_seqlens_q=lambda e: (e + (e > 0).int()).clamp(max=int(e[-1]))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_finds_a_broken_module(mutant: str) -> None:
    name, first, second = MUTANTS[mutant]
    assert judged_with(flash_3.make_pair, case(name), forward, backward)
    assert not judged_with(flash_3.make_pair, case(name), first, second)


@pytest.mark.parametrize("mutant", PACKED)
def test_the_contract_finds_a_broken_module_of_packed_calls(mutant: str) -> None:
    name, first, second = PACKED[mutant]
    assert judged_with(flash_3.make_varlen_pair, case(name), forward, backward)
    assert not judged_with(flash_3.make_varlen_pair, case(name), first, second)


def judged_with(make: Make, tried: Case, first: Broken, second: Broken) -> bool:
    module = SimpleNamespace(_flash_attn_forward=first, _flash_attn_backward=second)
    pair = edge(make("flash_3", lambda: module))
    return all(v.ok for v in verdicts(pair, replace(tried, dtype=torch.bfloat16), "cpu"))


def test_what_the_kernel_is_handed() -> None:
    """A window's ends from the bottom-right diagonal, options, buffers of ours; and the tensors as they are."""
    seen: dict[str, Any] = {}

    def noted(*args: Any, **given: Any) -> Any:
        seen.update(given, given=args)
        return backward(*args, **given)

    module = SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=noted)
    pair = flash_3.make_pair("flash_3", lambda: module)
    q, k, v, g = (torch.randn(2, n, 2, 8, dtype=torch.bfloat16) for n in (4, 9, 9, 4))
    mask, options = Mask(causal=6, since=-2), Options(0.5, softcap=3.0, deterministic=True)
    out, lse, *_ = pair.forward(q, k, v, mask, None, options)
    grads = pair.backward(g, None, q, k, v, mask, out, lse, None, (), options, Wanted(True, False, True))
    assert [x is None for x in grads] == [False, True, False, True]
    assert all(a is b for a, b in zip(seen["given"], (g, q, k, v, out, lse), strict=True))
    assert (seen["window_size_left"], seen["window_size_right"], seen["is_causal"]) == (7, 1, False)
    assert (seen["softmax_scale"], seen["softcap"], seen["deterministic"]) == (0.5, 3.0, True)


def test_a_wide_deterministic_backward_is_refused_before_the_kernel() -> None:
    pair = flash_3.make_pair("flash_3", lambda: pytest.fail("a kernel ran"))
    for dim, text in ((200, "or head dims up to 192"), (264, "[head-dim]")):
        with refused(rt.UnsupportedError, "flash_3: [", text):
            rt.attention(*qkv(4, dim=dim, dtype=torch.bfloat16, grad=True), backend=pair, deterministic=True)


def older(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None: ...


def b1_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Any, v_new: Any, qv: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    cu_seqlens_k_new: Any, seqused_q: Any, seqused_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, page_table: Any,
    kv_batch_idx: Any, leftpad_k: Any, rotary_cos: Any, rotary_sin: Any, seqlens_rotary: Any, q_descale: Any,
    k_descale: Any, v_descale: Any, softmax_scale: Any, causal: Any, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 1, pack_gqa: Any = None, sm_margin: int = 0,
) -> Any:  # fmt: skip
    """With the arguments of hopper/flash_attn_interface.py beside flash-attn 2.8.3."""
    return forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, *window_size, attention_chunk, softcap,
        rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip


def b1_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Any,
    cu_seqlens_k: Any, sequed_q: Any, sequed_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, dq: Any, dk: Any, dv: Any,
    softmax_scale: Any, causal: Any, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Any:  # fmt: skip
    backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
        dq, dk, dv, softmax_scale, causal, *window_size, softcap, deterministic, sm_margin,
    )  # fmt: skip


B1 = SimpleNamespace(_flash_attn_forward=b1_forward, _flash_attn_backward=b1_backward)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["window", "causal-bottom-right", "softcap", "scale-one", "gqa"])
def test_the_first_beta_is_called_by_its_own_arguments(name: str, packed: bool) -> None:
    assert flash_3.unlike(B1) is None
    make = flash_3.make_varlen_pair if packed else flash_3.make_pair
    tried = replace(case(name), dtype=torch.bfloat16)
    results = [whole(edge(make("flash_3", lambda m=m: m)), build(tried)) for m in (flash_attn_3, flash_3._renewed(B1))]
    for new, old in zip(*results, strict=True):
        assert new is None or torch.equal(new, old)
    assert flash_3._renewed(flash_attn_3) is flash_attn_3


def test_another_release_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of functions that are custom operators, as the releases that were read have them."""
    assert flash_3.unlike(flash_attn_3) is None
    reason = flash_3.unlike(SimpleNamespace(_flash_attn_forward=older, _flash_attn_backward=backward))
    assert reason is not None
    assert reason.code == "schema-moved"
    assert "softcap" in reason.value
    wrapped = [
        torch.library.custom_op(f"ringtrue_flash_3::{name}", mutates_args=())(function)
        for name, function in (("right", _right), ("wrong", _wrong))
    ]
    assert flash_3.unlike(SimpleNamespace(_flash_attn_forward=wrapped[0], _flash_attn_backward=backward)) is None
    assert flash_3.unlike(SimpleNamespace(_flash_attn_forward=wrapped[1], _flash_attn_backward=backward)) is not None
    monkeypatch.setattr(_hub, "fetch", lambda kernel, device: None)
    monkeypatch.setattr(_hub, "module", lambda kernel: flash_attn_3)
    assert flash_3.fetch("cuda") is None
    monkeypatch.setattr(_hub, "module", lambda kernel: SimpleNamespace(_flash_attn_forward=older))
    reason = flash_3.fetch("cuda")
    assert reason is not None
    assert reason.code == "schema-moved"


def _right(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float,
) -> torch.Tensor:  # fmt: skip
    return q.clone()


def _wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    return q.clone()
