"""The operations library, against the same operations of ``jax.lax`` in NumPy."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import numbers, on_devices

import pallasite
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


@pytest.mark.parametrize("method", ["two_steps", "pipelined"])
@pytest.mark.parametrize(
    ("count", "size", "dtype"),
    [(2, 7, jnp.bfloat16), (3, 8195, jnp.float16), (4, 4099, np.float32), (8, 33001, np.int16)],
)
def test_sums_whose_size_the_devices_do_not_divide(count, size, dtype, method):
    x = numbers((count, size), dtype)
    operation = functools.partial(ops.all_reduce, axis_name="x", method=method)
    found = on_devices(operation, x)
    close(found[0], reduced(x, "add"))
    np.testing.assert_array_equal(found[1:], found[:-1])


@pytest.mark.parametrize("size", [262144, 262145, (16 << 20) + 5])
def test_sums_of_any_size_are_made_in_place_by_wide_accesses(size):
    mesh, spec = jax.sharding.AbstractMesh((2,), ("x",)), jax.sharding.PartitionSpec("x")
    operation = functools.partial(ops.all_reduce, axis_name="x")
    call = jax.shard_map(operation, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = jax.NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((2 * size,), np.float32, sharding=sharding)
    traced = jax.jit(call).trace(x).jaxpr.jaxpr.pretty_print()
    assert not {"pad", "slice"} & set(re.findall(r"\b(pad|slice)\[", traced))
    (kernel,) = pallasite.compile_all(call, x, target="sm_90a")
    assert kernel.launch.aliases == ((0, 0),)
    narrow = re.findall(r"\b(?:ld|st)\.global\.b32 .*%rd", kernel.ptx)
    assert len(re.findall(r"ld\.global\.v4\.b32", kernel.ptx)) >= 8
    assert len(narrow) <= (4 if size % 8 else 1)  # What is left, and a semaphore.


def test_methods_are_chosen_by_size(monkeypatch):
    chosen = choice.method_of_all_reduce
    assert [chosen(1 << 10, 2), chosen(4 << 20, 2), chosen(64 << 20, 2)] == [
        *("two_steps", "two_steps", "pipelined"),
    ]
    unrolls = [("two_steps", 1 << 20, 4), ("two_steps", 8 << 20, 4), ("two_steps", 8 << 20, 2)]
    assert [choice.unroll_of_all_reduce(*one) for one in unrolls] == [8, 32, 8]
    assert [chosen(1 << 10, 8), chosen(4 << 20, 8), chosen(64 << 20, 8)] == [
        *("one_step", "two_steps", "pipelined"),
    ]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert [chosen(64 << 20, 2), chosen(64 << 20, 8)] == ["two_steps", "two_steps"]


def test_a_scatter_without_a_dimension_is_an_all_reduce():
    x = numbers((2, 4, 32), np.float32)
    operation = functools.partial(ops.reduce_scatter, axis_name="x", scatter_dimension=None)
    close(on_devices(operation, x)[1], reduced(x, "add"))


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_elements_of_64_bits(dtype):
    with jax.enable_x64(True):
        x = numbers((3, 5, 7), np.int64).astype(dtype) + (1 << 40)
        close(on_devices(functools.partial(ops.all_reduce, axis_name="x"), x)[1], x.sum(0))


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
