"""A small real Flux under Ulysses, Ring and both: outputs and all gradients of one process, and what ranks agree on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from tiny_flux import alone, build, error, inputs, on_process, on_rank, ragged, step, together, with_mask
from torch import Tensor

import ringtrue as rt
from gloo import Pool
from ringtrue.integrations import diffusers as ours
from ringtrue.parallel.twin import World

MODES = {"ulysses 2": (2, 1), "ring 2": (1, 2), "2 x 2": (2, 2)}
CASES = {
    "odd, ragged": (7, 5, True),
    "one text token": (9, 1, False),
    "fewer image tokens than ranks": (3, 6, True),
    "ranks without any token": (2, 1, False),
}


@pytest.fixture(scope="module", autouse=True)
def weights() -> None:
    build()  # before any thread asks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(mode: str, case: str) -> None:
    (ulysses, ring), (image, text, masked) = MODES[mode], CASES[case]
    keep = ragged(text) if masked else None
    steps = World(ulysses * ring).run(on_rank, (ulysses, ring), image, text, keep)
    assert error(together(steps), alone(image, text, keep)) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_float32_on_the_flash_kernel(mode: str) -> None:
    ulysses, ring = MODES[mode]
    truth = alone(7, 5, ragged(5))
    steps = World(ulysses * ring).run(on_rank, (ulysses, ring), 7, 5, ragged(5), torch.float32, "native_flash")
    assert error(together(steps), truth) < 3 * error(alone(7, 5, ragged(5), torch.float32), truth) + 1e-6


def test_real_processes(pool: Pool) -> None:
    """Two of them: each imports diffusers, which takes seconds."""
    for degrees in ((2, 1), (1, 2)):
        steps = pool.run(on_process, 2, degrees, 7, 5, ragged(5), timeout=120)
        assert error(together(steps), alone(7, 5, ragged(5))) < 1e-12


def test_the_key_mask_of_the_wrong_rank_is_caught() -> None:
    """The mutant: every rank passes its neighbour's mask, of the same shape."""
    keep = ragged(8)

    def on(rank: Any, shift: int) -> Any:
        model, size = build(), rank.size
        cp = ours.parallelize(model, rt.ContextParallelConfig(ring_degree=2, mesh=rank))
        masks = [torch.cat([keep.chunk(size, 1)[r], torch.ones(2, 4, dtype=torch.bool)], 1) for r in range(size)]
        mine = masks[(rank.rank + shift) % size][:, None, None]
        if shift == 0:
            assert torch.equal(mine, ours.local_key_mask(keep, 8, model=model))
        return step(model, with_mask(inputs(8, 8), mine), cp)

    expected = alone(8, 8, keep)
    assert error(together(World(2).run(on, 0)), expected) < 1e-12
    assert error(together(World(2).run(on, 1)), expected) > 1e-3


def test_checkpointed_forwards_keep_their_own_plans() -> None:
    """Two forwards of other lengths and masks before one backward, which recomputes their attention calls."""
    batches = ((7, 5, True), (6, 3, False))

    def both(model: Any, cp: rt.ContextParallel | None) -> dict[str, Tensor]:
        model.enable_gradient_checkpointing()
        total = torch.zeros((), dtype=torch.float64)
        for image, text, masked in batches:
            given = inputs(image, text)
            if masked:
                given = with_mask(given, ours.local_key_mask(ragged(text), image, model=model))
            total = total + model(**given)[0].square().sum()
        (total if cp is None else cp.loss(total)).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def on(rank: Any) -> tuple[dict[str, Tensor], int]:
        model = build()
        grads = both(model, ours.parallelize(model, rt.ContextParallelConfig(2, 2, mesh=rank)))
        return grads, sum(event.group.startswith("header") for event in rank.log)

    expected, results = both(build(), None), World(4).run(on)
    for name, grad in expected.items():
        assert torch.allclose(sum(grads[name] for grads, _ in results), grad, rtol=1e-10, atol=1e-10), name
    assert [headers for _, headers in results] == [2 * 3] * 4, (
        "one header to each of 3 peers, two forwards, no recompute"
    )


def test_one_header_per_forward_and_nothing_else_beforehand() -> None:
    def on(rank: Any) -> Counter[str]:
        on_rank(rank, (1, 2), 7, 5)
        return Counter("header" if event.group.startswith("header") else event.kind for event in rank.log)

    for sent in World(2).run(on):
        assert sent["header"] == 1
        assert sent["exchange"] == 2, "the output gathered, its gradient scattered; the rest is the ring's"


@pytest.mark.parametrize("backward", ["sum", "slice"])
def test_without_grad_and_with_either_gather(backward: Any) -> None:
    given = inputs(7, 5)
    expected = build()(**given)[0].detach()

    def on(rank: Any) -> Tensor:
        model = build().eval()
        ours.parallelize(model, rt.ContextParallelConfig(2, 2, mesh=rank), gather_backward=backward)
        with torch.no_grad():
            first, second = model(**given)[0], model(*list(given.values())[:-1]).sample
        assert torch.equal(first, second), "positional arguments are as good"
        loss = model(**given)[0].square().sum()
        loss.backward()  # no 1/N: "slice" keeps each rank's own part of one identical loss
        return first, model.x_embedder.weight.grad

    reference = build()
    reference(**given)[0].square().sum().backward()
    results = World(4).run(on)
    for out, _ in results:
        assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    factor = 4 if backward == "sum" else 1
    total = sum(grad for _, grad in results)
    assert torch.allclose(total, factor * reference.x_embedder.weight.grad, rtol=1e-10, atol=1e-10)


# ---- ranks agree, or all of them raise -------------------------------------------------------------------------------


def forward_on(rank: Any, make: Any) -> Tensor:
    """One forward on a rank; `make(rank number, model)` gives its inputs."""
    model = build()
    ours.parallelize(model, rt.ContextParallelConfig(ring_degree=2, mesh=rank))
    return model(**make(rank.rank, model))[0].detach()


def failures(make: Any) -> list[BaseException]:
    world = World(2)
    with pytest.raises(rt.RingtrueError):
        world.run(forward_on, make)
    return [world.failures[rank] for rank in range(2)]


def test_no_mask_beside_a_key_mask_is_all_true() -> None:
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[1, :2] = False  # all of it on rank 0

    def make(rank: int, model: Any) -> dict[str, Any]:
        return with_mask(inputs(7, 5), ours.local_key_mask(keep, 7, model=model) if rank == 0 else None)

    expected = build()(**with_mask(inputs(7, 5), ours.local_key_mask(keep, 7)))[0]
    for out in World(2).run(forward_on, make):
        assert torch.allclose(out, expected, rtol=0, atol=1e-12)


def test_a_float_key_mask_is_added() -> None:
    bias = torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    text, image = bias.split([5, 7], 1)
    expected = build()(**with_mask(inputs(7, 5), bias[:, None, None]))[0]

    def make(rank: int, model: Any) -> dict[str, Any]:
        mine = torch.cat([text.tensor_split(2, 1)[rank], image.tensor_split(2, 1)[rank]], 1)
        return with_mask(inputs(7, 5), rt.KeyBias(mine) if rank else mine[:, None, None])

    for out in World(2).run(forward_on, make):
        assert torch.allclose(out, expected, rtol=0, atol=1e-12)


DIFFERENCES = {
    "text length": (
        lambda rank: inputs(7, 5 - rank),
        r"encoder_hidden_states: rank 0 \(2, 5, 12\).*rank 1 \(2, 4, 12\)",
    ),
    "dtype of an input": (
        lambda rank: {**inputs(7, 5), "timestep": torch.ones(2, dtype=torch.float64 if rank else torch.float32)},
        r"timestep: rank 0 \(2,\) float32, rank 1 \(2,\) float64",
    ),
    "wanted gradient": (
        lambda rank: {
            **inputs(7, 5),
            "pooled_projections": torch.zeros(2, 10, dtype=torch.float64, requires_grad=rank > 0),
        },
        "pooled_projections: .* requires grad",
    ),
    "kind of mask": (
        lambda rank: with_mask(inputs(8, 8), torch.zeros(2, 1, 1, 8, dtype=torch.float64 if rank else torch.bool)),
        r"different kinds[\s\S]*rank 0: key_bool; rank 1: key_float, torch.float64",
    ),
}


@pytest.mark.parametrize("which", DIFFERENCES)
def test_ranks_that_disagree_all_raise(which: str) -> None:
    make, text = DIFFERENCES[which]
    for failure in failures(lambda rank, model: make(rank)):
        assert type(failure) is rt.DisagreementError
        with pytest.raises(rt.DisagreementError, match=text):
            raise failure


def test_frozen_parameters_on_one_rank_are_a_difference() -> None:
    def make(rank: int, model: Any) -> dict[str, Any]:
        model.proj_out.weight.requires_grad_(rank == 0)
        return inputs(7, 5)

    for failure in failures(make):
        assert type(failure) is rt.DisagreementError
        assert "require grad" in str(failure)


WRONG = {
    "another number of keys": (
        torch.ones(2, 1, 1, 12, dtype=torch.bool),
        r"another number of keys[\s\S]*5 keys[\s\S]*12 keys[\s\S]*local_key_mask",
    ),
    "rows": (torch.ones(2, 1, 5, 5, dtype=torch.bool), r"\[order-unknown\][\s\S]*local_key_mask"),
    "rows without batch": (torch.ones(5, 5, dtype=torch.bool), r"\[order-unknown\]"),
    "float rows": (torch.zeros(2, 1, 5, 5, dtype=torch.float64), r"\[order-unknown\]"),
    "heads": (torch.ones(2, 3, 1, 5, dtype=torch.bool), "not a mask of keys"),
    "whole numbers": (torch.ones(2, 1, 1, 5, dtype=torch.long), r"neither bool nor float[\s\S]*mask.bool\(\)"),
    "no tensor": (rt.Causal(), r"not a mask of keys[\s\S]*Causal"),
    "a trained bias": (torch.zeros(2, 1, 1, 5, dtype=torch.float64, requires_grad=True), "gradient of a float mask"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_mask_on_one_rank_makes_all_raise(which: str) -> None:
    mask, text = WRONG[which]

    def make(rank: int, model: Any) -> dict[str, Any]:
        good = ours.local_key_mask(ragged(5), 7, model=model)
        return with_mask(inputs(7, 5), mask if rank == 1 else good)

    other, own = failures(make)
    assert isinstance(own, (rt.ArgumentError, rt.UnsupportedError))
    assert type(other) is rt.PeerError
    for failure in (own, other):
        with pytest.raises(rt.RingtrueError, match=text):
            raise failure


BROKEN = {
    "3-D positions": ({"img_ids": torch.zeros(1, 7, 3, dtype=torch.float64)}, "img_ids has another number of dims"),
    "positions of another length": ({"txt_ids": torch.zeros(4, 3, dtype=torch.float64)}, "txt_ids does not fit"),
    "no text": ({"encoder_hidden_states": None}, "encoder_hidden_states is missing"),
}


@pytest.mark.parametrize("which", BROKEN)
def test_inputs_that_cannot_be_split_are_refused(which: str) -> None:
    changed, text = BROKEN[which]
    for failure in failures(lambda rank, model: {**inputs(7, 5), **changed}):
        with pytest.raises(rt.ArgumentError, match=text):
            raise failure


def swap_processor(model: Any) -> None:
    model.transformer_blocks[0].attn.set_processor(type(model.transformer_blocks[0].attn.processor)())


def swap_backend(model: Any) -> None:
    model.transformer_blocks[0].attn.processor._attention_backend = None


def swap_module(model: Any) -> None:
    model.proj_out = torch.nn.Linear(48, 8).double()


@pytest.mark.parametrize("change", [swap_processor, swap_backend, swap_module])
def test_a_model_that_was_changed_meanwhile_is_refused(change: Any) -> None:
    def make(rank: int, model: Any) -> dict[str, Any]:
        if rank == 1:
            change(model)
        return inputs(7, 5)

    other, own = failures(make)
    assert isinstance(own, rt.ArgumentError)
    assert isinstance(other, rt.PeerError)
    assert "then parallelize again" in str(other)


def test_a_block_called_by_itself_has_no_plan() -> None:
    def on(rank: Any) -> None:
        model = build()
        ours.parallelize(model, rt.ContextParallelConfig(ring_degree=2, mesh=rank))
        hidden, text = torch.randn(2, 3, 48).double(), torch.randn(2, 2, 48).double()
        with pytest.raises(rt.UnsupportedError, match=r"carries no plan[\s\S]*call the model itself"):
            model.transformer_blocks[0](hidden, text, torch.randn(2, 48).double())
        assert torch.equal(
            model.proj_out(hidden), torch.nn.functional.linear(hidden, model.proj_out.weight, model.proj_out.bias)
        )

    World(2).run(on)


def test_is_causal_has_no_order_to_refer_to() -> None:
    def on(rank: Any) -> None:
        model = build()
        ours.parallelize(model, rt.ContextParallelConfig(ring_degree=2, mesh=rank))
        marks = model.transformer_blocks[0].attn.processor
        q = torch.randn(2, 3, 3, 16)
        with pytest.raises(rt.UnsupportedError, match=r"\[order-unknown\] is_causal"):
            dispatch_attention_fn(
                q, q, q, is_causal=True, backend=marks._attention_backend, parallel_config=marks._parallel_config
            )

    World(2).run(on)


def test_a_cache_that_skips_blocks_by_local_numbers_is_refused() -> None:
    def make(rank: int, model: Any) -> dict[str, Any]:
        model._cache_config = object() if rank == 1 else None
        return inputs(7, 5)

    other, own = failures(make)
    assert isinstance(own, rt.UnsupportedError)
    assert isinstance(other, rt.PeerError)
    assert "disable_cache" in str(other)
