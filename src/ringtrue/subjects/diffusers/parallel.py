"""A call under diffusers' own context parallelism, set up as its `enable_parallelism` does and cut as its hooks do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import EquipartitionSharder, PartitionAnythingSharder
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

from ...audit.subject import Call, Quantities, Ranks, with_leaves
from .._ranks import in_place
from .._torch_calls import seeded


def config_of(ranks: Ranks, device: torch.device, anything: bool = False) -> Any:
    """What a model's processors are given by `enable_parallelism`, over the default process group."""
    flags = {"ulysses_anything": ranks.ulysses > 1, "ring_anything": ranks.ring > 1} if anything else {}
    config = ContextParallelConfig(ring_degree=ranks.ring, ulysses_degree=ranks.ulysses, **flags)
    mesh = dist.device_mesh.init_device_mesh(
        device.type, mesh_shape=config.mesh_shape, mesh_dim_names=config.mesh_dim_names
    )
    whole = ParallelConfig(context_parallel_config=config)
    whole.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
    return whole


Attend = Callable[[Call, Any], Any]


def run(call: Call, attend: Attend, anything: bool = False) -> Quantities:
    """This rank's part: whole-sized tensors that are zero where other ranks have something to say.

    attend    out, or out and lse, of this rank's own part of the call under a config
    anything  with ulysses_anything or ring_anything
    """
    ranks = call.ranks
    if ranks.balanced or ranks.prefix or ranks.replicated or ranks.lengths is not None:
        raise NotImplementedError("diffusers cuts every sequence into equal, contiguous parts")
    config = config_of(ranks, call.query.device, anything)
    mesh = config.context_parallel_config._flattened_mesh
    shard = PartitionAnythingSharder.shard_anything if anything else EquipartitionSharder.shard
    whole, leaves = with_leaves(call)
    keys = {name: getattr(whole.mask, name) for name in ("key_keep", "key_bias")}
    mine = replace(
        whole,
        **{name: shard(getattr(whole, name), 1, mesh) for name in ("query", "key", "value")},
        mask=replace(whole.mask, **{n: x if x is None else shard(x, 1, mesh) for n, x in keys.items()}),
    )
    places = shard(torch.arange(call.query.shape[1], device=call.query.device), 0, mesh)
    seeded(call)
    result = attend(mine, config)
    out, lse = result if isinstance(result, tuple) else (result, None)
    return in_place(call, leaves, places, out, None if lse is None else lse.transpose(1, 2))
