"""Kernels of the hub: the pinned version, from wherever `kernels` finds it, from the cache without a network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringtrue import select
from ringtrue.backends import REGISTRY, _hub
from ringtrue.contract import Facts

KERNEL = _hub.Kernel("owner/attention", version=3, attributes=("forward",), part="interface")
HUBS = [b for b in REGISTRY if b.fetch is not None]
Asked = list[tuple[object, ...]]


class Kernels:
    """A `kernels` that finds what is in `there` by (repository, version), and folders by their path."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, int], Any] = {}
        self.asked: Asked = []

    def get_kernel(self, repo_id: str, *, version: int) -> Any:
        self.asked.append((repo_id, version))
        if (repo_id, version) not in self.there:
            raise ConnectionError("no network\nand a long story")
        return self.there[repo_id, version]

    def get_local_kernel(self, repo_path: Path) -> Any:
        self.asked.append((repo_path,))
        return SimpleNamespace(interface=SimpleNamespace(forward=repo_path))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kernels]:
    fake = Kernels()
    monkeypatch.setattr(_hub, "loaded", lambda package: fake)
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path))
    _hub.module.cache_clear()
    yield fake
    _hub.module.cache_clear()


@pytest.fixture
def snapshot(tmp_path: Path) -> Callable[..., Path]:
    """A snapshot in the cache, younger than those before it."""

    def made(name: str, metadata: str, kind: str = "kernels", repo: str = "owner--attention") -> Path:
        folder = tmp_path / f"{kind}--{repo}" / "snapshots" / name
        (folder / "build" / "torch-cuda").mkdir(parents=True)
        (folder / "build" / "torch-cuda" / "metadata.json").write_text(metadata)
        age = len(list(tmp_path.glob("*/snapshots/*")))
        os.utime(folder, (age, age))
        return folder

    return made


def test_the_pinned_version_is_asked_for_once(kernels: Kernels) -> None:
    part = SimpleNamespace(forward=len)
    kernels.there[KERNEL.repo, 3] = SimpleNamespace(interface=part)
    kernels.there[KERNEL.repo, 4] = SimpleNamespace(interface=None)
    assert _hub.fetch(KERNEL, "cuda") is None
    assert _hub.module(KERNEL) is part
    assert kernels.asked == [("owner/attention", 3)]


def test_without_a_network_the_newest_snapshot_of_that_version_is_taken(
    kernels: Kernels, snapshot: Callable[..., Path]
) -> None:
    three = json.dumps({"version": 3})
    snapshot("old", three)
    right = snapshot("right", three, kind="models")
    snapshot("other-version", json.dumps({"version": 4}))
    snapshot("half-a-download", '{"vers')
    snapshot("no-mapping", "[3]")
    snapshot("another-kernel", three, repo="owner--other")
    assert _hub.module(KERNEL).forward == right
    assert kernels.asked == [("owner/attention", 3), (right,)]


def test_what_is_nowhere_is_told(kernels: Kernels, snapshot: Callable[..., Path]) -> None:
    snapshot("other-version", json.dumps({"version": 4}))
    reason = _hub.fetch(KERNEL, "cuda")
    assert reason is not None
    assert reason.code == "kernel-not-loaded"
    assert reason.text == "owner/attention cannot be loaded: ConnectionError: no network"
    assert "LOCAL_KERNELS=owner/attention=" in reason.remedy
    kernels.there[KERNEL.repo, 3] = SimpleNamespace(interface=SimpleNamespace(forward=len))
    assert _hub.fetch(KERNEL, "cuda") is None  # a failure is not remembered


@pytest.mark.parametrize("found", [SimpleNamespace(), SimpleNamespace(interface=SimpleNamespace(backward=len))])
def test_a_kernel_that_lacks_a_function_is_told(found: Any, kernels: Kernels) -> None:
    kernels.there[KERNEL.repo, 3] = found
    reason = _hub.fetch(KERNEL, "cuda")
    assert reason is not None
    assert "AttributeError" in reason.text


def test_another_version_is_another_kernel(kernels: Kernels) -> None:
    for version in (3, 4):
        kernels.there[KERNEL.repo, version] = SimpleNamespace(interface=SimpleNamespace(forward=version))
    assert [_hub.module(replace(KERNEL, version=v)).forward for v in (3, 4)] == [3, 4]


def test_there_are_kernels_of_the_hub() -> None:
    assert {"flash_hub", "flash_varlen_hub", "flash_3_hub", "flash_3_varlen_hub", "flash_4_hub"} <= {
        b.name for b in HUBS
    }  # fmt: skip


@pytest.mark.parametrize("backend", HUBS, ids=lambda b: b.name)
def test_nothing_is_fetched_but_for_a_call_that_names_it(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked why it cannot run, or for any other name, nothing is loaded; named, it is."""
    asked: list[str] = []

    def module(kernel: _hub.Kernel) -> Any:
        asked.append(kernel.repo)
        raise ConnectionError("no network")

    monkeypatch.setattr(_hub, "module", module)
    quiet = replace(backend, unavailable=lambda device: None)
    monkeypatch.setattr(select, "REGISTRY", tuple(quiet if b is backend else b for b in REGISTRY))
    facts = Facts("cuda", torch.bfloat16, 1, 64, 64, 2, 2, 64, 64, capability=(9, 0))
    select.reasons_for(backend, facts)
    select.survey.__wrapped__(select.AUTO, facts, tuple(b.name for b in REGISTRY))
    select.survey.__wrapped__("native_math", facts, ("native_math",))
    assert asked == []
    choices, trace = select.survey.__wrapped__(backend.name, facts, (backend.name,))
    assert (choices, len(asked)) == ((), 1)
    assert [reason.code for reason in dict(trace)[backend.name]] == ["kernel-not-loaded"]
