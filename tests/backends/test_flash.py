"""flash-attn 2's glue around a module with the arguments of 2.8.3, dense and packed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from calls import qkv, refused
from contract.subjects import verdicts
from ringtrue.audit.cases import case
from ringtrue.backends import flash
from ringtrue.contract import Mask, Options, Wanted
from ringtrue.edge import edge
from standins import flash_attn_2

RELEASED = {
    "_flash_attn_forward": """q k v dropout_p softmax_scale causal window_size_left window_size_right softcap
        alibi_slopes return_softmax""",
    "_flash_attn_backward": """dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left
        window_size_right softcap alibi_slopes deterministic rng_state=None""",
    "_flash_attn_varlen_forward": """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale
        causal window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None return_softmax=False
        block_table=None leftpad_k=None seqused_k=None zero_tensors=False""",
    "_flash_attn_varlen_backward": """dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q
        max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes
        deterministic rng_state=None zero_tensors=False""",
}


@pytest.mark.parametrize("name", flash.FUNCTIONS)
def test_the_stand_in_has_the_arguments_of_2_8_3(name: str) -> None:
    """flash_attn/flash_attn_interface.py; those of kernels-community/flash-attn2, version 3, are the same."""
    parameters = inspect.signature(getattr(flash_attn_2, name)).parameters.values()
    own = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert own == RELEASED[name].split()


def test_functions_of_another_release_are_told() -> None:
    assert flash.unlike(flash_attn_2) is None
    given = {name: getattr(flash_attn_2, name) for name in flash.FUNCTIONS}
    hidden = SimpleNamespace(_init_fn=given["_flash_attn_forward"], __call__=None)  # as torch's custom ops are
    assert flash.unlike(SimpleNamespace(**given | {"_flash_attn_forward": hidden})) is None
    for other in (None, lambda q, k, v: None, lambda q, k, v, softmax_scale, dropout_p: None):
        reason = flash.unlike(SimpleNamespace(**given | {"_flash_attn_forward": other}))
        assert reason is not None
        assert reason.code == "schema-moved"


def test_the_stand_in_refuses_what_the_kernel_does() -> None:
    q, lse = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16), torch.zeros(1, 2, 4)
    with pytest.raises(RuntimeError, match="does not support dropout"):
        flash_attn_2._flash_attn_forward(q, q, q, 0.5, 1.0, False, -1, -1, 2.0, None, False)
    with pytest.raises(RuntimeError, match="another mask than forward's"):
        flash_attn_2._flash_attn_backward(
            q, q, q, q, q, lse, *(torch.empty_like(q) for _ in range(3)), 0.5, 1.0, False, -1, -1, 0.0, None, False
        )  # fmt: skip


Broken = Callable[..., Any]
forward, backward = flash_attn_2._flash_attn_forward, flash_attn_2._flash_attn_backward


def place(function: Broken, name: str) -> int:
    return list(inspect.signature(function).parameters).index(name)


def changed(function: Broken, name: str, change: Callable[[Any], Any]) -> Broken:
    """The function, one of its arguments by place changed."""
    where = place(function, name)
    return lambda *a: function(*(change(x) if i == where else x for i, x in enumerate(a)))


def lse_changed(change: Callable[[Tensor], Tensor]) -> Broken:
    def broken(*args: Any) -> Any:
        out, lse, *rest = forward(*args)
        return out, change(lse), *rest

    return broken


def top_left(q: Tensor, k: Tensor, v: Tensor, p: float, scale: float, causal: bool, *args: Any) -> Any:
    keys = slice(0, q.shape[1] if causal else None)
    return forward(q, k[:, keys], v[:, keys], p, scale, causal, *args)


def other_state(state: Tensor | None) -> Tensor | None:
    return None if state is None else state + 1


def no_end(end: int) -> int:
    return -1


def zero(softcap: float) -> float:
    return 0.0


MUTANTS: dict[str, tuple[str, Broken, Broken]] = {
    "lse of another layout": ("length-33", lse_changed(lambda s: s.transpose(1, 2).reshape(s.shape)), backward),
    "lse in log2": ("length-33", lse_changed(lambda s: s * 1.4427), backward),
    "causal from the first key": ("causal-bottom-right", top_left, backward),
    "not causal in backward": ("causal-bottom-right", forward, changed(backward, "causal", lambda c: False)),
    "window without a beginning": ("window", changed(forward, "window_size_left", no_end), backward),
    "window one key early": (
        "window-past",
        forward,
        changed(backward, "window_size_left", lambda n: n if n < 0 else n + 1),
    ),
    "no softcap": ("softcap", changed(forward, "softcap", zero), backward),
    "no softcap in backward": ("softcap", forward, changed(backward, "softcap", zero)),
    "another dropout in backward": ("dropout", forward, changed(backward, "rng_state", other_state)),
    "no dropout in backward": ("dropout", forward, changed(backward, "dropout_p", zero)),
    "dk into dv": ("gqa", forward, lambda *a: backward(*a[:7], a[8], a[7], *a[9:])),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_contract_finds_a_broken_module(mutant: str) -> None:
    name, first, second = MUTANTS[mutant]
    tried = replace(case(name), dtype=torch.bfloat16)
    for functions, right in (((forward, backward), True), ((first, second), False)):
        module = SimpleNamespace(_flash_attn_forward=functions[0], _flash_attn_backward=functions[1])
        pair = edge(flash.make_pair("flash", partial(_given, module)))
        assert all(v.ok for v in verdicts(pair, tried, "cpu")) is right, mutant


def _given(module: Any) -> Any:
    return module


@pytest.mark.parametrize("packed", [False, True])
def test_what_the_kernel_is_handed(packed: bool) -> None:
    """A window's ends from the bottom-right diagonal, options, buffers of ours; and tensors that need not move."""
    right = flash_attn_2._flash_attn_varlen_backward if packed else backward
    first = flash_attn_2._flash_attn_varlen_forward if packed else forward
    seen: dict[str, Any] = {}

    def noted(*args: Any) -> Any:
        seen.update(zip(inspect.signature(right).parameters, args, strict=False))
        return right(*args)

    make, name = (flash.make_varlen_pair, "_varlen") if packed else (flash.make_pair, "")
    module = SimpleNamespace(**{f"_flash_attn{name}_forward": first, f"_flash_attn{name}_backward": noted})
    pair = make("flash", lambda: module)
    q, k, v, g = (torch.randn(2, n, 2, 8, dtype=torch.bfloat16) for n in (4, 9, 9, 4))
    mask, options = Mask(causal=6, since=-2), Options(0.5, softcap=3.0, deterministic=True)
    out, lse, _, saved = pair.forward(q, k, v, mask, None, options)
    assert saved == ()
    grads = pair.backward(g, None, q, k, v, mask, out, lse, None, (), options, Wanted(True, False, True))
    assert [x is None for x in grads] == [False, True, False, True]
    assert [seen[name].data_ptr() for name in ("dout", "q", "k", "v")] == [x.data_ptr() for x in (g, q, k, v)]
    assert (seen["window_size_left"], seen["window_size_right"], seen["causal"]) == (7, 1, False)
    assert (seen["softmax_scale"], seen["softcap"], seen["deterministic"]) == (0.5, 3.0, True)
    if packed:
        assert (seen["cu_seqlens_q"].tolist(), seen["cu_seqlens_k"].tolist()) == ([0, 4, 8], [0, 9, 18])
        assert (seen["max_seqlen_q"], seen["max_seqlen_k"]) == (4, 9)


@pytest.mark.parametrize("make", [flash.make_pair, flash.make_varlen_pair])
def test_what_the_kernel_refuses_or_leaves_out_is_refused_before_it(make: Callable[..., Any]) -> None:
    pair = make("flash", lambda: pytest.fail("a kernel ran"))
    for dim, given, text in (
        (64, {"dropout_p": 0.1, "softcap": 2.0}, "[softcap-dropout]"),
        (200, {"dropout_p": 0.1}, "[head-dim-dropout]"),
        (264, {}, "[head-dim]"),
    ):
        with refused(rt.UnsupportedError, f"flash: {text}"):
            rt.attention(*qkv(4, dim=dim, dtype=torch.bfloat16, grad=True), backend=pair, **given)


def test_padded_keys_beside_causal_are_refused() -> None:
    pair = flash.make_varlen_pair("flash_varlen", lambda: pytest.fail("a kernel ran"))
    keep = rt.KeyPadding(torch.ones(2, 4, dtype=torch.bool))
    for given in ({"is_causal": True, "attn_mask": keep}, {"attn_mask": keep & rt.Window(2, 2)}):
        with refused(rt.UnsupportedError, "flash_varlen: [mask-causal]"):
            rt.attention(*qkv(4, dtype=torch.bfloat16), backend=pair, **given)
