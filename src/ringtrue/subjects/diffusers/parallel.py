"""A call under diffusers' own context parallelism, set up as its `enable_parallelism` does and cut as its hooks do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import EquipartitionSharder, PartitionAnythingSharder
from diffusers.models import attention_dispatch as theirs
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import Tensor

from ...audit.subject import Call, Quantities, with_leaves
from .._torch_calls import seeded

if TYPE_CHECKING:
    from .dispatcher import Dispatched


def config_of(call: Call, anything: bool) -> Any:
    """What a model's processors are given by `enable_parallelism`, over the default process group."""
    ranks = call.ranks
    flags = {"ulysses_anything": ranks.ulysses > 1, "ring_anything": ranks.ring > 1} if anything else {}
    config = ContextParallelConfig(ring_degree=ranks.ring, ulysses_degree=ranks.ulysses, **flags)
    device = call.query.device
    mesh = dist.device_mesh.init_device_mesh(
        device.type, mesh_shape=config.mesh_shape, mesh_dim_names=config.mesh_dim_names
    )
    whole = ParallelConfig(context_parallel_config=config)
    whole.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
    return whole


def run(subject: Dispatched, call: Call) -> Quantities:
    """This rank's part: whole-sized tensors that are zero where other ranks have something to say."""
    from .dispatcher import arguments

    ranks = call.ranks
    if ranks.balanced or ranks.prefix or ranks.replicated or ranks.lengths is not None:
        raise NotImplementedError("diffusers cuts every sequence into equal, contiguous parts")
    config = config_of(call, subject.anything)
    mesh = config.context_parallel_config._flattened_mesh
    shard = PartitionAnythingSharder.shard_anything if subject.anything else EquipartitionSharder.shard
    whole, leaves = with_leaves(call)
    keys = {name: getattr(whole.mask, name) for name in ("key_keep", "key_bias")}
    mine = replace(
        whole,
        **{name: shard(getattr(whole, name), 1, mesh) for name in ("query", "key", "value")},
        mask=replace(whole.mask, **{n: x if x is None else shard(x, 1, mesh) for n, x in keys.items()}),
    )
    places = shard(torch.arange(call.query.shape[1], device=call.query.device), 0, mesh)
    seeded(call)
    result = theirs.dispatch_attention_fn(
        *arguments(mine, subject.flat), backend=subject.backend, parallel_config=config, **subject.options(call)
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    outputs, upstream = [out], [call.grad_out[:, places]]
    if lse is not None and call.grad_lse is not None:
        outputs, upstream = [out, lse], [*upstream, call.grad_lse[:, :, places].transpose(1, 2)]
    names = [name for name in ("query", "key", "value", "bias") if name in call.wanted]
    found: tuple[Tensor | None, ...] = ()
    if names:
        found = torch.autograd.grad(outputs, [leaves[n] for n in names], upstream, allow_unused=True)
    grads = dict(zip(names, found, strict=True))
    ends: list[Tensor | None] = [_at(out.detach(), places, call.grad_out, 1)]
    ends.append(None if lse is None else _at(lse.detach().transpose(1, 2), places, _lse_like(call), 2))
    return Quantities(*ends, *(grads.get(n) for n in ("query", "key", "value", "bias")))


def _at(x: Tensor, places: Tensor, like: Tensor, dim: int) -> Tensor:
    """`x` where its rows lie in the whole; zero elsewhere."""
    return torch.zeros(like.shape, dtype=x.dtype, device=x.device).index_copy(dim, places, x)


def _lse_like(call: Call) -> Tensor:
    batch, rows, heads, _ = call.query.shape
    return call.query.new_empty((batch, heads, rows))
