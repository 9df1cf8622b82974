"""Operations of the library within programs: axes, types, arguments, memory and gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import mesh_of, numbers, on_devices
from jax.sharding import PartitionSpec

from pallasite import config
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite_multigpu import ops


def test_along_one_axis_of_two_and_along_both():
    x = numbers((4, 6, 5), np.float32)
    grid = x.reshape(2, 2, 6, 5)
    found = on_devices(lambda row: ops.all_reduce(row, axis_name="b"), x, a=2, b=2)
    expected = np.broadcast_to(grid.sum(1, keepdims=True), grid.shape).reshape(x.shape)
    np.testing.assert_allclose(found, expected, 1e-6, 1e-6)
    found = on_devices(lambda row: ops.all_gather(row, axis_name=("a", "b")), x, a=2, b=2)
    np.testing.assert_array_equal(found[3], np.concatenate(list(x)))


def test_sizes_that_the_caller_chooses():
    x = numbers((2, 3000), np.float32)
    operation = functools.partial(
        ops.all_gather, axis_name="x", num_blocks=3, tile_size=512, vec_size=4
    )
    np.testing.assert_array_equal(on_devices(operation, x)[1], x.reshape(-1))


@pytest.fixture
def _64_bits():
    """For all threads: XLA calls kernels on its own."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("_64_bits")
def test_elements_of_64_bits():
    x = numbers((3, 3, 700), np.float64)
    for operation in (
        functools.partial(ops.all_reduce, axis_name="x"),
        functools.partial(ops.all_reduce, axis_name="x", method="pipelined"),
        functools.partial(ops.reduce_scatter, axis_name="x", scatter_dimension=None),
    ):
        np.testing.assert_allclose(on_devices(operation, x)[2], x.sum(0), 1e-13, 1e-13)
    whole = np.round(100 * x).astype(np.int64)
    found = on_devices(functools.partial(ops.all_to_all, axis_name="x"), whole)
    np.testing.assert_array_equal(found[1], whole[:, 1])


@pytest.mark.parametrize(
    ("operation", "error", "text"),
    [
        (
            lambda x: ops.all_gather(x, axis_name="x", gather_dimension=2),
            InvalidValueError,
            "gather_dimension is out of range\n  got: 2\n  expected: one of 2 dimensions",
        ),
        (
            lambda x: ops.reduce_scatter(x, axis_name="x"),
            InvalidValueError,
            "got: 3 elements along dimension 0\n  expected: a multiple of 2",
        ),
        (
            lambda x: ops.all_reduce(x, axis_name="x", reduction="mean"),
            InvalidValueError,
            "the reduction is unknown\n  got: 'mean'",
        ),
        (
            lambda x: ops.all_reduce(x, axis_name="x", reduction="xor"),
            InvalidTypeError,
            "the reduction 'xor' is of integers\n  got: float32",
        ),
        (
            lambda x: ops.all_reduce(x > 0, axis_name="x"),
            InvalidTypeError,
            "is of numbers\n  got: bool",
        ),
        (
            lambda x: ops.all_reduce(x, axis_name="x", method="ring"),
            InvalidValueError,
            "the method is unknown",
        ),
        (
            lambda x: ops.all_gather(x, axis_name="x", num_blocks=0),
            InvalidValueError,
            "num_blocks is no positive number",
        ),
        (
            lambda x: ops.all_gather(x, axis_name="x", tile_size=200, vec_size=4),
            InvalidValueError,
            "tile_size 200, vec_size 4\n  expected: a multiple of 512",
        ),
        (
            lambda x: ops.all_to_all(x, axis_name="x", split_dimension="y"),
            InvalidTypeError,
            "split_dimension is not an integer\n  got: 'y'",
        ),
        (lambda x: ops.all_gather([x], axis_name="x"), InvalidTypeError, "got: a list"),
        (
            lambda x: ops.all_reduce(x, axis_name=("x", "z")),
            InvalidValueError,
            "all_reduce: there is no axis of that name here\n  got: 'z'",
        ),
        (lambda x: ops.all_gather(x * 1j, axis_name="x"), InvalidTypeError, "got: complex64"),
        (lambda x: ops.all_gather(x, axis_name=["x"]), InvalidTypeError, "got: ['x']"),
        (lambda x: ops.all_reduce(x, axis_name=0), InvalidTypeError, "does not name an axis"),
        (lambda x: ops.all_reduce(x, axis_name=("x", "x")), InvalidValueError, "an axis twice"),
        (
            lambda x: jax.vmap(lambda r: ops.all_reduce(r, axis_name=("v", "x")), axis_name="v")(x),
            InvalidValueError,
            "the axis 'v' is not of devices\n  got: an axis of jax.vmap",
        ),
        (
            lambda x: x[ops.zigzag_order(3, 2)],
            InvalidValueError,
            "got: 3 tokens, 2 devices\n  expected: a multiple",
        ),
    ],
)
def test_arguments_that_do_not_fit(operation, error, text):
    with pytest.raises(error) as caught:
        on_devices(operation, numbers((2, 3, 4), np.float32))
    line = f"{__file__}:{operation.__code__.co_firstlineno} (<lambda>): "
    assert str(caught.value).startswith(line) and text in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "options", "text"),
    [
        (
            lambda x: ops.all_reduce(x, axis_name="x", method="multicast"),
            {},
            "multicast along some axes of the device mesh only\n  got: ['x']",
        ),
        (
            lambda x: ops.all_gather(x, axis_name="x"),
            {"axis_names": {"x"}},
            "some axes of the device mesh are not manual\n  got: manual ['x'] of ['x', 'y']",
        ),
    ],
)
def test_meshes_that_do_not_fit(operation, options, text):
    mesh, spec = mesh_of(x=2, y=2), PartitionSpec("x")
    call = jax.shard_map(operation, mesh=mesh, in_specs=spec, out_specs=spec, **options)
    with pytest.raises(UnsupportedError) as caught:
        jax.jit(call)(numbers((4, 4), np.float32))
    line = f"{__file__}:{operation.__code__.co_firstlineno} (<lambda>): "
    assert str(caught.value).startswith(line) and text in str(caught.value)


@pytest.mark.parametrize("method", ["one_step", "two_steps", "pipelined"])
def test_nobody_ends_while_others_use_its_memory(method):
    """By the sanitizer."""
    mesh, spec = mesh_of(x=3), PartitionSpec("x")
    x = numbers((18, 700), np.float32)

    def several(x):
        whole = ops.all_gather(x, axis_name="x")
        part = ops.reduce_scatter(whole, axis_name="x")
        other = ops.all_to_all(part, axis_name="x")
        return ops.all_reduce(x + part + other, axis_name="x", method=method)

    def reference(x):
        whole = jax.lax.all_gather(x, "x", tiled=True)
        part = jax.lax.psum_scatter(whole, "x", tiled=True)
        other = jax.lax.all_to_all(part, "x", 0, 0, tiled=True)
        return jax.lax.psum(x + part + other, "x")

    def on_each(function):
        call = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return np.asarray(jax.jit(call)(x))

    with config.scoped(sanitize=True):
        found = on_each(several)
    np.testing.assert_allclose(found, on_each(reference), 1e-5, 1e-5)


@pytest.mark.parametrize("method", ["two_steps", "pipelined"])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.sampled(alone=("method", "devices"))
def test_sums_in_place(method, devices):
    """The result takes the place of the operand: which is still what it was to what reads it later,
    and is the next operand in a loop."""
    mesh, spec = mesh_of(x=devices), PartitionSpec("x")
    x = numbers((devices * 5, 300), np.float32)

    def summed(x):
        return ops.all_reduce(x, axis_name="x", method=method)

    def program(x):
        after = x * summed(x)
        return after, jax.lax.fori_loop(0, 3, lambda _, x: summed(x) / (2 * devices), x)

    call = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with config.scoped(sanitize=True):
        after, looped = map(np.asarray, jax.jit(call)(x))
    total = np.tile(x.reshape(devices, -1, 300).sum(0), (devices, 1))
    np.testing.assert_allclose(after, x * total, 1e-5, 1e-5)
    np.testing.assert_allclose(looped, total / (8 * devices), 1e-5, 1e-5)


@pytest.mark.parametrize("method", ["one_step", "two_steps", "pipelined"])
@pytest.mark.parametrize("axis", ["x", ("x", "y")])
@pytest.mark.sampled(alone=("method", "axis"))
def test_reduced_arrays_do_not_vary(method, axis):
    """Where ``jax.shard_map`` checks that: a data-parallel step, as with ``lax.psum``."""
    axes = (axis,) if isinstance(axis, str) else axis
    mesh, data = mesh_of(x=2, y=2), PartitionSpec(axes)
    weights, x = numbers((7, 33), np.float32), numbers((4, 5, 7), np.float32)

    def step(total, weights, x):
        def loss(weights, x):
            outputs = jnp.tanh(x @ weights)
            return jnp.sum(total(jnp.sum(outputs, (0, 1)), axis) ** 2) + jnp.sum(weights)

        value, (d_weights, d_x) = jax.value_and_grad(loss, (0, 1))(weights, x)
        squares = jax.vmap(lambda row: total(row * row, axis), in_axes=1)(d_x[0])
        alike = total(jax.lax.pcast(weights, axes, to="varying"), axis) + total(weights, axis)
        return value, d_weights, d_x, squares, alike, total(weights[:0], axis)

    def on_mesh(total):
        replicated = PartitionSpec()
        specs = (replicated, replicated, data, replicated, replicated, replicated)
        program = functools.partial(step, total)
        call = jax.shard_map(program, mesh=mesh, in_specs=(replicated, data), out_specs=specs)
        return jax.jit(call)(weights, x)

    def ours(value, axis):
        return ops.all_reduce(value, axis_name=axis, method=method)

    for found, expected in zip(on_mesh(ours), on_mesh(jax.lax.psum), strict=True):
        np.testing.assert_allclose(found, expected, 1e-4, 1e-4)


@pytest.mark.parametrize("dtype", [np.float32, jnp.int4])
def test_reductions_of_one_device_do_not_vary(dtype):
    x = numbers((3, 5), dtype)
    call = jax.shard_map(
        lambda row: ops.all_reduce(row, axis_name="y", reduction="max"),
        mesh=mesh_of(x=3, y=1),
        in_specs=PartitionSpec(("x", "y")),
        out_specs=PartitionSpec("x"),
    )
    np.testing.assert_array_equal(jax.jit(call)(x), x)
