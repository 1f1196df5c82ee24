"""`ringtrue doctor`: what is installed, what of it is broken and why, and what mends it. Missing is not broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

import ringtrue as rt
from calls import backend_of, unreachable
from ringtrue import api, select
from ringtrue.backends import REGISTRY
from ringtrue.cli import installed
from ringtrue.cli.app import app
from ringtrue.cli.known_versions import KNOWN, Known
from ringtrue.contract import Backend, Package, Reason

ROOT = Path(__file__).parent.parent.parent
THERE = Package("half", "pip install --upgrade half", "half-there")
REFUSES = Reason("not-built", "half was built for another torch", "torch 2.10", "torch 2.11", "pip install half==1.1")
Registry = Callable[..., None]


def doctor(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})
    return done.exit_code, done.output


def data() -> tuple[int, dict[str, Any]]:
    code, out = doctor("--json")
    return code, json.loads(out)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Registry:
    """The registry is these backends, and "half" is a package that can be imported."""
    (tmp_path / "half.py").write_text("__version__ = '1.0'\n")
    info = tmp_path / "half_there-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half-there\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def put(*backends: Backend) -> None:
        for module in (select, api):
            monkeypatch.setattr(module, "REGISTRY", backends)

    return put


def optional(name: str, package: Package, why: Reason | None = None, **claims: Any) -> Backend:
    pair = unreachable(name, **claims)
    return replace(
        backend_of(pair), packages=(package,), unavailable=lambda device: why or rt.optional.why_not(package)
    )


def test_every_package_of_every_backend_is_told() -> None:
    _, found = data()
    for backend in REGISTRY:
        for package in backend.packages:
            told = [p for p in found["packages"] if (p["module"], p["install"]) == (package.module, package.install)]
            assert any(backend.name in p["needed_by"] for p in told)
    told = {package["module"]: package for package in found["packages"]}
    assert told["triton"]["needed_by"] == ["rings on a GPU"]
    assert "integrations.diffusers, demo" in told["diffusers"]["needed_by"]
    assert found["versions"]["torch"] == str(rt.api.torch.__version__)
    _, out = doctor()
    assert all(package["module"] in out for package in found["packages"])


def test_what_is_not_installed_is_not_broken(registry: Registry) -> None:
    registry(optional("a", Package("nowhere_at_all", "pip install it")))
    code, found = data()
    assert (code, found["broken"]) == (0, [])
    assert [p["state"] for p in found["packages"] if p["module"] == "nowhere_at_all"] == ["not installed"]
    code, out = doctor()
    assert code == 0
    assert "Nothing that is installed is broken." in out


def test_a_package_that_is_broken_and_the_command_that_mends_it(registry: Registry) -> None:
    old = replace(THERE, at_least="2")
    registry(optional("a", old), optional("b", old))
    code, found = data()
    (trouble,) = found["broken"]
    assert (code, trouble["name"], trouble["why"]["code"]) == (1, "half-there", "package-version")
    assert found["versions"]["half-there"] == "1.0"
    code, out = doctor()
    assert code == 1
    assert "half-there is broken: [package-version]" in out
    assert "needs: >= 2" in out
    assert "is: 1.0" in out
    assert "mend it: pip install --upgrade half\n" in out


@pytest.mark.parametrize("claims", [{}, {"dtypes": frozenset()}], ids=["claims the call", "claims nothing"])
def test_a_package_that_can_be_imported_and_refuses_all_the_same(claims: dict[str, Any], registry: Registry) -> None:
    """Half broken: each part works, and what the backend itself asks does not."""
    backend = optional("a", THERE, REFUSES, **claims)
    registry(backend, replace(backend, name="b"), optional("works", THERE))
    code, found = data()
    assert [p["state"] for p in found["packages"] if p["name"] == "half-there"] == ["works"]
    assert found["broken"] == [{"name": "a on cpu, b on cpu", "why": vars(REFUSES)}]
    assert code == 1
    _, out = doctor()
    assert "a on cpu, b on cpu is broken: [not-built] half was built for another torch" in out
    assert "mend it: pip install half==1.1" in out


def test_a_release_that_is_only_too_old_for_some_is_not_broken(registry: Registry) -> None:
    registry(optional("old", THERE), optional("new", replace(THERE, at_least="2", install="pip install 'half>=2'")))
    code, found = data()
    assert (code, found["broken"]) == (0, [])
    states = [(p["needed_by"], p["state"]) for p in found["packages"] if p["name"] == "half-there"]
    assert states == [(["old"], "works"), (["new"], "other release")]


def test_a_reason_of_the_claims_is_none_of_the_software(registry: Registry) -> None:
    registry(optional("a", THERE, dtypes=frozenset(), head_dims=frozenset({4}), max_head_dim=4))
    assert data()[0] == 0


def test_a_gpu_is_not_needed_to_see_that_its_package_is_broken(registry: Registry) -> None:
    gpu = replace(optional("a", THERE, REFUSES), pairs={"cuda": unreachable("a")})
    registry(gpu)
    assert data()[1]["broken"] == [{"name": "a on cuda", "why": vars(REFUSES)}]


def test_a_driver_beside_a_torch_that_finds_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installed, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(installed.torch.version, "cuda", "13.0")
    monkeypatch.setattr(installed.torch.cuda, "is_available", lambda: False)
    assert installed._driver() is None
    (tmp_path / "version").write_text("NVRM version:  535.1\nGCC\n")
    why = installed._driver()
    assert why is not None
    assert (why.code, why.value) == ("driver", "NVRM version: 535.1")
    assert "CUDA 13.0" in why.limit


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.page)
def test_versions_that_were_seen_to_work_are_on_a_page(known: Known) -> None:
    page = (ROOT / known.page).read_text("utf-8")
    assert all(version in page for version in known.versions.values())


def test_the_nearest_versions_that_were_seen_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"torch": "2.11.0+cu130", "half": "1.0"}
    monkeypatch.setattr(installed, "base", lambda: here)
    far, near = (
        Known("far", "x", {"torch": "2.12.0", "half": "1.0"}),
        Known("near", "y", {"torch": "2.11.0", "gone": "3"}),
    )
    both = Known("both", "z", {"torch": "2.11.0", "half": "1.0"})
    for known, page, differs in (((far, near, both), "both", {}), ((far,), "far", {"torch": "2.11.0+cu130"})):
        monkeypatch.setattr(installed, "KNOWN", known)
        _, found = data()
        assert (found["seen_to_work"]["page"], found["seen_to_work"]["other_here"]) == (page, differs)
    assert "Other here: torch 2.11.0+cu130, there 2.12.0" in doctor()[1]
    assert Known("", "", {"torch": "2.11.0+cu129"}).differences(here) == {"torch": ("2.11.0+cu130", "2.11.0+cu129")}


def test_bad_usage() -> None:
    assert doctor("--nothing")[0] == 2
