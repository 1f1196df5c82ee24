"""README's support table is what the backends claim: generated, never typed, on any machine the same."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ringtrue as rt

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
# the edge makes these alike for every pair (contract.Claims says how), so no reader has to know them
SHOWN = [
    name
    for name in (field.name for field in dataclasses.fields(rt.Claims))
    if not name.startswith("any_") and not name.endswith(("_multiple", "_tile", "head_dims"))
]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_support", ROOT / "docs" / "support.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support = load()


def test_readme_has_the_claims_of_today() -> None:
    """When this fails: read what changed, and if it is meant, run `python docs/support.py`."""
    assert support.written(README, support.declared()) == README


def test_the_page_has_the_claims_of_today() -> None:
    assert support.BACKENDS_PAGE.read_text("utf-8") == support.page(support.declared())


def test_every_note_is_on_the_page() -> None:
    """A note stands before the section of the backend that its file is named after."""
    notes = list(support.NOTES.glob("*.md"))
    assert notes
    for note in notes:
        before, _ = support.page(support.declared()).split(f"\n## {note.stem}\n")
        assert before.endswith("\n" + note.read_text("utf-8").strip() + "\n"), note.name


def both(supports: Sequence[rt.Support]) -> str:
    """README's table and docs/backends.md."""
    return str(support.table(supports)) + str(support.page(supports))


def test_every_backend_is_a_row_and_a_section() -> None:
    table, page = support.table(support.declared()), support.page(support.declared())
    for found in support.declared():
        assert f"| `{found.name}` | {found.summary} |" in table
        assert f"\n## {found.name}\n\n{found.summary}\n" in page
        assert all(f"\nNeeds `{package.module}`: {package.install}.\n" in page for package in found.packages)
    width = {line.count(" | ") for line in table.splitlines()}
    assert len(width) == 1


def test_the_release_that_is_installed_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    before = both(support.declared())
    monkeypatch.setattr(rt.api, "_missing", lambda backend, device: None)
    older = {b.name: b for b in rt.api.REGISTRY}["native_flash"]
    less = replace(older.pairs["cpu"].claims, lse=False)
    registry = tuple(replace(b, narrowed=lambda device: less) if b is older else b for b in rt.api.REGISTRY)
    monkeypatch.setattr(rt.api, "REGISTRY", registry)
    assert {s.name for s in rt.backends() if not s.claims.lse and s.claims.backward} == {"native_flash"}
    assert both(support.declared()) == before


def test_the_machine_does_not_show() -> None:
    gone = rt.Reason("device", "this machine has no such device")
    elsewhere = [replace(found, unavailable=gone) for found in support.declared()]
    assert both(elsewhere) == both(support.declared())


@pytest.mark.parametrize(
    ("verified", "said"),
    [
        ("", "| no |"),
        ("stand-in", "| glue, with a stand-in |"),
        ("every test run", "| every test run |"),
        ("docs/verified/2026-11-30-2xH200.md", "| [on H200](docs/verified/2026-11-30-2xH200.md) |"),
    ],
)
def test_how_a_kernel_was_proven_is_told(verified: str, said: str) -> None:
    found = replace(support.declared()[0], verified=verified)
    assert said in support.table([found])
    assert said.replace("docs/", "") in support.page([found])


def test_every_page_that_proves_something_is_there() -> None:
    for found in support.declared():
        if found.verified not in ("", "stand-in", "every test run"):
            assert (ROOT / found.verified).is_file(), (found.name, found.verified)


def other(value: Any) -> Any:
    """A value of the same kind that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, frozenset):
        return frozenset(list(value)[1:]) if value else frozenset({"something"})
    if value is None or isinstance(value, tuple):
        return (9, 9)
    return 7 if isinstance(value, int) else "something else"


@pytest.mark.parametrize("field", SHOWN)
def test_no_claim_can_change_unseen(field: str) -> None:
    """Whatever a backend claims less, or more: the table is another one, and the first test fails."""
    for found in support.declared():
        if field == "bias_dtype" and not {"dense_float", "key_bias"} & found.claims.masks:
            continue  # the dtype of what it does not take
        if field == "max_dropout_head_dim" and not found.claims.dropout:
            continue  # it has no dropout
        if field == "max_deterministic_head_dim" and not support.claims.exactly(found.claims):
            continue  # its backward is never deterministic
        if field == "softcap_dropout" and not (found.claims.softcap and found.claims.dropout):
            continue  # it lacks one of the two anyway
        if field == "backward_from_lse" and not found.claims.lse:
            continue  # it has no lse to give
        changed = replace(found.claims, **{field: other(getattr(found.claims, field))})
        seen = [replace(s, claims=changed) if s == found else s for s in support.declared()]
        assert both(seen) != both(support.declared()), (found.name, field)


def test_the_faults_have_the_table_of_today() -> None:
    assert support.faults_page() == support.FAULTS_PAGE.read_text("utf-8")


@pytest.mark.parametrize("text", ["", support.BEGIN, support.END, (support.BEGIN + support.END) * 2])
def test_a_readme_without_its_markers_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="marker"):
        support.written(text, support.declared())
