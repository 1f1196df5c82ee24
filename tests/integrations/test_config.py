"""diffusers' own ContextParallelConfig, taken by `parallelize`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models._modeling_parallel import ParallelConfig
from tiny_flux import build, inputs
from torch.distributed.device_mesh import init_device_mesh

import ringtrue as rt
from gloo import Pool
from ringtrue.integrations import diffusers as ours
from ringtrue.integrations.diffusers import config as configs
from ringtrue.parallel.twin import World

Theirs = diffusers.ContextParallelConfig


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(configs, "_said", set())
    return


def changed(config: Any, **fields: object) -> Any:
    """With values that its own constructor may refuse."""
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("wrap", [lambda config: config, lambda config: ParallelConfig(context_parallel_config=config)])
def test_its_degrees_and_mesh_are_ours(wrap: Any) -> None:
    expected = build()(**inputs(7, 5))[0]

    def on(rank: Any) -> tuple[rt.ContextParallelConfig, torch.Tensor]:
        model = build()
        cp = ours.parallelize(model, wrap(Theirs(ring_degree=2, ulysses_degree=2, mesh=rank)))
        return cp.config, model(**inputs(7, 5))[0]

    for config, out in World(4).run(on):
        assert (config.ring_degree, config.ulysses_degree) == (2, 2)
        assert torch.allclose(out, expected, rtol=0, atol=1e-12)


def on_larger_mesh(rank: int, world: int) -> tuple[tuple[int, ...], int]:
    """The mesh has data ranks too, as diffusers allows: each context is a slice of it."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("data", "ring", "ulysses"))
    config = configs.translated(Theirs(ulysses_degree=2, mesh=mesh))
    assert isinstance(config, rt.ContextParallelConfig)
    return tuple(config.mesh.mesh.flatten().tolist()), rt.ContextParallel(config).rank  # type: ignore[attr-defined]


def test_a_larger_mesh_is_sliced(pool: Pool) -> None:
    assert pool.run(on_larger_mesh, 4) == [((0, 1), 0), ((0, 1), 1), ((2, 3), 0), ((2, 3), 1)]


def test_every_flag_has_an_answer() -> None:
    """A release that adds one must be looked at."""
    names = {field.name for field in dataclasses.fields(Theirs) if not field.name.startswith("_")}
    assert names == {"ring_degree", "ulysses_degree", "mesh", *configs.FLAGS}
    config = Theirs(ring_degree=2)
    for name, (allowed, _) in configs.FLAGS.items():
        assert getattr(config, name) in allowed


def test_flags_that_mean_nothing_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    config = changed(Theirs(ulysses_degree=2, ulysses_anything=True, convert_to_fp32=False), rotate_method="alltoall")
    with caplog.at_level(logging.WARNING, "ringtrue"):
        configs.translated(Theirs(ulysses_degree=2))
        assert caplog.messages == [], "nothing was asked for"
        configs.translated(config)
        configs.translated(config)
        configs.translated(Theirs(ring_degree=2, ring_anything=True, convert_to_fp32=False))
    first, second = caplog.messages
    for flag in ("ulysses_anything=True (", "convert_to_fp32=False (", "rotate_method='alltoall' ("):
        assert flag in first
    assert "ring_anything=True (" in second
    assert "convert_to_fp32" not in second


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(rt.ArgumentError, match=r"rotate_method has no such value[\s\S]*'allgather' or 'alltoall'"):
        configs.translated(changed(Theirs(ring_degree=2), rotate_method="broadcast"))
    with pytest.raises(rt.ArgumentError, match="convert_to_fp32 has no such value"):
        configs.translated(changed(Theirs(ring_degree=2), convert_to_fp32="float16"))
    with pytest.raises(rt.ArgumentError, match="ring_degree is not a positive whole number"):
        configs.translated(changed(Theirs(ring_degree=2), ring_degree=0))
    for stranger in (object(), {"ring_degree": 2}, None, ParallelConfig()):
        with pytest.raises(rt.ArgumentError, match="not a configuration of context parallelism"):
            configs.translated(stranger)


def test_a_flag_of_a_later_release_is_refused_unless_it_is_at_its_default() -> None:
    @dataclasses.dataclass
    class Later(Theirs):
        zigzag: bool = False

    assert configs.translated(Later(ring_degree=2)).ring_degree == 2  # type: ignore[union-attr]
    with pytest.raises(rt.UnsupportedError, match=r"ContextParallelConfig.zigzag is not known[\s\S]*True"):
        configs.translated(Later(ring_degree=2, zigzag=True))


def test_tensor_parallelism_is_refused() -> None:
    config = ParallelConfig()
    config.tensor_parallel_config = object()  # a field since 0.42
    with pytest.raises(rt.UnsupportedError, match="tensor parallelism is not supported"):
        configs.translated(config)
