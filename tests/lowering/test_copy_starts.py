"""Windows of copies that begin at rows and columns known only when the kernel runs."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError

DTYPES = (jnp.int8, jnp.bfloat16, jnp.float32)
COPY = r"cp\.(?:reduce\.)?async\.bulk\.tensor"
TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def tiled(shape, dtype, swizzle, rows=8):
    """Shared memory in tiles whose rows are as wide as the swizzle."""
    columns = max(swizzle, 16) // np.dtype(dtype).itemsize
    transforms = [plgpu.TilingTransform((rows, columns))]
    if swizzle > 16:
        transforms.append(plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def values(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-100, 100, shape).astype(dtype))


def part(array, start, sizes):
    """The window of an array, with zeros beyond its ends."""
    result = np.zeros(sizes, array.dtype)
    for index in np.ndindex(*sizes):
        at = tuple(s + i for s, i in zip(start, index, strict=True))
        if all(0 <= a < n for a, n in zip(at, array.shape, strict=True)):
            result[index] = array[at]
    return result


def windows(kernel_starts, size, place):
    """The window of a reference at a row and a column of an array of starts."""
    return tuple(pl.ds(kernel_starts[place, axis], size[axis]) for axis in range(2))


def load(x, starts, scratch, *, blocks=1):
    """What copies of ``scratch.shape`` read at each of the starts (n, 2)."""
    size, count = scratch.shape, len(starts)
    cluster = dict(cluster=(blocks,), cluster_names=("pair",)) if blocks > 1 else {}
    shape = (blocks, count, *size)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(shape, x.dtype),
        scratch_types=[
            scratch,
            plgpu.Barrier(),
            *([plgpu.ClusterBarrier(collective_axes=("pair",))] if blocks > 1 else []),
        ],
        **cluster,
    )
    def kernel(x_ref, starts_ref, o_ref, tile, loaded, *free):
        block = lax.axis_index("pair") if blocks > 1 else 0

        @pl.loop(0, count)
        def _(place):
            window = x_ref.at[windows(starts_ref, size, place)]
            axes = "pair" if blocks > 1 else None
            plgpu.copy_gmem_to_smem(window, tile, loaded, collective_axes=axes)
            plgpu.barrier_wait(loaded)
            o_ref[block, place] = tile[...]
            plgpu.commit_smem()
            for barrier in free:
                plgpu.barrier_arrive(barrier)
                plgpu.barrier_wait(barrier)

    return np.asarray(kernel(x, jnp.asarray(starts, jnp.int32)))


def store(out, x, starts, scratch, *, reduction=None):
    """``out`` after windows at the starts (n, 2) were written with x (n, rows, columns)."""
    size = scratch.shape

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={0: 0},
        scratch_types=[scratch],
    )
    def kernel(before, x_ref, starts_ref, o_ref, tile):
        @pl.loop(0, len(starts))
        def _(place):
            tile[...] = x_ref[place]
            plgpu.commit_smem()
            window = o_ref.at[windows(starts_ref, size, place)]
            plgpu.copy_smem_to_gmem(tile, window, reduction_op=reduction)
            plgpu.wait_smem_to_gmem(0)

    return np.asarray(kernel(out, x, jnp.asarray(starts, jnp.int32)))


@st.composite
def cases(draw, least=0):
    """(array shape, scratch, starts): tiles beside and below each other, any starts that the
    hardware takes: columns in steps of 16 bytes, and for stores from 0 on (``least``)."""
    dtype = draw(st.sampled_from(DTYPES))
    swizzle = draw(st.sampled_from([16, 32, 64, 128]))
    rows = draw(st.sampled_from([8, 4])) if swizzle > 16 else 8
    unit = max(16, swizzle) // np.dtype(dtype).itemsize
    counts = [draw(st.sampled_from([1, 2, 4])) for _ in range(2)]
    counts[0] *= max(1, 128 // (rows * counts[0] * unit * counts[1]))
    size = (rows * counts[0], unit * counts[1])
    shape = (
        draw(st.sampled_from([8, 1])) * draw(st.integers(1, 6)),
        unit * draw(st.integers(1, 6)),
    )
    piece = 16 // np.dtype(dtype).itemsize
    start = st.tuples(
        st.integers(least * size[0], shape[0] + 3),
        st.integers(least * size[1] // piece, shape[1] // piece + 1).map(lambda n: n * piece),
    )
    starts = draw(st.lists(start, min_size=6, max_size=6))
    return shape, tiled(size, dtype, swizzle, rows), starts


@pytest.mark.runs_kernels
@settings(max_examples=12, deadline=None)
@given(cases(least=-1), st.sampled_from([1, 1, 2]))
def test_loads_from_any_start(case, blocks):
    shape, scratch, starts = case
    x = values(shape, scratch.dtype)
    try:
        result = load(x, starts, scratch, blocks=blocks)
    except InvalidValueError as error:
        assert "multiple of 128 bytes" in str(error) or "shared by" in str(error)
        return
    expected = np.stack([part(np.asarray(x), start, scratch.shape) for start in starts])
    for block in result:
        np.testing.assert_array_equal(block, expected)


@pytest.mark.runs_kernels
@settings(max_examples=12, deadline=None)
@given(cases())
def test_stores_to_any_start(case):
    shape, scratch, starts = case
    out = values(shape, scratch.dtype, 1)
    x = values((len(starts), *scratch.shape), scratch.dtype, 2)
    result = store(out, x, starts, scratch)
    expected = np.asarray(out).copy()
    for block, (row, column) in zip(np.asarray(x), starts, strict=True):
        for i, j in np.ndindex(*block.shape):
            if 0 <= row + i < shape[0] and 0 <= column + j < shape[1]:
                expected[row + i, column + j] = block[i, j]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.runs_kernels
def test_sums_from_any_start():
    scratch = tiled((16, 64), jnp.float32, 128)
    out, x = values((32, 128), jnp.float32, 1), values((3, 16, 64), jnp.float32, 2)
    starts = [(3, 4), (17, 64), (8, 72)]
    result = store(out, x, starts, scratch, reduction="add")
    expected = np.asarray(out).copy()
    for block, (row, column) in zip(np.asarray(x), starts, strict=True):
        rows, columns = min(16, 32 - row), min(64, 128 - column)
        expected[row : row + rows, column : column + columns] += block[:rows, :columns]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("swizzle", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_tiles_before_the_array(dtype, swizzle):
    """Starts that are known to be multiples of the tiles, from outside to outside; stores begin
    inside."""
    columns = max(swizzle, 16) // np.dtype(dtype).itemsize
    size, shape = (16, 2 * columns), (24, 3 * columns)
    if swizzle == 16:
        size = (16 * max(1, 128 // (16 * size[1])), size[1])
    steps = [(-3, -2), (-2, 0), (-1, -1), (-1, 1), (0, -1), (1, 2), (3, 3), (-1, -3)]
    x = values(shape, dtype)
    before, blocks = values(shape, dtype, 1), values((len(steps), *size), dtype, 2)

    @plgpu.kernel(
        out_type=[
            jax.ShapeDtypeStruct((len(steps), *size), dtype),
            jax.ShapeDtypeStruct(shape, dtype),
        ],
        input_output_aliases={0: 1},
        scratch_types=[tiled(size, dtype, swizzle), plgpu.Barrier()],
    )
    def kernel(before_ref, x_ref, blocks_ref, steps_ref, loaded_ref, stored_ref, tile, loaded):
        @pl.loop(0, len(steps))
        def _(place):
            row, column = steps_ref[place, 0] * 8, steps_ref[place, 1] * columns
            window = (pl.ds(row, size[0]), pl.ds(column, size[1]))
            plgpu.copy_gmem_to_smem(x_ref.at[window], tile, loaded)
            plgpu.barrier_wait(loaded)
            loaded_ref[place] = tile[...]
            tile[...] = blocks_ref[place]
            plgpu.commit_smem()
            window = (pl.ds(abs(row), size[0]), pl.ds(abs(column), size[1]))
            plgpu.copy_smem_to_gmem(tile, stored_ref.at[window])
            plgpu.wait_smem_to_gmem(0)

    operands = (before, x, blocks, jnp.asarray(steps, jnp.int32))
    results, stored = map(np.asarray, kernel(*operands))
    expected = np.asarray(before).copy()
    for block, (i, j) in zip(np.asarray(blocks), steps, strict=True):
        for row, column in np.ndindex(*size):
            at = (abs(8 * i) + row, abs(columns * j) + column)
            if all(0 <= a < n for a, n in zip(at, shape, strict=True)):
                expected[at] = block[row, column]
    np.testing.assert_array_equal(stored, expected)
    for block, (i, j) in zip(results, steps, strict=True):
        np.testing.assert_array_equal(block, part(np.asarray(x), (8 * i, columns * j), size))


# How many instructions ----------------------------------------------------------------------------


def issues(start, *, shape=(512, 512), size=(64, 128), axis=0, scratch=None, extent=4):
    """Instructions of one copy from ``start(index, number)``: of a loop, and out of memory."""
    scratch = scratch or plgpu.SMEM(size, jnp.bfloat16, transforms=TILES)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(size, jnp.bfloat16),
        scratch_types=[scratch, plgpu.Barrier()],
        grid=(extent,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
    )
    def kernel(x_ref, starts_ref, o_ref, tile, loaded):
        first = start(lax.axis_index("program"), starts_ref[0])
        window = [slice(None) if n == m else pl.ds(0, m) for n, m in zip(shape, size, strict=True)]
        window[axis] = pl.ds(first, size[axis])
        plgpu.copy_gmem_to_smem(x_ref.at[tuple(window)], tile, loaded)
        plgpu.barrier_wait(loaded)
        o_ref[...] = tile[...]

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    compiled = pallasite.compile(kernel, x, jax.ShapeDtypeStruct((1,), jnp.int32), target="sm_90a")
    return len(re.findall(COPY, compiled.ptx)), compiled


def test_rows_from_unknown_starts_are_copied_tile_by_tile():
    """One instruction for all tiles beside each other, which are one run of shared memory."""
    count, compiled = issues(lambda i, n: n)
    assert count == 8
    assert compiled.launch.parameters[0].box == (2, 8, 64)


def test_columns_from_unknown_starts_are_copied_tile_by_tile():
    count, compiled = issues(lambda i, n: n, axis=1)
    assert count == 16
    assert compiled.launch.parameters[0].box == (1, 8, 64)


def test_one_column_of_tiles_needs_no_known_start():
    assert issues(lambda i, n: n, size=(64, 64))[0] == 1


def test_untiled_memory_needs_no_known_start():
    assert issues(lambda i, n: n, scratch=plgpu.SMEM((64, 128), jnp.bfloat16))[0] == 1


def _in_steps(index, number):
    return lax.while_loop(lambda i: i < number, lambda i: i + 16, jnp.int32(64))


def _branches(index, number):
    return lax.cond(number > 3, lambda: index * 64, lambda: index * 8 + 128)


ALIGNED = {
    "promised": lambda i, n: pl.multiple_of(n, 8),
    "promised 24": lambda i, n: pl.multiple_of(n, 24),
    "promised and moved": lambda i, n: pl.multiple_of(n, 64) + 8,
    "program": lambda i, n: i * 64,
    "scaled": lambda i, n: 8 * n,
    "scaled sum": lambda i, n: (n + i) * 40 + 16,
    "difference": lambda i, n: 256 - n * 8,
    "shifted": lambda i, n: n << 3,
    "masked": lambda i, n: n & -8,
    "masked bits": lambda i, n: n & 0x18,
    "remainder": lambda i, n: lax.rem(n * 8, 64),
    "modulo": lambda i, n: (n * 8) % 64,
    "division": lambda i, n: lax.div(n, 64) * 64,
    "floor division": lambda i, n: n // 8 * 8,
    "quotient": lambda i, n: lax.div(n * 64, 8),
    "selected": lambda i, n: jnp.where(n > 7, i * 8, 64),
    "clipped": lambda i, n: jnp.clip(n * 8, 0, 448),
    "absolute": lambda i, n: jnp.abs(n * 8),
    "negative": lambda i, n: 64 + -(n * 16),
    "warpgroup": lambda i, n: lax.axis_index("warpgroup") * 64,
    "converted": lambda i, n: (n.astype(jnp.int32) * 8).astype(jnp.uint32),
    "branches": _branches,
    "in steps": _in_steps,
    "loop": lambda i, n: lax.fori_loop(0, n, lambda _, row: row + 24, i * 8),
    "long": lambda i, n: functools.reduce(lambda x, _: jnp.maximum(x, n) * 8, range(20), n),
}


@pytest.mark.parametrize("name", ALIGNED)
def test_known_multiples(name):
    assert issues(ALIGNED[name])[0] == 1


UNKNOWN = {
    "half": lambda i, n: lax.div(n * 8, 2),
    "sum": lambda i, n: i * 64 + n,
    "odd promise": lambda i, n: pl.multiple_of(n, 12),
    "bits": lambda i, n: (n * 24) | (i * 9),
    "xor": lambda i, n: (n * 24) ^ 4,
    "loop": lambda i, n: lax.fori_loop(0, n, lambda _, row: row + 4, i * 8),
    "loop of two": lambda i, n: lax.fori_loop(0, n, lambda _, p: (p[1], p[0] + 4), (i * 8, n))[0],
    "select": lambda i, n: jnp.where(n > 7, i * 8, 4),
    "shifted back": lambda i, n: (n * 16) >> 2,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_multiples(name):
    assert issues(UNKNOWN[name])[0] == 8


def inside(body, start, steps=4):
    """Instructions of one copy inside a loop that carries a row from ``start(number)``."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
        scratch_types=[plgpu.SMEM((64, 128), jnp.bfloat16, transforms=TILES), plgpu.Barrier()],
    )
    def kernel(x_ref, starts_ref, o_ref, tile, loaded):
        def step(carry):
            index, row = carry
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, 64)], tile, loaded)
            plgpu.barrier_wait(loaded)
            o_ref[...] = tile[...]
            return index + 1, body(row, starts_ref[1])

        lax.while_loop(lambda carry: carry[0] * 3 < steps, step, (0, start(starts_ref[0])))

    x = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    compiled = pallasite.compile(kernel, x, jax.ShapeDtypeStruct((2,), jnp.int32), target="sm_90a")
    return len(re.findall(COPY, compiled.ptx))


@pytest.mark.parametrize(
    ("body", "start", "count"),
    [
        (lambda row, n: row + 64, lambda n: 0, 1),
        (lambda row, n: row + n * 8, lambda n: n * 64, 1),
        (lambda row, n: lax.select(n > 0, row + 16, row - 8), lambda n: 64, 1),
        (lambda row, n: jax.jit(lambda row: row * 2)(row), lambda n: n * 8, 1),
        (lambda row, n: jnp.minimum(row + 8, 64), lambda n: 0, 1),
        (lambda row, n: row + 64, lambda n: n, 8),
        (lambda row, n: row + 4, lambda n: 64, 8),
        (lambda row, n: row + n, lambda n: 64, 8),
    ],
)
def test_rows_that_a_loop_carries(body, start, count):
    assert inside(body, start) == count


# Other instructions -------------------------------------------------------------------------------


def copies_of(kernel, x, target="sm_90a", copy=COPY):
    starts = jax.ShapeDtypeStruct((1,), jnp.int32)
    return len(re.findall(copy, pallasite.compile(kernel, x, starts, target=target).ptx))


@pytest.mark.parametrize(("promise", "count"), [(lambda n: n, 4), (lambda n: n * 8, 1)])
@pytest.mark.parametrize("partition", [None, "PARTITIONED", "REPLICATED"])
def test_copies_that_a_pair_shares(partition, promise, count):
    """Each block copies the tiles of its share."""
    size = (32, 128) if partition == "PARTITIONED" else (64, 128)
    mode = {"PARTITIONED": lambda: plgpu.CopyPartition.PARTITIONED(0), None: lambda: None}.get(
        partition, lambda: plgpu.CopyPartition.REPLICATED
    )()

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, *size), jnp.bfloat16),
        scratch_types=[plgpu.SMEM(size, jnp.bfloat16, transforms=TILES), plgpu.Barrier()],
        cluster=(2,),
        cluster_names=("pair",),
    )
    def kernel(x_ref, starts_ref, o_ref, tile, loaded):
        rows = pl.ds(promise(starts_ref[0]), 64)
        plgpu.copy_gmem_to_smem(
            x_ref.at[rows], tile, loaded, collective_axes="pair", leader_tracked=mode
        )
        plgpu.barrier_wait(loaded)
        o_ref[lax.axis_index("pair")] = tile[...]

    x = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    assert copies_of(kernel, x, "sm_100a" if partition else "sm_90a") == count


def test_prefetch_needs_no_tiles():
    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((1,), jnp.int32))
    def kernel(x_ref, starts_ref, o_ref):
        plgpu.async_prefetch(x_ref.at[pl.ds(starts_ref[0], 64), pl.ds(starts_ref[0], 128)])

    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    assert copies_of(kernel, x, copy="cp.async.bulk.prefetch.tensor") == 1


# Elements of 4 bits -------------------------------------------------------------------------------


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
@pytest.mark.parametrize("swizzle", [16, 32, 128])
@pytest.mark.parametrize("known", [False, True])
def test_windows_of_4_bits(dtype, swizzle, known):
    """The window's bytes go through shared memory to a window of the result."""
    width, transforms = 64, []
    if swizzle > 16:
        width = 2 * 2 * swizzle
        transforms = [plgpu.TilingTransform((8, width // 2)), plgpu.SwizzleTransform(swizzle)]
    steps = ((0, 0), (3, 32), (8, 64), (5, 416)) if known else ((1, 1), (0, 0), (7, 2))
    low = -8 if dtype == jnp.int4 else 0
    x = jnp.asarray(np.random.default_rng(0).integers(low, low + 16, (24, 1024)).astype(dtype))
    starts = jnp.asarray(steps, jnp.int32)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((len(steps) * 8, 1024), dtype),
        scratch_types=[plgpu.SMEM((8, width), dtype, transforms=transforms), plgpu.Barrier()],
    )
    def kernel(x_ref, starts_ref, o_ref, tile, loaded):
        for place, (row, column) in enumerate(steps):
            if not known:
                row, column = starts_ref[place, 0], starts_ref[place, 1] * 32
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, 8), pl.ds(column, width)], tile, loaded)
            plgpu.barrier_wait(loaded)
            window = o_ref.at[pl.ds(8 * place, 8), pl.ds(column, width)]
            plgpu.copy_smem_to_gmem(tile, window)
            plgpu.wait_smem_to_gmem(0)

    result = np.asarray(kernel(x, starts)).astype(np.int8)
    for place, (row, column) in enumerate(steps):
        column *= 1 if known else 32
        columns = slice(column, column + width)
        expected = np.asarray(x).astype(np.int8)[row : row + 8, columns]
        np.testing.assert_array_equal(result[8 * place : 8 * place + 8, columns], expected)


# Swizzled buffers ---------------------------------------------------------------------------------


@pytest.mark.runs_kernels
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sampled
def test_parts_of_swizzled_buffers(dtype, swizzle, known):
    """Copies that begin at any 128 bytes of a buffer keep to the pattern of its addresses."""
    columns, step = swizzle // np.dtype(dtype).itemsize, 128 // swizzle
    total, rows = 32 * step, 3 * step
    x = values((total, columns), dtype)
    firsts = range(0, total, rows)
    places = [min(first, total - rows) for first in firsts]

    @plgpu.kernel(
        out_type=[jax.ShapeDtypeStruct((total, columns), dtype)] * 2,
        scratch_types=[tiled((total, columns), dtype, swizzle), plgpu.Barrier()],
    )
    def kernel(x_ref, places_ref, values_ref, copied_ref, tile, loaded):
        def part(number):
            first = places[number]
            return first if known else pl.multiple_of(places_ref[number], step)

        for number, first in enumerate(places):
            window = tile.at[pl.ds(part(number), rows)]
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(first, rows)], window, loaded)
            plgpu.barrier_wait(loaded)
        values_ref[...] = tile[...]
        for number, first in enumerate(places):
            window = tile.at[pl.ds(part(number), rows)]
            plgpu.copy_smem_to_gmem(window, copied_ref.at[pl.ds(first, rows)])
            plgpu.wait_smem_to_gmem(0)

    for result in kernel(x, jnp.asarray(places, jnp.int32)):
        np.testing.assert_array_equal(result, x)


@pytest.mark.runs_kernels
def test_computed_parts_of_tiles():
    """Rows that stay in a tile may begin anywhere in it, and several tiles where one begins."""
    x = values((64, 64), jnp.bfloat16)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((8, 22, 64), jnp.bfloat16),
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16, transforms=TILES), plgpu.Barrier()],
    )
    def kernel(x_ref, numbers_ref, o_ref, tile, loaded):
        plgpu.copy_gmem_to_smem(x_ref, tile, loaded)
        plgpu.barrier_wait(loaded)
        for place in range(8):
            number = numbers_ref[place]
            o_ref[place, :4] = tile[pl.ds(number * 8 + 2, 4)]
            o_ref[place, 4:6] = tile[pl.ds(6 + number * 8, 2)]
            first = jnp.minimum(number * 8, 48)
            o_ref[place, 6:] = tile[pl.ds(first, 16)]

    order = [3, 7, 0, 5, 1, 2, 6, 4]
    result = np.asarray(kernel(x, jnp.asarray(order, jnp.int32)))
    rows = np.asarray(x).reshape(8, 8, 64)
    for block, number in zip(result, order, strict=True):
        first = min(8 * number, 48)
        np.testing.assert_array_equal(block[:4], rows[number, 2:6])
        np.testing.assert_array_equal(block[4:6], rows[number, 6:8])
        np.testing.assert_array_equal(block[6:], np.asarray(x)[first : first + 16])
