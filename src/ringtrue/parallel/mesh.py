"""Which ranks make a context, in the order of context ranks: read from degrees and a mesh, without talking to anybody.

Context rank = ring_rank * ulysses_degree + ulysses_rank: Ulysses ranks are neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ArgumentError, message

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_degrees(ulysses_degree: int, ring_degree: int) -> int:
    """The number of context ranks."""
    for name, degree in (("ulysses_degree", ulysses_degree), ("ring_degree", ring_degree)):
        if type(degree) is not int or degree < 1:
            raise ArgumentError(message(f"{name} is not a degree", limit="an int, 1 or more", value=repr(degree)))
    return ulysses_degree * ring_degree


def context_ranks(
    mesh: DeviceMesh | None, ulysses_degree: int, ring_degree: int, rank: int, world: int | None
) -> list[int]:
    """Global ranks in the order of context ranks, for global rank `rank` of `world` (None: nothing is initialised).

    Raises ArgumentError where degrees, mesh and world do not fit together.
    """
    product = check_degrees(ulysses_degree, ring_degree)
    call = f"ulysses_degree={ulysses_degree}, ring_degree={ring_degree}, mesh={mesh}"
    if world is None:
        if mesh is None and product == 1:
            return [0]
        remedy = "start one process a rank (torchrun) and call torch.distributed.init_process_group() first"
        raise ArgumentError(message("torch.distributed is not initialised", call=call, limit=product, remedy=remedy))
    ranks = list(range(world)) if mesh is None else _mesh_ranks(mesh, ulysses_degree, ring_degree, call)
    if len(ranks) != product:
        raise ArgumentError(
            message(
                f"the degrees do not fit the {'default group' if mesh is None else 'mesh'}",
                call=call,
                limit=f"{len(ranks)} ranks",
                value=f"ulysses_degree x ring_degree = {product}",
                remedy="change the degrees, or pass the mesh of one context: mesh['ring', 'ulysses']",
            )
        )
    if rank not in ranks:
        text = f"global rank {rank} is not in the mesh"
        raise ArgumentError(message(text, call=call, limit=f"ranks {ranks}", remedy="pass each rank its own slice"))
    return ranks


def _mesh_ranks(mesh: DeviceMesh, ulysses_degree: int, ring_degree: int, call: str) -> list[int]:
    names, table = tuple(mesh.mesh_dim_names or ()), mesh.mesh
    degrees = {"ring": ring_degree, "ulysses": ulysses_degree}
    if table.dim() != 1 and set(names) != set(degrees):
        raise ArgumentError(
            message(
                "the mesh has other dims than context parallelism reads",
                call=call,
                limit='dims "ring" and "ulysses", or one dim',
                value=f"dims {names}, shape {tuple(table.shape)}",
                remedy="pass a slice of it: mesh['ring', 'ulysses']",
            )
        )
    for name, size in zip(names, table.shape, strict=False):
        if size != degrees.get(name, size):
            text = f'mesh dim "{name}" has another size than {name}_degree'
            raise ArgumentError(message(text, call=call, limit=size, value=degrees[name], remedy="make them equal"))
    return (table.t() if names == ("ulysses", "ring") else table).flatten().tolist()
