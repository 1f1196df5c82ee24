"""The teeth of the audit: every fault is caught by a check that has what shows it, and is told by its name."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ringtrue import plants
from ringtrue.audit.checks import checks
from ringtrue.cli.audit.selftest import Caught, caught, self_test


@pytest.mark.parametrize("name", plants.REGISTRY)
def test_a_fault_is_caught_and_named(name: str) -> None:
    found = caught(name)
    assert not found.problem, found


def test_the_registry_is_whole() -> None:
    assert len(plants.REGISTRY) >= 80
    every = [*checks("full", dtypes=["float32"], chunks=True), *checks("parallel", dtypes=["float32"])]
    for plant in plants.REGISTRY.values():
        assert any(plants.FEATURES[plant.why](check) for check in every), plant
        assert (plant.make is None) != (plant.patch is None)
        assert plant.what[0] != plant.what[0].upper() or plant.what[:3] in ("Tru",)


def test_a_fault_between_ranks_is_no_pair() -> None:
    with pytest.raises(TypeError, match="between ranks"):
        plants.REGISTRY["merge in bf16"].on(None)  # type: ignore[arg-type]


def test_what_counts_as_caught() -> None:
    one = Caught("f", "what", "why", check="call/x/float32", right=True, diagnosis="a swap", expected="swap")
    assert one.problem == ""
    assert "fails without the fault too" in replace(one, right=False).problem
    assert "does not say" in replace(one, diagnosis="").problem
    assert "no check with why is wrong" in replace(one, check="").problem


def test_it_prints_and_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=200)
    path = tmp_path / "found.json"
    assert self_test(console, path, "dk-m*") == 0
    assert "1 of 1 faults caught" in console.file.getvalue()  # type: ignore[attr-defined]
    (one,) = json.loads(path.read_text("utf-8"))["faults"]
    assert (one["fault"], one["diagnosis"], one["problem"]) == ("dk-missing", "dk is missing", "")
    right = plants.Plant("nothing at all", "ordinary numbers", lambda pair: pair)
    monkeypatch.setitem(plants.REGISTRY, "none", right)
    assert self_test(console, None, "none") == 1
    assert "none: no check with ordinary numbers is wrong" in console.file.getvalue()  # type: ignore[attr-defined]
    assert self_test(console, None, "no-such-fault") == 1
