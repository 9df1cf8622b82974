"""Kernels of two GPUs of two processes: launches in any form, operations, peers that die."""

from __future__ import annotations

import sys
import textwrap

import gpu_programs
import jax
import pytest
from processes import FOLDER, run

pytestmark = pytest.mark.gpu

START = (
    gpu_programs.START
    + """
    config.update("peer_timeout", 10)
    config.update("symmetric_heap", "256M")
    print("devices", jax.devices(), "local", jax.local_devices(), flush=True)
"""
)

LOOPS = gpu_programs.LOOPS + gpu_programs.MIXED

STORE = """
    def swap(x_ref, out_ref, arrived):
        other = 1 - lax.axis_index("x")
        plgpu.remote_ref(out_ref, other)[...] = x_ref[...]
        pl.semaphore_signal(arrived, device_id=other)
        pl.semaphore_wait(arrived)

    part = jax.ShapeDtypeStruct((4096,), jnp.float32)
    exchange = plgpu.kernel(swap, out_type=part, scratch_types=[plgpu.SemaphoreType.REGULAR])
    f = jax.jit(on(exchange))
    y = f(put(x))
    check(y, swapped(x))
    done("store")
    check(jax.jit(on(pull))(put(x)), swapped(x))
    done("pull")
"""

OPERATIONS = """
    for size in (1000, 1 << 16, 1 << 20):
        y = random.standard_normal((2, size)).astype(np.float32)
        reduced = jax.jit(on(lambda y: ops.all_reduce(y, axis_name="x")))(put(y))
        check(reduced, np.broadcast_to(y.astype(np.float64).sum(0), (2, size)), 1e-5)
        done(f"all_reduce {size}")
        gathered = jax.jit(on(lambda y: ops.all_gather(y, axis_name="x"), out_specs=P()))(put(y))
        check(gathered, y)
        done(f"all_gather {size}")
        y = random.standard_normal((4, size)).astype(np.float32)
        scattered = jax.jit(on(lambda y: ops.reduce_scatter(y, axis_name="x")))(put(y))
        check(scattered, y.astype(np.float64).reshape(2, 2, size).sum(0), 1e-5)
        done(f"reduce_scatter {size}")
    a = random.standard_normal((512, 256)).astype(np.float32)
    b = random.standard_normal((256, 512)).astype(np.float32)
    a16, b16 = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    multiply = lambda a, b: ops.all_gather_matmul(a, b, axis_name="x")
    by_columns = P(None, "x")
    product = jax.jit(on(multiply, (P("x"), by_columns), by_columns))(
        put(a16), put(b16, by_columns)
    )
    check(product, a16.astype(np.float64) @ b16.astype(np.float64), 0.2)
    done("all_gather_matmul")
"""

SYMMETRIC = """
    from pallasite_multigpu.runtime import process_groups

    made = pallasite_multigpu.symmetric_empty((8192,), jnp.float32, NamedSharding(mesh, P("x")))
    assert pallasite_multigpu.is_symmetric(made)
    done("made")
    check(jax.jit(on(pull))(made), np.nan_to_num(swapped(np.zeros(8192))))
    done("zeros pulled")
    filled = jax.jit(lambda old, x: x, donate_argnums=0, keep_unused=True)(made, put(x))
    print("kept its place:", pallasite_multigpu.is_symmetric(filled), flush=True)
    check(jax.jit(on(pull))(filled), swapped(x))
    done("filled pulled")
    heap = process_groups.heap()
    del filled, made
    arrays = [
        pallasite_multigpu.symmetric_empty((8192,), jnp.float32, NamedSharding(mesh, P("x")))
        for _ in range(4)
    ]
    used = len(heap._used)
    del arrays
    print("freed:", used, len(heap._used), flush=True)
    try:
        pallasite_multigpu.symmetric_empty((1 << 30,), jnp.float32, NamedSharding(mesh, P("x")))
    except Exception as error:
        print(error)
"""

UNSIGNALLED = """
    def body(x_ref, out_ref, arrived):
        other = 1 - lax.axis_index("x")
        plgpu.remote_ref(out_ref, other)[...] = x_ref[...]
        pl.semaphore_signal(arrived, device_id=other)
        pl.semaphore_wait(arrived, 2)

    part = jax.ShapeDtypeStruct((4096,), jnp.float32)
    waits = plgpu.kernel(body, out_type=part, scratch_types=[plgpu.SemaphoreType.REGULAR])
    config.update("peer_timeout", 2)
    try:
        jax.jit(on(waits))(put(x)).block_until_ready()
        print("no error")
    except BaseException as error:
        time.sleep(1)
        print("ended", type(error).__name__, flush=True)
    os._exit(0)
"""


@pytest.fixture
def on_gpus(monkeypatch):
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(FOLDER), *(one for one in sys.path if one)]))

    def on_gpus(program, **options):
        text = textwrap.dedent(START) + textwrap.dedent(program)
        found = run(text, local="[RANK]", timeout=100, **options)
        for rank, (code, out, told) in enumerate(found):
            print(f"--- process {rank}: {code}\n{out[-3000:]}\n{told[-5000:]}")
        return found

    return on_gpus


@pytest.mark.parametrize("memory", ["ipc", "nvshmem"])
@pytest.mark.parametrize("program", ["STORE", "LOOPS", "OPERATIONS", "SYMMETRIC"])
def test_launches(program, memory, on_gpus, monkeypatch):
    monkeypatch.setenv("PALLASITE_PEER_MEMORY", memory)
    assert [code for code, *_ in on_gpus(globals()[program])] == [0, 0]


@pytest.mark.parametrize("program", ["LOOPS", "SYMMETRIC"])
def test_launches_in_cuda_graphs(program, on_gpus, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", gpu_programs.GRAPHS)
    assert [code for code, *_ in on_gpus(globals()[program])] == [0, 0]


def test_a_peer_that_is_killed(on_gpus):
    (code, printed, told), (killed, *_) = on_gpus(gpu_programs.KILLED)
    assert code == 0 and killed == -9
    assert "ended after" in printed and float(printed.split()[-2]) < 8  # Sooner than its time.
    assert "kernel 'acting': device 0" in told and "process 1, which has ended" in told


def test_a_signal_that_never_comes(on_gpus):
    found = on_gpus(UNSIGNALLED)
    assert all(code == 0 and "ended" in printed for code, printed, _ in found)
    told = "".join(told for *_, told in found)
    assert "waited in vain for signals of other devices: a semaphore has 1 of 2" in told
    assert "kernel 'body'" in told and "<string>" in told
