"""Where the external programs are: the assembler and the disassemblers of the CUDA toolkit."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

from pallasite import config

_WHEELS = {
    "ptxas": "nvidia-cuda-nvcc",
    "nvdisasm": "nvidia-cuda-nvdisasm",
    "cuobjdump": "nvidia-cuda-cuobjdump",
}
_roots: dict[tuple[str, ...], list[str]] = {}
"""Where the package ``nvidia`` is, by ``sys.path``, once it has been found."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A program that was looked for.

    Attributes:
      name: the name of the program.
      path: where it is, or None.
      reason: where it was found, or why it was not; one line for ``pallasite doctor``.
      install: what to install to get it.
    """

    name: str
    path: pathlib.Path | None
    reason: str
    install: str


def find_tool(name: str) -> Tool:
    """Looks for a program of the CUDA toolkit.

    The order is: the configuration (``ptxas`` only), NVIDIA's wheels, ``CUDA_HOME`` and
    ``CUDA_PATH``, ``PATH``.
    """
    install = f"pip install {_WHEELS.get(name, name)}"
    if name == "ptxas":
        setting = str(config.get("ptxas"))
        if setting == "off":
            return Tool(name, None, "switched off by the option ptxas", "PALLASITE_PTXAS=auto")
        if setting != "auto":
            path = pathlib.Path(setting)
            if _runnable(path):
                return Tool(name, path, "given by the option ptxas", install)
            reason = f"the option ptxas is {setting}, which is not a program"
            return Tool(name, None, reason, "PALLASITE_PTXAS=auto")
    for folder, where in _folders():
        path = folder / name
        if _runnable(path):
            return Tool(name, path, where, install)
    if (found := shutil.which(name)) is not None:
        return Tool(name, pathlib.Path(found), "found on PATH", install)
    reason = "neither in NVIDIA's wheels, nor in CUDA_HOME or CUDA_PATH, nor on PATH"
    return Tool(name, None, reason, install)


def _folders() -> Iterator[tuple[pathlib.Path, str]]:
    for folder in _wheel_folders():
        yield folder, "in NVIDIA's wheel"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            yield pathlib.Path(value) / "bin", f"in {variable}"


def _wheel_folders() -> Iterator[pathlib.Path]:
    """The ``bin`` folders in the namespace package ``nvidia``; newer toolkits first."""
    roots = _roots.get(path := tuple(sys.path))
    if roots is None:  # To look takes as long as to compile a small part of a kernel.
        spec = importlib.util.find_spec("nvidia")
        if spec is None or spec.submodule_search_locations is None:
            return
        roots = _roots[path] = list(spec.submodule_search_locations)
    for name in ("cu13", "cu12", "cuda_nvcc", "cuda_nvdisasm", "cuda_cuobjdump"):
        for root in roots:
            yield pathlib.Path(root, name, "bin")


def _runnable(path: pathlib.Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
