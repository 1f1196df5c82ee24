"""What the tests of one device share: small tensors, eager attention to compare with, pairs that must not run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from ringtrue import scope
from ringtrue.backends import REGISTRY
from ringtrue.contract import Backend, Claims, OpPair

HERE = tuple(b for b in REGISTRY if "cpu" in b.pairs and b.unavailable("cpu") is None)
# milliseconds a call on a CPU, seconds to compile one on a GPU: what is around pairs is tried on the quicker ones
SLOW = frozenset({"flex"})
EVERY_BACKEND = pytest.mark.parametrize("backend", [b.name for b in HERE])
WIDEST = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
EVERYTHING = Claims(
    dtypes=frozenset(WIDEST),
    masks=frozenset({"dense_bool", "dense_float", "key_keep", "key_bias", "segments", "window"}),
    bias_dtype="any",
    causal="offset",
    gqa=True,
    value_dim=True,
    any_strides=True,
    dropout=True,
    softcap=True,
    dbias=True,
    dlse=True,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For every file that imports it: with tiny tensors, threads cost more in waiting than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def claims_of(backend: str) -> Claims:
    """What a backend of this machine claims on the CPU, without its edge."""
    return next(b for b in HERE if b.name == backend).pairs["cpu"].claims


def widest(backend: str) -> torch.dtype:
    """The dtype in which a backend is compared most sharply."""
    return next(dtype for dtype in WIDEST if dtype in claims_of(backend).dtypes)


def qkv(
    q_len: int = 6,
    k_len: int | None = None,
    heads: int = 4,
    kv_heads: int | None = None,
    dim: int = 8,
    value_dim: int | None = None,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    grad: bool | str = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v; `grad` says which of them require grad: all, none, or those named ("qv")."""
    draw = torch.Generator().manual_seed(seed)
    k_len, kv_heads = q_len if k_len is None else k_len, kv_heads or heads
    shapes = ((q_len, heads, dim), (k_len, kv_heads, dim), (k_len, kv_heads, value_dim or dim))
    q, k, v = (torch.randn(batch, *shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    for name, x in zip("qkv", (q, k, v), strict=True):
        x.requires_grad_(grad if isinstance(grad, bool) else name in grad)
    return q, k, v


def like(x: Tensor, seed: int = 7) -> Tensor:
    """Random numbers in the shape and dtype of `x`."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x.dtype)


def eager(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: int | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse in plain, differentiable PyTorch: the few lines that anybody would write."""
    group = q.shape[2] // k.shape[2] if k.shape[2] else 1
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    seen = torch.ones_like(scores, dtype=torch.bool)
    if causal is not None:
        seen = seen.tril(causal)
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -math.inf)
        if mask.dtype != torch.bool:
            scores = scores + mask.to(scores.dtype).masked_fill(mask == -math.inf, 0.0)
    dead = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(dead, 0.0)
    weights = scores.softmax(-1).masked_fill(dead, 0.0)
    lse = scores.logsumexp(-1).masked_fill(dead.squeeze(-1), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def assert_close(got: Tensor | None, expected: Tensor | None) -> None:
    """Coarsely equal, relative to the largest number; same shape; same infinities; None only where None is expected."""
    assert (got is None) == (expected is None)
    if got is None or expected is None:
        return
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance * _size(expected))


def _size(x: Tensor) -> float:
    finite = x.detach()[x.detach().isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def reached(*_: object, **__: object) -> Any:
    pytest.fail("a kernel ran")


def unreachable(name: str = "unreachable", **claims: object) -> OpPair:
    """A pair that claims everything but what is given, and fails the test when it is run."""
    return OpPair(name, reached, reached, Claims(**{**vars(EVERYTHING), **claims}))  # type: ignore[arg-type]


def recorder(name: str, ran: list[str]) -> OpPair:
    """A right pair that writes down when it runs."""
    pair = HERE[0].pairs["cpu"]

    def forward(*args: Any) -> Any:
        ran.append(f"{name} forward")
        return pair.forward(*args)

    def backward(*args: Any) -> Any:
        ran.append(f"{name} backward")
        return pair.backward(*args)

    return replace(pair, name=name, forward=forward, backward=backward)


def backend_of(pair: OpPair) -> Backend:
    return Backend(pair.name, "for a test", {"cpu": pair})


@contextmanager
def refused(kind: type[rt.RingtrueError], *parts: object, unchanged: tuple[Tensor, ...] = ()) -> Iterator[None]:
    """The block raises `kind` with all of `parts` in its text; random state, scopes and tensors stay as they were."""
    before = torch.get_rng_state(), scope.current_backend(), scope.current_context()
    versions = [x._version for x in unchanged]
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    missing = [part for part in parts if str(part) not in text]
    assert not missing, f"{missing} not in:\n{text}"
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (scope.current_backend(), scope.current_context()) == before[1:]
    assert [x._version for x in unchanged] == versions
