"""import-linter holds the layers of the core and the door for plugins; each contract can fail."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("importlinter")

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = {
    "pallasite": "framework",
    "pallasite_std": "framework",
    "pallasite_hopper": "plugins/hopper/src",
    "pallasite_blackwell": "plugins/blackwell/src",
    "pallasite_multigpu": "plugins/multigpu/src",
    "pallasite_simulator": "plugins/simulator/src",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> pathlib.Path:
    """A copy of all packages side by side, and the contracts."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "pyproject.toml", root)
    for package, folder in SOURCES.items():
        for source in (ROOT / folder / package).rglob("*.py"):
            target = root / source.relative_to(ROOT / folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return root


def complaints(checkout: pathlib.Path, contract: str, *violations: tuple[str, str]) -> str:
    """What import-linter says of a contract, after further lines at the end of some modules.

    Empty if the contract is kept.
    """
    changed = {checkout / module: (checkout / module).read_text() for module, _ in violations}
    for module, line in violations:
        with (checkout / module).open("a") as file:
            file.write(f"\n{line}\n")
    program = (
        "import sys; from importlinter.cli import lint_imports;"
        f"sys.exit(lint_imports(limit_to_contracts=({contract!r},), no_cache=True))"
    )
    try:
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
    finally:
        for path, text in changed.items():
            path.write_text(text)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    assert "Contracts: " in result.stdout, result.stdout + result.stderr
    return result.stdout if result.returncode else ""


@pytest.mark.parametrize("contract", ["layers", "core", "door", "standard-library"])
def test_contracts_are_kept(checkout, contract):
    assert complaints(checkout, contract) == ""


@pytest.mark.parametrize(
    ("contract", "module", "line", "message"),
    [
        (
            "layers",
            "pallasite/layouts/registers.py",
            "from pallasite.language.mesh import Mesh",
            "pallasite.layouts is not allowed to import pallasite.language",
        ),
        (
            "layers",
            "pallasite/lowering/walker.py",
            "def late():\n    from pallasite.runtime import compiler",
            "pallasite.lowering is not allowed to import pallasite.runtime",
        ),
        (
            "layers",
            "pallasite/drawing/svg.py",
            "import pallasite.lowering.walker",
            "pallasite.drawing is not allowed to import pallasite.lowering",
        ),
        (
            "core",
            "pallasite/lowering/walker.py",
            "from pallasite_std.rules import shape",
            "pallasite.lowering.walker -> pallasite_std.rules.shape",
        ),
        (
            "door",
            "pallasite_std/rules/shape.py",
            "from pallasite.lowering.walker import lower_jaxpr",
            "pallasite_std.rules.shape -> pallasite.lowering.walker",
        ),
        (
            "door",
            "pallasite_hopper/plugin.py",
            "from pallasite import _jax",
            "pallasite_hopper.plugin -> pallasite._jax",
        ),
        (
            "standard-library",
            "pallasite_blackwell/plugin.py",
            "from pallasite_std.rules import shape",
            "pallasite_blackwell.plugin -> pallasite_std.rules.shape",
        ),
    ],
)
def test_violations_are_found(checkout, contract, module, line, message):
    assert message in complaints(checkout, contract, (module, line))
