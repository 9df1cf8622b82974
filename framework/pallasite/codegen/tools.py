"""Where the external programs are: the assembler and the disassemblers of the CUDA toolkit."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import shutil

from pallasite import config

_WHEELS = {
    "ptxas": "nvidia-cuda-nvcc",
    "nvdisasm": "nvidia-cuda-nvdisasm",
    "cuobjdump": "nvidia-cuda-cuobjdump",
}


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
    found = shutil.which(name)
    if found is not None:
        return Tool(name, pathlib.Path(found), "found on PATH", install)
    reason = "neither in NVIDIA's wheels, nor in CUDA_HOME or CUDA_PATH, nor on PATH"
    return Tool(name, None, reason, install)


def _folders() -> list[tuple[pathlib.Path, str]]:
    folders = [(folder, "in NVIDIA's wheel") for folder in _wheel_folders()]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        value = os.environ.get(variable)
        if value:
            folders.append((pathlib.Path(value) / "bin", f"in {variable}"))
    return folders


def _wheel_folders() -> list[pathlib.Path]:
    """The ``bin`` folders in the namespace package ``nvidia``; newer toolkits first."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return []
    roots = [pathlib.Path(root) for root in spec.submodule_search_locations]
    names = ("cu13", "cu12", "cuda_nvcc", "cuda_nvdisasm", "cuda_cuobjdump")
    return [root / name / "bin" for name in names for root in roots if (root / name).is_dir()]


def _runnable(path: pathlib.Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
