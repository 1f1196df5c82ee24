"""diffusers: its dispatcher with each backend, alone and under its own context parallelism, and its op pairs.

diffusers/NAME               dispatch_attention_fn(backend=NAME); with several ranks, under a ContextParallelConfig
diffusers/NAME/lse           the same with return_lse=True, which diffusers has under context parallelism alone
diffusers/NAME/anything      the same with ulysses_anything or ring_anything
diffusers/NAME/pair          its forward and backward op as TemplatedUlyssesAttention calls them
diffusers/NAME/pair-lse      the same with return_lse=True, as TemplatedRingAttention calls them
diffusers/templates          its context-parallel templates around a right pair
.../stand-in                 on a CPU: written-out attention in the place of the CUDA kernel that the pair calls
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module, metadata

import torch

from ...audit.subject import Call, Plain, Subject

RELEASES = ("0.39.0", "0.40.0", "0.41.0", "0.42.0", "0.42.1")  # those that somebody has looked at


def found(device: str) -> Iterator[Subject]:
    """Every backend of its registry; one subject that says why where there is nothing to be had."""
    missing = unusable()
    if missing:
        yield Plain("diffusers", _refuse, missing=missing)
        return
    about = f"diffusers {metadata.version('diffusers')}, torch {torch.__version__}"
    for part in ("dispatcher", "pairs", "templates"):
        yield from import_module(f"{__name__}.{part}").found(device, about)


def unusable() -> str:
    """Why no subject of this family can run; empty where they can."""
    try:
        version = metadata.version("diffusers")
    except metadata.PackageNotFoundError:
        return "diffusers is not installed"
    if version not in RELEASES:
        return f"diffusers {version} is a release that nobody looked at; known are {', '.join(RELEASES)}"
    try:
        import_module("diffusers.models.attention_dispatch")
    except Exception as error:
        return f"diffusers {version} cannot be imported: {type(error).__name__}: {error}"
    return ""


def _refuse(call: Call) -> torch.Tensor:
    raise NotImplementedError("diffusers is not here")
