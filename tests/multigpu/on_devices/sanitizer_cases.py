"""Kernels that are wrong, each with what the sanitizer says, beside one that is right."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from devices_support import SEMAPHORE, like, mesh_of, rows, run
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import config
from pallasite import gpu as plgpu


def _found(body, *, scratch=(SEMAPHORE,), count=2, arrays=None, out=None, **options):
    """What the sanitizer says of a kernel on some devices, or "" if it has nothing to say."""
    mesh = mesh_of(x=count)
    x = rows(mesh, (128,), np.float32) if arrays is None else arrays
    kernel = plgpu.kernel(
        body, out_type=like(x) if out is None else out, scratch_types=list(scratch), **options
    )
    with config.scoped(sanitize=True):
        try:
            run(kernel, mesh, x)
        except pallasite.PallasiteError as error:
            message = str(error)
            assert "sanitizer_cases.py:" in message
            return message
    return ""


def _other():
    return 1 - lax.axis_index("x")


def _right(x_ref, out_ref, semaphore):
    plgpu.remote_ref(out_ref, _other())[...] = x_ref[...]
    pl.semaphore_signal(semaphore, 1, device_id=_other())
    pl.semaphore_wait(semaphore)


def test_what_is_right():
    assert _found(_right) == ""


def test_devices_that_only_ask_which_they_are():
    """Each runs by itself: the memory there is its own, whichever device of the mesh it is."""

    def body(x_ref, out_ref, semaphore):
        out_ref[...] = x_ref[...] + lax.axis_index("x").astype(np.float32)

    assert _found(body, count=3) == ""


def test_blocks_that_load_from_a_peer():
    """The last block to end tells the peers of what all blocks have done."""

    def body(x_ref, out_ref, buffer, barrier):
        block = lax.axis_index("grid")
        source = plgpu.remote_ref(x_ref.at[block, 0:16, 0:32], _other())
        plgpu.copy_gmem_to_smem(source, buffer, barrier)
        plgpu.barrier_wait(barrier)
        out_ref[block] = buffer[...] + 1

    scratch = [plgpu.SMEM((16, 32), np.float32), plgpu.Barrier()]
    grid = {"grid": (4,), "grid_names": ("grid",)}
    out = jax.ShapeDtypeStruct((4, 16, 32), np.float32)
    x = rows(mesh_of(x=2), (4, 16, 64), np.float32)
    assert _found(body, scratch=scratch, arrays=x, out=out, **grid) == ""


def test_multicast():
    def body(x_ref, all_ref, sum_ref, semaphore):
        own = lax.axis_index("x")
        plgpu.multimem_store(x_ref[...], all_ref.at[own], "x")
        plgpu.semaphore_signal_multicast(semaphore, collective_axes="x")
        pl.semaphore_wait(semaphore, 3)
        sum_ref[...] = plgpu.multimem_load_reduce(x_ref, collective_axes="x", reduction_op="add")

    out = (jax.ShapeDtypeStruct((3, 128), np.float32), jax.ShapeDtypeStruct((128,), np.float32))
    assert _found(body, count=3, out=out) == ""


def test_race_between_devices():
    def body(x_ref, out_ref, semaphore):
        plgpu.remote_ref(out_ref, _other())[...] = x_ref[...]
        out_ref[...] = x_ref[...] + 1
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        pl.semaphore_wait(semaphore)

    message = _found(body)
    assert "data race in global memory between devices" in message
    assert "of device 0" in message and "of device 1" in message
    assert "order the devices with a semaphore" in message


def test_signal_before_the_store():
    def body(x_ref, out_ref, result_ref, semaphore):
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        plgpu.remote_ref(out_ref, _other())[...] = x_ref[...]
        pl.semaphore_wait(semaphore)
        result_ref[...] = out_ref[...]

    out = (jax.ShapeDtypeStruct((128,), np.float32),) * 2
    assert "data race in global memory between devices" in _found(body, out=out)


def test_devices_synchronized_at_the_scope_of_one():
    def body(x_ref, out_ref, result_ref, semaphore):
        plgpu.remote_ref(out_ref, _other())[...] = x_ref[...]
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        plgpu.semaphore_wait(semaphore, 1, memory_scope="gpu")
        result_ref[...] = out_ref[...]

    out = (jax.ShapeDtypeStruct((128,), np.float32),) * 2
    message = _found(body, out=out)
    assert "between devices" in message and "at .sys scope on both sides" in message


def test_memory_of_a_device_whose_kernel_may_have_ended():
    def body(x_ref, out_ref):
        out_ref[...] = plgpu.remote_ref(x_ref, _other())[...]

    assert _found(body, scratch=()) == ""
    params = plgpu.CompilerParams(exit_barrier=False)
    message = _found(body, scratch=(), compiler_params=params)
    assert "memory of a device whose kernel may have ended" in message
    assert "read byte 0 of input 0 of device 0" in message
    assert "but the kernel of device 0 may have ended before" in message
    assert "CompilerParams(exit_barrier=True)" in message


def test_stores_that_nobody_waits_for():
    def body(x_ref, out_ref, semaphore):
        there = plgpu.remote_ref(out_ref, _other())
        there[...] = x_ref[...]
        pl.semaphore_signal(semaphore)
        pl.semaphore_wait(semaphore)

    message = _found(body)
    assert "memory of a device whose kernel may have ended" in message
    assert "of output 0 of device" in message


def test_semaphores_that_are_not_at_zero():
    def body(x_ref, out_ref, semaphore):
        plgpu.remote_ref(out_ref, _other())[...] = x_ref[...]
        pl.semaphore_signal(semaphore, 3, device_id=_other())
        pl.semaphore_wait(semaphore, 1)

    message = _found(body)
    assert "semaphore that is not at zero at the end" in message
    assert "is at 2 when the kernel has ended on all devices" in message
    assert "the last to change it was thread" in message


def test_semaphores_that_count_up_may_stay():
    def body(x_ref, out_ref, semaphore):
        plgpu.remote_ref(out_ref, _other())[...] = x_ref[...]
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        pl.semaphore_wait(semaphore, 1, decrement=False)

    assert _found(body) == ""


def test_waits_that_nobody_can_end():
    """Each device waits for the one before it, which signals only afterwards."""

    def body(x_ref, out_ref, semaphore):
        own = lax.axis_index("x")
        out_ref[...] = x_ref[...]
        pl.semaphore_wait(semaphore)
        pl.semaphore_signal(semaphore, 1, device_id=lax.rem(own + 1, 3))

    message = _found(body, count=3)
    assert "deadlock in kernel 'body' on 3 devices: no thread can go on" in message
    for device in range(3):
        assert f"of device {device}" in message
    assert "find the device that should have signalled" in message
    cycle = "device 0 waits for device 2, which waits for device 1, which waits for device 0"
    assert f"in a cycle, {cycle}" in message


def test_a_wait_on_one_device_alone():
    def body(x_ref, out_ref, semaphore):
        out_ref[...] = x_ref[...]

        @pl.when(lax.axis_index("x") == 0)
        def _():
            pl.semaphore_wait(semaphore)
            pl.semaphore_signal(semaphore, 1, device_id=1)

    message = _found(body)
    assert "deadlock in kernel 'body'" in message and "of device 0" in message
    assert "device 0 waits for what no device that is left would do" in message


@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "not waited for"])
def test_copies_to_peers(wait):
    def body(x_ref, out_ref, buffer, barrier, semaphore):
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, plgpu.remote_ref(out_ref, _other()))
        if wait:
            plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        pl.semaphore_wait(semaphore)
        if not wait:
            plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM((128,), np.float32), plgpu.Barrier(), SEMAPHORE]
    message = _found(body, scratch=scratch)
    if wait:
        assert message == ""
    else:
        assert "a bulk copy begun by" in message and "device" in message
