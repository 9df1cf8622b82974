"""Movements of arrays of odd shapes: which parts of arrays in one row go through shared memory.

Arrays that are only moved would be copied within global memory instead (``test_movements.py``).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import pallasite
from pallasite import gpu as plgpu
from pallasite.layouts import Extent, MemoryLayout, row_major
from pallasite.plugin.layouts import even, padded
from pallasite_std.memory.joins import _elements
from pallasite_std.memory.ordering import elements_of
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.rows import row
from pallasite_std.memory.scratch import _places_in
from pallasite_std.primitives.slices import Slice
from pallasite_std.spaces import MemorySpace

SEMANTICS = [plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup]


@pytest.fixture(autouse=True)
def _from_registers() -> Iterator[None]:
    with pallasite.config.scoped(disabled_passes="move-directly"):
        yield


def moved(body: Callable[[Any], Any], x: np.ndarray, semantics: Any) -> np.ndarray:
    """What a kernel makes of an array."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = body(x_ref[...])

    called = plgpu.kernel(
        kernel,
        out_type=jax.eval_shape(body, jax.ShapeDtypeStruct(x.shape, x.dtype)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    return np.asarray(called(x))


def numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    made = np.random.default_rng(seed).integers(0, 2 if dtype is bool else 100, shape)
    return made.astype(dtype)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("shape", "dtype", "shift", "axis"),
    [
        ((2, 61, 8), np.float16, 1, 2),
        ((37, 45), bool, 5, 1),
        ((13, 29), np.int64, -3, 0),
        ((301,), ml_dtypes.float8_e5m2, 7, 0),
        ((9, 11, 5), np.uint8, 4, 1),
    ],
)
def test_rolled(shape: tuple[int, ...], dtype: Any, shift: int, axis: int, semantics: Any) -> None:
    x = numbers(shape, dtype, 1)
    with jax.enable_x64(True):
        found = moved(lambda x: jnp.roll(x, shift, axis), x, semantics)
    np.testing.assert_array_equal(found, np.roll(x, shift, axis))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_rolled_where_half_of_the_array_has_room_beside_the_result(semantics: Any) -> None:
    """Two parts of the result are made, each of a window of the array."""
    x = numbers((121, 221), np.int64, 2)
    with jax.enable_x64(True):
        found = moved(lambda x: jnp.roll(x, 1, -1), x, semantics)
    np.testing.assert_array_equal(found, np.roll(x, 1, -1))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_parts_of_the_result_that_one_of_two_arrays_is_not_needed_for(semantics: Any) -> None:
    def body(x: Any) -> Any:
        return jnp.concatenate([x, -x[1000:3000]], 0)

    x = numbers((11294,), np.int64, 8)
    with jax.enable_x64(True):
        found = moved(body, x, semantics)
    np.testing.assert_array_equal(found, np.concatenate([x, -x[1000:3000]]))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_slices_of_several_arrays(semantics: Any) -> None:
    def body(x: Any) -> Any:
        y = x + 1
        return jnp.concatenate([x[:, 3:20], y[:, :5], x, y[:, 7:8], x[:, :2]], 1)

    x = numbers((17, 23), np.int16, 3)
    y = x + 1
    wanted = np.concatenate([x[:, 3:20], y[:, :5], x, y[:, 7:8], x[:, :2]], 1)
    np.testing.assert_array_equal(moved(body, x, semantics), wanted)


def test_a_slice_that_is_also_used_alone() -> None:
    def body(x: Any) -> Any:
        first = x[:5]
        return jnp.concatenate([x[5:], first], 0) + jnp.sum(first)

    x = numbers((19, 21), np.int32, 4)
    wanted = np.concatenate([x[5:], x[:5]], 0) + x[:5].sum()
    np.testing.assert_array_equal(moved(body, x, SEMANTICS[0]), wanted)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("mode", ["fill", "clip", "wrap"])
@pytest.mark.parametrize(
    ("shape", "dtype", "axis"),
    [((45, 27), np.int8, 0), ((29, 51), np.float32, 1), ((7, 11, 16), bool, 1), ((333,), "V", 0)],
)
@pytest.mark.sampled
def test_taken_elements(
    shape: tuple[int, ...], dtype: Any, axis: int, mode: str, semantics: Any
) -> None:
    """A loop loads them, whole rows of 16 bytes at once where there are such."""
    x = numbers(shape, ml_dtypes.bfloat16 if dtype == "V" else dtype, 5)
    extent, count = shape[axis], 53
    places = (np.arange(count) * 7 + 3) % (2 * extent) - extent // 2

    def body(x: Any) -> Any:
        own = (lax.iota(jnp.int32, count) * 7 + 3) % (2 * extent) - extent // 2
        return jnp.take(x, own, axis=axis, mode=mode)

    wanted = np.asarray(jnp.take(x, places, axis=axis, mode=mode))
    np.testing.assert_array_equal(moved(body, x, semantics), wanted)


def test_first_rows_of_an_array_that_does_not_fit_shared_memory() -> None:
    """Only the registers that hold them are stored."""
    x = numbers((206, 155), np.float64, 6)
    with jax.enable_x64(True):
        found = moved(lambda x: jnp.broadcast_to(x[:1], (3, 155)), x, SEMANTICS[0])
    np.testing.assert_array_equal(found, np.broadcast_to(x[:1], (3, 155)))


def test_layouts_that_reductions_in_functions_ask_for_reach_loads() -> None:
    """``jax.nn.log_softmax`` is a function of its own in the kernel."""

    def lines(body: Callable[[Any], Any]) -> int:
        def kernel(x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = body(x_ref[...])

        x = jax.ShapeDtypeStruct((84, 5), jnp.float16)
        called = plgpu.kernel(kernel, out_type=x)
        return len(pallasite.compile(called, x, target="sm_90a").ptx.splitlines())

    def inlined(x: Any) -> Any:
        shifted = x - lax.stop_gradient(jnp.max(x, -1, keepdims=True))
        return shifted - jnp.log(jnp.sum(jnp.exp(shifted), -1, keepdims=True))

    assert lines(jax.nn.log_softmax) <= 1.2 * lines(inlined)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_movements_beside_other_shared_memory(semantics: Any) -> None:
    """There is room for the array, and for a part of the result."""
    x = numbers((45, 391), np.float32, 7)

    def kernel(x_ref: Any, out_ref: Any, kept: Any) -> None:
        kept[0:1024] = x_ref[0, 0:1] + jnp.zeros((1024,), jnp.float32)
        out_ref[...] = jnp.roll(x_ref[...], 3, 1) + kept[0:1]

    called = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM((36000,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    np.testing.assert_array_equal(np.asarray(called(x)), np.roll(x, 3, 1) + x[0, 0])


# Windows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_windows_of_views_hold_their_elements(seed: int) -> None:
    choose = random.Random(seed)
    extents = [
        Extent(choose.randint(1, 5), choose.choice([-7, -1, 0, 1, 2, 6, 30]))
        for _ in range(choose.randint(1, 4))
    ]
    layout = MemoryLayout(tuple((one,) for one in extents), 16, 32)
    pointer: Any = None
    view = MemoryReference(pointer, layout, np.dtype(np.int32), MemorySpace.SMEM, 16, offset=400)
    places = [
        400 + sum(index * one.stride for index, one in zip(indices, extents, strict=True))
        for indices in itertools.product(*(range(one.size) for one in extents))
    ]
    elements = elements_of(view, 1000)
    for first in range(len(places)):
        for count in range(1, len(places) - first + 1):
            ((low, high),) = elements.windows(first, count)
            assert low <= min(places[first : first + count])
            assert high > max(places[first : first + count])


@pytest.mark.parametrize("seed", range(20))
def test_windows_of_slices_hold_their_elements(seed: int) -> None:
    choose = random.Random(seed)
    dimension = choose.randrange(3)
    shapes = [[2, 3, 4] for _ in range(choose.randint(1, 3))]
    for shape in shapes:
        shape[dimension] = choose.randint(1, 6)
    slices = []
    for _ in range(choose.randint(1, 4)):
        operand = choose.randrange(len(shapes))
        start = choose.randrange(shapes[operand][dimension])
        size = choose.randint(1, shapes[operand][dimension] - start)
        slices.append(Slice(operand, start, size))
    numbered = [np.arange(math.prod(shape)).reshape(shape) for shape in shapes]
    cut = [(slice(None),) * dimension + (slice(s.start, s.start + s.size),) for s in slices]
    parts = [numbered[one.operand][where] for one, where in zip(slices, cut, strict=True)]
    places = np.concatenate(parts, dimension).reshape(-1)
    owners = np.concatenate(
        [np.full(part.shape, one.operand) for one, part in zip(slices, parts, strict=True)],
        dimension,
    ).reshape(-1)
    elements = _elements(
        [tuple(shape) for shape in shapes], slices, dimension, np.dtype(np.float32)
    )
    assert elements.size == len(places)
    for first in range(len(places)):
        for count in range(1, len(places) - first + 1):
            windows = elements.windows(first, count)
            for operand, (low, high) in enumerate(windows):
                own = places[first : first + count][owners[first : first + count] == operand]
                assert (len(own) > 0) == (low < high)
                assert all(low <= place < high for place in own)


def test_rows_have_registers_that_follow_each_other() -> None:
    from pallasite_std.memory.row_parts import first_registers

    layout = row((37, 91), 8)
    part = first_registers(layout, 2)
    assert part is not None
    assert part.size == 2 * layout.part_of_register(1, 0)
    assert row_major(part.shape, 16).size == part.size


@pytest.mark.parametrize(
    ("body", "shape", "dtype"),
    [
        (lambda x: x + x[:1], (28, 11, 33), np.int16),
        (lambda x: x * x[3:4], (28, 11, 33), np.float32),
        (lambda x: x + x[5:6, :, 3:4], (25, 7, 45), np.int8),
        (lambda x: x + x[:, 2:3], (4, 12, 15), np.int32),
    ],
)
def test_of_a_part_only_its_registers_are_stored(
    body: Callable[[Any], Any], shape: tuple[int, ...], dtype: Any
) -> None:
    x = numbers(shape, dtype, 6)
    with pallasite.config.scoped(sanitize=True, disabled_passes="move-directly,load-slices"):
        for semantics in SEMANTICS:
            found = moved(body, x, semantics)
            np.testing.assert_array_equal(found, np.asarray(body(jnp.asarray(x))))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_stores_of_a_part_of_an_array_that_is_reduced(semantics: Any) -> None:
    """Of the registers that hold the array, a few hold elements of four rows."""

    def body(x: Any) -> Any:
        return jnp.sum(x, 1, keepdims=True)[3:7] + x[5:9]

    x = numbers((40, 33), np.float32, 14)
    with pallasite.config.scoped(disabled_passes="move-directly,load-slices"):
        np.testing.assert_array_equal(moved(body, x, semantics), body(jnp.asarray(x)))

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = body(x_ref[...])

    called = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((4, 33), np.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    with pallasite.config.scoped(disabled_passes="move-directly,load-slices"):
        text = pallasite.compile(called, x, target="sm_90a").ptx
    assert text.count("st.shared") <= 8


@pytest.mark.parametrize("seed", range(20))
def test_places_of_a_view_are_those_that_hold_its_elements(seed: int) -> None:
    choose = random.Random(seed)
    shape = tuple(choose.randint(1, 9) for _ in range(choose.randint(1, 3)))
    starts = [choose.randrange(n) for n in shape]
    sizes = [choose.randint(1, n - start) for n, start in zip(shape, starts, strict=True)]
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    offset = sum(start * step for start, step in zip(starts, steps, strict=True))
    extents = tuple(Extent(n, step) for n, step in zip(sizes, steps, strict=True))
    for layout in (row(shape, choose.choice([1, 2, 4])), padded(shape), even(shape, 1)):
        expected = set()
        for register, place in itertools.product(
            range(layout.registers), range(layout.vector_length)
        ):
            for warp, lane in itertools.product(range(4), range(32)):
                index = layout.element_at(warp, lane, register, place)
                held = zip(index, starts, sizes, strict=True)
                if all(start <= n < start + size for n, start, size in held):
                    expected.add((register, place))
        found = _places_in(layout, offset, extents)
        whole = len(expected) == layout.registers * layout.vector_length
        assert found == (None if whole or tuple(sizes) == shape else expected)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("shape", [(16, 61, 2), (1, 613, 1)])
def test_one_element_of_a_row(shape: tuple[int, ...], semantics: Any) -> None:
    """A slice with steps that has one element, of an array in one row."""
    x = numbers(shape, np.uint32, 5)
    part = tuple(slice(size // 2, size // 2 + 2, 2) for size in shape)

    def body(x: Any) -> Any:
        return lax.cond(jnp.max(x) > 3, lambda: x + x, lambda: x)[part]

    np.testing.assert_array_equal(moved(body, x, semantics), 2 * x[part])
