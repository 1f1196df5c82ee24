"""A library that is not here, broken, or of a release that nobody looked at, says so instead of being audited."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ringtrue.audit.cases import case
from ringtrue.audit.checks import Check
from ringtrue.audit.examine import examine
from ringtrue.audit.outcome import NOT_RUN
from ringtrue.subjects import found
from ringtrue.subjects._installed import why_not


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    fake = ModuleType("a_library")
    monkeypatch.setitem(sys.modules, "a_library", fake)
    return fake


@pytest.mark.parametrize(
    ("version", "first", "last", "looked_at"),
    [
        ("5.24.0", "5.24", "5.24", True),
        ("5.24.3", "5.24", "5.24", True),
        ("5.25.0", "5.24", "5.24", False),
        ("5.23.9", "5.24", "5.24", False),
        ("0.0.35+cu128", "0.0.35", "0.0.35", True),
        ("0.0.36", "0.0.35", "0.0.35", False),
        ("1.9", "1.2", "2", True),
        ("2.7", "1.2", "2", True),
        ("nightly", "1.2", "2", False),
    ],
)
def test_releases(version: str, first: str, last: str, looked_at: bool, library: ModuleType) -> None:
    library.__version__ = version  # type: ignore[attr-defined]
    reason = why_not("a_library", first, last)
    assert (reason == "") == looked_at
    assert looked_at or version in reason


def test_missing_and_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_library.py").write_text("raise OSError('no libcudart')")
    (tmp_path / "halfway_library.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert why_not("nowhere_to_be_found", "1", "2") == "nowhere_to_be_found is not installed"
    assert why_not("broken_library", "1", "2") == "broken_library is broken: OSError: no libcudart"
    assert "nowhere_to_be_found" in why_not("halfway_library", "1", "2")


@pytest.mark.parametrize("family", ["transformers", "xformers"])
def test_a_family_of_another_release_is_not_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType(family)
    fake.__version__ = "99.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, family, fake)
    (subject,) = found(family, "cpu")
    outcome = examine(subject, Check(case("length-1")))
    assert outcome.verdict == NOT_RUN
    assert "99.0 is a release that nobody looked at" in outcome.reason


@pytest.mark.parametrize("family", ["transformers", "xformers"])
def test_a_family_that_is_not_installed_is_not_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, family, None)  # type: ignore[arg-type]
    (subject,) = found(family, "cpu")
    assert subject.unavailable() == f"{family} is not installed"
