"""The operations library, against the same operations of ``jax.lax`` in NumPy."""

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
from pallasite_multigpu.ops import choice

REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduced(x, reduction):
    wide = x.astype(np.float64) if reduction == "add" else x
    return REDUCE[reduction].reduce(wide, axis=0)


def close(found, expected):
    """Equal up to one rounding to the type that was found."""
    if jnp.issubdtype(found.dtype, np.integer):
        np.testing.assert_array_equal(found, expected)
    else:
        tolerance = 4 * float(jnp.finfo(found.dtype).eps)
        wide = found.astype(np.float64)
        np.testing.assert_allclose(wide, expected.astype(np.float64), tolerance, tolerance)


@pytest.mark.parametrize(
    ("count", "shape", "dimension", "dtype"),
    [
        (2, (4, 128), 0, np.float32),
        (2, (3, 5, 7), 1, jnp.bfloat16),
        (3, (2, 130), -1, np.int8),
        (4, (1000,), 0, np.float16),
        (4, (8, 3, 64), 1, np.int32),
        (8, (3,), 0, np.int32),
        (2, (5, 1), 1, jnp.int4),
    ],
)
def test_all_gather(count, shape, dimension, dtype):
    x = numbers((count, *shape), dtype)
    operation = functools.partial(ops.all_gather, axis_name="x", gather_dimension=dimension)
    found = on_devices(operation, x)
    for row in found:
        np.testing.assert_array_equal(row, np.concatenate(list(x), axis=dimension))


@pytest.mark.parametrize(
    ("count", "shape", "dimension", "reduction", "dtype"),
    [
        (2, (4, 128), 0, "add", np.float32),
        (2, (3, 6, 5), 1, "add", jnp.bfloat16),
        (3, (5, 66), -1, "max", np.float16),
        (4, (8, 33), 0, "xor", np.int32),
        (4, (64, 2), 0, "min", np.int8),
        (8, (3, 16), 1, "add", np.int32),
        (2, (6, 5), 0, "xor", jnp.uint4),
    ],
)
def test_reduce_scatter(count, shape, dimension, reduction, dtype):
    x = numbers((count, *shape), dtype)
    operation = functools.partial(
        ops.reduce_scatter, axis_name="x", scatter_dimension=dimension, reduction=reduction
    )
    found = on_devices(operation, x)
    parts = np.split(reduced(x, reduction), count, axis=dimension)
    for row, part in zip(found, parts, strict=True):
        close(row, part)


@pytest.mark.parametrize(
    ("count", "shape", "method", "reduction", "dtype"),
    [
        (2, (1000,), None, "add", np.float32),
        (2, (2, 3), "one_step", "add", jnp.bfloat16),
        (3, (7, 9, 2), "two_steps", "max", np.float32),
        (4, (3, 128), "two_steps", "add", np.float16),
        (4, (5, 13), "two_steps", "or", np.int32),
        (8, (3,), "two_steps", "add", np.int32),
        (8, (11, 3), None, "add", jnp.bfloat16),
        (2, (9000,), "pipelined", "add", np.float32),
        (3, (40, 33), "pipelined", "add", jnp.bfloat16),
        (4, (5, 13), "pipelined", "xor", np.int32),
        (2, (1000,), "multicast", "add", np.float32),
        (4, (7, 33), "multicast", "add", jnp.bfloat16),
        (3, (640,), "multicast", "min", np.int32),
        (2, (7,), "one_step", "min", jnp.int4),
        (3, (3, 5), "two_steps", "max", jnp.int4),
    ],
)
def test_all_reduce(count, shape, method, reduction, dtype):
    x = numbers((count, *shape), dtype)
    operation = functools.partial(ops.all_reduce, axis_name="x", method=method, reduction=reduction)
    found = on_devices(operation, x)
    close(found[0], reduced(x, reduction))
    for row in found[1:]:  # The same bits.
        np.testing.assert_array_equal(row, found[0])


@pytest.mark.parametrize(("count", "dtype"), [(2, np.float32), (3, np.int32)])
def test_large_sums_in_two_steps(count, dtype):
    """Blocks have whole tiles, and what is left."""
    unroll = choice.unroll_of_all_reduce("two_steps", 4 << 20, np.dtype(dtype).itemsize)
    assert unroll == choice.UNROLL_TWO_STEPS
    tile = choice.plan(4, 1 << 20, count, 4, None, unroll).tile
    x = numbers((count, 3 * count * tile + 33), dtype)
    operation = functools.partial(
        ops.all_reduce, axis_name="x", method="two_steps", num_blocks=2, tile_size=tile
    )
    found = on_devices(operation, x)
    close(found[0], reduced(x, "add"))
    np.testing.assert_array_equal(found[1:], found[:-1])


def test_methods_are_chosen_by_size(monkeypatch):
    chosen = choice.method_of_all_reduce
    assert [chosen(1 << 10, 2), chosen(4 << 20, 2), chosen(64 << 20, 2)] == [
        *("two_steps", "two_steps", "pipelined"),
    ]
    unrolls = [("two_steps", 1 << 20, 4), ("two_steps", 8 << 20, 4), ("two_steps", 8 << 20, 2)]
    assert [choice.unroll_of_all_reduce(*one) for one in unrolls] == [8, 32, 8]
    assert [chosen(1 << 10, 2, False), chosen(4 << 20, 2, False)] == ["one_step", "two_steps"]
    assert [chosen(1 << 10, 8), chosen(4 << 20, 8), chosen(64 << 20, 8)] == [
        *("one_step", "two_steps", "pipelined"),
    ]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert [chosen(64 << 20, 2), chosen(64 << 20, 8)] == ["two_steps", "two_steps"]


def test_a_scatter_without_a_dimension_is_an_all_reduce():
    x = numbers((2, 4, 32), np.float32)
    operation = functools.partial(ops.reduce_scatter, axis_name="x", scatter_dimension=None)
    close(on_devices(operation, x)[1], reduced(x, "add"))


@pytest.mark.parametrize(
    ("count", "shape", "dtype", "from_", "to"),
    [
        (4, (8, 12), np.float32, 0, 0),
        (4, (8, 12), np.float32, 1, 0),
        (4, (8, 12), np.float32, 0, 1),
        (2, (3, 2, 5), jnp.bfloat16, 1, 2),
        (3, (7, 3), np.float16, 1, 0),
        (8, (8, 1), np.int32, 0, 1),
        (2, (5, 2), jnp.int4, 1, 0),
    ],
)
def test_all_to_all(count, shape, dtype, from_, to):
    x = numbers((count, *shape), dtype)
    operation = functools.partial(
        ops.all_to_all, axis_name="x", split_dimension=from_, concat_dimension=to
    )
    found = on_devices(operation, x)
    for device, row in enumerate(found):
        parts = [np.split(one, count, axis=from_)[device] for one in x]
        np.testing.assert_array_equal(row, np.concatenate(parts, axis=to))


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


@pytest.mark.parametrize("method", ["one_step", "two_steps", "pipelined"])
@pytest.mark.parametrize("axis", ["x", ("x", "y")])
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
