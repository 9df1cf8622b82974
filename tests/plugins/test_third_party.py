"""A distribution of another author adds something of every kind, and imports the door only."""

from __future__ import annotations

import ast
import json
import pathlib
import sys

import installation
import pytest

HERE = pathlib.Path(__file__).parent
PROJECT = HERE / "third_party"
PROGRAM = PROJECT / "program.py"
MODULES = sorted((PROJECT / "third_party_plugin").glob("*.py"))
CHECKS = (
    "memory_space",
    "view",
    "hidden_operand",
    "prologue_and_epilogue",
    "barrier_kind",
    "layout",
    "jaxpr_primitive",
    "warpgroup_rule",
    "executor",
    "operation",
    "listing",
    "launched",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the installed distribution."""
    folder = tmp_path_factory.mktemp("installed")
    installation.install(PROJECT, folder)
    return folder


def run(folder, platform, cache, **variables):
    """What the program says of its checks on a platform."""
    done = installation.run_python(
        [str(PROGRAM), platform], folder, PALLASITE_CACHE_DIR=str(cache), **variables
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder for compiled kernels, empty at first."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def first(installed, cache):
    """What the first process says."""
    return run(installed, "cpu", cache)


@pytest.mark.parametrize("check", CHECKS)
def test_what_it_adds_works(first, check):
    failure = first["failures"][check]
    assert failure is None, failure


def test_every_check_is_listed(first):
    assert tuple(first["failures"]) == CHECKS


def test_another_process_finds_its_kernels_on_disk(first, installed, cache):
    second = run(installed, "cpu", cache)
    assert [one for one in second["failures"].values() if one is not None] == []
    assert first["disk_hits"] == 0 and first["refused"] > 0
    assert second["compiles"] == first["refused"] == second["refused"]
    assert second["disk_hits"] == first["compiles"] - first["refused"] > 20


def test_without_the_plugin_it_is_missing(installed):
    code = "from pallasite import gpu; gpu.LINES"
    assert installation.run_python(["-c", code], installed).returncode == 0
    for variables, folder in (
        ({"PALLASITE_DISABLE_PLUGINS": "third-party"}, installed),
        ({}, HERE),
    ):
        done = installation.run_python(["-c", code], folder, **variables)
        assert "MissingNameError: pallasite.gpu has no name 'LINES'" in done.stderr


@pytest.mark.skipif(
    not installation.can_build(),
    reason="pip or hatchling is not installed; `make setup` installs both with the group 'test'",
)
def test_pip_builds_and_installs_it(tmp_path):
    by_pip, by_hand = tmp_path / "pip", tmp_path / "hand"
    installation.install_by_pip(PROJECT, by_pip)
    installation.install_by_hand(PROJECT, by_hand)
    information = "pallasite_third_party-0.1.0.dist-info"
    assert (by_pip / information / "INSTALLER").read_text().strip() == "pip"
    assert "hatchling" in (by_pip / information / "WHEEL").read_text()
    points = [folder / information / "entry_points.txt" for folder in (by_pip, by_hand)]
    assert points[0].read_text() == points[1].read_text()
    for folder in (by_pip, by_hand):
        names = sorted(path.name for path in (folder / "third_party_plugin").glob("*.py"))
        assert names == [path.name for path in MODULES]


@pytest.mark.gpu
def test_its_executor_launches_kernels_on_the_gpu(installed, tmp_path):
    report = run(installed, "cuda", tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert report["failures"] == {"launched": None}, report["failures"]["launched"]


# What it is made of -------------------------------------------------------------------------------


def imports(tree):
    """Names of the modules that are imported, and by ``from``, of what may be a module, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            if node.module in ("pallasite", "jax"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def root_of(node):
    """The name at the beginning of ``a.b[c].d``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def is_allowed(name):
    package = name.split(".")[0]
    if name == "pallasite_std.api":  # The standard library's door.
        return True
    if package == "pallasite":
        return name == "pallasite.gpu" or f"{name}.".startswith("pallasite.plugin.")
    if package in ("jax", "jaxlib"):
        return "_src" not in name and "mosaic" not in name
    known = ("numpy", "third_party_plugin")
    return package in known or package in sys.stdlib_module_names - {"importlib", "sys", "gc"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_it_imports_the_door_only_and_changes_nothing_else(module):
    tree = ast.parse(module.read_text())
    assert [name for name in imports(tree) if not is_allowed(name)] == []
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    changed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if ast.unparse(node).endswith("[...]"):
                continue  # A store of a kernel.
            changed.add(root_of(node))
        elif isinstance(node, ast.Name):
            assert node.id not in ("setattr", "delattr", "exec", "eval", "__import__", "vars")
    assert changed & imported == set()


def test_these_checks_find_what_they_look_for():
    refused = ("pallasite", "pallasite.lowering.context", "pallasite_std.spaces", "jax._src.core")
    assert not any(map(is_allowed, refused))
    tree = ast.parse("from pallasite import plugins, gpu\nimport pallasite.registry as r")
    assert list(imports(tree)) == ["pallasite.plugins", "pallasite.gpu", "pallasite.registry"]
    (statement,) = ast.parse("gpu.Layout[0].name = 1").body
    assert root_of(statement.targets[0]) == "gpu"
