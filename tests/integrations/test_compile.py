"""A compiled Flux: right numbers and gradients on one device, and under a context whole compiled blocks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_training import spy
from tiny_flux import Step, build, error, inputs, ragged, step, together, with_mask
from torch._dynamo.testing import CompileCounterWithBackend

import ringtrue as rt
from gloo import Pool
from ringtrue.integrations import diffusers as ours

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"  # Dynamo itself reads it
)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def shallow(double: int = 1, single: int = 1) -> Any:
    """At most one block of each kind: compiling takes seconds a block."""
    model = build()
    model.transformer_blocks = model.transformer_blocks[:double]
    model.single_transformer_blocks = model.single_transformer_blocks[:single]
    return model


def masked(image: int, text: int, model: Any = None) -> dict[str, Any]:
    return with_mask(inputs(image, text), ours.local_key_mask(ragged(text), image, model=model))


def again(model: Any, given: dict[str, Any], cp: rt.ContextParallel | None = None) -> Step:
    """`step` with gradients from nothing."""
    model.zero_grad()
    return step(model, given, cp)


def check(model: Any, image: int = 7, text: int = 5) -> None:
    """One step is what it is when nothing is compiled."""
    plain = shallow(len(model.transformer_blocks), len(model.single_transformer_blocks))
    assert error(again(model, masked(image, text)), step(plain, masked(image, text))) < 1e-12


def test_blocks_compiled_before_they_are_bound() -> None:
    model = shallow()
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    ours.use(model, "native_math")
    check(model)
    check(model, 9, 4)


def test_a_whole_model() -> None:
    model = shallow()
    ours.use(model, "auto")
    model.compile(backend="eager", fullgraph=True)
    check(model)


def test_compiled_backward_of_checkpointed_blocks() -> None:
    model = shallow()
    ours.use(model, "native_math")
    model.enable_gradient_checkpointing()
    model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    check(model)


def test_what_is_chosen_later_counts() -> None:
    """Compiled blocks of two models share code: neither a second model, nor a new choice, nor undo is missed.

    An OpPair runs at a graph break, a name within the graph.
    """
    a, b = shallow(double=0), shallow(double=0)
    (first, one), (second, two) = spy(rt.op_pair("native_math")), spy(rt.op_pair("native_math"))
    for model in (a, b):
        model.compile_repeated_blocks(backend="eager")

    def runs(model: Any) -> tuple[int, int]:
        """How many forwards of each pair one step makes."""
        before = one.count("forward"), two.count("forward")
        check(model)
        return one.count("forward") - before[0], two.count("forward") - before[1]

    ours.use(a, first)
    ours.use(b, second)
    assert (runs(a), runs(b), runs(a)) == ((1, 0), (0, 1), (1, 0))
    ours.use(a, second)
    assert runs(a) == (0, 1)
    ours.use(a, "native_math")
    assert runs(a) == (0, 0)
    ours.use(a, first)
    assert runs(a) == (1, 0)
    ours.undo(a)
    assert runs(a) == (0, 0)
    assert runs(b) == (0, 1)


def test_a_model_that_is_collected_while_another_compiles() -> None:
    """Its entry in diffusers' registry is among the keys that torch guards then: none may go meanwhile."""
    gone, model = [shallow(double=0)], shallow(double=0)
    ours.use(gone[0], "native_flash")
    ours.use(model, "native_math")

    def drops(graph: torch.fx.GraphModule, _: Any) -> Any:
        gone.clear()
        gc.collect()
        return graph

    model.compile_repeated_blocks(backend=drops)
    check(model)
    assert gone == []


# ---- under a context: once a compiled caller went silently wrong there -----------------------------------------------


def on_process(rank: int, world: int) -> list[Step]:
    """Ulysses with whole compiled blocks, a ring with a compiled model; each twice, the second time from the cache."""
    results = []
    for degrees, model in (((2, 1), shallow()), ((1, 2), shallow(double=0))):
        torch._dynamo.reset()
        cp = ours.parallelize(model, rt.ContextParallelConfig(*degrees))
        if degrees == (2, 1):
            model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
        else:
            model.compile(backend="eager")
        results += [copy.deepcopy(again(model, masked(7, 5, model), cp)) for _ in range(2)]
    return results


def test_under_a_context(pool: Pool) -> None:
    ulysses, ring = (step(model, masked(7, 5)) for model in (shallow(), shallow(double=0)))
    found = zip(*pool.run(on_process, 2, timeout=300), strict=True)
    for steps, expected in zip(found, (ulysses, ulysses, ring, ring), strict=True):
        assert error(together(list(steps)), expected) < 1e-12


def other_lengths(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Graphs of a block after each of several forwards, and the operators in them, with checkpoints and a ring."""
    torch._dynamo.reset()
    model = shallow(double=0)
    cp = ours.parallelize(model, rt.ContextParallelConfig(ring_degree=2))
    model.enable_gradient_checkpointing()
    counter, found = CompileCounterWithBackend("aot_eager"), []
    model.compile_repeated_blocks(backend=counter, fullgraph=True)
    for image, text in ((7, 5), (9, 4), (12, 6), (8, 8)):
        again(model, masked(image, text, model), cp)
        found.append(counter.frame_count)
    operators = [sum("attention_together" in str(n.target) for n in graph.graph.nodes) for graph in counter.graphs]
    return found, operators


def test_other_lengths_compile_once_more(pool: Pool) -> None:
    for graphs, operators in pool.run(other_lengths, 2, timeout=300):
        assert graphs[0] == 1
        assert graphs[-1] == graphs[-2] <= 3
        assert set(operators) == {1}


def whole_graph(rank: int, world: int) -> str:
    model = shallow()
    ours.parallelize(model, rt.ContextParallelConfig(ulysses_degree=2))
    model.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        model(**inputs(7, 5))
    return str(caught.value)


def test_a_whole_graph_is_refused_under_a_context(pool: Pool) -> None:
    for text in pool.run(whole_graph, 2, timeout=300):
        assert "ranks exchange in this hook" in text
        assert "do not use fullgraph=True" in text
