"""torch.compile(fullgraph=True) of calls under a context, on real processes: the numbers of eager calls, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringtrue as rt
from calls import like
from gloo import Pool
from ringtrue import scope, together, tracing
from ringtrue.parallel.twin import Rank, World

OPERATOR = tracing.TOGETHER.attention
DEGREES = {"ulysses": (2, 1), "ring": (1, 2), "both": (2, 2)}
Function = Callable[..., Any]


# ---- what is compiled: fn(context, q, k, v) --------------------------------------------------------------------------


def layers(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(3):
        q = q + 2 * rt.attention(q, k, v, parallel=cp)
    return q


def independent(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 2 * rt.attention(q, k, v, parallel=cp) + rt.attention(k, q, v, parallel=cp)


def with_lse(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = rt.attention(q, k, v, is_causal=True, scale=-0.3, return_lse=True, layout="bshd", parallel=cp)
    return out, 2 * lse


def masked(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of keys and one of their biases that wants a gradient, both made in the compiled code."""
    keep = rt.KeyPadding(k[:, :, 0, 0] > -1.0)
    return rt.attention(q, k, v, keep & rt.KeyBias(k[:, :, 0, 1]), enable_gqa=True, parallel=cp, backend="native_math")


def bhsd(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rt.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", parallel=cp) * 2


def joint(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return rt.attention(q, k, v, return_lse=True, parallel=cp.call(joint_prefix=2))


def replicated(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rt.attention(q, k[:, :4], v[:, :4], parallel=cp.call(kv_replicated=True))


def declared(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Declared inside of the compiled code, from a length that may be a symbol."""
    lengths = [q.shape[1] + other - cp.rank for other in range(cp.size)]
    return rt.attention(q, k, v, parallel=cp.call(lengths, lengths))


def gathered(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Cut, attend, join, and a loss: of declared lengths, and of a length that nobody knows while torch traces."""
    out = rt.attention(*(cp.shard(x, 1) for x in (q, k, v)), parallel=cp)
    lengths = [(q.shape[1] + cp.size - 1 - rank) // cp.size for rank in range(cp.size)]
    loss = cp.loss((cp.gather(out * 2, -3, lengths=lengths) * q).sum())
    return loss, cp.gather(out.sin(), 1, backward="slice").cos()


def gathered_prefix(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = rt.attention(q, k, v, parallel=cp.call(joint_prefix=2))
    lengths = [q.shape[1] + other - cp.rank for other in range(cp.size)]
    return cp.gather(out, 1, prefix=2), cp.gather(out * 2, 1, prefix=2, lengths=lengths)


def entered(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    with cp.scope(), rt.attention_backend("native_math"):
        inside = rt.attention(q, k, v)
    return inside, rt.attention(q, k, v)


def drops(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return rt.attention(q, k, v, dropout_p=0.4, parallel=cp)


def block(cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 2 * rt.attention(q * 2, k, v, parallel=cp)


def checkpointed(keep: Function, cp: rt.ContextParallel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(2):
        q = keep(partial(block, cp), q, k, v, use_reentrant=False)
    return q


def policy(policy: CheckpointPolicy, ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    return policy if op is OPERATOR else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy_: CheckpointPolicy) -> Function:
    return partial(checkpoint, context_fn=partial(create_selective_checkpoint_contexts, partial(policy, policy_)))


SAVED, AGAIN = (selective(p) for p in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE))

# the function, on which contexts, and how often ranks agree in one step of it
CASES: dict[str, tuple[Function, tuple[str, ...], int]] = {
    "three layers": (layers, ("ulysses",), 3),
    "two independent calls": (independent, ("ring",), 2),
    "lse and its gradient, causal": (with_lse, ("ulysses", "ring"), 1),
    "masks of keys": (masked, ("ulysses",), 1),
    "bhsd": (bhsd, ("ring",), 1),
    "joint prefix": (joint, ("ring",), 1),
    "replicated keys": (replicated, ("ulysses",), 1),
    "declared": (declared, ("ulysses",), 0),
    "gather": (gathered, ("ulysses",), 2),
    "gather behind a prefix": (gathered_prefix, ("ring",), 2),
    "scopes inside": (entered, ("ulysses",), 1),
    "dropout": (drops, ("ring",), 1),
    "checkpoint": (partial(checkpointed, checkpoint), ("ulysses", "ring"), 4),
    "rt.checkpoint": (partial(checkpointed, rt.checkpoint), ("ulysses",), 4),
    "checkpoint that saves attention": (partial(checkpointed, SAVED), ("ulysses",), 2),
    "checkpoint that recomputes attention": (partial(checkpointed, AGAIN), ("ring",), 4),
}


def shards(rank: int, length: int, kv_heads: int = 4, asks: str = "qkv") -> list[Tensor]:
    """q, k, v of a rank, whose length is `length` and a bit; the first two tokens are the same on all ranks."""
    tensors = []
    for seed, heads in enumerate((4, kv_heads, kv_heads)):
        x = torch.randn(2, length + rank, heads, 8, generator=torch.Generator().manual_seed(10 * rank + seed))
        x[:, :2] = torch.randn(2, 2, heads, 8, generator=torch.Generator().manual_seed(seed))
        tensors.append(x.requires_grad_("qkv"[seed] in asks))
    return tensors


def step(fn: Function, cp: rt.ContextParallel, inputs: list[Tensor]) -> list[Tensor]:
    """What a function gives, and the gradients of its inputs from random upstream ones."""
    torch.manual_seed(5)
    given = fn(cp, *inputs)
    outs = list(given) if isinstance(given, tuple) else [given]
    asking = [x for x in inputs if x.requires_grad]
    grads = torch.autograd.grad(outs, asking, [like(o, seed) for seed, o in enumerate(outs)]) if asking else ()
    return [x.detach() for x in (*outs, *grads)]


def agreements(cp: rt.ContextParallel, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], int]:
    """What `run` gives, and how many headers it sent."""
    sent, agree = [], cp.agree
    cp.agree = lambda what, *rest: sent.append(what) or agree(what, *rest)  # type: ignore[func-returns-value,method-assign]
    try:
        return run(), len(sent)
    finally:
        del cp.agree  # type: ignore[attr-defined]


def on_process(rank: int, world: int, *args: Any) -> tuple[list[int], int]:
    torch._dynamo.reset()
    scope._entered.clear()  # the processes of the pool live on: an earlier task's scopes are not this one's
    return compare(rank, None, *args)


def compare(
    rank: int,
    mesh: Rank | None,
    case: str,
    degrees: str,
    backend: str,
    asks: str = "qkv",
    lengths: Sequence[int] = (5,),
) -> tuple[list[int], int]:
    """Graphs after each of some lengths, and headers of the last step; raises where a number differs."""
    fn, _, _ = CASES[case]
    cp = rt.ContextParallel(rt.ContextParallelConfig(*DEGREES[degrees], mesh=mesh, timeout=30.0))
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(fn, fullgraph=True, backend=counter)
    graphs = []
    for length in lengths:
        inputs = shards(0 if fn is gathered else rank, length, 2 if fn is masked else 4, asks)
        expected = step(fn, cp, inputs)
        found, sent = agreements(cp, partial(step, run, cp, inputs))
        assert len(found) == len(expected)
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(a, b), f"{number}: {float((a - b).abs().max())} at length {length}"
        graphs.append(counter.frame_count)
    return graphs, sent


@pytest.mark.parametrize(("case", "degrees"), [(case, d) for case in CASES for d in CASES[case][1]])
def test_a_compiled_call_is_the_eager_one(pool: Pool, case: str, degrees: str) -> None:
    """Of uneven shards; ranks agree as often as they should."""
    a, b = DEGREES[degrees]
    for graphs, sent in pool.run(on_process, a * b, case, degrees, "aot_eager", timeout=120):
        assert graphs == [1]
        assert sent == CASES[case][2]


def test_ulysses_over_rings() -> None:
    torch._dynamo.reset()
    found = World(4, wait=60.0).run(lambda mesh: compare(mesh.rank, mesh, "three layers", "both", "aot_eager"))
    assert found == [([1], 3)] * 4


@pytest.mark.parametrize("case", ["three layers", "declared"])
def test_other_lengths_compile_once_more(pool: Pool, case: str) -> None:
    for graphs, _ in pool.run(on_process, 2, case, "ring", "aot_eager", "qkv", (5, 8, 6), timeout=120):
        assert graphs == [1, 2, 2]


@pytest.mark.parametrize(("backend", "asks"), [("eager", "qkv"), ("aot_eager", "kv"), ("aot_eager", "")])
def test_other_compilers_and_other_wishes(pool: Pool, backend: str, asks: str) -> None:
    pool.run(on_process, 2, "lse and its gradient, causal", "ring", backend, asks, timeout=120)


def test_inductor(pool: Pool) -> None:
    pool.run(on_process, 2, "two independent calls", "ulysses", "inductor", timeout=300)


def scopes(rank: int, world: int) -> None:
    """A context in scope outside of compiled code: each its own graph, and gone when it was left."""
    torch._dynamo.reset()
    one, two = (rt.ContextParallel(rt.ContextParallelConfig(*d, timeout=30.0)) for d in ((2, 1), (1, 2)))
    tensors = shards(rank, 5, asks="")
    run = torch.compile(lambda *x: rt.attention(*x), fullgraph=True, backend="eager")
    alone = rt.attention(*tensors)
    for cp in (one, two, one):
        with cp:
            assert torch.equal(run(*tensors), rt.attention(*tensors))
        assert torch.equal(run(*tensors), alone)

    @torch.compile(backend="eager")
    def entering(*x: Tensor) -> Tensor:  # torch breaks the graph at an object made outside
        with one:
            return rt.attention(*x)

    with one:
        expected = rt.attention(*tensors)
    assert torch.equal(entering(*tensors), expected)
    assert rt.ContextParallel.current() is None


def test_scopes_outside(pool: Pool) -> None:
    pool.run(scopes, 2, timeout=120)


def mixed(rank: int, world: int) -> None:
    """One rank runs eagerly, as it does where torch gave up compiling; it may even be the one without gradients."""
    torch._dynamo.reset()
    cp = rt.ContextParallel(rt.ContextParallelConfig(2, timeout=30.0))
    run = torch.compile(layers, fullgraph=True, backend="aot_eager") if rank else layers
    for asks in ("qkv", "qkv" if rank else ""):
        inputs = shards(rank, 5, asks=asks)
        expected, out = layers(cp, *inputs), run(cp, *inputs)
        assert torch.equal(out, expected)
        for x in (expected, out):
            x.backward(like(x), inputs=[y for y in inputs if y.requires_grad] or None)


def test_an_eager_rank_among_compiled_ones(pool: Pool) -> None:
    pool.run(mixed, 2, timeout=120)


# ---- ranks that disagree ---------------------------------------------------------------------------------------------


def in_another_order(graph: torch.fx.GraphModule, _: object) -> Any:
    """A compiler that runs the second attention call before the first."""
    first, second = (node for node in graph.graph.nodes if node.target is OPERATOR)
    for node in second.all_input_nodes:
        if node.op != "placeholder":
            first.prepend(node)
    first.prepend(second)
    graph.graph.lint()
    graph.recompile()
    return graph


def joined(cp: rt.ContextParallel, q: Tensor, *_: Tensor) -> Tensor:
    return cp.gather(q * 2, 1)


def disagreement(mesh: Rank, how: str) -> str:
    cp = rt.ContextParallel(rt.ContextParallelConfig(2, mesh=mesh))
    other = cp.rank == 1
    q, k, v = shards(0, 5, asks="" if how.endswith("gradient") and other else "qkv")
    k = k.detach()[:, :3] if how == "own mistake" and other else k
    compiler = in_another_order if how == "another order" and other else "aot_eager"
    with pytest.raises(rt.RingtrueError) as caught:
        fn = {"own mistake": layers, "gather without gradient": joined}.get(how, independent)
        torch.compile(fn, fullgraph=True, backend=compiler)(cp, q, k, v)
    return f"{type(caught.value).__name__}: {caught.value}"


SAID = {
    "another order": ("DisagreementError", "another way on another rank", "rank 0: call 0; rank 1: call 1"),
    "no gradient": ("DisagreementError", "no backward for its peers", "rank 0: compiled, a gradient"),
    "gather without gradient": ("DisagreementError", "about this gather", "rank 1: compiled, no gradient"),
    "own mistake": ("PeerError", "rank 1: ArgumentError: key and value differ in length"),
}


@pytest.mark.parametrize("how", SAID)
def test_ranks_that_disagree(how: str) -> None:
    """Sizes and headers are equal but for this: without a word of it the numbers would be silently wrong."""
    torch._dynamo.reset()
    for rank, said in enumerate(World(2, wait=60.0).run(disagreement, how)):
        kind, *texts = SAID[how]
        if how == "own mistake" and rank == 1:
            kind, texts = "ArgumentError", ["key and value differ in length"]
        assert said.startswith(kind), said
        assert all(text in said for text in texts), said


# ---- what torch is told of the operators -----------------------------------------------------------------------------


def test_backwards_cannot_change_places() -> None:
    """They talk without a header, so each depends on the one before, gather's too."""
    torch._dynamo.reset()
    graphs: list[torch.fx.Graph] = []
    cp = rt.ContextParallel(rt.ContextParallelConfig())
    show = lambda module, _: graphs.append(module.graph) or make_boxed_func(module)
    joined = lambda *given: cp.gather(independent(*given), 1)
    run = torch.compile(joined, fullgraph=True, backend=aot_autograd(fw_compiler=show, bw_compiler=show))
    run(cp, *shards(0, 5)).sum().backward()
    backwards = [node for node in graphs[1].nodes if "together_backward" in str(node.target)]
    assert [str(node.target).split(".")[1] for node in backwards] == [
        "gather_together_backward", "attention_together_backward", "attention_together_backward",
    ]  # fmt: skip
    assert backwards[0].args[-1] is None
    for first, second in pairwise(backwards):
        assert second.args[-1].args == (first, 0)


def test_torchs_own_check_of_the_operators() -> None:
    torch._dynamo.reset()
    seen: list[Any] = []
    cp = rt.ContextParallel(rt.ContextParallelConfig())

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is OPERATOR:
                seen.append(args)
            return super().call_function(target, args, kwargs)

    torch.compile(with_lse, fullgraph=True, backend=lambda graph, _: Recorder(graph).run)(cp, *shards(0, 5))
    torch.library.opcheck(OPERATOR, *seen)


def test_no_cuda_graph_replays_it() -> None:
    """What ranks tell each other would be left out."""
    gathers = (torch.ops.ringtrue.gather_together.default, torch.ops.ringtrue.gather_together_backward.default)
    for operator in (OPERATOR, tracing.TOGETHER.attention_backward, *gathers):
        assert torch.Tag.cudagraph_unsafe in operator.tags


def test_bytes_are_what_was_kept() -> None:
    kept = [torch.arange(3), torch.rand(2, 5).bfloat16(), torch.rand(0, 4), torch.rand(7, 3).t(), torch.tensor(True)]
    kept += [torch.ones(3).to(dtype) for dtype in (torch.uint16, torch.uint64)]  # ids of segments
    found = together._unpacked(*together._packed(kept, torch.device("cpu")))
    assert [x.dtype for x in found] == [x.dtype for x in kept]
    assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    assert together._unpacked(*together._packed([], torch.device("cpu"))) == []
