"""Kernels of several devices on the simulator: each module of cases in a process with 8 devices."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from tests import python_processes

FOLDER = pathlib.Path(__file__).parent / "on_devices"
MODULES = sorted(FOLDER.glob("*_cases.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_cases(module: pathlib.Path):
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *(path for path in sys.path if path)]),
    }
    options = ["-q", "-p", "no:cacheprovider", "-o", "python_files=*_cases.py"]
    done = python_processes.run(
        ["-m", "pytest", *options, str(module)], env=environment, cwd=FOLDER.parents[2]
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
