"""Installs a plugin's distribution into a folder, and runs programs that find it there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence

from tests import python_processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
GROUP = "pallasite.plugins"


def can_build() -> bool:
    """Whether pip and the build backend of the distributions are there, so that nothing is
    downloaded."""
    return all(importlib.util.find_spec(name) is not None for name in ("pip", "hatchling"))


def install(project: pathlib.Path, folder: pathlib.Path) -> None:
    """Installs a distribution as pip does; by hand where there is nothing to build it with.

    Plugins of the checkout that are only on the path, and not installed, get entry points, too.
    """
    if can_build():
        install_by_pip(project, folder)
    else:
        install_by_hand(project, folder)
    installed = {point.name for point in importlib.metadata.entry_points(group=GROUP)}
    for one in [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]:
        if not installed.issuperset(read_project(one)["entry-points"][GROUP]):
            write_metadata(one, folder)


def install_by_pip(project: pathlib.Path, folder: pathlib.Path) -> None:
    """Builds a wheel and installs it, without an index."""
    # fmt: off
    pip = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-input", "--no-index", "--no-deps", "--no-build-isolation", f"--target={folder}",
        str(project),
    ]
    # fmt: on
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def install_by_hand(project: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes what an installer would write for a project."""
    write_metadata(project, folder)
    tool = tomllib.loads((project / "pyproject.toml").read_text())["tool"]
    wheel = tool["hatch"]["build"]["targets"]["wheel"]
    for name in wheel.get("packages", ()):
        shutil.copytree(project / name, folder / name)
    for name in wheel.get("only-include", ()):
        shutil.copy(project / name, folder / name)


def read_project(folder: pathlib.Path) -> dict:
    """What the ``pyproject.toml`` in a folder says of the project."""
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def write_metadata(folder: pathlib.Path, into: pathlib.Path) -> None:
    """Writes into a folder what an installer writes there of a project, but for its code."""
    project = read_project(folder)
    name, version = project["name"], project.get("version", "0")
    information = into / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (information / "METADATA").write_text(metadata)
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run_python(
    arguments: Sequence[str], folder: pathlib.Path, **variables: str
) -> subprocess.CompletedProcess:
    """Runs Python in a new process in which the distributions of a folder are installed.

    Args:
      arguments: of Python, such as ``["-c", code]``.
      folder: where they are installed.
      **variables: of the environment; no other option of Pallasite is set.
    """
    inherited = [path for path in sys.path if path and "site-packages" not in path]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PALLASITE_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *inherited])
    return python_processes.run(arguments, env=environment | variables, timeout=600)
