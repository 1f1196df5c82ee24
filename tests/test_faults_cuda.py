"""On a GPU: the faults of the table are still there without what is done about them, and not with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringtrue as rt
from contract.test_order import broken
from ringtrue import faults
from ringtrue.audit.drawn import drawn_mask
from ringtrue.audit.inputs import Inputs
from ringtrue.audit.judge import judged
from ringtrue.audit.truth import Quantities
from ringtrue.backends import REGISTRY
from ringtrue.call import random_state
from ringtrue.contract import Mask, OpPair, Options, Wanted
from ringtrue.edge import edge

pytestmark = pytest.mark.gpu
HALF = torch.bfloat16
EVERY = Wanted(True, True, True)
ON_CUDA = tuple(b.name for b in REGISTRY if "cuda" in b.pairs)


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    faults._checked.layouts.clear()


def raw(name: str) -> OpPair:
    """The pair as it is, without its edge and without what its faults need."""
    return next(b for b in REGISTRY if b.name == name).pairs["cuda"]


def tensors(*shape: int, number: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, device="cuda", dtype=HALF) for _ in range(number)]


def heads_outermost(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def gradients(pair: OpPair, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    options = Options(scale=q.shape[3] ** -0.5)
    result = pair.forward(q, k, v, Mask(), None, options)
    grads = pair.backward(g, None, q, k, v, Mask(), result.out, result.lse, None, result.saved, options, EVERY)
    return [x for x in grads if x is not None]


def test_cudnns_cache_is_still_at_fault() -> None:
    assert next(broken(edge(faults.padded(raw("native_cudnn"))), "cuda", HALF, 200), None)


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("first", ["tokens outermost", "heads outermost"])
@pytest.mark.parametrize("stored", ["tokens outermost", "heads outermost"])
def test_other_peoples_calls_do_not_reach_ours(name: str, first: str, stored: str) -> None:
    """torch's own attention, on every kernel it has, with both layouts of grad_out, before ours in the process."""
    length = 64 + 8 * ON_CUDA.index(name) + 2 * (first == stored) + (stored == "heads outermost")
    q, k, v, g = tensors(2, length, 4, 64)
    if stored == "heads outermost":
        q, k, v = (heads_outermost(x) for x in (q, k, v))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    layouts = [g, heads_outermost(g)]
    for grad_out in layouts if first == "tokens outermost" else reversed(layouts):
        for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            with sdpa_kernel(kernel):
                out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
                torch.autograd.grad(out, inputs, grad_out)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    right = torch.autograd.grad(rt.attention(*wide, backend="native_math"), wide, g.float())
    for grad_out in layouts:
        found = torch.autograd.grad(rt.attention(*inputs, backend=name), inputs, grad_out)
        assert all((a - b).abs().max() < 0.05 for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("name", [n for n in ON_CUDA if raw(n).claims.dropout])
@pytest.mark.parametrize("first", ["tokens outermost", "heads outermost"])
def test_other_peoples_dropout_does_not_reach_ours(name: str, first: str) -> None:
    """torch's own cuDNN attention with the same dropout_p first; ours is held against the mask that it draws."""
    q, k, v, g = tensors(2, 320 + 8 * ON_CUDA.index(name) + (first == "tokens outermost"), 4, 64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    layouts = [g, heads_outermost(g)][:: 1 if first == "tokens outermost" else -1]
    for grad_out in layouts:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), dropout_p=0.3).transpose(1, 2)
            torch.autograd.grad(out, inputs, grad_out)
    options = Options(scale=0.125, dropout_p=0.3, return_lse=True)
    for grad_out in layouts:
        torch.manual_seed(5)
        x = Inputs(*(t.detach() for t in inputs), Mask(), options, grad_out, rng=random_state())
        torch.manual_seed(5)
        out, lse = rt.attention(*inputs, dropout_p=0.3, backend=name, return_lse=True)
        found = Quantities(out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad_out), None)
        verdicts = judged(found, replace(x, dropout=drawn_mask(rt.op_pair(name, "cuda"), x)))
        assert all(verdict.ok for verdict in verdicts), "\n".join(map(str, verdicts))


def test_cudnns_cache_is_still_at_fault_with_dropout() -> None:
    """One state, one grad_out in two layouts: two gradients."""
    q, k, v, g = tensors(2, 333, 4, 64)
    options, state, pair = Options(0.125, dropout_p=0.3), torch.tensor([1, 0]), raw("native_cudnn")
    out, lse, *_ = pair.forward(q, k, v, Mask(), state, options)
    found = [
        pair.backward(layout(g), None, q, k, v, Mask(), out, lse, state, (), options, EVERY)
        for layout in (heads_outermost, torch.clone)
    ]
    assert not torch.allclose(found[0].dv, found[1].dv, atol=0.1)  # type: ignore[arg-type]


def test_a_first_call_in_a_captured_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [x.requires_grad_() for x in tensors(1, 72, 2, 64, number=3)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(rt.GradientError, match="run one step before the capture"):
        rt.attention(*inputs, backend="native_cudnn").sum().backward()


@pytest.mark.parametrize("k_len", [64, 192])
def test_odd_multiples_of_64_keys_are_still_at_fault(k_len: int) -> None:
    """All scores of a query about -200: cuDNN's dq is NaN, ours is not."""
    k = -torch.ones(1, k_len, 2, 64, device="cuda", dtype=HALF) * 5 + tensors(1, k_len, 2, 64)[0] / 100
    q, v = torch.full((1, 33, 2, 64), 5.0, device="cuda", dtype=HALF), tensors(1, k_len, 2, 64)[1]
    g = tensors(1, 33, 2, 64)[3]
    assert gradients(edge(raw("native_cudnn")), q, k, v, g)[0].isfinite().all()
    assert not gradients(raw("native_cudnn"), q, k, v, g)[0].isfinite().all()


def test_a_single_query_is_still_at_fault() -> None:
    k = -torch.ones(1, 128, 2, 64, device="cuda", dtype=HALF) * 5 + tensors(1, 128, 2, 64)[0] / 100
    q, v = torch.full((1, 1, 2, 64), 5.0, device="cuda", dtype=HALF), tensors(1, 128, 2, 64)[1]
    g = tensors(1, 1, 2, 64)[3]
    assert all(x.isfinite().all() for x in gradients(rt.op_pair("native_cudnn"), q, k, v, g))
    assert not all(x.isfinite().all() for x in gradients(raw("native_cudnn"), q, k, v, g))


def test_efficients_count_of_weights_is_still_at_fault() -> None:
    """16384 tokens: head 16 begins 2**32 weights after head 0. Ours draws them apart, and backward drops the same."""
    q, k, v, g, moved = tensors(1, 16384, 18, 64, number=5)
    values = torch.zeros_like(v)
    values[:, :64] = torch.eye(64, device="cuda", dtype=HALF)[:, None]
    options, state = Options(0.125, dropout_p=0.5), torch.tensor([1, 0])
    for pair, alike in ((raw("native_efficient"), True), (rt.op_pair("native_efficient"), False)):
        kept = pair.forward(0 * q, k, values, Mask(), state, options).out != 0
        assert torch.equal(kept[:, :, 0], kept[:, :, 16]) is alike
    out, lse, rng, saved = pair.forward(q, k, v, Mask(), state, options)
    grads = pair.backward(g, None, q, k, v, Mask(), out, lse, rng, saved, options, EVERY)
    with_moved = pair.forward(q, k, moved, Mask(), state, options).out
    assert faults._lawful(grads, q, k, moved, out, with_moved, g, 0.125)


def test_efficients_layout_of_out_is_still_at_fault() -> None:
    q, k, v, g = (x.transpose(1, 2) for x in tensors(2, 33, 4, 64))
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, seed, offset = op(q, k, v, None, True)
    back = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    rest = (lse, seed, offset, 0.0, [True, True, True, False])
    right, wrong = (back(g, q, k, v, None, x, *rest)[0] for x in (out, out.contiguous()))
    assert not torch.allclose(right, wrong, atol=0.1)
    grads = rt.op_pair("native_efficient").backward(
        g.transpose(1, 2), None, *(x.transpose(1, 2) for x in (q, k, v)), Mask(), out.contiguous().transpose(1, 2),
        lse[:, :, :33], None, (), Options(scale=0.125), EVERY,
    )  # fmt: skip
    assert grads.dq is not None
    assert torch.allclose(grads.dq.transpose(1, 2), right, atol=1e-2)
