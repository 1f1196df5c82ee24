"""A small real Flux for tests: one set of weights, inputs of any length, one step alone or on a rank of a context."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

import ringtrue as rt

HEADS, HEAD_DIM = 3, 16


class Step(NamedTuple):
    """The output, and the gradients of all parameters and of the image and text inputs, of one forward and backward."""

    out: Tensor
    grads: dict[str, Tensor]


@functools.cache
def _weights() -> FluxTransformer2DModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FluxTransformer2DModel(
            in_channels=8,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=12,
            pooled_projection_dim=10,
            axes_dims_rope=(4, 6, 6),
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm_q" in name or "norm_k" in name or "norm_added" in name:
                parameter.mul_(2.0)  # attention that is not flat: a wrong mask or order must show
            parameter.copy_(parameter.bfloat16())  # the same numbers in every dtype
    return model


def build(dtype: torch.dtype = torch.float64) -> FluxTransformer2DModel:
    """A model of its own, always with the same weights. Not thread-safe the first time."""
    model = copy.deepcopy(_weights())
    return torch.nn.Module.to(model, dtype)  # diffusers' own warns


def numbers(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Gaussian, and the same in every dtype: torch draws others for each."""
    return torch.randn(shape, generator=generator).bfloat16().to(dtype)


def inputs(image: int, text: int, dtype: torch.dtype = torch.float64, batch: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(image * 100 + text)
    random = functools.partial(numbers, generator, dtype=dtype)
    grid = torch.arange(image)
    return {
        "hidden_states": random(batch, image, 8).requires_grad_(),
        "encoder_hidden_states": random(batch, text, 12).requires_grad_(),
        "pooled_projections": random(batch, 10),
        "timestep": torch.linspace(0.25, 0.5, batch, dtype=dtype),
        "img_ids": torch.stack([torch.zeros(image), grid // 3, grid % 3], 1).to(dtype),
        "txt_ids": torch.zeros(text, 3, dtype=dtype),
        "return_dict": False,
    }


def ragged(text: int, batch: int = 2) -> Tensor:
    """Every sample has another number of real text tokens."""
    return torch.arange(text)[None] < torch.tensor([[max(1, text - 2 * sample)] for sample in range(batch)])


def with_mask(given: dict[str, Any], mask: object) -> dict[str, Any]:
    return {**given, "joint_attention_kwargs": {"attention_mask": mask}}


def step(model: FluxTransformer2DModel, given: dict[str, Any], cp: rt.ContextParallel | None = None) -> Step:
    """One forward and backward; the loss is a fixed random weighting of the output."""
    out = model(**given)[0]
    loss = (out * numbers(torch.Generator().manual_seed(9), *out.shape, dtype=out.dtype)).sum()
    (loss if cp is None else cp.loss(loss)).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    grads |= {name: given[name].grad for name in ("hidden_states", "encoder_hidden_states")}
    return Step(out.detach(), grads)


def alone(image: int, text: int, keep: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Step:
    """One process, diffusers' own default attention."""
    given = inputs(image, text, dtype)
    if keep is not None:
        given = with_mask(given, rt.integrations.diffusers.local_key_mask(keep, image))
    return step(build(dtype), given)


def on_rank(
    mesh: object,
    degrees: tuple[int, int],
    image: int,
    text: int,
    keep: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    backend: str | None = None,
    checkpointing: bool = False,
) -> Step:
    """One rank of a context of `degrees` (Ulysses, ring)."""
    hooks = rt.integrations.diffusers
    model, given = build(dtype), inputs(image, text, dtype)
    if checkpointing:
        model.enable_gradient_checkpointing()
    cp = hooks.parallelize(model, rt.ContextParallelConfig(*degrees, mesh=mesh))
    if backend is not None:
        hooks.use(model, backend)
    if keep is not None:
        given = with_mask(given, hooks.local_key_mask(keep, image, model=model))
    return step(model, given, cp)


def on_process(rank: int, world: int, *args: Any) -> Step:
    """`on_rank` for a task of the process pool."""
    return on_rank(None, *args)


def together(steps: list[Step]) -> Step:
    """What all ranks of a context found: one output, equal on all of them, and the sum of their gradients."""
    for other in steps[1:]:
        assert torch.equal(other.out, steps[0].out)
    return Step(steps[0].out, {name: sum(each.grads[name] for each in steps) for name in steps[0].grads})


def error(got: Step, expected: Step) -> float:
    """The worst relative error: of the output, and of each gradient (against the largest of all, where it is small)."""
    largest = max(float(grad.norm()) for grad in expected.grads.values())
    worst = float((got.out - expected.out).norm() / expected.out.norm())
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        worst = max(worst, float((got.grads[name] - grad).norm()) / max(float(grad.norm()), 1e-6 * largest))
    return worst
