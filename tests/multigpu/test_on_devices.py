"""Kernels of several devices on the simulator: each module of cases in a process with 8 devices."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(module)]
    done = subprocess.run(
        [*command, "-o", "python_files=*_cases.py"],
        env=environment,
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
