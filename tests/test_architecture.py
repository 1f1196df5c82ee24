"""The house keeps its shape: imports go one way, files and functions stay small, public names are documented."""

from __future__ import annotations

import inspect
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import ringtrue
from architecture import ARROWS, Tree, broken_arrows, broken_libraries, cycle, function_sizes, unit

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ringtrue"
OPTIONAL_LIBRARIES = ("diffusers", "jinja2", "plotly", "rich", "transformers", "typer")
LONG_FUNCTIONS: dict[str, str] = {}  # function -> why it may be longer than 60 lines
# composed, so that this file does not contain what it looks for
PRIVATE = re.compile(
    "|".join([r"(?<![\w.])/(work|root|home|opt)" + r"/\w", "/tmp/" + "venv", r"\bpypi" + r"\.", "python" + "hosted"])
)


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(SOURCE)


def test_every_room_has_arrows(tree: Tree) -> None:
    assert {unit(module) for module in tree.paths} <= ARROWS.keys()


def test_arrows_go_one_way(tree: Tree) -> None:
    assert broken_arrows(tree) == []


def test_libraries_stay_in_their_rooms(tree: Tree) -> None:
    assert broken_libraries(tree) == []


def test_no_import_cycle(tree: Tree) -> None:
    assert cycle(tree) == []


def test_import_loads_no_optional_library() -> None:
    code = f"import sys, ringtrue; print([x for x in {OPTIONAL_LIBRARIES} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_sizes(tree: Tree) -> None:
    lines = [len(path.read_text("utf-8").splitlines()) for path in tree.paths.values()]
    assert statistics.median(n for n in lines if n) < 200
    long = {name: size for name, size in function_sizes(tree).items() if size > 60}
    assert long.keys() == LONG_FUNCTIONS.keys(), long


def test_public_names_are_sorted_and_documented() -> None:
    names = list(ringtrue.__all__)
    assert names == sorted(names)
    for name in names:
        thing = getattr(ringtrue, name)
        assert inspect.isclass(thing) or inspect.ismodule(thing) or callable(thing), name
        doc = thing.__doc__ or ""
        assert doc.strip(), f"{name} has no docstring"
        assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclass made"


def test_no_file_names_a_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for path in (ROOT / name for name in listed.stdout.splitlines()):
        if path.is_file():
            found = PRIVATE.search(path.read_text("utf-8", errors="replace"))
            assert found is None, f"{path.relative_to(ROOT)} contains {found}"


PLANTED = {
    "a backend that imports another": ("backends/native_new.py", "from .native_math import forward", broken_arrows),
    "a backend that imports the edge": ("backends/native_new.py", "from .. import edge", broken_arrows),
    "parallel that imports a backend": ("parallel/new.py", "from ..backends import native_math", broken_arrows),
    "parallel that selects, in a call": ("parallel/new.py", "def f():\n    import ringtrue.select", broken_arrows),
    "audit that imports a backend": (
        "audit/new.py",
        "from ringtrue.backends.native_math import forward",
        broken_arrows,
    ),
    "plants outside of cli": ("api.py", "from . import plants", broken_arrows),
    "an integration that reaches inside": ("integrations/new.py", "from ..contract import Mask", broken_arrows),
    "an integration with a private name": ("integrations/new.py", "from ringtrue import nothing", broken_arrows),
    "an integration with a hidden one": (
        "integrations/new.py",
        "import ringtrue as rt\nrt.contract.Mask",
        broken_arrows,
    ),
    "distributed outside of comm": ("parallel/new.py", "from torch import distributed as dist", broken_libraries),
    "distributed by attribute": (
        "edge.py",
        "import torch\ndef f():\n    torch.distributed.barrier()",
        broken_libraries,
    ),
    "an optional library at load": (
        "api.py",
        "try:\n    import rich.console\nexcept ImportError: ...",
        broken_libraries,
    ),
    "a cycle": ("parallel/comm.py", "from .ring import hop", cycle),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_import_is_caught(planted: str, tmp_path: Path) -> None:
    path, source, check = PLANTED[planted]
    for room in ("audit", "backends", "integrations", "parallel"):
        (tmp_path / room).mkdir()
    files = {
        "__init__.py": "from .contract import Mask\n__all__ = ['Mask']",
        "contract.py": "",
        "edge.py": "from .contract import Mask",
        "masks.py": "from .contract import Mask",
        "merge.py": "",
        "plants.py": "",
        "select.py": "from . import backends",
        "backends/__init__.py": "from . import native_math",
        "backends/native_math.py": "from ..contract import Mask",
        "integrations/right.py": "import ringtrue as rt\nimport diffusers\nrt.Mask",
        "parallel/comm.py": "import torch.distributed as dist",
        "parallel/ring.py": "from . import comm",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    clean = Tree(tmp_path)
    assert broken_arrows(clean) == broken_libraries(clean) == cycle(clean) == []
    (tmp_path / path).write_text(source)
    assert len(check(Tree(tmp_path))) >= 1


def test_a_planted_long_function_is_seen(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("def f():\n" + "    x = 1\n" * 60)
    assert function_sizes(Tree(tmp_path)) == {"ringtrue.f": 61}


def test_reference_names_everything_public() -> None:
    """docs/reference.md lists every public name."""
    page = (Path(__file__).parents[1] / "docs" / "reference.md").read_text("utf-8")
    assert [name for name in ringtrue.__all__ if f"`{name}" not in page] == []
