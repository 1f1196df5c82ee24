"""Known faults of kernels: each entry names what is done about it, and the two wrappers do it, on a CPU too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from calls import qkv, unreachable
from ringtrue import faults
from ringtrue.backends import REGISTRY
from ringtrue.contract import ForwardOut, Grads, Mask, OpPair, Options, Wanted
from ringtrue.faults import FAULTS, guarded, mended, padded
from ringtrue.plants import BackwardCall, transposed_again
from ringtrue.plants.memories import first_strides

EVERY = Wanted(True, True, True)
MATH = rt.op_pair("native_math", "cpu")
OPTIONS = Options(scale=0.3)
STATE = torch.tensor([7, 0])
EVERY_P = pytest.mark.parametrize("p", [0.0, 0.3, 0.9])
Layout = Callable[[Tensor], Tensor]


def tokens_outermost(x: Tensor) -> Tensor:
    return x.contiguous()


def heads_outermost(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.fixture(autouse=True)
def nothing_checked() -> Iterator[None]:
    faults._checked.layouts.clear()
    yield
    faults._checked.layouts.clear()


def backward(
    pair: OpPair, q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Mask, wanted: Wanted = EVERY, p: float = 0.0
) -> Grads:
    options = replace(OPTIONS, dropout_p=p)
    result = pair.forward(q, k, v, mask, STATE, options)
    return pair.backward(g, None, q, k, v, mask, result.out, result.lse, STATE, result.saved, options, wanted)


def close(a: Grads, b: Grads) -> bool:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    return bool(pairs) and all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in pairs)


@pytest.mark.parametrize("others", [tokens_outermost, heads_outermost])
@pytest.mark.parametrize("stored", [tokens_outermost, heads_outermost])
@pytest.mark.parametrize("causal", [None, 0])
@EVERY_P
def test_a_guarded_pair_is_right_whatever_ran_before_it(
    others: Layout, stored: Layout, causal: int | None, p: float
) -> None:
    """A graph cache keyed without the strides of grad_out, filled by somebody else's call of the same sizes."""
    q, k, v = (stored(x) for x in qkv(6, 6, 4, 4, 8, 8, dtype=torch.float32))
    mask, g = Mask(causal=causal), torch.randn(q.shape)
    faulty = first_strides("grad_out")(MATH)
    right = backward(MATH, q, k, v, g, mask, p=p)
    backward(faulty, q, k, v, others(g), mask, p=p)
    unlike = heads_outermost if others is tokens_outermost else tokens_outermost
    assert not close(backward(faulty, q, k, v, unlike(g), mask, p=p), right)
    pair = guarded(faulty, MATH)
    for layout in (tokens_outermost, heads_outermost, tokens_outermost):
        assert close(backward(pair, q, k, v, layout(g), mask, p=p), right)


@pytest.mark.parametrize("name", ["grad_out", "out"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_laws_alone_find_either_misread_tensor(name: str, kv_heads: int) -> None:
    """With dropout no other pair can be asked: it must not run."""
    q, k, v = qkv(12, 10, 4, kv_heads, 8, 8, dtype=torch.float32)
    read = next(i for i, n in enumerate(BackwardCall._fields) if n == name)

    def misread(*args: Any) -> Grads:
        return MATH.backward(*args[:read], transposed_again(args[read]), *args[read + 1 :])

    alone = unreachable("nobody")
    with pytest.raises(rt.GradientError, match="no dropout mask can give"):
        backward(guarded(replace(MATH, backward=misread), alone), q, k, v, torch.randn(q.shape), Mask(), p=0.3)
    backward(guarded(MATH, alone), q, k, v, torch.randn(q.shape), Mask(), p=0.3)


def test_a_probability_is_part_of_the_signature() -> None:
    q, k, v = qkv(6, 5, 4, 4, 8, 8, dtype=torch.float32)
    for p in (0.0, 0.3, 0.4, 0.3):
        backward(guarded(MATH, MATH), q, k, v, torch.randn(q.shape), Mask(), p=p)
    assert len(faults._checked.layouts) == 3


def test_a_mask_that_drops_all_proves_nothing() -> None:
    """The check draws until something is kept."""
    q, k, v = qkv(2, 2, 1, 1, 8, 8, batch=1, dtype=torch.float32)
    seen: list[bool] = []

    def noted(*args: Any) -> Grads:
        seen.append(bool(args[7 - 1].any()))
        return MATH.backward(*args)

    backward(guarded(replace(MATH, backward=noted), MATH), q, k, v, torch.randn(q.shape), Mask(), p=0.9)
    assert seen[0]


def test_a_signature_is_checked_once() -> None:
    q, k, v = qkv(6, 5, 4, 4, 8, 8, dtype=torch.float32)
    calls: list[str] = []

    def counted(*args: Any) -> Grads:
        calls.append("other")
        return MATH.backward(*args)

    pair = guarded(MATH, replace(MATH, backward=counted))
    for _ in range(3):
        backward(pair, q, k, v, torch.randn(q.shape), Mask())
    assert len(calls) == 1
    backward(pair, heads_outermost(q), k, v, torch.randn(q.shape), Mask())
    assert len(calls) == 2


@pytest.mark.parametrize("upstream", [torch.ones_like, torch.zeros_like, lambda g: g * 1e-23, lambda g: g * torch.nan])
def test_a_first_call_that_hides_the_fault_proves_nothing(upstream: Layout) -> None:
    """out.sum().backward(): a grad_out of ones is the same in any order."""
    q, k, v = qkv(6, 6, 4, 4, 8, 8, dtype=torch.float32)
    faulty, g = first_strides("grad_out")(MATH), torch.randn(q.shape)
    backward(faulty, q, k, v, heads_outermost(g), Mask())
    pair = guarded(faulty, MATH)
    backward(pair, q, k, v, upstream(g), Mask())
    assert close(backward(pair, q, k, v, g, Mask()), backward(MATH, q, k, v, g, Mask()))


@pytest.mark.parametrize("form", [tokens_outermost, heads_outermost, lambda x: x[:, :, :1].expand(x.shape)])
def test_the_check_draws_tensors_of_the_same_form_and_no_random_number_of_the_user(form: Layout) -> None:
    q, k, v = (form(x) for x in qkv(6, 5, 4, 4, 8, 8, dtype=torch.float32))
    seen: list[tuple[object, ...]] = []

    def noted(*args: Any) -> Grads:
        seen.append(tuple((x.shape, x.stride(), x.dtype) for x in args[2:5]))
        return MATH.backward(*args)

    torch.manual_seed(3)
    expected = torch.get_rng_state()
    backward(guarded(replace(MATH, backward=noted), MATH), q, k, v, torch.ones(q.shape), Mask())
    assert torch.equal(torch.get_rng_state(), expected)
    assert len(set(seen)) == 1
    assert len(seen) == 2


def test_small_gradients_of_half_precision_are_no_fault() -> None:
    q, k, v = qkv(16, 16, 4, 4, 8, 8, dtype=torch.float16)
    flash = rt.op_pair("native_flash", "cpu")
    grads = backward(guarded(flash, MATH), q, k, v, torch.randn(q.shape).half() * 1e-6, Mask())
    assert all(x is None or x.isfinite().all() for x in grads)


def test_what_was_checked_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "LIMIT", 3)
    pair = guarded(MATH, MATH)
    for length in range(2, 9):
        q, k, v = qkv(length, 5, 4, 4, 8, 8, dtype=torch.float32)
        backward(pair, q, k, v, torch.randn(q.shape), Mask())
        assert 0 < len(faults._checked.layouts) <= 3


def wrong(part: str, by: Callable[[Tensor], Tensor]) -> OpPair:
    def changed(*args: Any) -> Grads:
        grads = MATH.backward(*args)
        return grads._replace(**{part: by(getattr(grads, part))})

    return replace(MATH, backward=changed)


@pytest.mark.parametrize("part", ["dq", "dk", "dv"])
@pytest.mark.parametrize("by", [lambda x: 1.5 * x, lambda x: x * torch.nan, torch.zeros_like], ids=["", "nan", "zero"])
@pytest.mark.parametrize("wanted", [EVERY, Wanted(False, True, False)])
@EVERY_P
def test_a_kernel_that_is_wrong_in_every_layout_is_refused(
    part: str, by: Callable[[Tensor], Tensor], wanted: Wanted, p: float
) -> None:
    q, k, v = qkv(6, 5, 4, 4, 8, 8, dtype=torch.float32)
    story = r"no dropout mask can give[\s\S]*use another" if p else r"unlike those of[\s\S]*use backend="
    with pytest.raises(rt.GradientError, match=story):
        backward(guarded(wrong(part, by), MATH), q, k, v, torch.randn(q.shape), Mask(), wanted, p)


@EVERY_P
@pytest.mark.parametrize("k_len", [1, 2, 64])
@pytest.mark.parametrize("kind", ["none", "causal", "dense"])
def test_a_right_pair_in_16_bits_passes_the_check(p: float, k_len: int, kind: str) -> None:
    q, k, v = qkv(16, k_len, 4, 2, 8, 16, dtype=torch.bfloat16)
    bias = torch.randn(2, 1, 16, k_len) if kind == "dense" else None
    mask = Mask(bias, causal=0 if kind == "causal" else None)
    backward(guarded(MATH, MATH), q, k, v, torch.randn(2, 16, 4, 16).bfloat16(), mask, p=p)
    assert len(faults._checked.layouts) == 1


def test_gradients_of_almost_nothing_do_not_fail_the_check() -> None:
    """One key: dq and dk are 0, and what kernels give is rounding."""
    q, k, v = qkv(6, 1, 4, 4, 8, 8, dtype=torch.bfloat16)

    def rounded(*args: Any) -> Grads:
        grads = MATH.backward(*args)
        return grads._replace(dq=grads.dq + 2e-3 * torch.randn_like(grads.dq))  # type: ignore[operator]

    backward(guarded(replace(MATH, backward=rounded), MATH), q, k, v, torch.randn_like(q), Mask())
    assert len(faults._checked.layouts) == 1


def single(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rng: None, options: Options) -> ForwardOut:
    assert q.shape[1] != 1, "a single query"
    return MATH.forward(q, k, v, mask, rng, options)


@pytest.mark.parametrize("k_len", [1, 9])
@pytest.mark.parametrize("kind", ["none", "causal", "dense"])
def test_a_single_query_is_asked_twice(k_len: int, kind: str) -> None:
    q, k, v = qkv(1, k_len, 4, 2, 8, 8, dtype=torch.float32)
    mask = Mask(torch.randn(2, 1, 1, k_len) if kind == "dense" else None, causal=0 if kind == "causal" else None)
    g = torch.randn(q.shape)
    pair = padded(replace(MATH, forward=single))
    ours, right = (p.forward(q, k, v, mask, None, OPTIONS) for p in (pair, MATH))
    assert torch.allclose(ours.out, right.out)
    assert torch.allclose(ours.lse, right.lse)
    inner = replace(MATH, forward=single, backward=two_rows)
    grads = padded(inner).backward(
        g, None, q, k, v, mask, right.out, right.lse, None, right.saved, replace(OPTIONS, levelled=True), EVERY
    )
    assert close(grads, backward(MATH, q, k, v, g, mask))


def two_rows(*args: Any) -> Grads:
    assert args[2].shape[1] == 2
    return MATH.backward(*args)


def test_a_single_query_asked_twice_lies_in_memory_as_kernels_read_it() -> None:
    """torch.cat may choose an order of dims in which the last one's stride is not 1."""
    q = torch.randn(2, 4, 16).unsqueeze(-1).movedim(-1, 1)
    k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 4, 16)
    assert torch.cat([q, q], 1).stride(-1) != 1

    def forward(*args: Any) -> ForwardOut:
        assert args[0].stride(-1) == 1
        return MATH.forward(*args)

    def read(*args: Any) -> Grads:
        assert all(args[i].stride(-1) == 1 for i in (0, 2, 7))
        return MATH.backward(*args)

    backward(padded(replace(MATH, forward=forward, backward=read)), q, k, v, torch.randn_like(q), Mask())


def test_every_entry_says_who_and_what() -> None:
    known = {(b.name, device) for b in REGISTRY for device in b.pairs}
    here = Path(faults.__file__).parent
    for fault in FAULTS:
        assert (fault.backend, fault.device) in known
        assert re.match(r"https://\S+$", fault.link)
        where = here / fault.where.split(" ")[0]
        assert where.exists() or where.with_suffix("").is_dir(), fault.where


def test_what_needs_code_around_the_pair_gets_it() -> None:
    for backend in REGISTRY:
        for device, pair in backend.pairs.items():
            around = mended(pair, device, MATH)
            named = {f.action for f in FAULTS if (f.backend, f.device) == (backend.name, device)}
            assert (around.backward is not pair.backward) == bool(named & {"pad", "guard"})
