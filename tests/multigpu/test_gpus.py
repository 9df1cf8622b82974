"""Kernels of two GPUs of one process: launches in any form, permuted meshes, errors in time."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import jax
import pytest

pytestmark = pytest.mark.gpu

FOLDER = pathlib.Path(__file__).parent

START = """
    import os, sys, time
    import jax, jax.numpy as jnp, numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from acting import Acting, kernel_of
    from pallasite import config, plugins
    import pallasite_multigpu

    plugins.register(Acting(), name="acting")
    config.update("peer_timeout", 3)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def on(mesh, function):
        specs = dict(in_specs=P("x"), out_specs=P("x"))
        return jax.shard_map(function, mesh=mesh, check_vma=False, **specs)

    def put(x, mesh=mesh):
        return jax.device_put(x, NamedSharding(mesh, P("x")))

    def swapped(x):
        return np.roll(np.asarray(x), len(x) // 2)

    x = np.random.default_rng(0).standard_normal(8192).astype(np.float32)
    pull = kernel_of("pull", size=4096)
"""

LOOPS = """
    f = jax.jit(on(mesh, pull))
    y = put(x)
    for _ in range(1000):
        y = f(y)
    np.testing.assert_array_equal(np.asarray(y), x)
    f = jax.jit(on(mesh, lambda x: lax.fori_loop(0, 1001, lambda i, y: pull(y), x)))
    np.testing.assert_array_equal(np.asarray(f(put(x))), swapped(x))
    f = jax.jit(on(mesh, pull), donate_argnums=0)
    y = put(x)
    for _ in range(101):
        y = f(y)
    np.testing.assert_array_equal(np.asarray(y), swapped(x))
"""

MIXED = """
    other = kernel_of("pull", size=4096, name="another")

    def run(x):
        for _ in range(3):
            x = lax.psum(x, "x") * 0.5 + pull(x)
            x = other(x * 0.5)
        return x

    z = x.astype(np.float64)
    for _ in range(3):
        z = np.tile((z[:4096] + z[4096:]) * 0.5, 2) + swapped(z)
        z = swapped(z * 0.5)
    np.testing.assert_allclose(np.asarray(jax.jit(on(mesh, run))(put(x))), z, 1e-4, 1e-4)
    cold = [kernel_of("pull", size=4096, name=f"cold_{i}") for i in range(6)]

    def all_of_them(x):
        for kernel in cold:
            x = kernel(x) + 0
        return x

    np.testing.assert_array_equal(np.asarray(jax.jit(on(mesh, all_of_them))(put(x))), x)
    large = np.random.default_rng(1).standard_normal(1 << 21).astype(np.float32)
    f, g = jax.jit(on(mesh, pull)), jax.jit(on(mesh, kernel_of("pull", size=1 << 20)))
    a, b = put(x), put(large)
    for _ in range(50):
        a, b = f(a), g(b)  # More blocks than fit on the GPU.
    np.testing.assert_array_equal(np.asarray(a), x)
    np.testing.assert_array_equal(np.asarray(b), large)
"""

PERMUTED = """
    ranks = kernel_of("rank", dtype=np.int32)
    reverse = Mesh(np.array(jax.devices()[:2][::-1]), ("x",))
    for one in (mesh, reverse):
        f = jax.jit(on(one, pull))
        np.testing.assert_array_equal(np.asarray(f(put(x, one))), swapped(x))
        found = np.asarray(jax.jit(on(one, ranks))(put(x[:256], one)))
        assert (found[0], found[128]) == (0, 1)

    @jax.jit
    def anywhere(x):
        return jax.shard_map(pull, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)

    for one in (mesh, reverse, mesh):
        with jax.set_mesh(one):
            np.testing.assert_array_equal(np.asarray(anywhere(put(x, one))), swapped(x))
"""

ALONE = """
    def run(x):
        return lax.cond(lax.axis_index("x") == 0, pull, lambda x: x, x)

    jax.jit(on(mesh, pull))(put(x)).block_until_ready()
    start = time.time()
    try:
        jax.jit(on(mesh, run))(put(x)).block_until_ready()
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
        jax.jit(on(mesh, run))(put(x)).block_until_ready()
    except Exception as error:
        time.sleep(0.5)
        print("ended", type(error).__name__)
    os._exit(0)
"""

GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE"
    " --xla_gpu_graph_min_graph_size=1"
)


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


@pytest.mark.parametrize("flags", ["", GRAPHS], ids=["streams", "graphs"])
@pytest.mark.parametrize("program", [LOOPS, MIXED, PERMUTED], ids=["loops", "mixed", "permuted"])
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
