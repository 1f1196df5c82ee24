"""On a GPU: gradients of every kernel that drops belong to its mask, and only the mask comes of the random state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ringtrue as rt
from ringtrue.audit.drawn import drawn_mask
from ringtrue.audit.inputs import Case, build
from ringtrue.audit.judge import judged
from ringtrue.audit.laws import whole
from ringtrue.backends import REGISTRY
from ringtrue.select import composed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
DROPS = [b for b in REGISTRY if "cuda" in b.pairs and b.pairs["cuda"].claims.dropout]
EVERY = pytest.mark.parametrize("backend", DROPS, ids=lambda b: b.name)
FUSED = pytest.mark.parametrize("backend", [b for b in DROPS if b.pairs["cuda"].claims.arithmetic != "float32"])
SHAPES = [
    Case("drop-many", 200, 333, heads=4, kv_heads=2, head_dim=64),
    Case("drop-even", 256, 256, heads=4, head_dim=128),
    Case("drop-odd-tile", 128, 192, heads=4, head_dim=64),
    Case("drop-causal", 190, 190, heads=4, head_dim=64, causal=0),
    Case("drop-chunk", 100, 260, heads=4, head_dim=64, causal=77),
    Case("drop-one-query", 1, 70, heads=4, head_dim=64),
    Case("drop-one-key", 70, 1, heads=4, head_dim=64),
    Case("drop-outermost", 130, 140, heads=4, head_dim=64, storage="heads_outermost"),
    Case("drop-wide", 90, 140, heads=2, head_dim=256),
    Case("drop-narrow-values", 90, 140, heads=2, head_dim=64, value_dim=32),
    Case("drop-odd-width", 90, 140, heads=2, head_dim=44),
    Case("drop-bias", 90, 140, heads=2, head_dim=64, mask="float:hqk"),
    Case("drop-keys", 90, 140, heads=2, head_dim=64, mask="keep"),
    Case("drop-lse", 90, 140, heads=2, head_dim=64, grad_lse=True),
    Case("drop-peaked", 90, 140, heads=2, head_dim=64, values="peaked"),
]


@EVERY
@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.id)
def test_gradients_belong_to_the_revealed_mask(backend: rt.Backend, p: float, case: Case) -> None:
    claims = backend.pairs["cuda"].claims
    for dtype in (torch.bfloat16, torch.float16):
        x = build(replace(case, dtype=dtype, dropout=p), "cuda", dbias=claims.dbias)
        said = rt.explain(
            x.q, x.k, x.v, is_causal=case.causal is not None, enable_gqa=True, dropout_p=p, backend=backend.name
        )
        if said.backend is None or (x.mask.kinds and not claims.masks):
            pytest.skip("does not take it, dropout or not")
        pair = composed(backend, "cuda")
        x = replace(x, dropout=drawn_mask(pair, x))
        found = judged(whole(pair, x), x)
        assert all(v.ok for v in found), "\n".join(map(str, found))


def call(name: str, length: int = 96, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator("cuda").manual_seed(seed)
    q, k, v, g = (torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16, generator=draw) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = rt.attention(*inputs, dropout_p=0.3, backend=name)
    return out, *torch.autograd.grad(out, inputs, g)


@FUSED
def test_the_devices_generator_is_left_as_it_was(backend: rt.Backend) -> None:
    torch.cuda.manual_seed(3)
    torch.rand(5, device="cuda")
    before = torch.cuda.get_rng_state()
    call(backend.name)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.manual_seed(8)
    torch.cuda.manual_seed(1)
    first = call(backend.name)[0]
    torch.manual_seed(8)
    torch.cuda.manual_seed(2)
    torch.rand(5, device="cuda")
    assert torch.equal(call(backend.name)[0], first)


@FUSED
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device(backend: rt.Backend) -> None:
    call(backend.name)
    try:
        torch.cuda.set_sync_debug_mode("error")
        call(backend.name)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@FUSED
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_captured_call_is_refused(backend: rt.Backend) -> None:
    call(backend.name, 48)
    torch.cuda.synchronize()
    q = torch.randn(1, 48, 2, 64, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(rt.UnsupportedError, match="every replay would drop the same"):
        rt.attention(q, q, q, dropout_p=0.3, backend=backend.name)


@FUSED
def test_long_calls_drop_each_head_by_itself(backend: rt.Backend) -> None:
    """2**32 weights and more: counted in 32 bits, heads (or rows) would draw the same numbers again."""
    for length, heads in ((16384, 18), (65536, 2)):
        x = torch.zeros(1, length, heads, 64, device="cuda", dtype=torch.bfloat16)
        v = torch.zeros_like(x)
        v[:, :64] = torch.eye(64, device="cuda")[:, None]
        torch.manual_seed(1)
        with torch.no_grad():
            kept = (rt.attention(x, x, v, dropout_p=0.5, backend=backend.name) != 0).float() - 0.5
        assert abs(kept.mean()) < 0.01
        pairs = [(kept[:, :, 0], kept[:, :, i]) for i in range(1, heads)] + [(kept[:, :-1], kept[:, 1:])]
        for one, other in pairs:
            assert abs((one * other).mean()) * 4 < 0.02


def test_auto_takes_a_kernel() -> None:
    q = torch.randn(1, 48, 2, 64, device="cuda", dtype=torch.bfloat16)
    assert rt.explain(q, q, q, dropout_p=0.3).backend == DROPS[0].name
    assert rt.explain(q, q, q, dropout_p=0.3, deterministic=True).backend == "native_math"
