"""What can be done with memory of another device: loads, stores, atomics, copies, prefetch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import LANE, PARTIAL, SEMAPHORE, WARPGROUP, like, mesh_of, rows, run
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

BOTH = pytest.mark.parametrize("params", [LANE, WARPGROUP], ids=["lane", "warpgroup"])


def _other():
    return 1 - lax.axis_index("x")


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8, np.float16])
def test_loads_of_arguments_need_no_signal(dtype, params):
    """The kernel's beginning and its end wait for the other device."""
    mesh = mesh_of(x=2)
    x = rows(mesh, (8, 128), np.float32).astype(dtype)

    def body(x_ref, out_ref):
        whole = plgpu.remote_ref(x_ref, _other())
        out_ref[0:4] = whole[4:8]
        out_ref[4:8] = plgpu.load(plgpu.remote_ref(x_ref.at[0:4], _other()))

    kernel = plgpu.kernel(body, out_type=like(x), compiler_params=params)
    np.testing.assert_array_equal(run(kernel, mesh, x), np.roll(x[::-1], 4, axis=1))


def test_scalars_slices_and_masks():
    mesh = mesh_of(x=2)
    x = rows(mesh, (4, 128), np.int32)

    def body(x_ref, out_ref, semaphore):
        there = plgpu.remote_ref(out_ref, _other())
        number = plgpu.remote_ref(x_ref, _other())[1, 5]
        there[0, 3] = number + 1
        there.at[2][...] = x_ref[2] + number
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        pl.semaphore_wait(semaphore)

    kernel = plgpu.kernel(
        body, out_type=like(x), scratch_types=[SEMAPHORE], compiler_params=PARTIAL
    )
    found = run(kernel, mesh, x)
    assert (found[:, 0, 3] == x[:, 1, 5] + 1).all()
    expected = x[::-1, 2] + x[:, 1, 5, None]
    np.testing.assert_array_equal(found[:, 2], expected)


@pytest.mark.parametrize("operation", ["add", "max", "or"])
def test_atomic_operations(operation):
    mesh = mesh_of(x=4)
    x = rows(mesh, (128,), np.int32)
    combine = {"add": plgpu.atomic_add, "max": plgpu.atomic_max, "or": plgpu.atomic_or}[operation]

    def body(x_ref, out_ref, semaphore):
        out_ref[...] = x_ref[...]
        plgpu.semaphore_signal_parallel(
            *[plgpu.SemaphoreSignal(semaphore, device_id=device) for device in range(4)]
        )
        pl.semaphore_wait(semaphore, 4)
        for device in range(4):

            @pl.when(lax.axis_index("x") != device)
            def _(device=device):
                combine(plgpu.remote_ref(out_ref, device), x_ref[...])

        plgpu.semaphore_signal_parallel(
            *[plgpu.SemaphoreSignal(semaphore, device_id=device) for device in range(4)]
        )
        pl.semaphore_wait(semaphore, 4)

    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE])
    ufunc = {"add": np.add, "max": np.maximum, "or": np.bitwise_or}[operation]
    expected = np.broadcast_to(ufunc.reduce(x, axis=0), x.shape)
    np.testing.assert_array_equal(run(kernel, mesh, x), expected)


_TILED = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


@BOTH
@pytest.mark.parametrize("transforms", [(), _TILED], ids=["linear", "tiled"])
def test_copies_from_a_peer(transforms, params):
    mesh = mesh_of(x=3)
    x = rows(mesh, (64, 64), np.float32)

    def body(x_ref, out_ref, buffer, barrier):
        peer = lax.rem(lax.axis_index("x") + 1, 3)
        source = plgpu.remote_ref(x_ref.at[16:48, 32:64], peer)
        plgpu.copy_gmem_to_smem(source, buffer, barrier)
        plgpu.barrier_wait(barrier)
        out_ref[...] = buffer[...]

    if params is WARPGROUP and transforms:
        transforms = ()
    kernel = plgpu.kernel(
        body,
        out_type=like(x, (32, 32)),
        scratch_types=[
            plgpu.SMEM((32, 32), np.float32, transforms=transforms),
            plgpu.Barrier(),
        ],
        compiler_params=params,
    )
    with jax.default_device(None):
        found = _on_hopper(kernel, mesh, x)
    np.testing.assert_array_equal(found, np.roll(x, -1, axis=0)[:, 16:48, 32:64])


def _on_hopper(kernel, mesh, *arrays):
    import pallasite

    with pallasite.target("sm_90a"):
        return run(kernel, mesh, *arrays)


@pytest.mark.parametrize("shape", [(32, 32), (8, 64)], ids=["window", "whole rows"])
def test_copies_to_peers_in_a_loop(shape):
    mesh = mesh_of(x=4)
    x = rows(mesh, shape, np.float32)

    def body(x_ref, out_ref, buffer, barrier, semaphore):
        own = lax.axis_index("x")
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)

        def step(peer, _):
            window = out_ref.at[own, 0 : shape[0], 0 : shape[1]]
            plgpu.copy_smem_to_gmem(buffer, plgpu.remote_ref(window, peer))
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(semaphore, 1, device_id=peer)

        lax.fori_loop(0, 4, step, None)
        pl.semaphore_wait(semaphore, 4)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((4, shape[0], 64), np.float32),
        compiler_params=PARTIAL,
        scratch_types=[plgpu.SMEM(shape, np.float32), plgpu.Barrier(), SEMAPHORE],
    )
    found = _on_hopper(kernel, mesh, x)[:, :, :, : shape[1]]
    np.testing.assert_array_equal(found, np.broadcast_to(x, (4, *x.shape)))


def test_reductions_by_copies_to_a_peer():
    mesh = mesh_of(x=2)
    x = rows(mesh, (16, 64), np.float32)

    def body(x_ref, out_ref, buffer, barrier, semaphore):
        out_ref[...] = x_ref[...]
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        pl.semaphore_wait(semaphore)
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)
        there = plgpu.remote_ref(out_ref, _other())
        plgpu.copy_smem_to_gmem(buffer, there, reduction_op="add")
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        pl.semaphore_wait(semaphore)

    kernel = plgpu.kernel(
        body,
        out_type=like(x),
        scratch_types=[plgpu.SMEM((16, 64), np.float32), plgpu.Barrier(), SEMAPHORE],
    )
    np.testing.assert_array_equal(_on_hopper(kernel, mesh, x), x + x[::-1])


def test_prefetch_and_copies_by_single_warps():
    mesh = mesh_of(x=2)
    x = rows(mesh, (16, 64), np.float32)

    def body(x_ref, out_ref, buffer, barrier, semaphore):
        source = plgpu.remote_ref(x_ref.at[0:8, 0:32], _other())
        plgpu.async_prefetch(source)

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            @pl.when(lax.axis_index("warp") == 0)
            def _():
                plgpu.copy_gmem_to_smem(source, buffer, barrier)
                pl.semaphore_signal(semaphore, 1, device_id=_other())
                pl.semaphore_wait(semaphore)

        plgpu.barrier_wait(barrier)
        out_ref[...] = buffer[...]

    kernel = plgpu.kernel(
        body,
        out_type=like(x, (8, 32)),
        scratch_types=[plgpu.SMEM((8, 32), np.float32), plgpu.Barrier(), SEMAPHORE],
        compiler_params=LANE,
    )
    np.testing.assert_array_equal(_on_hopper(kernel, mesh, x), x[::-1, :8, :32])


def test_blocks_of_a_grid_share_work():
    mesh = mesh_of(x=2)
    x = rows(mesh, (4, 16, 64), np.float32)

    def body(x_ref, out_ref, buffer, barrier):
        block = lax.axis_index("grid")
        source = plgpu.remote_ref(x_ref.at[block, 0:16, 0:32], _other())
        plgpu.copy_gmem_to_smem(source, buffer, barrier)
        plgpu.barrier_wait(barrier)
        out_ref[block] = buffer[...] + 1

    kernel = plgpu.kernel(
        body,
        out_type=like(x, (4, 16, 32)),
        grid=(4,),
        grid_names=("grid",),
        scratch_types=[plgpu.SMEM((16, 32), np.float32), plgpu.Barrier()],
    )
    np.testing.assert_array_equal(_on_hopper(kernel, mesh, x), x[::-1, :, :, :32] + 1)


def test_clusters_and_several_threads():
    mesh = mesh_of(x=2)
    x = rows(mesh, (2, 2, 128), np.float32)

    def body(x_ref, out_ref, semaphore):
        block, thread = lax.axis_index("cluster"), lax.axis_index("thread")
        there = plgpu.remote_ref(out_ref, _other())
        there[block, thread] = x_ref[block, thread] * 2
        pl.semaphore_signal(semaphore.at[thread], 1, device_id=_other())
        pl.semaphore_wait(semaphore.at[thread])

    kernel = plgpu.kernel(
        body,
        out_type=like(x),
        cluster=(2,),
        cluster_names=("cluster",),
        num_threads=2,
        thread_name="thread",
        scratch_types=[plgpu.SemaphoreType.REGULAR((2,))],
    )
    np.testing.assert_array_equal(_on_hopper(kernel, mesh, x), x[::-1] * 2)


def test_donated_and_aliased_arrays():
    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.float32)

    def body(x_ref, out_ref, semaphore):
        value = x_ref[...]
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        pl.semaphore_wait(semaphore)
        plgpu.remote_ref(out_ref, _other())[...] = value + 1
        pl.semaphore_signal(semaphore, 1, device_id=_other())
        pl.semaphore_wait(semaphore)

    kernel = plgpu.kernel(
        body, out_type=like(x), scratch_types=[SEMAPHORE], input_output_aliases={0: 0}
    )
    np.testing.assert_array_equal(run(kernel, mesh, x), x[::-1] + 1)


def test_inlined_code_gets_memory_of_a_peer():
    import jax.experimental.mosaic.gpu as mgpu

    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.float32)
    strided = plgpu.Layout.WG_STRIDED((128,), vec_size=1)

    def body(x_ref, out_ref):
        there = plgpu.remote_ref(x_ref, _other())

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((128,), np.float32, layout=strided),
        )
        def load(context, ref):
            del context
            return mgpu.FragmentedArray.load_strided(ref, vec_size=1)

        out_ref[...] = load(there)

    kernel = plgpu.kernel(body, out_type=like(x), compiler_params=LANE)
    np.testing.assert_array_equal(run(kernel, mesh, x), x[::-1])
