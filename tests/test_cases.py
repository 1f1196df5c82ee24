"""Public bug reports on attention, each as the smallest call that shows it, on every backend: right, or refused.

A BR number is one report (or a family of them) in public issue trackers; the words and the code here are our own. What
several ranks do is in tests/parallel; BR-51 (empty calls that end the process) is in test_edge.py, BR-59 (the
environment variable) in test_scope.py; imports of broken optional libraries come with those libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringtrue as rt
from calls import HERE, assert_close, claims_of, eager, like, qkv
from calls import one_thread as one_thread
from ringtrue.audit.inputs import Case, Inputs, build
from ringtrue.audit.judge import judged
from ringtrue.audit.truth import Quantities
from ringtrue.contract import Claims, Mask, Options, Wanted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = (
    Case("BR-01a heads == length hides a transposition", 16, 16, heads=16, head_dim=64),
    Case("BR-01b heads != length", 24, 24, heads=4, head_dim=64, batch=1),
    Case("BR-03a upstream gradient strided inside", 32, 32, heads=4, kv_heads=1, head_dim=64, storage="inner_strided"),
    Case("BR-03b upstream gradient heads outermost", 32, 32, heads=4, head_dim=64, storage="heads_outermost"),
    *(Case(f"BR-10 head dim {d}", 40, 40, heads=2, head_dim=d, batch=1) for d in (36, 40, 72, 104)),
    Case("BR-14 key gradients summed over the group", 24, 24, heads=8, kv_heads=2, head_dim=32),
    Case("BR-16 fused qkv, lowest padding", 23, 23, heads=4, mask="float_lowest_input:bk", storage="fused"),
    *(
        Case(
            f"BR-18 mask has {axes}", 8, 8, heads=4, head_dim=64, mask=f"{'blind' if axes == 'bhq' else 'some'}:{axes}"
        )
        for axes in ("bqk", "hqk", "bhk", "bk", "qk", "bhq")
    ),
    Case("BR-20 more than 2^16 keys", 3, 65537, heads=1, batch=1, mask="keep_ragged"),
    Case("many queries add up in one key's gradient", 8192, 3, heads=1, batch=1),
    Case("BR-22a odd lengths", 33, 77, heads=4, head_dim=64, batch=1),
    Case("BR-22b few keys", 5, 3, heads=2, head_dim=128),
    Case("BR-26 scale 1/3", 16, 16, heads=2, head_dim=32, scale=1 / 3),
    Case("BR-26b scale 1.0 is not unset", 16, 16, heads=2, head_dim=32, scale=1.0),
    Case("BR-29 text of two lengths, image rows stay", 40, 12, heads=4, head_dim=32, mask="keep_ragged"),
    Case("BR-31b additive -inf is not bool", 12, 12, heads=2, mask="float_infinite_input:qk"),
    Case("BR-31c random bias is not bool", 12, 12, heads=2, mask="float_input:hqk"),
    Case("BR-33a 43 keys", 43, 43, heads=4, head_dim=64, mask="float_infinite_input:bqk"),
    Case("BR-33b 70 keys", 35, 70, heads=4, head_dim=64, mask="float_infinite_input:bk"),
    Case("BR-33c 5 keys", 7, 5, heads=4, head_dim=64, mask="float_infinite_input:bk"),
    Case("BR-35a rows that see nothing, bool", 8, 8, heads=2, mask="blind:bqk"),
    Case("BR-35b rows that see nothing, -inf", 8, 8, heads=2, mask="float_blind_input:bqk"),
    Case("BR-35c rows at the lowest number", 8, 8, heads=2, mask="float_lowest_rows_input:bqk"),
    Case("BR-38b batch of 512", 8, 8, heads=4, batch=512),
    *(
        Case(f"BR-39 causal {q} x {k}", q, k, heads=2, batch=1, causal=0)
        for q, k in ((2, 5), (5, 2), (1, 8), (130, 257))
    ),
    *(
        Case(f"BR-39 causal {q} x {k}, bottom right", q, k, heads=2, batch=1, causal=k - q)
        for q, k in ((2, 5), (5, 2), (1, 8), (130, 257))
    ),
    Case("BR-40 natural logarithm", 64, 64, heads=4, head_dim=64),
    Case("BR-42 lse of 16 queries", 16, 16, heads=2, head_dim=128, batch=1),
    Case("BR-53 narrow values", 32, 32, heads=2, head_dim=48, value_dim=32, batch=1),
    Case("BR-53b wide values, causal", 4, 4, heads=2, head_dim=8, value_dim=16, batch=1, causal=0),
)


NAMES = ("auto", *(b.name for b in HERE))
EVERY_NAME = pytest.mark.parametrize("backend", NAMES)


def able(backend: str, what: Callable[[Claims], object]) -> bool:
    """Whether a backend, or any that "auto" may take, claims something."""
    return any(what(claims_of(b.name)) for b in HERE if backend in ("auto", b.name))


def as_passed(mask: Mask) -> Any:
    """A mask as a user writes it, float parts asking for their gradient where they do."""
    parts = [] if mask.causal is None else [rt.Causal("top_left" if mask.causal == 0 else "bottom_right")]
    parts += [part for part in (mask.dense,) if part is not None]
    parts += [] if mask.key_keep is None else [rt.KeyPadding(mask.key_keep)]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


def attend(backend: str, x: Inputs) -> Quantities:
    """The public call, forward and backward, for what is wanted."""
    asked = [t for t, wanted in zip((x.q, x.k, x.v, x.mask.bias), x.wanted, strict=True) if wanted and t is not None]
    for tensor in asked:
        tensor.requires_grad_()
    out, lse = rt.attention(
        x.q, x.k, x.v, as_passed(x.mask), scale=x.options.scale, enable_gqa=True, return_lse=True, backend=backend
    )
    found = iter(torch.autograd.grad(out, asked, x.grad_out))
    grads = (next(found) if wanted else None for wanted in x.wanted)
    return Quantities(out.detach(), lse.detach(), *grads)


def assert_right(backend: str, x: Inputs) -> None:
    verdicts = judged(attend(backend, x), x)
    assert all(v.ok for v in verdicts), "\n".join(map(str, verdicts))


@EVERY_NAME
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_reported_call(backend: str, dtype: torch.dtype, case: Case) -> None:
    if able(backend, lambda claims: dtype in claims.dtypes):
        assert_right(backend, build(replace(case, dtype=dtype), dbias=False))


def inputs(
    tensors: tuple[Tensor, ...], mask: Tensor | None = None, wanted: Wanted = Wanted(True, True, True)
) -> Inputs:
    options = Options(1 / math.sqrt(tensors[0].shape[3]), return_lse=True)
    dense = None if mask is None else mask[(None,) * (4 - mask.dim())]
    return Inputs(*tensors, Mask(dense), options, like(eager(*tensors)[0]), wanted=wanted)


def very_negative_logits() -> Inputs:
    """BR-06: one query, 128 keys, every logit near -128; dk and dv were NaN."""
    q, k, v = (0.1 * x for x in qkv(1, 128, heads=1, dim=64, batch=1))
    q[..., 0], k[..., 0] = 1.0, -128.0 * 8
    return inputs((q, k, 10 * v))


def two_documents() -> Inputs:
    """BR-12: two packed documents of 37 and 91 tokens."""
    document = torch.arange(128) < 37
    return inputs(qkv(128, dim=32, batch=1), document[:, None] == document)


def last_keys_hidden() -> Inputs:
    """BR-27: a backend without masks attended to all keys."""
    return inputs(qkv(10, heads=8, dim=64, batch=1), (torch.arange(10) < 6).expand(1, 1, 10, 10))


def lowest_above_the_diagonal() -> Inputs:
    """BR-31a: an additive causal mask of the lowest number, cast to bool, was inverted."""
    return inputs(qkv(12, heads=2, batch=1), torch.zeros(12, 12).masked_fill(torch.ones(12, 12).triu(1) > 0, -3e38))


def both_paddings() -> Inputs:
    """BR-35d: cross-attention, padded queries and padded keys in one mask."""
    rows, keys = torch.tensor([8, 5]), torch.tensor([7, 16])
    mask = (torch.arange(8) < rows[:, None])[:, None, :, None] & (torch.arange(16) < keys[:, None])[:, None, None]
    return inputs(qkv(8, 16, dim=128), mask)


def large_numbers() -> Inputs:
    """BR-38a: q.k beyond the range of float16."""
    q, k, v = qkv(16, heads=2, dim=64, batch=1)
    return inputs((60 * q, 60 * k, v))


SPECIAL = (
    very_negative_logits,
    two_documents,
    last_keys_hidden,
    lowest_above_the_diagonal,
    both_paddings,
    large_numbers,
)


@EVERY_NAME
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", SPECIAL)
def test_a_reported_call_of_its_own_kind(backend: str, dtype: torch.dtype, make: Callable[[], Inputs]) -> None:
    if not able(backend, lambda claims: dtype in claims.dtypes):
        return
    x = make()
    q, k, v, g = (t.to(dtype) for t in (x.q, x.k, x.v, x.grad_out))
    assert_right(backend, replace(x, q=q, k=k, v=v, grad_out=g))


@EVERY_NAME
@pytest.mark.parametrize("shape", [(1, 4, 16, 16), (1, 1, 16, 16)])
@pytest.mark.parametrize("wanted", [Wanted(False, False, False, True), Wanted(True, False, False, True)])
def test_only_the_mask_asks_for_a_gradient(backend: str, shape: tuple[int, ...], wanted: Wanted) -> None:
    """BR-08: lse was kept only if q, k or v asked. Right, or refused with the name of who can."""
    x = inputs(qkv(16, dim=16), like(torch.empty(shape)), wanted)
    if able(backend, lambda claims: claims.dbias):
        assert_right(backend, x)
    else:
        with pytest.raises(rt.UnsupportedError, match=r"\[no-dbias\](.|\n)*these can: \w+"):
            attend(backend, x)


@EVERY_NAME
@pytest.mark.parametrize("wanted", [Wanted(False, False, True), Wanted(False, True, False)])
def test_only_one_input_asks_for_a_gradient(backend: str, wanted: Wanted) -> None:
    """BR-08b, BR-08c: as LoRA on one projection does."""
    assert_right(backend, inputs(qkv(16, dim=16), like(torch.empty(16, 16)), wanted))


def test_a_bare_call_is_full_attention() -> None:
    """BR-24: a wrapper that fixed is_causal=True."""
    tensors = qkv(16, heads=2, dim=16, dtype=torch.float64)
    assert_close(rt.attention(*tensors), eager(*tensors)[0])


@EVERY_NAME
def test_dropout_is_applied_or_refused_never_ignored(backend: str) -> None:
    """BR-45: a literal probability; seeded, unbiased."""
    tensors = qkv(64)
    if not able(backend, lambda claims: claims.dropout):
        with pytest.raises(rt.UnsupportedError, match=r"no-dropout(.|\n)*dropout_p=0\.5"):
            rt.attention(*tensors, dropout_p=0.5, backend=backend)
        return
    plain, runs = rt.attention(*tensors, backend=backend), []
    for seed in (*range(24), 0):
        torch.manual_seed(seed)
        runs.append(rt.attention(*tensors, dropout_p=0.5, backend=backend))
    assert torch.equal(runs[0], runs[-1])
    assert not torch.allclose(runs[0], runs[1])
    assert (torch.stack(runs[:-1]).mean(0) - plain).abs().mean() < 0.5 * plain.abs().mean()


@EVERY_NAME
def test_a_gradient_penalty_is_right_or_an_error_that_says_what_to_do(backend: str) -> None:
    """BR-47: d/dk of |dq|^2."""
    q, k, v = qkv(8, heads=2, grad=True)
    (grad,) = torch.autograd.grad(rt.attention(q, k, v, backend=backend).sum(), q, create_graph=True)
    if not claims_of(str(rt.explain(q, k, v, backend=backend).backend)).double_backward:
        with pytest.raises(rt.GradientError, match=r"double backward(.|\n)*native_math"):
            torch.autograd.grad(grad.square().sum(), k)
        return
    (true,) = torch.autograd.grad(eager(q, k, v)[0].sum(), q, create_graph=True)
    assert_close(*(torch.autograd.grad(g.square().sum(), k)[0] for g in (grad, true)))


@pytest.mark.parametrize("backend", [None, *NAMES])
@pytest.mark.parametrize(("kv_heads", "gqa", "words"), [(2, False, "enable_gqa is False"), (3, True, "not a multiple")])
def test_heads_that_do_not_fit_get_one_verdict(backend: str | None, kv_heads: int, gqa: bool, words: str) -> None:
    """BR-49: one kernel took what the others refused."""
    with pytest.raises(rt.ArgumentError, match=words):
        rt.attention(*qkv(16, heads=8, kv_heads=kv_heads), enable_gqa=gqa, backend=backend)


def test_a_choice_for_one_model_is_not_anothers() -> None:
    """BR-57: a maskless backend chosen for model A was in force for model B. BR-57b: nested, and raising."""
    maskless = replace(
        HERE[0].pairs["cpu"], name="maskless", claims=replace(claims_of(HERE[0].name), masks=frozenset())
    )
    tensors, mask = qkv(), torch.ones(6, 6, dtype=torch.bool)
    with rt.attention_backend(maskless):
        rt.attention(*tensors)
        with pytest.raises(rt.UnsupportedError, match="maskless"), rt.attention_backend(maskless):
            rt.attention(*tensors, mask)
        assert rt.current_backend() is maskless
    assert rt.current_backend() == "auto"
    assert_close(rt.attention(*tensors, mask), rt.attention(*tensors))
