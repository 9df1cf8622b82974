"""Copies of windows that lie in one piece, with and without a tensor map."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.gpu import OOBFillMode

DTYPES = (jnp.int8, jnp.bfloat16, jnp.float32)
FORMS = {
    "load": r"cp\.async\.bulk\.shared::cta\.global\.",
    "store": r"cp\.async\.bulk\.global\.shared::cta\.bulk_group",
    "tensor": r"cp\.async\.bulk\.tensor",
    "cut": r"mbarrier\.complete_tx",
}


def values(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 8, shape).astype(dtype))


def numbers(array):
    """An array of any dtype as one that NumPy computes with."""
    return np.asarray(array).astype(np.float32)


def loader(shape, dtype, window, size, *, mode=None, count=1):
    """A kernel that loads ``count`` windows of an array, at the starts in rows of its second
    operand, and returns them; what no copy writes are ones."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((count, *size), dtype),
        scratch_types=[plgpu.SMEM(size, dtype), plgpu.Barrier()],
    )
    def kernel(x_ref, starts_ref, o_ref, tile, loaded):
        for place in range(count):
            tile[...] = jnp.ones(size, dtype)
            plgpu.commit_smem()
            index = window(lambda axis, place=place: starts_ref[place, axis])
            plgpu.copy_gmem_to_smem(x_ref.at[index], tile, loaded, oob_mode=mode)
            plgpu.barrier_wait(loaded)
            plgpu.copy_smem_to_gmem(tile, o_ref.at[place])
            plgpu.wait_smem_to_gmem(0)

    return kernel


def storer(shape, dtype, window, size, *, count=1):
    """A kernel that writes its third operand to windows of the first, in place."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        input_output_aliases={0: 0},
        scratch_types=[plgpu.SMEM(size, dtype), plgpu.Barrier()],
    )
    def kernel(before_ref, starts_ref, x_ref, o_ref, tile, loaded):
        for place in range(count):
            plgpu.copy_gmem_to_smem(x_ref.at[place], tile, loaded)
            plgpu.barrier_wait(loaded)
            index = window(lambda axis, place=place: starts_ref[place, axis])
            plgpu.copy_smem_to_gmem(tile, o_ref.at[index])
            plgpu.wait_smem_to_gmem(0)

    return kernel


def forms(kernel, *operands):
    """How many instructions of each form a kernel has."""
    ptx = pallasite.compile(kernel, *operands, target="sm_90a").ptx
    found = {name: len(re.findall(form, ptx)) for name, form in FORMS.items()}
    return {name: count for name, count in found.items() if count}


def load_forms(shape, window, size, *, dtype=jnp.float32, mode=None):
    """The forms of a load; the kernel's store of the result, a row of it, is left out."""
    kernel = loader(shape, dtype, window, size, mode=mode)
    x = jax.ShapeDtypeStruct(shape, dtype)
    found = forms(kernel, x, jax.ShapeDtypeStruct((1, 3), jnp.int32))
    found.pop("store", 0)
    return found


# Windows whose place is known ---------------------------------------------------------------------

INSIDE = [
    ((256,), np.s_[...]),
    ((64, 128), np.s_[...]),
    ((64, 128), np.s_[2:3]),
    ((64, 128), np.s_[3, 8:40]),
    ((3, 64, 128), np.s_[1, 8:24]),
    ((3, 64, 1, 128), np.s_[0, 0:32, 0, 0:128]),
    ((5, 5, 512), np.s_[4, 4]),
    ((8192,), np.s_[...]),
    ((8224,), np.s_[32:]),
    ((6, 20), np.s_[2:6]),
]


@pytest.mark.runs_kernels
@pytest.mark.parametrize(("shape", "part"), INSIDE)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_windows_inside_of_the_array(shape, part, dtype):
    """The same part of the array, of shared memory and of the result."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        input_output_aliases={0: 0},
        scratch_types=[plgpu.SMEM(shape, dtype), plgpu.Barrier()],
    )
    def kernel(before_ref, x_ref, o_ref, scratch, loaded):
        plgpu.copy_gmem_to_smem(x_ref.at[part], scratch.at[part], loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(scratch.at[part], o_ref.at[part])
        plgpu.wait_smem_to_gmem(0)

    before, x = values(shape, dtype, 1), values(shape, dtype, 2)
    expected = numbers(before)
    expected[part] = numbers(x)[part]
    np.testing.assert_array_equal(numbers(kernel(before, x)), expected)
    assert forms(kernel, x, x) == {"load": 1, "store": 1}


def test_zeros_are_filled_by_a_tensor_map():
    assert load_forms((64, 128), lambda start: ..., (64, 128), mode=OOBFillMode.ZEROS) == {
        "tensor": 1
    }


@pytest.mark.parametrize("mode", [None, *OOBFillMode])
def test_only_one_piece_is_one_piece(mode):
    """Part of each row, and shared memory in tiles."""
    assert load_forms((64, 128), lambda start: np.s_[:, :64], (64, 64), mode=mode) == {"tensor": 1}


def test_one_instruction_takes_what_no_tensor_map_describes():
    """4112 is 16 times a prime number; a box has at most 256 elements."""
    assert load_forms((5000,), lambda start: np.s_[16:4128], (4112,), dtype=jnp.int8) == {"load": 1}
    assert load_forms(
        (5000,), lambda start: np.s_[16:4128], (4112,), dtype=jnp.int8, mode=OOBFillMode.ZEROS
    ) == {"load": 1}


# Windows whose place the kernel computes ----------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        (None, {"tensor": 1}),
        (OOBFillMode.ZEROS, {"tensor": 1}),
        (OOBFillMode.UNDEFINED, {"load": 1, "cut": 1}),
        (OOBFillMode.PROMISE_IN_BOUNDS, {"load": 1}),
    ],
)
def test_modes(mode, found):
    assert load_forms((64, 128), lambda start: (pl.ds(start(0), 8),), (8, 128), mode=mode) == found


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        (None, {"tensor": 1}),
        (OOBFillMode.UNDEFINED, {"load": 1, "cut": 1}),
        (OOBFillMode.PROMISE_IN_BOUNDS, {"load": 1}),
    ],
)
def test_starts_in_rows_are_taken_to_be_aligned(mode, found):
    """As no tensor map could do without that either."""
    assert load_forms((4096,), lambda start: (pl.ds(start(0), 64),), (64,), mode=mode) == found


@pytest.mark.parametrize("mode", OOBFillMode)
def test_ends_inside_of_a_unit_need_a_tensor_map(mode):
    found = load_forms((4094,), lambda start: (pl.ds(start(0), 64),), (64,), mode=mode)
    assert found == ({"load": 1} if mode is OOBFillMode.PROMISE_IN_BOUNDS else {"tensor": 1})


@st.composite
def rows(draw):
    """(dtype, shape, size, starts) of windows of rows of 8 bytes more than a multiple of 16, which
    no tensor map describes; starts (index, pair of rows) from before the array to behind it."""
    dtype = draw(st.sampled_from(DTYPES))
    columns = (8 + 16 * draw(st.integers(0, 3))) // np.dtype(dtype).itemsize
    shape = (draw(st.integers(1, 3)), 2 * draw(st.integers(1, 8)), columns)
    size = (2 * draw(st.integers(1, 8)), columns)
    start = st.tuples(
        st.sampled_from([-1, 0, 0, shape[0] - 1, shape[0] - 1, shape[0]]),
        st.integers(-(size[0] // 2) - 1, shape[1] // 2 + 1),
    )
    return dtype, shape, size, draw(st.lists(start, min_size=6, max_size=6))


def pairs(start, size):
    return (start(0), pl.ds(start(1) * 2, size[0]))


def inside(shape, size, start):
    """Where a window lies in the array, and which of its rows do."""
    first = 2 * start[1]
    low, high = max(first, 0), min(first + size[0], shape[1])
    if not 0 <= start[0] < shape[0] or low >= high:
        return None
    return (start[0], slice(low, high)), slice(low - first, high - first)


@pytest.mark.runs_kernels
@settings(max_examples=15, deadline=None)
@given(rows())
def test_loads_that_leave_the_array(case):
    dtype, shape, size, starts = case
    x = values(shape, dtype)
    kernel = loader(
        shape,
        dtype,
        lambda start: pairs(start, size),
        size,
        mode=OOBFillMode.UNDEFINED,
        count=len(starts),
    )
    result = numbers(kernel(x, jnp.asarray(starts, jnp.int32)))
    for block, start in zip(result, starts, strict=True):
        if (found := inside(shape, size, start)) is not None:
            np.testing.assert_array_equal(block[found[1]], numbers(x)[found[0]])


@pytest.mark.runs_kernels
@settings(max_examples=15, deadline=None)
@given(rows())
def test_stores_that_leave_the_array(case):
    dtype, shape, size, starts = case
    before, x = values(shape, dtype, 1), values((len(starts), *size), dtype, 2)
    kernel = storer(shape, dtype, lambda start: pairs(start, size), size, count=len(starts))
    result = numbers(kernel(before, jnp.asarray(starts, jnp.int32), x))
    expected = numbers(before)
    for block, start in zip(numbers(x), starts, strict=True):
        if (found := inside(shape, size, start)) is not None:
            expected[found[0]] = block[found[1]]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.runs_kernels
def test_stores_to_a_place_that_is_known_to_be_outside():
    """Row -2 to row 4 of an array whose rows no tensor map describes."""
    before, x = values((10, 6), jnp.float32, 1), values((1, 6, 6), jnp.float32, 2)
    kernel = storer((10, 6), jnp.float32, lambda start: (pl.ds(start(0) * 2, 6),), (6, 6))
    result = kernel(before, jnp.asarray([[-1, 0]], jnp.int32), x)
    expected = np.asarray(before).copy()
    expected[:4] = np.asarray(x)[0, 2:]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
def test_elements_of_4_bits(dtype):
    """Rows of 12 bytes, from four rows before the array to four behind it."""
    shape, size, starts = (16, 24), (8, 24), [(-1, 0), (0, 0), (1, 0), (3, 0), (5, 0)]
    low = -8 if dtype == jnp.int4 else 0
    drawn = np.random.default_rng(0).integers(low, low + 16, (6, *shape))
    x, before = (jnp.asarray(array, dtype) for array in drawn[:2])
    blocks = jnp.asarray(drawn[:5, :8], dtype)

    def window(start):
        return (pl.ds(start(0) * 4, 8),)

    kernel = loader(shape, dtype, window, size, mode=OOBFillMode.UNDEFINED, count=len(starts))
    result = numbers(kernel(x, jnp.asarray(starts, jnp.int32)))
    stored = storer(shape, dtype, window, size, count=len(starts))
    written = numbers(stored(before, jnp.asarray(starts, jnp.int32), blocks))
    expected = numbers(before)
    for place, (start, _) in enumerate(starts):
        first = 4 * start
        at = slice(max(first, 0), min(first + 8, 16))
        part = slice(at.start - first, max(at.stop - first, 0))
        np.testing.assert_array_equal(result[place][part], numbers(x)[at])
        expected[at] = numbers(blocks)[place][part]
    np.testing.assert_array_equal(written, expected)


# Predicates and announced bytes -------------------------------------------------------------------


@pytest.mark.runs_kernels
@pytest.mark.parametrize("mode", [None, OOBFillMode.UNDEFINED])
def test_predicates(mode):
    """Of rows 0 to 7 those that an operand names are copied."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
    )
    def kernel(x_ref, wanted_ref, o_ref, row, loaded):
        row[...] = jnp.zeros((128,), jnp.float32)
        plgpu.commit_smem()
        for number in range(8):
            index = number if mode is None else wanted_ref[8] + number
            wanted = wanted_ref[number] != 0
            source = x_ref.at[index]
            plgpu.copy_gmem_to_smem(source, row, loaded, predicate=wanted, oob_mode=mode)
            plgpu.barrier_wait(loaded)
            plgpu.copy_smem_to_gmem(row, o_ref.at[number])
            plgpu.wait_smem_to_gmem(0)

    x = values((8, 128), jnp.float32)
    wanted = [1, 0, 0, 1, 1, 0, 1, 0, 0]
    copied = [0, 0, 0, 3, 4, 4, 6, 6]
    result = kernel(x, jnp.asarray(wanted, jnp.int32))
    np.testing.assert_array_equal(result, np.asarray(x)[copied])


@pytest.mark.runs_kernels
def test_bytes_that_were_announced_before():
    """Two copies of which one is cut, for one arrival."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, 6, 6), jnp.float32),
        scratch_types=[plgpu.SMEM((2, 6, 6), jnp.float32), plgpu.Barrier()],
    )
    def kernel(x_ref, start_ref, o_ref, tiles, loaded):
        tiles[...] = jnp.ones((2, 6, 6), jnp.float32)
        plgpu.commit_smem()
        plgpu.barrier_expect(loaded, tiles)
        for number in range(2):
            rows = pl.ds((start_ref[0] + number) * 2, 6)
            plgpu.copy_gmem_to_smem(
                x_ref.at[rows],
                tiles.at[number],
                loaded,
                oob_mode=OOBFillMode.UNDEFINED,
                arrive=False,
            )
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(tiles, o_ref)
        plgpu.wait_smem_to_gmem(0)

    x = values((10, 6), jnp.float32)
    result = np.asarray(kernel(x, jnp.asarray([2], jnp.int32)))
    np.testing.assert_array_equal(result[0], np.asarray(x)[4:10])
    np.testing.assert_array_equal(result[1, :4], np.asarray(x)[6:])
