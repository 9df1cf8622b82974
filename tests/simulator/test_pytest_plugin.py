"""The plugin for pytest: marks, options, and what happens to errors."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest
from tests import python_processes

CONFTEST = """
import pallasite_simulator.pytest_plugin
pytest_plugins = ["pallasite_simulator.pytest_plugin"]
"""

TESTS = """
import jax, jax.numpy as jnp, numpy as np, pytest
from jax.experimental import pallas as pl
from pallasite import gpu as plgpu
from pallasite_simulator import SanitizerError, SimulationError

OUT = jax.ShapeDtypeStruct((128,), jnp.float32)

def run(body, *scratch):
    kernel = plgpu.kernel(body, out_type=OUT, scratch_types=scratch)
    return jax.block_until_ready(jax.jit(kernel)(jnp.arange(128, dtype=jnp.float32)))

def double(x, o):
    o[...] = 2 * x[...]

def beyond(x, o):
    o[...] = x[pl.ds(jnp.int32(x[1]), 128)]

def forget(x, o, tile):
    o[...] = tile[...]

@pytest.mark.runs_kernels
def test_double(pallasite_executor):
    assert pallasite_executor == "simulator"
    np.testing.assert_array_equal(run(double), 2 * np.arange(128))

@pytest.mark.runs_kernels
def test_beyond():
    run(beyond)

@pytest.mark.runs_kernels
def test_forgotten():
    run(forget, plgpu.SMEM((128,), jnp.float32))

@pytest.mark.runs_kernels(sanitize=False)
def test_forgiven():
    run(forget, plgpu.SMEM((128,), jnp.float32))

def test_without_a_mark():
    run(forget, plgpu.SMEM((128,), jnp.float32))
"""


@pytest.fixture
def run(tmp_path):
    """Runs the tests above in a process of its own; returns its status and output."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_kernels.py").write_text(TESTS)

    def run(*options, start=python_processes.run):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "JAX_PLATFORMS": "cpu",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # Other plugins take time.
        }
        always = ["-p", "no:cacheprovider", "-rA", "--strict-markers", "--tb=short"]
        done = start(["-m", "pytest", *always, *options], cwd=tmp_path, env=environment)
        return done.returncode, done.stdout + done.stderr

    return run


def test_simulator(run):
    status, output = run("--executor=simulator")
    assert status == 1
    for name in ("double", "forgiven", "without_a_mark"):
        assert f"PASSED test_kernels.py::test_{name}\n" in output
    assert "FAILED test_kernels.py::test_beyond - pallasite_simulator.errors.Simulation" in output
    assert "FAILED test_kernels.py::test_forgotten - pallasite_simulator.errors.Sanit" in output
    assert "JaxRuntimeError" not in output


def test_without_the_sanitizer(run):
    status, output = run("--no-sanitize", "-k", "not beyond")
    assert status == 0, output
    assert "4 passed" in output


def test_marks(run):
    status, output = run("-m", "gpu")
    assert status == 5 and "5 deselected" in output
    status, output = run("-m", "not runs_kernels")
    assert status == 0 and "1 passed, 4 deselected" in output
    assert "runs_kernels(sanitize=True): runs kernels" in run("--markers")[1]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU here")
def test_no_gpu(run):
    status, output = run("--executor=gpu")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "--executor=gpu: JAX has no CUDA GPU here, it is on the platform 'cpu'" in output


GPU = """
import jax
jax.default_backend = lambda: "gpu"
"""


def test_on_a_gpu_the_tests_are_marked(run, tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST + GPU)
    for options in ((), ("--executor=gpu",)):
        status, output = run("-m", "gpu", "--collect-only", "-q", *options)
        assert status == 0
        assert "test_beyond" in output and "4/5 tests collected (1 deselected)" in output


def start_anew(arguments, **keywords):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **keywords)


def test_projects_without_kernels_pay_nothing(run, tmp_path):
    (tmp_path / "test_kernels.py").write_text(
        "import sys\ndef test_it():\n    assert not {'jax', 'numpy'} & set(sys.modules)\n"
    )
    status, output = run(start=start_anew)
    assert status == 0, output
