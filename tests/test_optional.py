"""A broken optional package costs nothing but itself (BR-61): fake packages on sys.path, each broken in its own way."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringtrue.optional import Package, why_not

INSTALL = "pip install it"
_numbers = itertools.count()
Make = Callable[..., Package]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Write a package under a name of its own and say what is needed of it; code None: a folder without code."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(code: str | None, *, installed: str = "", **needs: object) -> Package:
        name = f"fake_package_{next(_numbers)}"
        folder = tmp_path / name
        (folder / "cute").mkdir(parents=True)
        (folder / "cute" / "__init__.py").write_text("")
        if code is not None:
            (folder / "__init__.py").write_text(code)
        if installed:
            info = tmp_path / f"{name}-{installed}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {installed}\n")
        importlib.invalidate_caches()  # a folder that was listed in the same tick of its clock would not be read again
        return Package(name, INSTALL, **needs)  # type: ignore[arg-type]

    return make


BROKEN = {
    "import error": "raise ImportError('cannot import name flash_attn_func: needs flash-attn < 2.8')",
    "os error": "raise OSError('libfoo.so: undefined symbol: _ZN3c105ErrorC2E')",
    "runtime error": "raise RuntimeError('CUDA driver version is insufficient')",
    "no dependency": "import a_package_that_is_nowhere",
    "syntax error": "def f(:",
    "exit": "raise SystemExit('no GPU')",
    "panic": "class PanicException(BaseException): pass\nraise PanicException('called unwrap on None')",
    "no text": "class Error(Exception):\n    def __str__(self):\n        raise ValueError\nraise Error",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_whatever_an_import_raises_is_a_reason(kind: str, fake: Make) -> None:
    package = fake(BROKEN[kind])
    reason = why_not(package)
    assert reason is not None
    anew = "pip install --force-reinstall --no-deps --no-cache-dir it"  # pip finds what is there satisfied
    assert (reason.code, reason.remedy) == ("package-broken", INSTALL if kind == "no dependency" else anew)
    said = BROKEN[kind].split("'")[1] if "'" in BROKEN[kind] else "Error"
    assert said in reason.text
    assert package.module in reason.text


def test_a_package_that_is_not_there(fake: Make) -> None:
    for module in ("a_package_that_is_nowhere", f"{fake('').module}.no_such_part"):
        reason = why_not(Package(module, INSTALL))
        assert reason is not None
        assert (reason.code, reason.limit, reason.remedy) == ("package-missing", module, INSTALL)


def test_a_folder_that_a_removed_package_left_behind(fake: Make) -> None:
    remnant = fake(None)
    reason = why_not(remnant)
    assert reason is not None
    assert reason.code == "package-broken"
    assert "folder without code" in reason.text
    assert why_not(Package(f"{remnant.module}.cute", INSTALL)) is None  # what is left of it may be whole


def test_a_missing_name(fake: Make) -> None:
    package = fake("class here:\n    inner = 1", attributes=("here.inner", "gone"))
    reason = why_not(package)
    assert reason is not None
    assert reason.code == "package-broken"
    assert "gone" in reason.text
    assert why_not(fake("class here:\n    inner = 1", attributes=("here.inner",))) is None


def test_a_name_that_is_loaded_when_it_is_looked_at(fake: Make) -> None:
    package = fake("def __getattr__(name):\n    raise RuntimeError('failed to import ' + name)", attributes=("model",))
    reason = why_not(package)
    assert reason is not None
    assert reason.code == "package-broken"
    assert "RuntimeError: failed to import" in reason.text


@pytest.mark.parametrize(
    ("version", "pre", "fits"),
    [
        ("1.9.9", False, False),
        ("2.0.0b1", True, False),
        ("2.0", False, True),
        ("2.9.1+cu128", False, True),
        ("2.9.1+b3", False, True),
        ("2.1.0.dev0", False, False),
        ("2.1rc1", False, False),
        ("2.1.0b36", True, True),
        ("3.0.0.dev1", True, False),
        ("3.0", False, False),
    ],
)
@pytest.mark.parametrize("where", ["metadata", "module"])
def test_versions(version: str, pre: bool, fits: bool, where: str, fake: Make) -> None:
    if where == "metadata":
        package = fake("", installed=version, at_least="2.0", below="3.0", pre=pre)
    else:
        package = fake(f"__version__ = {version!r}", at_least="2.0", below="3.0", pre=pre)
    reason = why_not(package)
    if fits:
        assert reason is None
    else:
        assert reason is not None
        limit = ">= 2.0, < 3.0" if pre else ">= 2.0, < 3.0, no pre-release"
        assert (reason.code, reason.limit, reason.value) == ("package-version", limit, version)


def test_a_wrong_release_is_not_imported(fake: Make) -> None:
    package = fake("raise RuntimeError", installed="1.0", at_least="2.0")
    reason = why_not(package)
    assert reason is not None
    assert reason.code == "package-version"
    assert package.module not in sys.modules


def test_what_is_imported_counts_not_what_is_installed(fake: Make) -> None:
    """A folder of the same name that shadows the installed package."""
    reason = why_not(fake("__version__ = '1.0'", installed="2.5", at_least="2.0"))
    assert reason is not None
    assert (reason.code, reason.value) == ("package-version", "1.0")


def test_a_release_that_does_not_say_which_it_is(fake: Make) -> None:
    reason = why_not(fake("", at_least="2.0"))
    assert reason is not None
    assert (reason.code, reason.value) == ("package-version", "it does not say")
    assert why_not(fake("")) is None


def test_the_answer_is_kept(fake: Make, tmp_path: Path) -> None:
    package = fake("raise OSError('first')")
    first = why_not(package)
    (tmp_path / package.module / "__init__.py").write_text("")
    assert why_not(package) is first


# Each kind of breakage, for every package that ringtrue has an extra for, and the code of the reason.
NAMES = ("diffusers", "transformers", "flash_attn", "sageattention", "xformers", "kernels")
KINDS = {
    "import error": (BROKEN["import error"], "package-broken"),
    "os error": (BROKEN["os error"], "package-broken"),
    "missing attribute": ("__version__ = '0.42.1'", "package-broken"),
    "wrong version": ("__version__ = '0.1.0'", "package-version"),
    "remnant": (None, "package-broken"),
}
SCRIPT = """
import json, sys
root, names, kinds = json.loads(sys.argv[1])
sys.path.insert(0, root + "/" + kinds[0])
import torch, ringtrue as rt
from ringtrue.cli.app import app
from typer.testing import CliRunner
found = {}
for kind in kinds:
    sys.path[0] = root + "/" + kind
    for name in [n for n in sys.modules if n.split(".")[0] in names]:
        del sys.modules[name]
    rt.optional.why_not.cache_clear()
    printed = CliRunner().invoke(app, ["backends", "--json"])
    q = torch.randn(1, 3, 2, 4)
    rt.attention(q, q, q)
    loaded = [n for n in names if n in sys.modules]
    needs = rt.optional.Package("xformers", "", at_least="0.42", below="0.43", attributes=("ops",))
    said = [rt.optional.why_not(needs).code]
    if kind != "remnant":  # there the whole diffusers further down the path is found, as it should be
        try:
            rt.integrations.diffusers.use(torch.nn.Linear(1, 1), "auto")
        except rt.UnsupportedError as error:
            said.append(str(error))
    same = [b.name for b in rt.backends()] == [b["name"] for b in json.loads(printed.stdout)]
    found[kind] = [printed.exit_code, same, loaded, said]
print(json.dumps(found))
"""


def test_every_kind_of_broken_package_costs_nothing_but_itself(tmp_path: Path) -> None:
    """In a process of its own: import, `backends()`, the command and a call work; only diffusers' own door is shut."""
    for kind, name in itertools.product(KINDS, NAMES):
        folder = tmp_path / kind / name
        folder.mkdir(parents=True)
        code, _ = KINDS[kind]
        (folder / ("remnant.txt" if code is None else "__init__.py")).write_text(code or "")
    given = json.dumps([str(tmp_path), NAMES, list(KINDS)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, given], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for kind, (exit_code, same, loaded, said) in found.items():
        assert (exit_code, same, loaded) == (0, True, []), kind
        assert said[0] == KINDS[kind][1]
        assert all(f"[{said[0]}]" in text for text in said[1:])
    assert sum(len(said) for *_, said in found.values()) == 9


def test_metadata_that_cannot_be_read_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "ringtrue_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(b"Metadata-Version: 2.1\nName: ringtrue_broken\nVersion: 1.0\nSummary: \xff\xfe\n")
    (tmp_path / "ringtrue_broken.py").write_text("", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = why_not(Package("ringtrue_broken", "reinstall it"))
    assert found is not None
    assert found.code == "package-broken"


def test_a_version_that_is_none_is_not_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ringtrue_odd.py").write_text("__version__ = 'not-a-version'", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = why_not(Package("ringtrue_odd", "reinstall it", at_least="0.5"))
    assert found is not None
    assert found.code == "package-version"
