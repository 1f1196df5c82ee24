"""One training run of the demo, the same code for every reference and every rank of every mode."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import Batch

LEARNING_RATE = 0.05
MOMENTUM = 0.9
LOSS_SCALE = {torch.float16: 8192.0}  # the gradients of a mean vanish in float16 otherwise


@dataclass(frozen=True)
class Measured:
    """What a run showed: output and summed gradients at step 0, the loss before each step and after the last."""

    out: Tensor
    grads: dict[str, Tensor]
    losses: list[float]
    seconds: float


def train(
    model: nn.Module,
    batch: Batch,
    key_mask: Tensor,
    steps: int,
    *,
    share: Callable[[Tensor], Tensor] = lambda loss: loss,
    total: Callable[[Tensor], Tensor] = lambda grads: grads,
    on_step: Callable[[int], None] = lambda step: None,
) -> Measured:
    """SGD with momentum.

    share  what of the loss this rank back-propagates (`ContextParallel.loss`)
    total  the sum of a flat tensor over the ranks; gradients are summed in float32 (float64 for float64)
    """
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    scale = LOSS_SCALE.get(batch.image.dtype, 1.0)
    losses: list[float] = []
    out, grads = batch.image, {}
    synchronise(batch)
    start = time.perf_counter()
    for step in range(steps):
        prediction, loss = forward(model, batch, key_mask)
        losses.append(loss.item())
        (share(loss) * scale).backward()
        summed = sum_gradients(model, total, scale)
        if step == 0:
            out, grads = prediction.detach().clone(), summed
        for name, parameter in model.named_parameters():
            parameter.grad = summed[name].to(parameter.dtype)
        optimiser.step()
        optimiser.zero_grad()
        on_step(step + 1)
    with torch.no_grad():
        losses.append(forward(model, batch, key_mask)[1].item())
    synchronise(batch)
    return Measured(out, grads, losses, time.perf_counter() - start)


def forward(model: nn.Module, batch: Batch, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The prediction, and its mean squared error, in float64: losses that differ shall not look alike."""
    prediction = batch.run(model, key_mask)
    return prediction, F.mse_loss(prediction.double(), batch.target.double())


def sum_gradients(model: nn.Module, total: Callable[[Tensor], Tensor], scale: float) -> dict[str, Tensor]:
    """Every parameter's gradient, summed over ranks in one flat buffer of float32 (float64 for a float64 model)."""
    parameters = dict(model.named_parameters())
    wide = torch.promote_types(next(iter(parameters.values())).dtype, torch.float32)
    missing = [name for name, p in parameters.items() if p.grad is None]
    if missing:
        raise RuntimeError(f"{len(missing)} parameters have no gradient, the first is {missing[0]}")
    flat = total(torch.cat([p.grad.flatten().to(wide) for p in parameters.values() if p.grad is not None]))
    parts = (flat / scale).split([p.numel() for p in parameters.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}


def synchronise(batch: Batch) -> None:
    """Wait for the device, so that the clock is right."""
    if batch.image.is_cuda:
        torch.cuda.synchronize(batch.image.device)
