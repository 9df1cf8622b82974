"""The examples of several devices, run by the command line on devices of the simulator."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import numpy as np
from tests import python_processes

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = "import sys; from pallasite.cli import main; sys.exit(main())"


def _run(*arguments: str, flags: str = ""):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return python_processes.run(arguments, env=environment, cwd=ROOT)


def test_two_devices(tmp_path):
    results = tmp_path / "results.json"
    done = _run(
        *("-c", PROGRAM, "run", "examples/exchange.py::exchange"),
        *("--devices", "2", "--arg", "f32[512]"),
        *("--sanitize", "--statistics", "--json", str(results), "--save", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    assert "device 0 to device 1" in done.stdout and "links to other devices" in done.stdout
    reports = json.loads(results.read_text())
    assert "on device 0" in json.dumps(reports) and "on device 1" in json.dumps(reports)
    found = np.load(tmp_path / "output_0.npy")
    assert found.shape == (512,) and len(np.unique(found)) > 500


def test_attention_of_a_sequence_on_three_devices():
    flags = "--xla_force_host_platform_device_count=3"
    done = _run("examples/ring_attention.py", flags=flags)
    assert done.returncode == 0, done.stderr
    assert "attended to 24 tokens on 3 devices" in done.stdout
