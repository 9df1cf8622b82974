"""Kernels of two GPUs of one process: launches in any form, permuted meshes, errors in time."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import gpu_programs
import jax
import pytest

pytestmark = pytest.mark.gpu

FOLDER = pathlib.Path(__file__).parent

START = (
    gpu_programs.START
    + """
    config.update("peer_timeout", 3)
"""
)

PERMUTED = """
    ranks = kernel_of("rank", dtype=np.int32)
    reverse = Mesh(np.array(jax.devices()[:2][::-1]), ("x",))
    for one in (mesh, reverse):
        check(jax.jit(on(pull, mesh=one))(put(x, mesh=one)), swapped(x))
        found = np.asarray(jax.jit(on(ranks, mesh=one))(put(x[:256], mesh=one)))
        assert (found[0], found[128]) == (0, 1)

    @jax.jit
    def anywhere(x):
        return jax.shard_map(pull, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)

    for one in (mesh, reverse, mesh):
        with jax.set_mesh(one):
            check(anywhere(put(x, mesh=one)), swapped(x))
"""

ALONE = """
    def run(x):
        return lax.cond(lax.axis_index("x") == 0, pull, lambda x: x, x)

    jax.jit(on(pull))(put(x)).block_until_ready()
    start = time.time()
    try:
        jax.jit(on(run))(put(x)).block_until_ready()
    except Exception as error:
        time.sleep(0.5)
        print("ended after", time.time() - start, type(error).__name__)
    os._exit(0)
"""

DIFFERENT = """
    first, second = (kernel_of("pull", size=4096, name=name) for name in ("first", "second"))

    def run(x):
        return lax.cond(lax.axis_index("x") == 0, first, second, x)

    try:
        jax.jit(on(run))(put(x)).block_until_ready()
    except Exception as error:
        time.sleep(0.5)
        print("ended", type(error).__name__)
    os._exit(0)
"""


def run(program: str, monkeypatch: pytest.MonkeyPatch, flags: str = "") -> tuple[str, str]:
    """What a program on two GPUs, in a process of its own, prints and reports."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(FOLDER), *(one for one in sys.path if one)]))
    text = textwrap.dedent(START) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr


@pytest.mark.parametrize("flags", ["", gpu_programs.GRAPHS], ids=["streams", "graphs"])
@pytest.mark.parametrize(
    "program",
    [gpu_programs.LOOPS, gpu_programs.MIXED, PERMUTED],
    ids=["loops", "mixed", "permuted"],
)
def test_launches(program, flags, monkeypatch):
    run(program, monkeypatch, flags)


def test_a_peer_that_never_comes(monkeypatch):
    printed, told = run(ALONE, monkeypatch)
    assert "ended after" in printed and float(printed.split()[2]) < 30
    assert "kernel 'acting': device 0 (GPU 0) waited in vain for the kernel to begin on" in told
    assert "acting.py" in told and "device 1 (GPU 1)" in told and "peer_timeout" in told


def test_different_kernels_meet(monkeypatch):
    printed, told = run(DIFFERENT, monkeypatch)
    assert "ended" in printed and "met another kernel on another device of its mesh" in told
