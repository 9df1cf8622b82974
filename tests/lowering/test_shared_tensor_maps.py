"""Outputs with copies of more tile shapes than the launcher passes tensor maps for."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.launch import ArrayParameter, Buffer, BufferKind, TensorMapParameter
from pallasite_std.copies.shared_tensor_maps import (
    arrangement,
    common_box,
    cut_boxes,
    shared_parameters,
)

# The choice of boxes ----------------------------------------------------------------------------

EXTENTS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


@st.composite
def families(draw):
    """Boxes of one rank, and the bits of their elements."""
    rank = draw(st.integers(1, 3))
    boxes = st.tuples(*[EXTENTS] * rank)
    return draw(st.lists(boxes, min_size=1, max_size=5)), draw(st.sampled_from([8, 16, 32, 128]))


def places(box):
    """The elements of a box in the order of shared memory."""
    return list(itertools.product(*map(range, box)))


@settings(deadline=None)
@given(families())
def test_parts_lie_one_after_the_other(family):
    boxes, bits = family
    part = common_box(boxes, bits)
    if part is None:
        return
    size = math.prod(part)
    for box in boxes:
        assert all(extent % one == 0 for extent, one in zip(box, part, strict=True))
        order = places(box)
        assert box == part or size * bits % 1024 == 0
        for begin in range(0, len(order), size):
            first = order[begin]
            inside = [tuple(f + i for f, i in zip(first, at, strict=True)) for at in places(part)]
            assert order[begin : begin + size] == inside


@given(families(), st.integers(1, 2))
def test_no_more_boxes_than_asked_for(family, count):
    boxes, bits = family
    cut = cut_boxes(boxes, count, bits)
    if cut is None:
        assert len(set(boxes)) > count
        return
    assert cut.keys() == set(boxes) and len(set(cut.values())) <= count
    for part in set(cut.values()):
        users = [box for box, one in cut.items() if one == part]
        assert common_box([*users, part], bits) == part


@pytest.mark.parametrize(
    ("boxes", "count", "bits", "expected"),
    [
        ([(64, 64)], 1, 16, [(64, 64)]),
        ([(64, 64), (32, 64)], 2, 16, [(64, 64), (32, 64)]),
        ([(64, 64), (32, 64)], 1, 16, [(32, 64), (32, 64)]),
        ([(1, 64), (64, 64), (4, 64), (16, 64)], 2, 16, [(1, 64), (64, 64), (1, 64), (1, 64)]),
        ([(64, 64), (48, 64), (24, 64), (40, 64)], 2, 32, [(64, 64), *[(8, 64)] * 3]),
        ([(4, 16, 64), (4, 8, 64)], 1, 16, [(1, 8, 64), (1, 8, 64)]),
        ([(4, 16, 64), (2, 16, 64)], 1, 16, [(2, 16, 64), (2, 16, 64)]),
        ([(8, 128), (8, 64)], 1, 32, [(1, 64), (1, 64)]),
        ([(8, 64), (4, 64), (2, 64)], 2, 8, [(8, 64), (2, 64), (2, 64)]),
        ([(3, 64), (4, 64)], 1, 8, None),  # Rows of 64 bytes.
        ([(64, 64)], 0, 16, None),
    ],
)
def test_boxes(boxes, count, bits, expected):
    cut = cut_boxes(boxes, count, bits)
    assert (cut and [cut[box] for box in boxes]) == expected


# Which parameters are replaced ------------------------------------------------------------------

OUTPUT = Buffer(BufferKind.OUTPUT, 0, (256, 256), np.dtype("float32"))
INPUT = dataclasses.replace(OUTPUT, kind=BufferKind.INPUT)


def tensor_map(rows, buffer=OUTPUT, swizzle=128):
    return TensorMapParameter(buffer, 6, (256, 256), (256, 1), (rows, 32), swizzle)


def always(parameter):
    return True


def test_few_parameters_are_left_alone():
    few = [tensor_map(8), tensor_map(4), *[tensor_map(rows, INPUT) for rows in (1, 2, 3)]]
    assert shared_parameters(few, [], always) == {}
    assert shared_parameters([ArrayParameter(OUTPUT), tensor_map(8)], [], always) == {}


def test_a_pointer_leaves_room_for_one_tensor_map():
    parameters = [tensor_map(12), ArrayParameter(OUTPUT), tensor_map(8)]
    assert shared_parameters(parameters, [], always) == {
        tensor_map(12): tensor_map(4),
        tensor_map(8): tensor_map(4),
    }


def test_an_aliased_pair_is_one_array():
    parameters = [ArrayParameter(INPUT), tensor_map(8, INPUT), tensor_map(8), tensor_map(4)]
    assert shared_parameters(parameters, [(0, 0)], always) == {
        tensor_map(8, INPUT): tensor_map(4, INPUT),
        tensor_map(8): tensor_map(4, INPUT),
        tensor_map(4): tensor_map(4, INPUT),
    }
    assert shared_parameters(parameters, [], always) == {}


def test_what_a_plugin_uses_in_its_own_way_is_left_alone():
    maps = [tensor_map(rows) for rows in (8, 4, 2)]
    assert shared_parameters(maps, [], lambda one: one != maps[1]) == {maps[0]: maps[2]}
    assert shared_parameters(maps, [], lambda one: False) == {}


def test_tensor_maps_that_differ_in_more_than_their_boxes():
    maps = [tensor_map(8), tensor_map(4), tensor_map(8, swizzle=16)]
    assert shared_parameters(maps, [], always) == {maps[0]: maps[1]}
    more = [*maps, dataclasses.replace(maps[0], shape=(128, 256))]
    assert shared_parameters(more, [], always) == {}


def test_order_of_dimensions():
    """A dimension of which a box has one element has no place in shared memory."""
    large = TensorMapParameter(OUTPUT, 6, (8, 256, 32), (32, 256, 1), (2, 64, 32), 128)
    row = TensorMapParameter(OUTPUT, 6, (256, 8, 32), (256, 32, 1), (1, 1, 32), 128)
    rows = dataclasses.replace(row, box=(4, 1, 32))
    other = dataclasses.replace(row, box=(4, 2, 32))
    assert arrangement(large, large) == (0, 1, 2)
    assert arrangement(row, large) == arrangement(rows, large) == (1, 0, 2)
    assert arrangement(other, large) is None
    assert shared_parameters([row, large, rows], [], always) == {
        row: dataclasses.replace(large, box=(1, 1, 32)),
        rows: dataclasses.replace(large, box=(1, 1, 32)),
    }
    assert shared_parameters([row, large, other], [], always) == {
        row: dataclasses.replace(large, box=(1, 1, 32)),
        large: dataclasses.replace(large, box=(1, 1, 32)),
    }


# Kernels ----------------------------------------------------------------------------------------

pytestmark = pytest.mark.runs_kernels
DTYPES = (jnp.int8, jnp.bfloat16, jnp.float32)
ROWS = 64


def values(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-50, 50, shape).astype(dtype))


def numbers(array):
    return np.asarray(array, np.float32)


def tensor_maps(kernel, *operands, output=0):
    """Boxes of the tensor maps of an output, or of the input that it shares memory with."""
    launch = pallasite.compile(kernel, *operands).launch
    given = {given for given, result in launch.aliases if result == output}
    return [
        one.box
        for one in launch.parameters
        if isinstance(one, TensorMapParameter)
        and (one.buffer.kind, one.buffer.index)
        in {(BufferKind.OUTPUT, output), *((BufferKind.INPUT, number) for number in given)}
    ]


def store_ladder(tile, target, first, count, **options):
    """Stores ``count`` rows of a tile, from ``first`` on, by copies of powers of two.

    Args:
      tile: shared memory of ``ROWS`` rows.
      target: makes the window of an output from the first row in the tile and the number of rows.
      first, count: computed in the kernel.
      **options: of the copies.
    """
    size = ROWS
    while size:

        @pl.when(count & size != 0)
        def _(first=first, size=size):
            part = tile.at[pl.ds(first, size)]
            plgpu.copy_smem_to_gmem(part, target(first, size), **options)

        first += count & size
        size //= 2


def rows_kernel(shape, dtype, columns, transforms, blocks, **options):
    """A kernel whose n-th block writes, in place, ``counts[n]`` rows of its tile of the second
    operand, from ``firsts[n]`` on, to the rows of the first operand from ``starts[n]`` on."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        input_output_aliases={0: 0},
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((ROWS, columns), dtype, transforms=transforms),
            plgpu.Barrier(),
        ],
    )
    def kernel(before_ref, x_ref, numbers_ref, o_ref, tile, loaded):
        block = jax.lax.axis_index("block")
        start, first, count = (numbers_ref[block, i] for i in range(3))
        plgpu.copy_gmem_to_smem(x_ref.at[block], tile, loaded)
        plgpu.barrier_wait(loaded)

        def window(row, size):
            return o_ref.at[pl.ds(start + row - first, size), pl.ds(columns, columns)]

        store_ladder(tile, window, first, count, **options)
        plgpu.wait_smem_to_gmem(0)

    return kernel


# Start in the output, first row of the tile, count; the last one ends behind the output.
PARTS = np.array([(0, 0, 64), (65, 0, 63), (130, 5, 37), (170, 63, 1), (171, 1, 0), (175, 7, 44)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["plain", "swizzled", "columns"])
@pytest.mark.parametrize("reduction", [None, "add"])
@pytest.mark.sampled
def test_any_number_of_rows(dtype, form, reduction):
    if reduction and dtype == jnp.int8:
        dtype = jnp.int32
    width = 128 // np.dtype(dtype).itemsize
    columns = width if form == "swizzled" else 2 * width
    transforms = [] if form == "plain" else [plgpu.SwizzleTransform(128)]
    boxes = [(ROWS, columns), (1, columns)]
    if form == "columns":
        transforms.insert(0, plgpu.TilingTransform((ROWS, width)))
        boxes = [(2, ROWS, width), (1, 1, width)]
    shape = (200, 2 * columns)
    options = {} if reduction is None else {"reduction_op": reduction}
    kernel = rows_kernel(shape, dtype, columns, transforms, len(PARTS), **options)
    before, x = values(shape, dtype), values((len(PARTS), ROWS, columns), dtype, seed=1)
    operands = before, x, jnp.asarray(PARTS, jnp.int32)
    assert tensor_maps(kernel, *operands) == boxes
    result = numbers(jax.jit(kernel)(*operands))
    expected = numbers(before).copy()
    for (start, first, count), tile in zip(PARTS, numbers(x), strict=True):
        end = min(start + count, len(expected))
        part = expected[start:end, columns:]
        part[...] = tile[first : first + end - start] + (part if reduction else 0)
    np.testing.assert_array_equal(result, expected)


def test_rows_of_half_a_line():
    """Parts begin at multiples of 128 bytes, so rows of 64 bytes are copied in pairs."""
    sizes = (32, 12, 6)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.int8),
        scratch_types=[plgpu.SMEM((64, 64), jnp.int8), plgpu.Barrier()],
    )
    def kernel(x_ref, o_ref, tile, loaded):
        plgpu.copy_gmem_to_smem(x_ref, tile, loaded)
        plgpu.barrier_wait(loaded)
        first = 0
        for size in (*sizes, 14):
            plgpu.copy_smem_to_gmem(tile.at[first : first + size], o_ref.at[pl.ds(first, size)])
            first += size
        plgpu.wait_smem_to_gmem(0)

    x = values((64, 64), jnp.int8)
    np.testing.assert_array_equal(jax.jit(kernel)(x), x)


@pytest.mark.parametrize("pointer", [False, True])
def test_two_outputs(pointer):
    """Each has tensor maps of its own; plain stores take the place of one of them."""
    shape = (96, 64)

    @plgpu.kernel(
        out_type=[
            jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(shape, "float32"),
        ],
        grid=(2,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((ROWS, 64), jnp.bfloat16, transforms=[plgpu.SwizzleTransform(128)]),
            plgpu.SMEM((ROWS, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    def kernel(x_ref, y_ref, count_ref, o_ref, p_ref, narrow, wide, loaded):
        block = jax.lax.axis_index("block")
        count = count_ref[block]
        start = block * count_ref[0]
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(start, ROWS)], narrow, loaded)
        plgpu.copy_gmem_to_smem(y_ref.at[pl.ds(start, ROWS)], wide, loaded)
        plgpu.barrier_wait(loaded)
        store_ladder(narrow, lambda row, size: o_ref.at[pl.ds(start + row, size)], 0, count)
        store_ladder(wide, lambda row, size: p_ref.at[pl.ds(start + row, size)], 0, count)
        plgpu.wait_smem_to_gmem(0)
        if pointer:

            @pl.when(block == 1)
            def _():
                p_ref[95, 63] = jnp.float32(-1)

    x, y = values(shape, jnp.bfloat16), values(shape, jnp.float32, seed=1)
    counts = jnp.array([57, 39], jnp.int32)
    assert tensor_maps(kernel, x, y, counts) == [(64, 64), (1, 64)]
    boxes = tensor_maps(kernel, x, y, counts, output=1)
    assert boxes == ([(1, 64)] if pointer else [(64, 64), (1, 64)])
    o, p = jax.jit(kernel)(x, y, counts)
    np.testing.assert_array_equal(numbers(o), numbers(x))
    expected = numbers(y).copy()
    if pointer:
        expected[95, 63] = -1
    np.testing.assert_array_equal(p, expected)


def test_boxes_that_differ_along_two_dimensions():
    """Parts of the first lie within one of its matrices; a dimension is squeezed."""
    shape = (4, 2, 32, 64)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((3, 32, 64), jnp.bfloat16, transforms=[plgpu.SwizzleTransform(128)]),
            plgpu.SMEM((32, 64), jnp.bfloat16, transforms=[plgpu.SwizzleTransform(128)]),
            plgpu.Barrier(num_arrivals=2),
        ],
    )
    def kernel(x_ref, places_ref, o_ref, tile, other, loaded):
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(0, 3), 0], tile, loaded)
        plgpu.copy_gmem_to_smem(x_ref.at[3, 0], other, loaded)
        plgpu.barrier_wait(loaded)
        one = places_ref[0]
        plgpu.copy_smem_to_gmem(tile, o_ref.at[pl.ds(one, 3), 0])
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, 2)], o_ref.at[pl.ds(0, 2), one])
        plgpu.copy_smem_to_gmem(tile.at[2, :16], o_ref.at[2, one, :16])
        plgpu.copy_smem_to_gmem(tile.at[2, 16:24], o_ref.at[2, one, 16:24])
        plgpu.copy_smem_to_gmem(tile.at[2, 24:], o_ref.at[2, one, 24:])
        plgpu.copy_smem_to_gmem(other, o_ref.at[3, 1])
        plgpu.copy_smem_to_gmem(other, o_ref.at[0, 0])
        plgpu.wait_smem_to_gmem(0)

    x = values(shape, jnp.bfloat16)
    places = jnp.array([1], jnp.int32)
    assert len(tensor_maps(kernel, x, places)) == 2
    result = numbers(jax.jit(kernel)(x, places))
    expected = numbers(x)[:, 0]
    np.testing.assert_array_equal(result[1:, 0], expected[:3])
    np.testing.assert_array_equal(result[0, 0], expected[3])
    np.testing.assert_array_equal(result[:, 1], expected)


def test_loads_from_an_array_that_is_written_in_place():
    """Loads, stores and prefetches of one array share what there is; barriers count its bytes."""
    shape = (128, 64)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        input_output_aliases={0: 0},
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16), plgpu.Barrier(num_arrivals=2)],
    )
    def kernel(x_ref, start_ref, o_ref, tile, loaded):
        plgpu.async_prefetch(o_ref.at[pl.ds(0, 56)])
        plgpu.copy_gmem_to_smem(x_ref.at[:48], tile.at[:48], loaded)
        plgpu.copy_gmem_to_smem(o_ref.at[pl.ds(start_ref[0], 16)], tile.at[48:], loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(tile, o_ref.at[pl.ds(start_ref[1], 64)])
        plgpu.wait_smem_to_gmem(0)
        plgpu.copy_smem_to_gmem(tile.at[:24], o_ref.at[pl.ds(104, 24)])
        plgpu.wait_smem_to_gmem(0)

    x, starts = values(shape, jnp.bfloat16), jnp.array([120, 48], jnp.int32)
    # Copies of static windows take a pointer.
    assert tensor_maps(kernel, x, starts) == [(8, 64)]
    expected = numbers(x).copy()
    tile = np.concatenate([expected[:48], expected[120:], np.zeros((8, 64), np.float32)])
    expected[48:112] = tile
    expected[104:] = tile[:24]
    np.testing.assert_array_equal(numbers(jax.jit(kernel)(x, starts)), expected)


@pytest.mark.parametrize("known", [1, 4, 8])
def test_layouts_that_inference_chooses(known):
    """Slices that begin at any row of several tiles of columns are right."""
    shape = (200, 128)

    @plgpu.kernel(
        out_type=[jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((16, 128), "f4")],
        scratch_types=[plgpu.SMEM((ROWS, 128), jnp.bfloat16), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    def kernel(x_ref, numbers_ref, o_ref, p_ref, tile, loaded):
        first, count = pl.multiple_of(numbers_ref[0], known), numbers_ref[1]
        plgpu.copy_gmem_to_smem(x_ref, tile, loaded)
        plgpu.barrier_wait(loaded)
        if known == 1:
            store_ladder(tile, lambda row, size: o_ref.at[pl.ds(row, size)], first, count)
        p_ref[...] = tile[pl.ds(first, 16)].astype(jnp.float32)
        plgpu.wait_smem_to_gmem(0)

    x = values((ROWS, 128), jnp.bfloat16)
    first, count = 3 * known, 39
    o, p = jax.jit(kernel)(x, jnp.array([first, count], jnp.int32))
    if known == 1:
        np.testing.assert_array_equal(numbers(o)[first : first + count], numbers(x)[first:][:count])
    np.testing.assert_array_equal(p, numbers(x)[first : first + 16])
