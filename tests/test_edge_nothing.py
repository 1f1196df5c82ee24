"""Nothing to see: empty calls reach no kernel, and a query that may attend to no key gives zeros and zero gradients."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringtrue as rt
from calls import EVERY_BACKEND, HERE, claims_of, eager, like, qkv, unreachable, widest
from calls import one_thread as one_thread
from ringtrue.masks import parts_of

DEAD = torch.zeros(2, 4, 6, dtype=torch.bool)  # (B, H, Sq): what the first three masks below hide from everything
DEAD[0, :, 1] = DEAD[1, 2, 4] = True
ROWS = torch.ones(2, 4, 6, 5, dtype=torch.bool).masked_fill(DEAD[..., None], False)
BIAS = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(0)).masked_fill(~ROWS, -math.inf)
KEEP = torch.tensor([[False] * 5, [True, False, True, True, False]])
UNSEEN: dict[str, Any] = {
    "bool": ROWS,
    "float": BIAS,
    "broadcast over keys": ROWS[..., :1],
    "padding": rt.KeyPadding(KEEP),
    "bias": rt.KeyBias(torch.zeros(2, 5).masked_fill(~KEEP, -math.inf)),
    "causal": rt.Causal("bottom_right"),
    "two that leave nothing together": rt.KeyPadding(KEEP) & (torch.arange(30).view(6, 5) % 5 == 1),
    "all at once": rt.Causal("bottom_right") & rt.KeyPadding(KEEP) & BIAS,
    "everything": torch.tensor(False),
}


@EVERY_BACKEND
@pytest.mark.parametrize("kind", UNSEEN)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["widest", "bfloat16"])
def test_a_query_that_sees_nothing(backend: str, kind: str, dtype: torch.dtype | None) -> None:
    """out 0, lse -inf, gradients 0, also where the upstream gradient is NaN, as that of a norm of zeros is."""
    dtype = dtype or widest(backend)
    if dtype not in claims_of(backend).dtypes:
        return
    tensors = qkv(6, 5, dtype=dtype, grad=True)
    out, lse = rt.attention(*tensors, UNSEEN[kind], return_lse=True, backend=backend)
    dead = lse == -math.inf
    assert dead.any()
    assert (out.transpose(1, 2)[dead] == 0).all()
    assert out.isfinite().all()
    upstream = like(out)
    zeroed, poisoned = (
        upstream.transpose(1, 2).masked_fill(dead[..., None], x).transpose(1, 2) for x in (0.0, math.nan)
    )
    for a, b in zip(
        *(torch.autograd.grad(out, tensors, g, retain_graph=True) for g in (zeroed, poisoned)), strict=True
    ):
        assert b.isfinite().all()
        assert torch.equal(a, b)
    (dq,) = torch.autograd.grad(out, tensors[:1], poisoned)
    assert (dq.transpose(1, 2)[dead] == 0).all()


def test_these_masks_hide_what_they_are_meant_to() -> None:
    q, k, v = qkv(6, 5)
    for kind in ("bool", "float", "broadcast over keys"):
        assert torch.equal(eager(q, k, v, UNSEEN[kind])[1] == -math.inf, DEAD)
        assert torch.equal(rt.attention(q, k, v, UNSEEN[kind], return_lse=True)[1] == -math.inf, DEAD)


EMPTY = {
    "batch": {"batch": 0}, "queries": {"q_len": 0, "k_len": 4}, "keys": {"k_len": 0}, "both": {"q_len": 0, "k_len": 0},
}  # fmt: skip
MASKS: dict[str, Callable[[int, int, int], Any]] = {
    "none": lambda b, q, k: None,
    "causal": lambda b, q, k: rt.Causal("bottom_right"),
    "bool": lambda b, q, k: torch.ones(q, k, dtype=torch.bool),
    "float": lambda b, q, k: torch.zeros(b, 4, q, k, requires_grad=True),
    "one number": lambda b, q, k: torch.tensor(0.5),
    "padding": lambda b, q, k: rt.KeyPadding(torch.ones(b, k, dtype=torch.bool)),
    "bias": lambda b, q, k: rt.KeyBias(torch.zeros(b, k, requires_grad=True)) & rt.Causal(),
    "window": lambda b, q, k: rt.Window(1, 1) & torch.zeros(q, k, requires_grad=True),
    "segments": lambda b, q, k: rt.Segments(torch.zeros(b, q).int(), torch.zeros(b, k).int()) & rt.Window(None, 2),
}


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("kind", MASKS)
def test_an_empty_call_reaches_no_kernel(empty: str, kind: str) -> None:
    q, k, v = qkv(**{"q_len": 3, "value_dim": 5, "grad": True, **EMPTY[empty]})
    mask = MASKS[kind](q.shape[0], q.shape[1], k.shape[1])
    out, lse = rt.attention(q, k, v, mask, return_lse=True, backend=unreachable())
    assert out.shape == (*q.shape[:3], 5)
    assert lse.shape == (q.shape[0], 4, q.shape[1])
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    out.sum().backward()
    floats = [getattr(part, name, None) for part in parts_of(mask) for name in ("mask", "bias")]
    wanted = [q, k, v, *(x for x in floats if x is not None and x.requires_grad)]
    assert all(x.grad is not None and x.grad.shape == x.shape and (x.grad == 0).all() for x in wanted)


def test_no_heads_are_empty_too() -> None:
    q = torch.ones(2, 3, 0, 4, requires_grad=True)
    out = rt.attention(q, q, q, backend=unreachable())
    out.sum().backward()
    assert out.shape == q.shape


IN_A_PROCESS_OF_ITS_OWN = """
import sys, torch, ringtrue as rt
for name in sys.argv[1:]:
    for b, s, t in ((0, 3, 3), (2, 0, 4), (2, 4, 0), (2, 0, 0), (0, 0, 0)):
        q, k, v = (torch.ones(b, n, 2, 8, requires_grad=True) for n in (s, t, t))
        for mask in (None, rt.Causal(), rt.KeyPadding(torch.ones(b, t, dtype=torch.bool))):
            try:
                out, lse = rt.attention(q, k, v, mask, return_lse=True, backend=name)
            except rt.UnsupportedError:
                continue
            out.sum().backward()
            assert out.shape == q.shape and lse.shape == (b, 2, s) and (out == 0).all()
print("alive")
"""


def test_no_kernel_dies_of_an_empty_call() -> None:
    """torch's CPU flash ends the process with SIGFPE where it is reached (BR-51)."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN, *(b.name for b in HERE)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr
