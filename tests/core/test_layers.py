"""The lint refuses imports against the order of the layers."""

from __future__ import annotations

import ast
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "framework" / "pallasite"

# The folders of the layers 3 to 8, in order, and the modules of the first two.
FOLDERS = [("layouts", "ir"), ("language",), ("lowering",), ("passes", "codegen"), ("runtime",)]
LAST = [("drawing",), ("cli",)]
LAYER_1 = {"errors", "targets", "config"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The lint configuration of the checkout, without its modules."""
    root = tmp_path_factory.mktemp("checkout")
    for source in [ROOT / "pyproject.toml", *PACKAGE.rglob("ruff.toml")]:
        target = root / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return root


def complaints(checkout: pathlib.Path, module: str, text: str) -> str:
    """What ruff says about a module of the package with one line of code."""
    path = checkout / "framework" / "pallasite" / module
    path.write_text(f'"""A module."""\n\n{text}\n')
    try:
        result = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", path],
            capture_output=True,
            text=True,
            cwd=checkout,
        )
    finally:
        path.unlink()
    assert result.returncode in (0, 1), result.stderr
    return "\n".join(line for line in result.stdout.splitlines() if "TID25" in line)


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        ("bad.py", "import pallasite.layouts.registers", "layouts is a later layer"),
        ("bad.py", "from pallasite import language", "language is a later layer"),
        ("bad.py", "from pallasite._jax import Jaxpr", "_jax is a later layer"),
        ("layouts/bad.py", "from pallasite import _jax", "_jax is a later layer"),
        ("ir/bad.py", "from pallasite.language.mesh import Mesh", "language is a later layer"),
        ("language/bad.py", "from pallasite.lowering import walker", "lowering is a later layer"),
        ("lowering/bad.py", "from pallasite.passes import pipeline", "passes is a later layer"),
        ("lowering/bad.py", "import pallasite.codegen.ptx", "codegen is a later layer"),
        ("codegen/bad.py", "from pallasite.runtime import launch", "runtime is a later layer"),
        ("runtime/bad.py", "from pallasite.cli import main", "cli is a later layer"),
        ("runtime/bad.py", "from pallasite import drawing", "drawing is a later layer"),
        ("drawing/bad.py", "from pallasite.lowering import walker", "layouts only"),
        ("lowering/bad.py", "from jax._src import core", "pallasite._jax only"),
        ("lowering/bad.py", "from .walker import walk", "absolute imports"),
        (
            "language/bad.py",
            "from jax.experimental.pallas import mosaic_gpu",
            "nothing from the reference backend",
        ),
    ],
)
def test_import_of_a_later_layer_is_refused(checkout, module, line, message):
    assert message in complaints(checkout, module, line)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("_jax.py", "from jax._src import core"),
        ("gpu.py", "from pallasite import language"),
        ("language/good.py", "from pallasite import _jax, errors, plugins"),
        ("lowering/good.py", "from pallasite.language.mesh import Mesh"),
        ("codegen/good.py", "from pallasite.passes import pipeline"),
        ("runtime/good.py", "from pallasite.codegen.compiled import CompiledKernel"),
    ],
)
def test_import_of_an_earlier_layer_is_accepted(checkout, module, line):
    assert complaints(checkout, module, line) == ""


def test_each_folder_bans_all_later_layers():
    """A new folder needs a ruff.toml, and each lists exactly what comes after it."""
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    order = [*FOLDERS, *LAST]
    assert folders <= {name for layer in order for name in layer}
    for number, layer in enumerate(FOLDERS):
        later = {name for names in order[number + 1 :] for name in names}
        if number < 1:
            later.add("_jax")
        for name in layer:
            lint = tomllib.loads((PACKAGE / name / "ruff.toml").read_text())["lint"]
            banned = set(lint["flake8-tidy-imports"]["banned-api"])
            assert {f"pallasite.{one}" for one in later} == {
                one for one in banned if one.startswith("pallasite.")
            }, name


def test_drawing_imports_layouts_only():
    lint = tomllib.loads((PACKAGE / "drawing" / "ruff.toml").read_text())["lint"]
    others = {name for layer in FOLDERS for name in layer} - {"layouts"} | {"_jax", "cli"}
    assert {f"pallasite.{one}" for one in others} == {
        one for one in lint["flake8-tidy-imports"]["banned-api"] if one.startswith("pallasite.")
    }


def test_first_layer_imports_only_itself():
    for module in LAYER_1:
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pallasite"):
                imported = {node.module.removeprefix("pallasite.")}
                if node.module == "pallasite":
                    imported = {alias.name for alias in node.names}
                assert imported <= LAYER_1, module
