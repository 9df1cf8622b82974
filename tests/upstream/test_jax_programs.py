"""Programs that JAX's own compiler compiled for Blackwell run and give right numbers."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax_compiler
import jax_programs
import pytest
from replay import replay

from pallasite_simulator.sanitizer import GROUPS, LaunchState
from pallasite_simulator.sanitizer.groups import FURTHER


@pytest.mark.parametrize("name", jax_programs.PROGRAMS)
def test_recorded(name):
    # JAX declares one byte of its dynamic shared memory. It has fences after waits for mbarriers,
    # but none between stores and the products that read what was stored.
    fences = name not in ("a from registers", "reducing")
    groups = {*GROUPS, *(FURTHER if fences else ())}
    state = LaunchState(groups - {"bounds"})
    found, expected, execution = replay(name, state=state)
    jax_programs.assert_right(jax_programs.PROGRAMS[name], found, expected)
    assert not state.findings, str(state.findings.error())
    one = getattr(jax_programs.PROGRAMS[name].build, "__self__", None)
    if one is not None:
        assert execution.counters["tensor operations"] == 2 * one.m * one.n * one.k
        assert execution.bytes_moved["tensor", "write"] > 0


@pytest.mark.skipif(jax_compiler.missing() is not None, reason=str(jax_compiler.missing()))
def test_compiled():
    names = ["f16", "nvf4 pair", "cancelling"]
    script = pathlib.Path(jax_programs.__file__)
    # It changes how JAX compiles, and so has a process of its own.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, str(script), *names],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    assert [one for one in names if f"{one} is right" in found.stdout] == names
