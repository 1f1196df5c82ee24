"""diffusers' own configuration of context parallelism, as ours: degrees and mesh count, its flags are answered."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NoReturn

import ringtrue as rt

from .theirs import ContextParallelConfig, ParallelConfig

_log = logging.getLogger("ringtrue")
_said: set[str] = set()  # flags that this process was told about

# flag -> what it may be, and why it means nothing here
FLAGS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "convert_to_fp32": ((True, False), "partial results of a ring are always merged in float32"),
    "rotate_method": (("allgather", "alltoall"), "keys and values always travel from rank to rank, with equal results"),
    "ulysses_anything": ((True, False), "lengths and heads that do not divide always work"),
    "ring_anything": ((True, False), "lengths that do not divide always work"),
}
_HONOURED = ("ring_degree", "ulysses_degree", "mesh")


def translated(config: object) -> rt.ContextParallelConfig | rt.ContextParallel:
    """What was passed as `config` to `parallelize`, as ringtrue takes it.

    Flags that differ from their default and mean nothing here are logged once a process (logger "ringtrue", WARNING).
    ArgumentError for another type, and for a value of a flag that is none of its own; UnsupportedError for a flag that
    is not known here, and for tensor parallelism.
    """
    if isinstance(config, (rt.ContextParallelConfig, rt.ContextParallel)):
        return config
    given = type(config).__qualname__
    if isinstance(config, ParallelConfig):
        if getattr(config, "tensor_parallel_config", None) is not None:  # new in 0.42
            text = "diffusers' tensor parallelism is not supported"
            raise rt.UnsupportedError(rt.errors.message(text, value=given, remedy="pass a ContextParallelConfig"))
        config = config.context_parallel_config
    if not isinstance(config, ContextParallelConfig):
        limit = "ringtrue's ContextParallelConfig or ContextParallel, or diffusers' ContextParallelConfig"
        _fail("config is not a configuration of context parallelism", limit, given)
    _answer_flags(config)
    mesh = config.mesh
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if len(names) > 2 and {"ring", "ulysses"} <= set(names):  # as diffusers does with a larger mesh
        mesh = mesh["ring", "ulysses"]
    return rt.ContextParallelConfig(ulysses_degree=config.ulysses_degree, ring_degree=config.ring_degree, mesh=mesh)


def _answer_flags(config: Any) -> None:
    """Log what means nothing here and was not said yet; an error for what cannot be judged."""
    idle = []
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if name in _HONOURED or name.startswith("_"):
            continue
        if name not in FLAGS:
            if value != field.default:
                text = f"diffusers' ContextParallelConfig.{name} is not known here"
                remedy = f"leave it at its default, {field.default!r}"
                raise rt.UnsupportedError(rt.errors.message(text, value=repr(value), remedy=remedy))
            continue
        allowed, why = FLAGS[name]
        if not any(value is each or (isinstance(each, str) and value == each) for each in allowed):
            _fail(f"diffusers' ContextParallelConfig.{name} has no such value", " or ".join(map(repr, allowed)), value)
        if value != field.default and name not in _said:
            idle.append(f"{name}={value!r} ({why})")
            _said.add(name)
    if idle:
        _log.warning("flags of diffusers' ContextParallelConfig that mean nothing to ringtrue: %s", "; ".join(idle))


def _fail(problem: str, limit: str, value: object) -> NoReturn:
    raise rt.ArgumentError(rt.errors.message(problem, limit=limit, value=repr(value)))
