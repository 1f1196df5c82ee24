"""torch.compile(fullgraph=True) of attention: the numbers of an eager call, bit by bit, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ringtrue as rt
from calls import HERE, assert_close, like, qkv, refused, unreachable
from calls import one_thread as one_thread
from ringtrue import compiled, tracing
from ringtrue.backends import REGISTRY
from ringtrue.contract import Mask, Options

FULL = next(b.name for b in HERE if b.pairs["cpu"].claims.dbias and b.pairs["cpu"].claims.dlse)  # gives every gradient

INDUCTOR = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def results(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Tensor | None]:
    """What a function gives, and the gradients of all inputs that ask, from random upstream ones."""
    given = fn(*inputs)
    outs = given if isinstance(given, tuple) else (given,)
    asking = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    attached = [o for o in outs if o.requires_grad]
    grads: tuple[Tensor | None, ...] = ()
    if attached:
        upstream = [like(o, seed).masked_fill(o.isinf(), 0.0) for seed, o in enumerate(attached)]
        grads = torch.autograd.grad(attached, asking, upstream, allow_unused=True)
    return [*outs, *grads]


def same(fn: Callable[..., Any], *inputs: Any, backend: Any = "aot_eager", dynamic: bool | None = None) -> None:
    run = torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic)
    for got, expected in zip(results(run, inputs), results(fn, inputs), strict=True):
        assert (got is None) == (expected is None)
        assert got is None or expected is None or torch.equal(got, expected)


def attention(**arguments: Any) -> Callable[..., Any]:
    return lambda *inputs: rt.attention(*inputs, **arguments)


def grid(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.6


def bias(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4)).requires_grad_(grad)


def everything(q: Tensor, k: Tensor, v: Tensor, m: Tensor, keep: Tensor) -> Any:
    mask = rt.Dense(m) & rt.KeyPadding(keep) & rt.Causal("bottom_right")
    return rt.attention(q, k, v, mask, scale=-0.3, enable_gqa=True, return_lse=True, backend=FULL)


def with_bool(q: Tensor, k: Tensor, v: Tensor, m: Tensor, keep: Tensor) -> Any:
    return rt.attention(q, k, v, rt.Dense(m) & rt.Dense(keep), backend=FULL)


def bhsd(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return rt.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", is_causal=True) * 2


def without_grad(q: Tensor, k: Tensor, v: Tensor) -> Any:
    with torch.no_grad():
        fixed = rt.attention(q, k, v)
    return rt.attention(fixed, k, v)


def packed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, b: Tensor) -> Any:
    mask = rt.Segments(ids) & rt.Window(2, None) & rt.KeyBias(b)
    return rt.attention(q, k, v, mask, softcap=1.5, return_lse=True, backend=FULL)


PADDED = rt.KeyPadding(grid(2, 5)) & rt.Causal()
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "plain": (attention(), qkv(grad=True)),
    "causal, more keys, half of them ask": (attention(is_causal=True), qkv(4, 7, grad="kv")),
    "everything": (everything, (*qkv(6, 5, kv_heads=2, value_dim=3, grad=True), bias(6, 5), grid(2, 5))),
    "bool mask": (attention(), (*qkv(6, 5, grad=True), grid(1, 4, 6, 5))),
    "float mask joined with a wider bool one": (with_bool, (*qkv(6, 5, grad="q"), bias(6, 1), grid(2, 1, 6, 5))),
    "bias per key": (lambda q, k, v, b: rt.attention(q, k, v, rt.KeyBias(b)), (*qkv(grad=True), bias(2, 6))),
    "expanded bias": (lambda q, k, v, b: rt.attention(q, k, v, b.expand(2, 4, 6, 6)), (*qkv(), bias(2, 1, 1, 6))),
    "window, segments, softcap": (packed, (*qkv(grad=True), torch.arange(12).reshape(2, 6) // 3, bias(2, 6))),
    "window alone": (lambda q, k, v: rt.attention(q, k, v, rt.Window(1, 2), return_lse=True), qkv(9, grad=True)),
    "huge level": (attention(), (*qkv(grad=True), bias(6, 6, grad=False) - 1e9)),
    "mask objects from outside": (lambda q, k, v: rt.attention(q, k, v, PADDED), qkv(6, 5, grad=True)),
    "bhsd": (bhsd, qkv(grad=True)),
    "lse of no gradient": (attention(return_lse=True), qkv(grad=False, dtype=torch.bfloat16)),
    "no_grad inside": (without_grad, qkv(grad=True)),
    "no keys": (attention(), qkv(3, 0, grad=True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_is_the_eager_one(name: str) -> None:
    fn, inputs = CALLS[name]
    same(fn, *inputs)


@INDUCTOR
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_compilers(backend: str) -> None:
    fn, inputs = CALLS["everything"]
    same(fn, *inputs, backend=backend)


@INDUCTOR
def test_br_26_the_scale_of_the_user_and_a_permuted_key() -> None:
    """pytorch#174361: compiled eager attention was fused with the default scale, and a permuted K as if transposed."""
    q, k, v = qkv(16, heads=2, dim=32, grad=True)
    permuted = k.detach().permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0).requires_grad_()
    same(attention(scale=1 / 3), q, permuted, v, backend="inductor")


@pytest.mark.parametrize("backend", [b.name for b in HERE])
def test_br_53_another_value_dim(backend: str) -> None:
    """pytorch#110832: head dim 8, value dim 16, compiled."""
    same(attention(backend=backend), *qkv(dim=8, value_dim=16, grad=True))


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Any:
    return rt.attention(q, k, v, rt.KeyPadding(keep))


@pytest.mark.parametrize("dynamic", [True, None])
def test_sizes_are_symbols(dynamic: bool | None) -> None:
    """From the second sizes on, new ones compile nothing."""
    graphs = []
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(masked, fullgraph=True, backend=counter, dynamic=dynamic)
    for q_len, k_len, dim in ((6, 9, 8), (7, 12, 4), (11, 5, 6)):
        inputs = (*qkv(q_len, k_len, dim=dim, grad=True), grid(2, k_len))
        for got, expected in zip(results(run, inputs), results(masked, inputs), strict=True):
            assert torch.equal(got, expected)  # type: ignore[arg-type]
        graphs.append(counter.frame_count)
    assert graphs[1] == graphs[-1] > 0


def test_another_scale_is_another_graph() -> None:
    run = torch.compile(lambda scale, *x: rt.attention(*x, scale=scale), fullgraph=True, backend="eager")
    tensors = qkv()
    for scale in (0.5, 0.25, 0.0, -1, None):
        assert torch.equal(run(scale, *tensors), rt.attention(*tensors, scale=scale))


@pytest.mark.parametrize("mode", [True, False])
def test_determinism_is_part_of_the_call(mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    normalise = tracing._Rooms.normalise

    def look(*args: Any) -> Any:
        seen.append(args[-1].deterministic)
        return normalise(*args)

    monkeypatch.setattr(tracing._Rooms, "normalise", look)
    torch.use_deterministic_algorithms(mode)
    try:
        torch.compile(attention(), fullgraph=True, backend="eager")(*qkv())
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(seen) == {mode}


def under_autocast(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return rt.attention(q, k, v, b)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_autocast_inside_and_around(compiler: str) -> None:
    inputs = (*qkv(grad=True), bias(6, 6))
    same(under_autocast, *inputs, backend=compiler)
    torch._dynamo.reset()
    run = torch.compile(attention(), fullgraph=True, backend=compiler)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = run(*inputs), rt.attention(*inputs)
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):  # what is on in backward is not the call's
        grads = [torch.autograd.grad(x, inputs, like(x)) for x in (out, expected)]
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert torch.equal(run(*inputs), rt.attention(*inputs))  # off again


def drop(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The backend is named: what is recomputed outside of a scope is refused once any test has entered one."""
    out, again = (rt.attention(q, k, v, dropout_p=0.5, backend="auto") for _ in range(2))
    return out, again


def kept(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(drop, q, k, v, use_reentrant=False)


@INDUCTOR
@pytest.mark.parametrize(("compiler", "fn"), [("eager", drop), ("aot_eager", kept), ("inductor", drop)])
def test_dropout_draws_outside_of_the_operator(compiler: str, fn: Callable[..., Any]) -> None:
    """Another mask with every call, the same after manual_seed, and backward's is forward's: out is linear in v.

    (A checkpoint under Dynamo alone does not replay random numbers, F.dropout's neither: torch 2.13.)
    """
    inputs = qkv(24, grad=True)
    run = torch.compile(fn, fullgraph=True, backend=compiler)
    torch.manual_seed(1)
    first, second = run(*inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(run(*inputs)[0], first)
    for out in (first, second):
        (dv,) = torch.autograd.grad(out, inputs[2], like(out), retain_graph=True)
        torch.testing.assert_close((dv * inputs[2]).sum(), (out * like(out)).sum())
    if compiler != "inductor":  # which has random numbers of its own
        torch.manual_seed(1)
        assert torch.equal(drop(*inputs)[0], first)


REFUSED: dict[str, tuple[type[Exception], Callable[..., Any], str]] = {
    "lengths": (rt.ArgumentError, lambda q, k, v: rt.attention(q, k[:, :4], v), "key and value differ in length"),
    "flag": (rt.ArgumentError, attention(is_causal=1), "is_causal is not a bool"),
    "mask": (rt.ArgumentError, lambda q, k, v: rt.attention(q, k, v, q[:, :, 0, 0]), "does not broadcast"),
    "name": (rt.ArgumentError, attention(backend="nobody"), "unknown backend"),
    "parallel": (rt.ArgumentError, attention(parallel="cp"), "parallel is not a context"),
    "option": (rt.UnsupportedError, attention(backend_options={"x": 1}), "unknown-option"),
}


@pytest.mark.filterwarnings("ignore")  # what Dynamo says about code that it steps into after the break
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_so(name: str) -> None:
    kind, fn, text = REFUSED[name]
    tensors = qkv(grad=True)
    with pytest.raises(kind, match=text):  # the eager call behind the graph break raises it
        torch.compile(fn, backend="eager")(*tensors)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(fn, fullgraph=True, backend="eager")(*tensors)
    assert name in NO_TEXT or text in str(caught.value)


NO_TEXT = ("parallel",)  # a context is not looked at


def test_a_pair_cannot_be_compiled() -> None:
    fn = attention(backend=unreachable())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="with an OpPair as backend, is not compiled"):
        torch.compile(fn, fullgraph=True, backend="eager")(*qkv())
    torch._dynamo.reset()
    tensors, pair = qkv(), HERE[0].pairs["cpu"]
    got = torch.compile(attention(backend=pair), backend="eager")(*tensors)  # at a graph break
    assert torch.equal(got, rt.attention(*tensors, backend=pair))


def test_a_second_derivative_is_an_error() -> None:
    q, k, v = qkv(grad=True)
    out = torch.compile(attention(), fullgraph=True, backend="eager")(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), like(out), create_graph=True)
    with refused(rt.GradientError, "double backward", "compiled", "eager attention"):
        sum(g.square().sum() for g in grads).backward()


def test_a_pair_that_breaks_its_word_is_an_error() -> None:
    """Compiled code would read a gradient of another dtype as if it were right."""
    right = qkv()[0]
    assert compiled._promised(right, right, HERE[0].pairs["cpu"]) is right
    for wrong in (None, right.double(), right[:, :1]):
        with refused(rt.GradientError, "another gradient than asked", "float32"):
            compiled._promised(wrong, right, HERE[0].pairs["cpu"])


def test_torchs_own_check_of_operators() -> None:
    """torch.library.opcheck: the schema, the fake kernel and autograd, on a call with all there is."""
    fn, inputs = CALLS["everything"]
    seen: list[tuple[Any, ...]] = []

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is tracing.OPERATORS.attention:
                seen.append(args)
            return super().call_function(target, args, kwargs)

    torch.compile(fn, fullgraph=True, backend=lambda graph, _: Recorder(graph).run)(*inputs)
    (arguments,) = seen
    torch.library.opcheck(tracing.OPERATORS.attention, arguments)


@INDUCTOR
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # nothing is beside the operators here
@pytest.mark.parametrize(
    "mode",
    [
        None,
        pytest.param(
            "reduce-overhead",
            marks=pytest.mark.xfail(strict=False, reason="torch 2.11: an output that is a tuple, cudagraph_trees.py"),
        ),
    ],
)
@pytest.mark.parametrize("backend", [b.name for b in REGISTRY if "cuda" in b.pairs])
def test_on_cuda(backend: str, mode: str | None) -> None:
    """With CUDA graphs, too: warmed up, captured, replayed with other numbers."""
    reason = next(b for b in REGISTRY if b.name == backend).unavailable("cuda")
    if reason is not None:
        pytest.skip(str(reason))
    run = torch.compile(attention(backend=backend, is_causal=True), fullgraph=True, mode=mode)
    for seed in range(4):
        inputs = [x.detach().cuda().requires_grad_() for x in qkv(128, dim=64, dtype=torch.bfloat16, seed=seed)]
        upstream = like(inputs[0].cpu()).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        out = run(*inputs)
        got = [x.clone() for x in (out, *torch.autograd.grad(out, inputs, upstream))]
        right = rt.attention(*inputs, backend=backend, is_causal=True)
        for a, b in zip(got, (right, *torch.autograd.grad(right, inputs, upstream)), strict=True):
            assert_close(a, b)


def test_another_count_of_saved_tensors_is_another_format() -> None:
    """torch keeps compiled graphs on disk, across releases: when this fails, count FORMAT up and change it here."""
    q, k, v = qkv(grad=True)
    bias = torch.zeros(1, 1, q.shape[1], k.shape[1])
    saved = rt.op_pair("native_math").forward(q, k, v, Mask(dense=bias), None, Options(0.3)).saved
    assert (compiled.FORMAT, len(saved)) == (2, 4)
    assert compiled.Plain._field_defaults == {"format": compiled.FORMAT}
    assert "int format" in compiled.PLAIN
