"""Kernels of several devices on the simulator: modules of cases in processes with 8 devices."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from tests import python_processes

FOLDER = pathlib.Path(__file__).parent / "on_devices"
MODULES = {path.stem.removesuffix("_cases"): path for path in sorted(FOLDER.glob("*_cases.py"))}

# What runs a kernel for the first time in a process takes as long as the cases of a small module.
TOGETHER = [
    ("accesses", "exchange", "sanitizer", "wrong"),
    ("attention_gradients", "experts", "replicated"),
    ("attention_programs", "products"),
    ("empty", "multicast", "network", "traps", "tuning"),
]
ALONE = [(name,) for name in MODULES if not any(name in names for names in TOGETHER)]


@pytest.mark.parametrize("names", TOGETHER + ALONE, ids=" ".join)
def test_cases(names: tuple[str, ...]):
    run_cases(names)


@pytest.mark.slow
def test_slow_cases():
    run_cases(tuple(MODULES), "-m", "slow")


def run_cases(names: tuple[str, ...], *options: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(FOLDER), *(path for path in sys.path if path)]),
    }
    options = ("-q", "-p", "no:cacheprovider", "-o", "python_files=*_cases.py", *options)
    done = python_processes.run(
        ["-m", "pytest", *options, *(MODULES[name] for name in names)],
        env=environment,
        cwd=FOLDER.parents[2],
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
