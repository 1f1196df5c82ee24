"""Reads a package's imports and sizes with ast, and says where they break the arrows of docs/architecture.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "ringtrue"
CORE = frozenset(
    {
        "api",
        "autograd",
        "backends",
        "call",
        "checks",
        "compiled",
        "contract",
        "edge",
        "errors",
        "exact",
        "faults",
        "kept",
        "level",
        "masks",
        "merge",
        "native",
        "order",
    }
)
CORE |= {"merge_triton", "parallel", "prepared", "scope", "select", "together", "tracing", "tuned"}

# What the files of a unit (a module, or a package with all its files) may import of ringtrue; "" is the public face.
ARROWS: dict[str, frozenset[str]] = {
    "": CORE | {"integrations", "optional", "version"},
    "api": CORE - {"api"},
    "autograd": frozenset({"contract", "errors"}),
    "call": frozenset({"checks", "contract", "masks"}),
    "checks": frozenset({"contract", "errors", "masks"}),
    "compiled": frozenset({"autograd", "contract", "errors"}),
    "contract": frozenset(),
    "edge": frozenset({"contract", "errors", "kept", "level", "masks", "merge"}),
    "errors": frozenset(),
    "exact": frozenset({"contract"}),
    "faults": frozenset({"contract", "errors", "masks"}),
    "kept": frozenset(),
    "level": frozenset({"contract", "masks", "merge"}),
    "masks": frozenset({"contract", "errors"}),
    "merge": frozenset({"contract", "merge_triton"}),
    "merge_triton": frozenset(),
    "optional": frozenset({"contract"}),
    "scope": frozenset({"contract", "errors"}),
    "native": frozenset({"contract"}),
    "order": frozenset({"contract"}),
    "select": frozenset({"backends", "contract", "edge", "errors", "exact", "faults", "native", "order", "tuned"}),
    "prepared": frozenset({"checks", "contract"}),
    "tuned": frozenset({"backends", "contract", "order", "version"}),
    "version": frozenset(),
    "together": frozenset({"autograd", "compiled", "contract", "errors", "parallel"}),
    "tracing": frozenset(
        {"backends", "call", "checks", "compiled", "contract", "masks", "parallel", "scope", "select", "together"}
    ),
    "backends": frozenset({"contract", "errors", "masks", "optional"}),
    "parallel": CORE
    - {
        "api",
        "backends",
        "edge",
        "exact",
        "faults",
        "native",
        "order",
        "parallel",
        "prepared",
        "select",
        "together",
        "tracing",
        "tuned",
    },
    "audit": frozenset({"contract", "masks"}),
    "integrations": frozenset({""}),
    "subjects": frozenset({"", "audit", "integrations"}),  # of the audit its seam alone, see SEAM
    "testing": frozenset({"audit", "subjects"}),  # resolves names of subjects, which the audit itself must not
    "plants": frozenset({"audit", "call", "contract", "masks", "merge", "parallel"}),
    "bench": frozenset({"", "audit", "integrations", "subjects"}),
    "cli": frozenset({"", "audit", "bench", "integrations", "plants", "subjects"}),
}
SEAM = "audit.subject"  # all that subjects may import of the audit
DISTRIBUTED = (
    "parallel.comm",
    "cli.hosted",
    "cli.worker",
    "bench",
    "subjects",
)  # modules (or packages) that may import torch.distributed
# units that may need more than the base install
OPTIONAL = frozenset({"bench", "cli", "integrations", "merge_triton", "subjects"})
BASE = frozenset({"torch", "jaxtyping"}) | sys.stdlib_module_names


@dataclass(frozen=True)
class Import:
    """One imported module, or one name taken from a module. `when` is "load", "call" or "typing"."""

    module: str
    target: str
    name: str | None
    line: int
    when: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}" + (f" ({self.name})" if self.name else "")


class Tree:
    """The modules of a package, parsed."""

    def __init__(self, root: Path) -> None:
        self.paths = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}
        self.asts = {name: ast.parse(path.read_text("utf-8")) for name, path in self.paths.items()}
        self.imports = [found for module in self.asts for found in self._imports(module)]

    def public(self) -> set[str]:
        """The names in the package's __all__ (a plain list or tuple of strings)."""
        for node in self.asts[PACKAGE].body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                return set(ast.literal_eval(node.value))
        return set()

    def _imports(self, module: str) -> Iterator[Import]:
        is_package = self.paths[module].name == "__init__.py"
        for node, when in walk(self.asts[module]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(module, alias.name, None, node.lineno, when)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = module.split(".")
                    up = parts[: len(parts) - node.level + is_package]
                    base = ".".join([*up, base] if base else up)
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    is_module = whole in self.paths or whole == "torch.distributed"
                    yield Import(
                        module, whole if is_module else base, None if is_module else alias.name, node.lineno, when
                    )
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                yield Import(module, "torch.distributed", None, node.lineno, when)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join([PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)])


def walk(node: ast.AST, when: str = "load") -> Iterator[tuple[ast.AST, str]]:
    """Every node, and whether it runs when the module loads, in a call, or never (under TYPE_CHECKING)."""
    for child in ast.iter_child_nodes(node):
        inner = when
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = "call" if when == "load" else when
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            inner = "typing"
        yield child, inner
        yield from walk(child, inner)


def unit(module: str) -> str:
    """The room of a module: `ringtrue.parallel.ring` is in "parallel", `ringtrue` itself is ""."""
    return [*module.split("."), ""][1]


def is_ours(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


def broken_arrows(tree: Tree) -> list[str]:
    """Imports within the package that no arrow allows, and names that the public face does not have."""
    public = tree.public() | {"__version__"}
    broken = []
    for found in (x for x in tree.imports if is_ours(x.target)):
        here, there = unit(found.module), unit(found.target)
        arrows = ARROWS.get(here, frozenset())
        if here == there and here != "":
            shared = found.module == f"{PACKAGE}.backends" or found.target.rsplit(".", 1)[-1].startswith("_")
            if here == "backends" and not shared:
                broken.append(f"{found}: no backend imports another")
        elif (here, there) == ("subjects", "audit") and found.target != f"{PACKAGE}.{SEAM}":
            broken.append(f"{found}: subjects may import only {SEAM} of the audit")
        elif there not in arrows and not ("" in arrows and there in public):
            broken.append(f"{found}: {here or PACKAGE} may not import {there or 'the public face'}")
        elif there == "" and found.name is not None and found.name not in public:
            broken.append(f"{found}: not a public name")
    for module, code in tree.asts.items():
        if "" in ARROWS.get(unit(module), frozenset()):
            broken += [f"{module}: ringtrue.{name} is not a public name" for name in used_names(code) - public]
    return broken


def used_names(code: ast.Module) -> set[str]:
    """The attributes that a module takes from `import ringtrue` or `import ringtrue as rt`."""
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(code)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == PACKAGE
    }
    return {
        node.attr
        for node in ast.walk(code)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases
    }


def broken_libraries(tree: Tree) -> list[str]:
    """Imports of torch.distributed where it may not be, and of optional libraries at load time in the base install."""
    broken = []
    for found in (x for x in tree.imports if not is_ours(x.target) and x.when != "typing"):
        room = found.module.removeprefix(f"{PACKAGE}.")
        if found.target.startswith("torch.distributed"):
            if not any(room == allowed or room.startswith(f"{allowed}.") for allowed in DISTRIBUTED):
                broken.append(f"{found}: only {', '.join(DISTRIBUTED)} may")
        elif found.target.split(".")[0] not in BASE and found.when == "load" and unit(found.module) not in OPTIONAL:
            broken.append(f"{found}: not in the base install")
    return broken


def cycle(tree: Tree) -> list[str]:
    """A ring of modules that import each other when they load; empty when there is none."""
    graph: dict[str, set[str]] = {module: set() for module in tree.paths}
    for found in tree.imports:
        if found.when == "load" and found.target in graph and found.target != found.module:
            graph[found.module].add(found.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def function_sizes(tree: Tree) -> dict[str, int]:
    """Lines of every function, signature and docstring included, by `module.function`."""
    return {
        f"{module}.{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for module, code in tree.asts.items()
        for node in ast.walk(code)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
