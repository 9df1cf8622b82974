"""The walker can be read alone: what it imports, and what that imports, is little."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

WALKER = "pallasite.lowering.walker"
LIMIT = 20


def modules_of(statement: ast.stmt, package: str) -> list[str]:
    """The modules that an import statement may load."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module is not None:
        assert statement.level == 0, f"a relative import in {package}"
        inner = [f"{statement.module}.{alias.name}" for alias in statement.names]
        return [statement.module, *inner]
    return []


class Imports(ast.NodeVisitor):
    """The imports of a module, those in functions among them; without those for types only."""

    def __init__(self, name: str):
        self.name = name
        self.found: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += modules_of(node, self.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.found += modules_of(node, self.name)


def source_of(name: str) -> Path | None:
    """The file of a module of the core or the standard library; None if there is no such module."""
    root, *rest = name.split(".")
    if root not in ("pallasite", "pallasite_std"):
        return None
    package = importlib.util.find_spec(root)
    assert package is not None and package.origin is not None
    place = Path(package.origin).parent.joinpath(*rest)
    for file in (place.with_suffix(".py") if rest else place, place / "__init__.py"):
        if file.is_file():
            return file
    return None


def closure(name: str) -> set[str]:
    """A module, what it imports, what that imports and so on, with the packages around."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        file = source_of(module)
        if file is None or module in found:
            continue
        found.add(module)
        if "." in module:
            waiting.append(module.rpartition(".")[0])
        if module != "pallasite":  # Its public names are looked up when they are asked for.
            imports = Imports(module)
            imports.visit(ast.parse(file.read_text()))
            waiting += imports.found
    return found


def test_what_is_written():
    found = closure(WALKER)
    assert {WALKER, "pallasite.lowering.context", "pallasite._jax", "pallasite"} <= found
    assert len(found) < LIMIT, sorted(found)


def test_what_is_loaded():
    program = f"import sys, {WALKER}; print(*(m for m in sys.modules if m.startswith('pallasite')))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert WALKER in loaded
    assert len(loaded) < LIMIT, sorted(loaded)
    assert loaded <= closure(WALKER) | {"pallasite.forks"}  # Which the package itself imports.


def test_strategies_are_not_among_it():
    known = {"references", "inference", "inference.plan", "arrays"}
    assert not closure(WALKER) & {f"pallasite_std.lane_layouts.{name}" for name in known}
    assert not any(name.startswith("pallasite_std") for name in closure(WALKER))
    strategies = closure("pallasite_std.lane_layouts.strategy")
    assert {
        f"pallasite_std.lane_layouts.{name}" for name in ("known_layouts", "access_widths")
    } <= strategies
