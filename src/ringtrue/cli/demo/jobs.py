"""What the workers do: prepare the problem, train the one-process references, train under a mode. Imports diffusers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import diffusers
import torch
from torch import Tensor

import ringtrue as rt

from ... import plants
from ..worker import Job
from .model import CONFIG, Batch, Eager, empty_copy, make_batch, make_model, sharpen, whole_mask
from .settings import Mode, Settings
from .train import Measured, train

PROBLEM = "problem.pt"


def prepare(job: Job, settings: Settings) -> dict[str, Any]:
    """Make weights and batch, rounded to the dtype of the demo, and leave them in the folder for everybody."""
    model, batch = make_model(settings), make_batch(settings)
    dtype = dtype_of(settings)
    entropy, factor = sharpen(model, batch, dtype)
    weights = {name: value.to(dtype) for name, value in model.state_dict().items()}
    batch = batch.to(torch.device("cpu"), dtype)
    torch.save({"weights": weights, "batch": {**asdict(batch)}}, job.folder / PROBLEM)
    return {
        "backend": resolve(job, settings, batch),
        "class": type(model).__name__,
        "config": CONFIG,
        "parameters": sum(value.numel() for value in weights.values()),
        "tensors": len(weights),
        "entropy": entropy,
        "sharpened_by": factor,
        "diffusers": diffusers.__version__,
        "device_name": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
    }


def reference(job: Job, settings: Settings, kind: str, backend: str) -> dict[str, Any]:
    """Train in this process alone: "float64" (the truth), "eager" (the yardstick) or "single" (the backend)."""
    dtype = torch.float64 if kind == "float64" else dtype_of(settings)
    model, batch = load(job, dtype)
    if kind == "single":
        rt.integrations.diffusers.use(model, backend=backend)
    else:
        model.set_attn_processor(Eager(exact=kind == "float64"))
    measured = train(model, batch, whole_mask(batch), settings.steps, on_step=job.report)
    return keep(job, kind, measured)


def parallel(job: Job, settings: Settings, mode: Mode, backend: str) -> dict[str, Any]:
    """Train as one rank of a mode, with the plant under the backend if there is one."""
    model, batch = load(job, dtype_of(settings))
    pair: str | rt.OpPair = backend
    if settings.plant is not None:
        pair = plants.PLANTS[settings.plant](rt.op_pair(backend, job.device.type))
    config = rt.ContextParallelConfig(ulysses_degree=mode.ulysses, ring_degree=mode.ring, timeout=job.timeout)
    cp = rt.integrations.diffusers.parallelize(model, config)
    rt.integrations.diffusers.use(model, backend=pair)
    key_mask = rt.integrations.diffusers.local_key_mask(batch.keep_text, batch.image.shape[1], model=model)
    measured = train(model, batch, key_mask, settings.steps, share=cp.loss, total=job.total, on_step=job.report)
    planted = plants.ran(pair) if isinstance(pair, rt.OpPair) else 0
    return {**keep(job, mode.name, measured), "plant_ran": planted}


def load(job: Job, dtype: torch.dtype) -> tuple[Any, Batch]:
    """The prepared model and batch on this worker's device, in `dtype`."""
    stored = torch.load(job.folder / PROBLEM, weights_only=True)
    model = empty_copy(dtype)
    model.load_state_dict(stored["weights"])
    model.to(job.device)
    return model, Batch(**stored["batch"]).to(job.device, dtype)


def keep(job: Job, name: str, measured: Measured) -> dict[str, Any]:
    """Leave output and gradients in the folder (they are the same on all ranks) and return the numbers."""
    if job.rank == 0:
        grads: dict[str, Tensor] = {parameter: grad.cpu() for parameter, grad in measured.grads.items()}
        torch.save({"out": measured.out.cpu(), "grads": grads}, job.folder / f"{name}.pt")
    return {"losses": measured.losses, "seconds": measured.seconds}


def resolve(job: Job, settings: Settings, batch: Batch) -> str:
    """The name of the backend that runs. UnsupportedError, with every reason, when none can."""
    heads, width = (int(str(CONFIG[name])) for name in ("num_attention_heads", "attention_head_dim"))
    tokens = settings.text_tokens + settings.image_tokens
    x = torch.zeros(2, tokens, heads, width, dtype=batch.image.dtype, device=job.device, requires_grad=True)
    mask = rt.KeyPadding(whole_mask(batch)[:, 0, 0].to(job.device))
    found = rt.explain(x, x, x, backend=settings.backend, attn_mask=mask)
    if found.backend is None:
        raise rt.UnsupportedError(str(found))
    return found.backend


def dtype_of(settings: Settings) -> torch.dtype:
    """The torch dtype of the demo."""
    dtype = getattr(torch, settings.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
