"""Which device a kernel reaches: all forms of ids, meshes of one and of two dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import LANE, PARTIAL, SEMAPHORE, WARPGROUP, like, mesh_of, rows, run
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu


def _put(x_ref, out_ref, semaphore, device):
    """Stores this device's row on another device, and waits for the row that comes here."""
    plgpu.remote_ref(out_ref, device)[...] = x_ref[...] + 1
    pl.semaphore_signal(semaphore, 1, device_id=device)
    pl.semaphore_wait(semaphore)


@pytest.mark.parametrize("params", [LANE, WARPGROUP], ids=["lane", "warpgroup"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_rows_go_round(count, params):
    mesh = mesh_of(x=count)
    x = rows(mesh, (256,), np.float32)

    def body(x_ref, out_ref, semaphore):
        _put(x_ref, out_ref, semaphore, lax.rem(lax.axis_index("x") + 1, lax.axis_size("x")))

    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE], compiler_params=params)
    np.testing.assert_array_equal(run(kernel, mesh, x), np.roll(x, 1, axis=0) + 1)


def _logical(a, b):
    return a * 4 + b


_IDS = {
    "tuple": lambda a, b: (1 - a, lax.rem(b + 1, 4)),
    "dict": lambda a, b: {"a": 1 - a, "b": lax.rem(b + 1, 4)},
    "dict_of_joined_axes": lambda a, b: {("a", "b"): _logical(1 - a, lax.rem(b + 1, 4))},
    "scalar": lambda a, b: _logical(1 - a, lax.rem(b + 1, 4)),
}


@pytest.mark.parametrize("form", _IDS)
def test_ids_in_two_dimensions(form):
    mesh = mesh_of(a=2, b=4)
    x = rows(mesh, (128,), np.int32)

    def body(x_ref, out_ref, semaphore):
        _put(x_ref, out_ref, semaphore, _IDS[form](lax.axis_index("a"), lax.axis_index("b")))

    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE])
    expected = np.roll(x.reshape(2, 4, 128), (1, 1), axis=(0, 1)).reshape(8, 128) + 1
    np.testing.assert_array_equal(run(kernel, mesh, x), expected)


def test_axes_that_an_id_leaves_out_are_the_own_ones():
    mesh = mesh_of(a=2, b=2)
    x = rows(mesh, (128,), np.int32)

    def body(x_ref, out_ref, semaphore):
        _put(x_ref, out_ref, semaphore, {"b": 1 - lax.axis_index("b")})

    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE])
    expected = x.reshape(2, 2, 128)[:, ::-1].reshape(4, 128) + 1
    np.testing.assert_array_equal(run(kernel, mesh, x), expected)


def test_ids_that_join_two_axes_of_three():
    mesh = mesh_of(a=2, b=2, c=2)
    x = rows(mesh, (128,), np.float32)

    def body(x_ref, out_ref, semaphore):
        next_ = lax.rem(lax.axis_index(("a", "b")) + 1, 4)
        device = {("a", "b"): next_, "c": 1 - lax.axis_index("c")}
        plgpu.remote_ref(out_ref, device)[...] = x_ref[...]
        plgpu.semaphore_signal(semaphore, device_id=device)
        plgpu.semaphore_signal_parallel(plgpu.SemaphoreSignal(semaphore, device_id=device))
        pl.semaphore_wait(semaphore, 2)

    found = run(plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE]), mesh, x)
    expected = np.roll(x.reshape(4, 2, 128), 1, axis=0)[:, ::-1]
    np.testing.assert_array_equal(found, expected.reshape(8, 128))


def test_constant_ids_and_ids_of_loops_and_memory():
    mesh = mesh_of(x=4)
    x = rows(mesh, (128,), np.int32)
    places = np.broadcast_to(np.array([2, 3, 0, 1], np.int32), (4, 4))

    def body(x_ref, place_ref, out_ref, semaphore):
        own = lax.axis_index("x")

        def step(device, _):
            plgpu.remote_ref(out_ref, device)[own] = x_ref[...]
            pl.semaphore_signal(semaphore, 1, device_id=device)

        lax.fori_loop(0, 4, step, None)
        pl.semaphore_wait(semaphore, 4)

        @pl.when(own == 0)
        def _():
            plgpu.remote_ref(out_ref, 3)[4] = x_ref[...]
            pl.semaphore_signal(semaphore, 1, device_id=3)

        @pl.when(own == 3)
        def _():
            pl.semaphore_wait(semaphore)

        other = place_ref[own]
        plgpu.remote_ref(out_ref, other)[5] = x_ref[...]
        pl.semaphore_signal(semaphore, 1, device_id=other)
        pl.semaphore_wait(semaphore)

    out = jax.ShapeDtypeStruct((6, 128), np.int32)
    kernel = plgpu.kernel(body, out_type=out, scratch_types=[SEMAPHORE], compiler_params=PARTIAL)
    found = run(kernel, mesh, x, places)
    for device in range(4):
        np.testing.assert_array_equal(found[device, :4], x)
        np.testing.assert_array_equal(found[device, 5], x[places[0].tolist().index(device)])
    np.testing.assert_array_equal(found[3, 4], x[0])


def test_meshes_of_some_devices_in_another_order():
    if len(jax.devices()) < 7:
        pytest.skip("needs 7 devices")
    devices = np.array(jax.devices())[[6, 1, 4]]
    mesh = jax.sharding.Mesh(devices, ("x",))
    x = rows(mesh, (128,), np.int32)

    def body(x_ref, out_ref, semaphore):
        _put(x_ref, out_ref, semaphore, lax.rem(lax.axis_index("x") + 1, 3))

    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE])
    np.testing.assert_array_equal(run(kernel, mesh, x), np.roll(x, 1, axis=0) + 1)


def test_indices_of_devices_and_of_blocks_together():
    mesh = mesh_of(a=2, b=2)
    x = rows(mesh, (128,), np.int32)

    def body(x_ref, out_ref):
        block = lax.axis_index("grid")
        numbers = [
            lax.axis_index("a"),
            lax.axis_index(("b", "a")),
            lax.axis_index(("a", "grid")),
            lax.axis_size("b"),
        ]
        total = sum(number * 10**place for place, number in enumerate(numbers))
        out_ref[block] = x_ref[...] * 0 + total

    out = jax.ShapeDtypeStruct((3, 128), np.int32)
    kernel = plgpu.kernel(body, out_type=out, grid=(3,), grid_names=("grid",))
    found = run(kernel, mesh, x)[..., 0]
    expected = [
        [a + 10 * (2 * b + a) + 100 * (3 * a + block) + 2000 for block in range(3)]
        for a in range(2)
        for b in range(2)
    ]
    np.testing.assert_array_equal(found, expected)


def test_several_kernels_in_a_loop_and_independent_ones():
    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.int32)

    def body(x_ref, out_ref, semaphore):
        _put(x_ref, out_ref, semaphore, 1 - lax.axis_index("x"))

    one = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE])
    other = plgpu.kernel(
        body, out_type=like(x), scratch_types=[SEMAPHORE], grid=(1,), grid_names=("g",)
    )

    def program(x):
        in_loop = lax.fori_loop(0, 3, lambda i, value: one(value), x)
        return in_loop, one(x), other(x * 2), one(x * 3)

    in_loop, first, second, third = run(program, mesh, x)
    np.testing.assert_array_equal(in_loop, x[::-1] + 3)
    np.testing.assert_array_equal(first, x[::-1] + 1)
    np.testing.assert_array_equal(second, x[::-1] * 2 + 1)
    np.testing.assert_array_equal(third, x[::-1] * 3 + 1)


def test_kernels_of_the_front_ends_of_pallas():
    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.int32)
    options = {"compiler_params": plgpu.CompilerParams()}
    memory = pl.BlockSpec(memory_space=plgpu.GMEM)

    def body(x_ref, out_ref, semaphore):
        _put(x_ref, out_ref, semaphore, 1 - lax.axis_index("x"))

    by_call = pl.pallas_call(
        body,
        out_shape=like(x),
        in_specs=[memory],
        out_specs=memory,
        scratch_shapes=[SEMAPHORE],
        **options,
    )
    by_mesh = pl.kernel(
        body, out_type=like(x), scratch_types=[SEMAPHORE], mesh=plgpu.Mesh(), **options
    )
    for kernel in (by_call, by_mesh):

        def program(x, kernel=kernel):
            kernel(x * 5)  # Kept: other devices may wait for it.
            return kernel(x), kernel(x * 2)

        jaxpr = jax.make_jaxpr(program, axis_env=[("x", 2)])(x[0])
        assert {str(one) for one in jaxpr.effects} == {"Communication"}
        names = [str(one.primitive) for one in jaxpr.eqns]
        assert len([one for one in names if "call" in one or "map" in one]) == 3
        first, second = run(program, mesh, x)
        np.testing.assert_array_equal(first, x[::-1] + 1)
        np.testing.assert_array_equal(second, x[::-1] * 2 + 1)


def test_signals_together_and_reading_semaphores():
    mesh = mesh_of(x=4)
    x = rows(mesh, (128,), np.int32)

    def body(x_ref, out_ref, semaphores):
        own = lax.axis_index("x")
        out_ref[1] = x_ref[...] * 0 + pl.semaphore_read(semaphores.at[1])
        for step in range(1, 4):
            plgpu.remote_ref(out_ref, lax.rem(own + step, 4))[1 + step] = x_ref[...]
        plgpu.semaphore_signal_parallel(
            *[
                plgpu.SemaphoreSignal(semaphores.at[0], device_id=lax.rem(own + step, 4), inc=step)
                for step in range(1, 4)
            ],
            plgpu.SemaphoreSignal(semaphores.at[1], device_id=None, inc=7),
        )
        pl.semaphore_wait(semaphores.at[0], 6)
        out_ref[0] = x_ref[...] * 0 + pl.semaphore_read(semaphores.at[1])
        pl.semaphore_wait(semaphores.at[1], 7)

    out = jax.ShapeDtypeStruct((5, 128), np.int32)
    kernel = plgpu.kernel(body, out_type=out, scratch_types=[plgpu.SemaphoreType.REGULAR((2,))])
    found = run(kernel, mesh, x)
    assert (found[:, 0] == 7).all() and (found[:, 1] == 0).all()
    for step in range(1, 4):
        np.testing.assert_array_equal(found[:, 1 + step], np.roll(x, step, axis=0))


def test_a_loop_reads_a_semaphore_until_its_device_has_come():
    """All threads of a block go around the loop together, behind barriers of the block."""
    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.float32)

    def body(x_ref, out_ref, ready, done):
        peer = 1 - lax.axis_index("x")
        pl.semaphore_signal(ready, 3)
        there = plgpu.remote_ref(ready, peer)
        lax.while_loop(lambda found: found < 3, lambda _: pl.semaphore_read(there), jnp.int32(0))
        out_ref[...] = plgpu.remote_ref(x_ref, peer)[...]
        pl.semaphore_signal(done, device_id=peer)
        pl.semaphore_wait(done)
        pl.semaphore_wait(ready, 3)

    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE, SEMAPHORE])
    np.testing.assert_array_equal(run(kernel, mesh, x), x[::-1])


def test_global_semaphores_of_many_blocks():
    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.int32)

    def body(x_ref, out_ref):
        semaphore = pl.get_global(SEMAPHORE)
        other = 1 - lax.axis_index("x")
        block = lax.axis_index("grid")
        plgpu.remote_ref(out_ref, other)[block] = x_ref[...] + block
        pl.semaphore_signal(semaphore, 1, device_id=other)
        pl.semaphore_wait(semaphore, 4, decrement=False)

    out = jax.ShapeDtypeStruct((4, 128), np.int32)
    kernel = plgpu.kernel(body, out_type=out, grid=(4,), grid_names=("grid",))
    expected = x[::-1][:, None] + np.arange(4)[:, None]
    np.testing.assert_array_equal(run(kernel, mesh, x), expected)


def test_cold_programs_of_other_devices_do_not_meet_in_vain():
    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.float32)

    def body(x_ref, out_ref, semaphore):
        _put(x_ref, out_ref, semaphore, 1 - lax.axis_index("x"))

    kernel = plgpu.kernel(body, out_type=like(x), scratch_types=[SEMAPHORE])

    def program(x):
        total = lax.psum(kernel(x), "x")
        return kernel(total) + lax.psum(jnp.ones_like(x), "x")

    expected = np.broadcast_to((x + 1).sum(axis=0, keepdims=True), x.shape) + 3
    np.testing.assert_allclose(run(program, mesh, x), expected, rtol=1e-6)
