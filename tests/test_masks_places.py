"""Windows and segments through every backend: right with all they can be joined with, and never written out whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringtrue as rt
from calls import EVERY_BACKEND, assert_close, claims_of, eager, like, qkv, refused, unreachable, widest
from calls import one_thread as one_thread

Q_IDS = torch.tensor([[0, 0, 1, 1, 2, 5], [3, 3, 3, 0, 0, 0]])
K_IDS = torch.tensor([[0, 1, 1, 2, 2], [0, 0, 3, 0, 4]])
KEEP = torch.tensor([[True, True, False, True, True], [True, False, True, True, True]])
BIAS = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(0))
KEY_BIAS = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
ROWS = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)) < 0.7


def band(left: int | None, right: int | None, q_len: int = 6, k_len: int = 5) -> Tensor:
    """Where a window lets look, from its definition."""
    row, key = torch.arange(q_len)[:, None], torch.arange(k_len)
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    seen = seen if left is None else seen & (key >= row - left)
    return seen if right is None else seen & (key <= row + right)


SAME = (Q_IDS[:, None, :, None] == K_IDS[:, None, None, :]).expand(2, 1, 6, 5)
SEGMENTS = rt.Segments(Q_IDS, K_IDS)
ENDS = ((2, 1), (1, None), (None, -1), (-1, 2), (9, 9), (0, 0))
JOINED: dict[str, tuple[Any, Tensor]] = {
    **{f"window {ends}": (rt.Window(*ends), band(*ends)) for ends in ENDS},
    "no window": (rt.Window(), band(None, None)),
    "window and causal": (rt.Window(2, 3) & rt.Causal(), band(2, 0)),
    "window and causal, bottom right": (rt.Causal("bottom_right") & rt.Window(2), band(2, -1)),
    "two windows": (rt.Window(2, 3) & rt.Window(None, 1), band(2, 1)),
    "window and padding": (rt.Window(2, 1) & rt.KeyPadding(KEEP), band(2, 1) & KEEP[:, None, None]),
    "window and rows": (ROWS & rt.Window(2, 1), band(2, 1) & ROWS),
    "segments": (SEGMENTS, SAME),
    "segments and causal": (rt.Causal() & SEGMENTS, SAME & band(None, 0)),
    "all of them": (
        SEGMENTS & rt.Window(3, 1) & rt.KeyPadding(KEEP) & ROWS,
        SAME & band(3, 1) & KEEP[:, None, None] & ROWS,
    ),
}


@EVERY_BACKEND
@pytest.mark.parametrize("name", JOINED)
def test_what_is_seen(backend: str, name: str) -> None:
    mask, seen = JOINED[name]
    tensors = qkv(6, 5, kv_heads=2, value_dim=5, dtype=widest(backend), grad=True)
    out, lse = rt.attention(*tensors, mask, enable_gqa=True, return_lse=True, backend=backend)
    true, true_lse = eager(*tensors, seen)
    assert_close(out, true)
    assert_close(lse, true_lse)
    for a, b in zip(*(torch.autograd.grad(x, tensors, like(true)) for x in (out, true)), strict=True):
        assert_close(a, b)


BIASED = {
    "rows": (BIAS, lambda x: x, lambda x: x),
    "keys": (KEY_BIAS, rt.KeyBias, lambda x: x[:, None, None]),
    "one row, lowest": (torch.tensor([0.0, -3e38, 1.0, -3e38, 0.5]), lambda x: x, lambda x: x),
}


@EVERY_BACKEND
@pytest.mark.parametrize("name", ["window (2, 1)", "segments and causal", "all of them"])
@pytest.mark.parametrize("form", BIASED)
def test_a_float_mask_beside_them(backend: str, name: str, form: str) -> None:
    places, seen = JOINED[name]
    values, make, plain = BIASED[form]
    if name == "all of them":
        places, seen = SEGMENTS & rt.Window(3, 1), SAME & band(3, 1)
    bias = values.clone().requires_grad_(claims_of(backend).dbias)
    tensors = qkv(6, 5, dtype=widest(backend), grad=True)
    asked = [*tensors, *([bias] if bias.requires_grad else [])]
    out = rt.attention(*tensors, make(bias) & places, backend=backend)
    true = eager(*tensors, plain(bias).masked_fill(~seen, -math.inf))[0]
    assert_close(out, true)
    for a, b in zip(*(torch.autograd.grad(x, asked, like(true)) for x in (out, true)), strict=True):
        assert_close(a, b)


@EVERY_BACKEND
def test_packed_documents_are_as_if_alone(backend: str) -> None:
    """BR-12, the other way to write it: from where each document ends."""
    tensors = qkv(128, batch=1, dim=32, dtype=widest(backend), grad=True)
    ends = torch.tensor([0, 37, 100, 128], dtype=torch.int32)
    out = rt.attention(*tensors, rt.Segments.from_cu_seqlens(ends) & rt.Causal(), backend=backend)
    alone = [
        rt.attention(*(x[:, a:b] for x in tensors), is_causal=True, backend=backend)
        for a, b in ((0, 37), (37, 100), (100, 128))
    ]
    assert_close(out, torch.cat(alone, 1))
    for a, b in zip(*(torch.autograd.grad(x, tensors, like(out)) for x in (out, torch.cat(alone, 1))), strict=True):
        assert_close(a, b)


class Largest(TorchDispatchMode):
    """The largest tensor that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


@pytest.mark.parametrize("name", ["window", "segments", "window and padding"])
def test_a_long_sequence_is_written_out_in_blocks(name: str) -> None:
    length, backend = 5000, "native_flash"
    masks = {
        "window": rt.Window(20, 10),
        "segments": rt.Segments(torch.arange(length)[None] // 100),
        "window and padding": rt.Window(20, 10) & rt.KeyPadding(torch.rand(1, length) < 0.9),
    }
    tensors = qkv(length, heads=1, batch=1, dim=4, grad=True)
    with Largest() as made:
        out = rt.attention(*tensors, masks[name], backend=backend)
        torch.autograd.grad(out, tensors, like(out))
    assert made.numel <= 1024 * (length if name == "segments" else 1024 + 31)


@EVERY_BACKEND
def test_the_default_device_is_not_asked(backend: str) -> None:
    """Everything is made where the tensors are, or on the CPU, whatever torch.set_default_device says."""
    tensors = qkv(6, 5, grad=True)
    bias = BIAS.clone().requires_grad_(claims_of(backend).dbias)
    masks = (None, rt.Causal("bottom_right"), bias & rt.Window(2, 1) & SEGMENTS, rt.KeyBias(KEY_BIAS) & rt.Causal())
    dropout = 0.3 if claims_of(backend).dropout else 0.0

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        found: list[Tensor] = []
        for mask in masks:
            out, lse = rt.attention(*tensors, mask, dropout, return_lse=True, backend=backend)
            live = lse.masked_fill(lse == -math.inf, 0.0)
            found += [out, lse, *torch.autograd.grad((out.sum(), live.sum()), tensors)]
        return found

    expected = run()
    with torch.device("meta"):
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_kernel_without_masks_refuses_them() -> None:
    poor = unreachable("poor", masks=frozenset())
    for mask, kind in ((rt.Window(2), "window"), (rt.Segments(Q_IDS), "segments")):
        with refused(rt.UnsupportedError, "[mask]", kind):
            rt.attention(*qkv(), mask, backend=poor)
    claims = next(b for b in rt.backends() if b.name == "native_flash").claims
    assert {"window", "segments"} <= claims.masks
