"""flex's glue: what the contract would not let through, and that a torch with other private functions is a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import ringtrue as rt
from contract.subjects import verdicts
from ringtrue import select
from ringtrue.audit.cases import case
from ringtrue.audit.inputs import Case
from ringtrue.backends import _flex_compiled, _flex_mods, flex
from ringtrue.backends._flex_blocks import block_mask, seen_and_full
from ringtrue.contract import Facts, Mask, Options, Wanted
from ringtrue.edge import edge
from ringtrue.masks import allowed

Broken = Callable[..., Any]
OPS = flex.ops()


def before(**change: Callable[[Any], Any]) -> Broken:
    """The backward op with arguments changed by place."""

    def broken(*args: Any) -> Any:
        return OPS.flex_attention_backward(*(change.get(f"a{i}", lambda x: x)(x) for i, x in enumerate(args)))

    return broken


def of_its_own(*args: Any) -> Any:
    """Backward from an out and lse that it computes again, of the keys it is given."""
    q, k, v, _, _, g, g_lse, score, back, places, *rest = args
    out, lse, _ = OPS.flex_attention(q, k, v, score, places, *rest)
    return OPS.flex_attention_backward(q, k, v, out, lse, g, g_lse, score, back, places, *rest)


def unchanged(kind: Any) -> Broken:
    return lambda score, b, h, i, j, grad, *tensors: [grad, *(None,) * (4 + len(tensors))]


def without(**parts: Any) -> Broken:
    right = flex.mods_of

    def broken(mask: Any, options: Any, q: Any) -> Any:
        return right(replace(mask, **parts), options, q)

    return broken


# case, whether in parts, the module, what is broken there
MUTANTS: dict[str, tuple[str, bool, Any, str, Any]] = {
    "lse in base 2": ("length-33", False, flex, "LN2", 1.0),
    "lse of its own keys": ("length-33", True, OPS, "flex_attention_backward", of_its_own),
    "a natural lse in backward": ("length-33", False, OPS, "flex_attention_backward", before(a4=lambda x: x * 0.6931)),
    "no gradient of lse": ("grad-lse", False, OPS, "flex_attention_backward", before(a6=lambda x: None)),
    "its gradient in base 2": ("grad-lse", False, OPS, "flex_attention_backward", before(a6=lambda x: x / 0.6931)),
    "softcap without a slope": ("softcap", False, _flex_mods, "slope", unchanged),
    "no causal limit": ("causal", False, flex, "mods_of", without(causal=None)),
    "no window": ("window", False, flex, "mods_of", without(since=None)),
    "no segments": ("segments", False, flex, "mods_of", without(q_segments=None, k_segments=None)),
    "no key padding": ("keep", False, flex, "mods_of", without(key_keep=None)),
    "no bias": ("bias", False, flex, "mods_of", without(key_bias=None)),
    "no mask": ("bool-bhqk", False, flex, "mods_of", without(dense=None)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_contract_finds_broken_glue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, in_parts, where, what, broken = MUTANTS[name]
    pair = edge(flex.BACKEND.pairs["cpu"])

    def judged() -> list[bool]:
        typed = replace(case(tried), dtype=torch.float32)
        return [v.ok for v in verdicts(pair, typed, "cpu", in_parts=in_parts)]

    assert all(judged())
    if where is OPS:
        changed = SimpleNamespace(**{**vars(OPS), what: broken})
        monkeypatch.setattr(flex, "ops", lambda: changed)
    else:
        monkeypatch.setattr(where, what, broken)
    assert not all(judged())


@pytest.mark.parametrize("name", flex.ARGUMENTS)
@pytest.mark.parametrize("found", [None, lambda query, key: None], ids=["absent", "other arguments"])
def test_a_private_function_that_moved_is_a_reason(name: str, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flex.BACKEND.unavailable("cpu") is None
    changed = SimpleNamespace(**{**vars(OPS), name: found})
    monkeypatch.setattr(flex, "ops", lambda: changed)
    reason = flex.BACKEND.unavailable("cpu")
    assert reason is not None
    assert (reason.code, reason.limit) == ("schema-moved", ", ".join(flex.ARGUMENTS[name]))
    assert reason.value == ("absent" if found is None else "query, key")


def test_a_torch_without_the_module_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise ModuleNotFoundError("no module of that name")

    monkeypatch.setattr(flex, "ops", gone)
    reason = flex.BACKEND.unavailable("cpu")
    assert reason is not None
    assert (reason.code, reason.value) == ("schema-moved", "absent")


def ids(batch: int, length: int, of_each: int) -> torch.Tensor:
    """Segments of `of_each` tokens."""
    return (torch.arange(length) // of_each).expand(batch, -1)


PLACES = {
    "causal": (300, 300, Mask(causal=0)),
    "causal, other lengths": (100, 520, Mask(causal=200)),
    "causal from later queries on": (400, 130, Mask(causal=-140)),
    "window": (384, 384, Mask(causal=0, since=-150)),
    "window to later keys": (256, 500, Mask(causal=290, since=129)),
    "segments": (300, 300, Mask(q_segments=ids(2, 300, 70), k_segments=ids(2, 300, 70))),
    "one segment": (256, 256, Mask(q_segments=ids(1, 256, 256), k_segments=ids(1, 256, 256))),
    "segments out of order": (256, 256, Mask(q_segments=ids(1, 256, 256), k_segments=ids(1, 256, 100).flip(1))),
    "key padding": (130, 390, Mask(key_keep=torch.arange(390) < torch.tensor([[390], [129], [0]]))),
    "bool": (256, 300, Mask(dense=(ids(1, 256, 60)[:, :, None] != ids(1, 300, 100)[:, None]).unsqueeze(1))),
    "bool of keys": (256, 300, Mask(dense=(torch.arange(300) > 128)[None, None, None])),
    "bool of heads": (130, 256, Mask(dense=torch.tensor([True, False])[None, :, None, None])),
}
PLACES["all"] = (300, 300, replace(PLACES["segments"][2], causal=5, since=-200, dense=torch.ones(1, 2, 1, 300) > 0))


def by_block(mask: Mask, q_len: int, k_len: int, how: str) -> torch.Tensor:
    """What the mask written out says of each block: whether any, or all, of it is seen; all: never of a cut one."""
    seen = allowed(mask, q_len, k_len, torch.device("cpu"))
    assert seen is not None
    seen = seen.expand(*seen.shape[:2], q_len, k_len)
    missing = (0, -k_len % 128, 0, -q_len % 128)
    seen = torch.nn.functional.pad(seen, missing).unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    return getattr(getattr(seen, how)(5), how)(3)


@pytest.mark.parametrize("name", PLACES)
def test_blocks_are_those_of_the_mask(name: str) -> None:
    """Whatever is seen lies in a block that is looked at, and a block without the function is seen in full."""
    q_len, k_len, mask = PLACES[name]
    seen, full = seen_and_full(mask, q_len, k_len, torch.device("cpu"))
    every, whole = by_block(mask, q_len, k_len, "any"), by_block(mask, q_len, k_len, "all")
    assert not (every & ~seen).any()
    assert not (full & ~whole).any()
    if name not in ("segments out of order", "all"):  # there some blocks are looked at in vain
        assert torch.equal(seen.expand_as(every), every)
        assert torch.equal(full.expand_as(whole), whole)


def heads_first(q_len: int, k_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(1, q_len, 1, 1), torch.empty(1, k_len, 1, 1)


@pytest.mark.parametrize("name", ["window", "segments", "key padding"])
def test_the_block_mask_is_torchs(name: str) -> None:
    """Built by torch from the blocks of keys alone, it has the same items, in the same order."""
    q_len, k_len, mask = PLACES[name]
    built = block_mask(mask, *heads_first(q_len, k_len), more=False, of_keys=True)
    theirs = BlockMask.from_kv_blocks(*built[:4], BLOCK_SIZE=128, seq_lengths=(q_len, k_len)).as_tuple()[2:-1]
    assert len(built) == len(theirs)
    for i, (a, b) in enumerate(zip(built, theirs, strict=True)):
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        assert a.is_contiguous(), i
        if i % 2 == 0:
            assert torch.equal(a, b), i
        else:  # what comes after the number that counts may be anything
            counted = torch.arange(a.shape[-1]) < built[i - 1].unsqueeze(-1)
            assert torch.equal(a.where(counted, -1), b.where(counted, -1)), i


@pytest.mark.parametrize("ids", [[-(1 << 63)] * 2 + [(1 << 63) - 1, 0], [0, 0, 2, 1], [1, 1, 0, 4]], ids=str)
def test_no_query_has_the_segment_of_hidden_keys(ids: list[int]) -> None:
    """Whatever ids the caller has, the extreme ones of int64 too."""
    torch.manual_seed(0)
    x, segments = torch.randn(1, 4, 2, 8), rt.Segments(torch.tensor([ids]))
    mask = segments & rt.KeyPadding(torch.tensor([[True, False, True, False]]))
    found, right = (rt.attention(x, x, x, mask, backend=name) for name in ("flex", "native_math"))
    torch.testing.assert_close(found, right)


def test_without_a_mask_there_is_one_block() -> None:
    q, k = heads_first(9, 70)
    theirs = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32), BLOCK_SIZE=1 << 30
    ).as_tuple()[2:-1]
    built = block_mask(Mask(key_bias=torch.zeros(1, 70)), q, k, more=False, of_keys=True)
    assert len(built) == len(theirs)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(built, theirs, strict=True))
    *_, size, _ = block_mask(Mask(), q, k, more=True, of_keys=False)
    assert size == 128


def test_a_block_mask_of_another_form_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flex.other_block_mask() is None
    monkeypatch.setattr(flex, "block_mask_length", lambda: 14)
    reason = flex.other_block_mask()
    assert reason is not None
    assert (reason.code, reason.value) == ("schema-moved", "14")


def test_compiled_calls_are_right_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair of CUDA, its two graphs run by torch as they are; other lengths and ends need no others."""
    monkeypatch.setattr(_flex_compiled, "COMPILER", "aot_eager")
    kernel = flex.BACKEND.pairs["cuda"]
    pair = edge(replace(kernel, claims=replace(kernel.claims, min_capability=None)))
    counted = torch._dynamo.utils.counters["stats"]
    tried = Case("compiled", 300, 500, mask="keep_ragged+bias_infinite", causal=10, softcap=2.0, grad_lse=True)
    tried = replace(tried, batch=1, heads=2, kv_heads=1)
    graphs = counted["unique_graphs"]
    for other in (tried, replace(tried, q_len=150, k_len=700, causal=-3)):
        found = verdicts(pair, other, "cpu")
        assert all(v.ok for v in found), "\n".join(map(str, found))
        assert counted["unique_graphs"] - graphs == 2


def test_in_a_graph_of_the_user() -> None:
    """torch leaves out layers of dispatch in the first run of a compiled graph; the op's functions need them."""
    q, k, v, g = (torch.randn(2, 9, 2, 8, requires_grad=i < 3) for i in range(4))
    mask = rt.Causal() & rt.Segments(ids(2, 9, 4))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rt.attention(q, k, v, mask, backend="flex")

    found = []
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out = call(q, k, v)
        found.append((out, *torch.autograd.grad(out, (q, k, v), g)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_torch_cannot_compile_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("No valid triton configs.")

    monkeypatch.setattr(_flex_compiled, "COMPILER", fails)
    q = torch.randn(1, 16, 1, 16)
    with pytest.raises(rt.UnsupportedError, match=r"forward kernel for this call[^$]*No valid triton configs"):
        flex.compiled_forward(q, q, q, Mask(), None, Options(1.0))


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (256, torch.bfloat16), (256, torch.float32)])
def test_beside_a_dense_mask_blocks_are_small(which: str, dim: int, dtype: torch.dtype) -> None:
    """What one turn of the loop keeps: four tiles of queries and keys, the dense mask's and two of scores."""
    plain = _flex_compiled.kernel_options(_flex_mods.Kind(), which, dim * dtype.itemsize)
    assert plain == _flex_compiled.KERNEL_OPTIONS
    told = _flex_compiled.kernel_options(_flex_mods.Kind(dense="float"), which, dim * dtype.itemsize)
    sizes = {told[name] for name in told if name.startswith("BLOCK_") and name[6] in "MN"}
    (size,) = sizes
    assert told["num_stages"] == 1
    assert size % 16 == 0
    assert 4 * size * dim * dtype.itemsize + 3 * size * size * 4 <= 99 * 1024


SLOPES = torch.tensor([0.5, 0.1])


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j).abs() < 5


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * score - SLOPES[h] * (i - j).abs()


@pytest.mark.parametrize("compiled", [False, True])
def test_functions_of_the_caller(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softcap, the score's own function, then the float mask; what hides joins the mask. The tensor is read anew."""
    monkeypatch.setattr(_flex_compiled, "COMPILER", "aot_eager")
    kernel = flex.BACKEND.pairs["cuda" if compiled else "cpu"]
    pair = edge(replace(kernel, claims=replace(kernel.claims, min_capability=None)))
    options = Options(0.3, softcap=2.0, extra=(("mask_mod", near), ("score_mod", alibi)))
    q, k, v, g = (torch.randn(2, 140 if compiled else 9, 2, 16) for _ in range(4))
    bias, places = torch.randn(2, q.shape[1]), torch.arange(q.shape[1])
    apart = (places[:, None] - places).abs()
    for slopes in ([0.5, 0.1], [0.0, 1.0]):
        SLOPES.copy_(torch.tensor(slopes))
        out, lse, _, saved = pair.forward(q, k, v, Mask(key_bias=bias, causal=3), None, options)
        wanted = Wanted(True, True, True)
        grads = pair.backward(g, None, q, k, v, Mask(key_bias=bias, causal=3), out, lse, None, saved, options, wanted)
        x, y, z = (t.double().requires_grad_() for t in (q, k, v))
        scores = 2.0 * torch.tanh(0.3 * torch.einsum("bihd,bjhd->bhij", x, y) / 2.0)
        scores = scores * scores - SLOPES[:, None, None] * apart + bias[:, None, None]
        seen = (apart < 5) & (places <= places[:, None] + 3)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = torch.einsum("bhij,bjhd->bihd", weights, z)
        expected = (expected, *torch.autograd.grad(expected, (x, y, z), g.double()))
        for a, b in zip((out, *grads[:3]), expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_a_function_beside_ranks_or_a_tensor_that_learns_is_refused() -> None:
    q = torch.randn(1, 4, 2, 8)
    learns = torch.zeros(2, requires_grad=True)
    with pytest.raises(rt.UnsupportedError, match="option-grad"):
        options = {"score_mod": lambda score, b, h, i, j: score + learns[h]}
        rt.attention(q, q, q, backend="flex", backend_options=options)
    with pytest.raises(rt.UnsupportedError, match="option-value"):
        rt.attention(q, q, q, backend="flex", backend_options={"mask_mod": 3})
    facts = Facts("cpu", torch.float32, 1, 4, 4, 2, 2, 8, 8, options=(("mask_mod", near),))
    flex_cpu = flex.BACKEND.pairs["cpu"].claims
    assert not select.reasons_against(flex_cpu, facts)
    assert [r.code for r in select.reasons_against(flex_cpu, replace(facts, sharded=True))] == ["option-sharded"]
    attend = torch.compile(
        lambda q: rt.attention(q, q, q, backend="flex", backend_options={"mask_mod": near}), fullgraph=True
    )
    with pytest.raises(Exception, match="backend_options of a compiled call are plain values"):
        attend(q)
