"""TMA plans, carried out in NumPy as the engine would, against the expected shared memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.errors import InvalidValueError
from pallasite.layouts import MemoryLayout, row_major, swizzle_bytes
from pallasite_std.copies.tensor_map_types import (
    TensorMapPlan,
    WindowDimension,
    element_code,
    reduction_operator,
)
from pallasite_std.copies.tensor_maps import plan_tensor_map, start_alignment

DTYPES = {8: "uint8", 16: "uint16", 32: "uint32"}


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def copy(plan: TensorMapPlan, flat: np.ndarray, starts: Sequence[int], size: int) -> np.ndarray:
    """Executes a plan for all blocks; the shared memory in bytes (pattern 0xAB if unwritten)."""
    item = plan.element_bits // 8
    data = flat.view(np.uint8).reshape(-1, item)
    shared = np.full(size, 0xAB, np.uint8)
    written = np.zeros(size, bool)
    for block, issue in itertools.product(range(plan.blocks), plan.issues):
        first = [
            c.value(starts) + i for c, i in zip(plan.coordinates, issue.coordinates, strict=True)
        ]
        base = issue.shared_offset
        for term in plan.block_terms:
            first[term.tensor_dim] += term.place(block) * term.coordinate_step
            base += term.place(block) * term.shared_stride
        assert base * item % 128 == 0
        for linear, box in enumerate(np.ndindex(*plan.box)):
            at = [f + b for f, b in zip(first, box, strict=True)]
            inside = all(0 <= a < n for a, n in zip(at, plan.shape, strict=True))
            source = sum(a * s for a, s in zip(at, plan.strides, strict=True))
            value = data[source] if inside else 0
            address = swizzle_bytes((base + linear) * item, plan.swizzle)
            assert not written[address : address + item].any()
            shared[address : address + item] = value
            written[address : address + item] = True
    return shared


def check(
    shape: Sequence[int],
    starts: Sequence[int],
    window: Sequence[WindowDimension],
    shared: MemoryLayout,
    *,
    blocks: int = 1,
) -> TensorMapPlan:
    bits = shared.element_bits
    plan = plan_tensor_map(
        shape, packed_strides(shape), DTYPES[bits], window, shared, blocks=blocks
    )
    dtype = np.dtype(DTYPES[bits])
    array = (np.arange(math.prod(shape)) * 2654435761 % 251 + 1).astype(dtype).reshape(shape)
    size = -(-(shared.cosize * bits // 8) // 1024) * 1024
    got = copy(plan, array.ravel(), starts, size)
    expected = np.full(size, 0xAB, np.uint8)
    for index in np.ndindex(*shared.shape):
        inner = iter(index)
        at = [s + (0 if w.squeezed else next(inner)) for s, w in zip(starts, window, strict=True)]
        inside = all(0 <= a < n for a, n in zip(at, shape, strict=True))
        value = array[tuple(at)] if inside else dtype.type(0)
        address = shared.byte_address(index)
        expected[address : address + dtype.itemsize] = np.frombuffer(value.tobytes(), np.uint8)
    np.testing.assert_array_equal(got, expected)
    assert plan.expected_bytes == shared.size * bits // 8
    assert plan.rank <= 5 and max(plan.box) <= 256
    return plan


def tiled(shape: Sequence[int], bits: int, swizzle: int, rows: int = 8) -> MemoryLayout:
    columns = 8 * swizzle // bits
    *lead, m, n = shape
    physical = (*lead, m // rows, n // columns, rows, columns)
    return row_major(physical, bits, swizzle).untile((rows, columns))


def whole(starts: Sequence[int], sizes: Sequence[int], dynamic: bool) -> list[WindowDimension]:
    return [WindowDimension(None if dynamic else s, n) for s, n in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_swizzled_rows_one_after_the_other(bits: int, swizzle: int) -> None:
    """Tiles of one row are no tiles at all: their rows join to longer ones than a box can have."""
    columns = 8 * swizzle // bits
    shared = tiled((16, 4 * columns), bits, swizzle, rows=1)
    starts = (8, columns)
    plan = check((40, 8 * columns), starts, whole(starts, (16, 4 * columns), False), shared)
    assert plan.box == (16, 4, columns) and len(plan.issues) == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_tiled_copy(bits: int, swizzle: int, dynamic: bool) -> None:
    columns = 8 * swizzle // bits
    shape = (32, 4 * columns)
    for starts in ((0, 0), (8, columns), (24, 3 * columns)):
        window = whole(starts, (16, 2 * columns), dynamic)
        plan = check(shape, starts, window, tiled((16, 2 * columns), bits, swizzle))
        assert len(plan.issues) == 1 and plan.box == (2, 2, 8, columns)


def test_untiled_and_transposed_order() -> None:
    plan = check((32, 64), (4, 16), whole((4, 16), (8, 32), True), row_major((8, 32), 16))
    assert plan.rank == 2 and plan.box == (8, 32)
    check((32, 64), (30, 48), whole((30, 48), (8, 32), True), row_major((8, 32), 16))
    order = row_major((4, 2, 32), 16).transpose((1, 0, 2))
    check((3, 5, 64), (2, 3, 0), whole((2, 3, 0), (2, 4, 32), True), order)


def test_array_that_tiles_do_not_divide() -> None:
    plan = check(
        (20, 100 * 4), (16, 384), whole((16, 384), (16, 128), True), tiled((16, 128), 16, 128)
    )
    assert len(plan.issues) > 1
    plan = check((5, 64), (0, 0), whole((0, 0), (8, 64), False), tiled((8, 64), 16, 128))
    assert len(plan.issues) == 1
    plan = check((1, 64), (0, 0), whole((0, 0), (16, 64), False), tiled((16, 64), 16, 128))


def test_start_that_is_not_a_multiple_of_the_tile() -> None:
    window = [WindowDimension(3, 16), WindowDimension(None, 128, multiple_of=1)]
    plan = check((32, 256), (3, 17), window, tiled((16, 128), 16, 128))
    assert len(plan.issues) == 4


@pytest.mark.parametrize(
    ("rows", "columns", "box", "issues"),
    [
        (8, 64, (2, 2, 8, 64), 1),
        (16, 128, (2, 2, 8, 64), 1),
        (4, 64, (2, 8, 64), 2),
        (1, 64, (2, 8, 64), 2),
        (8, 8, (1, 8, 64), 4),
        (1, 1, (8, 64), 4),
    ],
)
def test_what_starts_are_multiples_of(
    rows: int, columns: int, box: Sequence[int], issues: int
) -> None:
    """Only a dimension of which too little is known is copied tile by tile."""
    window = [
        WindowDimension(None, 16, multiple_of=rows),
        WindowDimension(None, 128, multiple_of=columns),
    ]
    shared = tiled((16, 128), 16, 128)
    plan = check((32, 256), (rows, columns), window, shared)
    assert plan.box == tuple(box) and len(plan.issues) == issues
    assert start_alignment(window, shared) == (8, 64)


def test_start_within_wide_tiles() -> None:
    """A start that is a multiple of the inner tiles alone still copies those in one go."""
    # Columns lie in memory as two blocks of two tiles of 32, with the rows' tiles in between.
    order = row_major((2, 2, 2, 8, 32), 16, 64)
    block, row_tile, tile, row, column = order.dims
    shared = order.with_dims([row_tile + row, block + tile + column])
    for multiple, issues in ((64, 1), (32, 2), (16, 8)):
        window = [WindowDimension(8, 16), WindowDimension(None, 128, multiple_of=multiple)]
        plan = check((32, 256), (8, multiple), window, shared)
        assert len(plan.issues) == issues


@pytest.mark.parametrize("rows", [300, 512, 1024])
def test_long_boxes_are_split(rows: int) -> None:
    plan = check((2048, 32), (8, 0), whole((8, 0), (rows, 32), True), row_major((rows, 32), 16))
    assert len(plan.issues) == -(-rows // 256)


def test_long_inner_box_is_factored_or_split() -> None:
    plan = check((8, 1024), (2, 512), whole((2, 512), (4, 512), False), row_major((4, 512), 16))
    assert len(plan.issues) == 1 and plan.box == (4, 2, 256)
    plan = check((8, 1024), (2, 512), whole((2, 512), (4, 512), True), row_major((4, 512), 16))
    assert len(plan.issues) == 8
    plan = check((4096,), (1024,), [WindowDimension(None, 1024)], row_major((1024,), 16))
    assert len(plan.issues) == 4
    with pytest.raises(InvalidValueError, match="would take 521 TMA instructions"):
        check((521, 64), (0, 0), whole((0, 0), (521, 64), True), row_major((521, 64), 16))


def test_part_of_a_larger_buffer() -> None:
    part = row_major((8, 128), 16).slice(1, 64, 64).layout
    plan = check((64, 256), (8, 64), whole((8, 64), (8, 64), True), part)
    assert len(plan.issues) == 8 and plan.box == (1, 64)


def test_squeezed_unit_and_many_dimensions() -> None:
    window = [WindowDimension(None, 1, True), *whole((8, 64), (8, 64), True)]
    plan = check((3, 16, 128), (2, 8, 64), window, tiled((8, 64), 16, 128))
    assert plan.rank == 3
    window = [WindowDimension(None, 1, True), *whole((8, 64), (8, 64), True)]
    assert check((1, 16, 128), (0, 8, 64), window, tiled((8, 64), 16, 128)).rank == 2
    lead = [WindowDimension(None, 1, True)] * 3
    window = [*lead, *whole((8, 64), (16, 128), True)]
    plan = check((2, 3, 2, 32, 256), (1, 2, 1, 8, 64), window, tiled((16, 128), 16, 128))
    assert plan.rank == 5
    shape = (2, 3, 2, 2, 2, 2, 64)
    window = whole((0,) * 7, shape, False)
    plan = check(shape, (0,) * 7, window, row_major(shape, 16))
    assert plan.rank <= 5
    shared = row_major((2, 2, 2, 1, 2, 1, 32), 16)
    window = whole((1,) * 6 + (32,), shared.shape, True)
    with pytest.raises(InvalidValueError, match="at most 5"):
        check(shape, (1,) * 6 + (32,), window, shared)


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_multicast(blocks: int) -> None:
    starts = (8, 64)
    plan = check(
        (64, 512), starts, whole(starts, (32, 128), True), tiled((32, 128), 16, 128), blocks=blocks
    )
    assert plan.issue_bytes * blocks == 32 * 128 * 2
    plan = check(
        (64, 512), starts, whole(starts, (2, 128), True), row_major((2, 128), 32), blocks=blocks
    )
    check((30, 512), starts, whole(starts, (16, 256), True), tiled((16, 256), 16, 128), blocks=2)


def test_multicast_errors() -> None:
    window = whole((0, 0), (6, 64), True)
    with pytest.raises(InvalidValueError, match="cannot be shared by 4 blocks"):
        check((64, 64), (0, 0), window, row_major((6, 64), 16, 128), blocks=4)
    window = whole((0, 0), (1, 64), True)
    with pytest.raises(InvalidValueError, match="multiple of 128 bytes"):
        check((64, 64), (0, 0), window, row_major((1, 64), 16), blocks=4)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_windows(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([8, 16]))
    swizzle = data.draw(st.sampled_from([16, 32, 64]))
    columns = 8 * swizzle // bits
    rows = data.draw(st.sampled_from([2, 8]))
    sizes = (rows * data.draw(st.integers(1, 2)), columns * data.draw(st.integers(1, 2)))
    unit = 128 // bits
    shape = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 24)),
        unit * data.draw(st.integers(1, 5 * columns // unit)),
    )
    starts = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    window = [WindowDimension(data.draw(st.sampled_from([None, starts[0]])), 1, True)]
    for start, size in zip(starts[1:], sizes, strict=True):
        known = data.draw(st.booleans())
        window.append(
            WindowDimension(start if known else None, size, multiple_of=math.gcd(start, 64))
        )
    shared = tiled(sizes, bits, swizzle, rows)
    blocks = data.draw(st.sampled_from([1, 1, 2]))
    try:
        check(shape, starts, window, shared, blocks=blocks)
    except InvalidValueError as error:
        text = str(error)
        assert "multiple of 128 bytes" in text or "shared by" in text


def test_limits() -> None:
    def plan(
        shape: Sequence[int], sizes: Sequence[int], shared: MemoryLayout, **kw: object
    ) -> None:
        dtype = str(kw.pop("dtype", DTYPES[shared.element_bits]))
        window = whole((0,) * len(shape), sizes, True)
        strides = tuple(kw.pop("strides", packed_strides(shape)))  # type: ignore[call-overload]
        plan_tensor_map(shape, strides, dtype, window, shared)

    with pytest.raises(InvalidValueError, match="stride of 12 elements of 8 bits"):
        plan((8, 12), (8, 12), row_major((8, 12), 8))
    with pytest.raises(InvalidValueError, match="multiple of 16 bytes"):
        plan((8, 64), (8, 4), row_major((8, 4), 16))
    with pytest.raises(InvalidValueError, match="exactly 128 bytes, that is 64"):
        plan((8, 64), (8, 32), row_major((8, 32), 16, 128))
    with pytest.raises(InvalidValueError, match="contiguous in both"):
        plan((64, 64), (8, 64), row_major((64, 8), 16).transpose((1, 0)))
    with pytest.raises(InvalidValueError, match="cannot transfer elements of type complex64"):
        plan((64, 64), (8, 64), row_major((8, 64), 16), dtype="complex64")
    with pytest.raises(InvalidValueError, match="does not fit shared memory"):
        plan((64, 64), (8, 64), row_major((8, 32), 16))
    with pytest.raises(InvalidValueError, match="single element"):
        plan((64,), (1,), row_major((1,), 16))


def test_codes_and_reductions() -> None:
    assert element_code("bfloat16") == 7 and element_code("float8_e4m3fn") == 1
    assert element_code("int32") == 3 and element_code("int32", "smax") == 9
    assert element_code("int64", "smin") == 10 and element_code("int64", "umin") == 4
    assert reduction_operator("smax", "int32") == "max"
    assert reduction_operator("min", "bfloat16") == "min"
    assert reduction_operator("add", "float32") == "add"
    with pytest.raises(InvalidValueError, match="no reduction 'max' for float32"):
        reduction_operator("max", "float32")
    with pytest.raises(InvalidValueError, match="no reduction 'mul'"):
        element_code("int8", "mul")


def test_packed_units() -> None:
    window = whole((0, 0), (8, 64), True)
    plan = plan_tensor_map((16, 128), (128, 1), "int4", window, row_major((8, 64), 4))
    assert plan.packed() == ((16, 64), (64,), (8, 32)) and plan.expected_bytes == 256
