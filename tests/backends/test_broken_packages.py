"""Every optional package of every backend, broken in five ways: only its own backends are lost, and they say why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import ringtrue as rt
from ringtrue.backends import REGISTRY

Package = rt.optional.Package
OURS = Package("ringtrue_fake.part", "pip install it", "ringtrue-fake", at_least="2", attributes=("kernel",))
NEEDED = tuple(dict.fromkeys([OURS, *(package for b in REGISTRY for package in b.packages)]))
# what is wrong -> the code of the module (None: a folder without code), and the code of the reason
KINDS = {
    "import error": ("raise ImportError('cannot import name: it needs another release')", "package-broken"),
    "os error": ("raise OSError('libkernel.so: undefined symbol: _ZN3c105ErrorC2E')", "package-broken"),
    "missing attribute": ("", "package-broken"),
    "wrong version": ("", "package-version"),
    "remnant": (None, "package-broken"),
}
SCRIPT = """
import json, sys
root, kinds, tops = json.loads(sys.argv[1])
sys.path.insert(0, "")
import torch, ringtrue as rt
torch.version.hip = "7.0"  # else aiter's reason is that this torch is not built for AMD GPUs
from ringtrue import optional
from ringtrue.backends import REGISTRY
from ringtrue.cli.app import app
from typer.testing import CliRunner
meta = torch.empty(1, 4, 2, 64, device="meta", dtype=torch.bfloat16)
found = {}
for kind in kinds:
    sys.path[0] = root + "/" + kind
    for name in [n for n in sys.modules if n.split(".")[0] in tops]:
        del sys.modules[name]
    optional.why_not.cache_clear()
    optional.loaded.cache_clear()
    packages = list(dict.fromkeys(p for b in REGISTRY for p in b.packages))
    said = {p.module: optional.why_not(p) for p in packages}
    lost = {}
    for b in (b for b in REGISTRY if b.packages):
        for device in b.pairs:
            why = rt.explain(meta, meta, meta, device=device, parallel=False).reasons[b.name]
            lost[b.name + " " + device] = [str(reason) for reason in why]
    q = torch.randn(1, 3, 2, 4, requires_grad=True)
    rt.attention(q, q, q).sum().backward()
    codes = [CliRunner().invoke(app, words.split()).exit_code for words in ("backends", "backends --json")]
    doctor = CliRunner().invoke(app, ["doctor", "--json"])
    sick = {one["name"] for one in json.loads(doctor.stdout)["broken"]}
    codes.append(doctor.exit_code if all((p.distribution or p.module.split(".")[0]) in sick or why is None
        for p, why in zip(packages, said.values())) else sorted(sick))
    found[kind] = [{name: why and [why.code, why.text] for name, why in said.items()}, lost, codes]
print(json.dumps(found))
"""


def write(folder: Path, package: Package, kind: str) -> None:
    """The package below a folder, broken in that way, with metadata of a release that will do (or will not)."""
    parts, (code, _) = package.module.split("."), KINDS[kind]
    folder.joinpath(*parts).mkdir(parents=True, exist_ok=True)
    if code is not None:
        folder.joinpath(*parts, "__init__.py").write_text(code)
        for depth in range(1, len(parts)):
            folder.joinpath(*parts[:depth], "__init__.py").touch()
    right = package.at_least or "1.0"
    wrong = "0.0.1" if package.at_least else f"{package.below}.99"
    name = package.distribution or parts[0]
    info = folder / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir(exist_ok=True)
    version = wrong if kind == "wrong version" else right
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def concerns(package: Package, kind: str) -> bool:
    """Whether a package can be broken in that way at all."""
    if kind == "missing attribute":
        return bool(package.attributes)
    return kind != "wrong version" or bool(package.at_least or package.below)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What a process of its own says under each kind."""
    root = tmp_path_factory.mktemp("broken")
    for kind in KINDS:
        for package in sorted(NEEDED, key=lambda package: -package.module.count(".")):
            write(root / kind, package, kind)
    tops = sorted({package.module.split(".")[0] for package in NEEDED})
    given = json.dumps([str(root), list(KINDS), tops])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, given], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_each_package_says_what_is_wrong_and_the_library_works(kind: str, found: dict[str, list]) -> None:
    said, lost, codes = found[kind]
    assert codes == [0, 0, 1]  # of `backends`, and of `doctor`, which names each of them
    for package in NEEDED[1:]:
        name = package.distribution or package.module.split(".")[0]
        if concerns(package, kind):
            assert said[package.module] is not None, package
            code, text = said[package.module]
            assert code == KINDS[kind][1], (package, text)
            assert name in text or package.module in text
    for backend in REGISTRY:
        broken = [package for package in backend.packages if concerns(package, kind)]
        for device in backend.pairs if broken else ():
            why = lost[f"{backend.name} {device}"]
            assert any(reason.startswith(f"[{KINDS[kind][1]}]") and remedy(reason, broken) for reason in why), why


def remedy(reason: str, packages: Iterable[Package]) -> bool:
    return any(
        reason.endswith(f": {mend}")
        for package in packages
        for mend in (package.install, rt.optional.anew(package.install))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_five_ways_are_those(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes themselves, in this process: each gives the reason that it should."""
    write(tmp_path, OURS, kind)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "ringtrue_fake"]:
        monkeypatch.delitem(sys.modules, name)
    why = rt.optional.why_not.__wrapped__(OURS)
    assert why is not None
    broken = KINDS[kind][1] == "package-broken"
    assert (why.code, why.remedy) == (KINDS[kind][1], rt.optional.anew(OURS.install) if broken else OURS.install)
    assert "ringtrue-fake" in why.text
