"""The public bug reports on a GPU: through every backend that has a kernel there and "auto", right or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from calls import SLOW
from ringtrue.audit.inputs import Case, Inputs, build
from ringtrue.backends import REGISTRY
from ringtrue.contract import Mask
from test_cases import CASES, SPECIAL, as_passed, assert_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
EVERY_NAME = pytest.mark.parametrize("backend", ["auto", *(b.name for b in REGISTRY if "cuda" in b.pairs)])
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def right_or_refused(backend: str, x: Inputs) -> None:
    if backend in SLOW and x.q.dtype != torch.bfloat16:
        pytest.skip("each would be compiled once more")
    refusal = nullcontext() if takes(backend, x) else pytest.raises(rt.UnsupportedError, match="these can: ")
    with refusal:
        assert_right(backend, x)


def takes(backend: str, x: Inputs) -> bool:
    """Whether the claims take the call; "auto" must take every one."""
    mask = as_passed(x.mask)
    said = rt.explain(x.q, x.k, x.v, mask, scale=x.options.scale, enable_gqa=True, return_lse=True, backend=backend)
    assert backend != "auto" or said.backend is not None, said
    return said.backend is not None


def moved(x: Inputs, dtype: torch.dtype) -> Inputs:
    def there(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to("cuda")

    q, k, v, g = (t.to("cuda", dtype) for t in (x.q, x.k, x.v, x.grad_out))
    mask = Mask(*map(there, x.mask.tensors), x.mask.causal, x.mask.since)
    return replace(x, q=q, k=k, v=v, grad_out=g, mask=mask)


@EVERY_NAME
@EVERY_DTYPE
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reported_call(backend: str, dtype: torch.dtype, case: Case) -> None:
    right_or_refused(backend, build(replace(case, dtype=dtype), "cuda", dbias=False))


@EVERY_NAME
@EVERY_DTYPE
@pytest.mark.parametrize("make", SPECIAL)
def test_a_reported_call_of_its_own_kind(backend: str, dtype: torch.dtype, make: Callable[[], Inputs]) -> None:
    right_or_refused(backend, moved(make(), dtype))
