"""Memory layouts and access plans against arrays of addresses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.errors import InvalidValueError
from pallasite.layouts import (
    Digit,
    Extent,
    MemoryLayout,
    Owner,
    RegisterLayout,
    named,
    row_major,
    strided,
    swizzle_bytes,
)
from pallasite.layouts.construct import padded
from pallasite_std.copies.indexed_access import plan_indexed_access
from pallasite_std.memory.access import plan_access


def offsets(layout: MemoryLayout) -> np.ndarray:
    """The element offset of every index."""
    result = np.zeros(layout.shape, np.int64)
    for index in np.ndindex(*layout.shape):
        result[index] = layout.offset(index)
    return result


@st.composite
def memories(draw: st.DrawFn, bits: int = 16) -> MemoryLayout:
    """Dense tiled and transposed layouts, sometimes with a gap."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    stride, extents = draw(st.sampled_from([1, 1, 2])), []
    for size in sizes:
        extents.append(Extent(size, stride))
        stride *= size
    rank = draw(st.integers(1, 3))
    dims: list[list[Extent]] = [[] for _ in range(rank)]
    for extent in draw(st.permutations(extents)):
        dims[draw(st.integers(0, rank - 1))].append(extent)
    swizzle = draw(st.sampled_from([16, 32, 64, 128]))
    return MemoryLayout(tuple(map(tuple, dims)), swizzle, bits)


def test_row_major() -> None:
    layout = row_major((3, 4, 5), 32)
    np.testing.assert_array_equal(offsets(layout).ravel(), np.arange(60))
    assert layout.is_contiguous and layout.is_dense and layout.cosize == 60
    assert layout.dims == ((Extent(3, 20),), (Extent(4, 5),), (Extent(5, 1),))
    assert layout.contiguous_run(2) == 5 and layout.contiguous_run(1) == 1


def test_untile_and_tile() -> None:
    physical = row_major((2, 4, 8, 64), 16)
    layout = physical.untile((8, 64))
    expected = np.arange(4096).reshape(2, 4, 8, 64).transpose(0, 2, 1, 3).reshape(16, 256)
    np.testing.assert_array_equal(offsets(layout), expected)
    assert layout.tile((8, 64)) == physical
    assert layout.is_dense and not layout.is_contiguous
    with pytest.raises(InvalidValueError, match="not tiled by"):
        physical.untile((8, 32))
    with pytest.raises(InvalidValueError, match="dimension 0 of shape"):
        layout.tile((7, 64))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_transpose_reshape_tile(data: st.DataObject) -> None:
    layout = data.draw(memories())
    table = offsets(layout)
    permutation = data.draw(st.permutations(range(len(layout.shape))))
    np.testing.assert_array_equal(
        offsets(layout.transpose(permutation)), table.transpose(permutation)
    )
    merged = layout.reshape((layout.size,))
    np.testing.assert_array_equal(offsets(merged), table.ravel())
    assert merged.reshape(layout.shape) == layout
    assert layout.cosize == table.max() + 1
    assert layout.is_dense == (sorted(table.ravel()) == list(range(layout.size)))
    tiling = [
        data.draw(st.sampled_from([t for t in (1, 2, 4) if n % t == 0])) for n in layout.shape
    ]
    try:
        tiled = layout.tile(tiling)
    except InvalidValueError:
        return
    split = table.reshape(
        [m for n, t in zip(layout.shape, tiling, strict=True) for m in (n // t, t)]
    )
    rank = table.ndim
    expected = split.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)])
    np.testing.assert_array_equal(offsets(tiled), expected)
    assert tiled.untile(tiling) == layout


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_slices(data: st.DataObject) -> None:
    layout = data.draw(memories())
    table = offsets(layout)
    dim = data.draw(st.integers(0, len(layout.shape) - 1))
    start = data.draw(st.integers(0, layout.shape[dim] - 1))
    size = data.draw(st.integers(1, layout.shape[dim] - start))
    expected = table.take(range(start, start + size), dim)
    try:
        part = layout.slice(dim, start, size)
        np.testing.assert_array_equal(part.offset + offsets(part.layout), expected)
    except InvalidValueError as error:
        assert "cuts through a tile" in str(error)
    try:
        part = layout.slice(dim, None, size)
    except InvalidValueError:
        return
    for start in range(0, layout.shape[dim] - size + 1, part.alignment):
        expected = table.take(range(start, start + size), dim)
        np.testing.assert_array_equal(part.element_offset(start) + offsets(part.layout), expected)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_index(data: st.DataObject) -> None:
    layout = data.draw(memories())
    dim = data.draw(st.integers(0, len(layout.shape) - 1))
    dynamic = layout.index(dim, None)
    assert dynamic.alignment == 1
    for i in range(layout.shape[dim]):
        expected = offsets(layout).take(i, dim)
        part = layout.index(dim, i)
        np.testing.assert_array_equal(part.offset + offsets(part.layout), expected)
        np.testing.assert_array_equal(dynamic.element_offset(i) + offsets(dynamic.layout), expected)


def test_order() -> None:
    """Tiles make wide steps, too; what counts is the narrowest step of a dimension."""
    tiled = row_major((4, 2, 8, 32), 32).untile((8, 32))
    assert tiled.order == (0, 1)
    assert tiled.transpose((1, 0)).order == (1, 0)
    turned = row_major((3, 1, 5, 7), 16).transpose((3, 1, 2, 0))
    assert turned.shape == (7, 1, 5, 3)
    assert turned.order == (3, 1, 2, 0)
    assert turned.transpose(turned.order) == row_major((3, 1, 5, 7), 16)


def test_slice_out_of_bounds() -> None:
    with pytest.raises(InvalidValueError, match="outside dimension 0"):
        row_major((4,), 8).slice(0, 3, 2)


@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
def test_swizzle(swizzle: int) -> None:
    addresses = [swizzle_bytes(a, swizzle) for a in range(2048)]
    assert sorted(addresses) == list(range(2048))
    chunks = swizzle // 16
    for a in range(2048):
        row, chunk, rest = a // 128, a % 128 // 16, a % 16
        low = chunk % chunks ^ row % chunks
        assert addresses[a] == row * 128 + (chunk // chunks * chunks + low) * 16 + rest
    with pytest.raises(InvalidValueError, match="does not exist"):
        row_major((4,), 8, swizzle=48)


def check_plan(layout: RegisterLayout, memory: MemoryLayout) -> None:
    plan = plan_access(layout, memory)
    bits = memory.element_bits
    parts = [part for access in plan.accesses for part in access.parts]
    everything = itertools.product(range(layout.registers), range(layout.vector_length))
    assert sorted(parts) == sorted(everything)
    assert plan.width_bytes <= 16
    for warp, lane in itertools.product(range(4), (0, 1, 2, 5, 13, 31)):
        thread = plan.thread_offset(warp, lane)
        for access in plan.accesses:
            address = plan.byte_address(access, warp, lane)
            if plan.width * bits >= 8:
                assert address % min(plan.width_bytes, 16) == 0
            for step, (r, v) in enumerate(access.parts):
                index = layout.element_at(warp, lane, r, v)
                assert memory.byte_address(index) == address + step * bits // 8
                assert memory.offset(index) == (
                    thread + plan.register_offsets[r] + plan.vector_offsets[v]
                )
            if plan.swizzle_separable:
                base = swizzle_bytes(thread * bits // 8, plan.swizzle)
                assert (base ^ access.swizzle_xor) + access.swizzle_add == address


def check_indexed(layout: RegisterLayout, memory: MemoryLayout) -> None:
    plan = plan_indexed_access(layout, memory)
    size = memory.element_bits // 8
    for warp, lane, r in itertools.product(range(4), (0, 3, 17, 31), range(layout.registers)):
        for v in range(layout.vector_length):
            address = plan.byte_address(warp, lane, r, v)
            assert address == memory.byte_address(layout.element_at(warp, lane, r, v))
            first = plan.byte_address(warp, lane, r, v - v % plan.width)
            assert address == first + v % plan.width * size
            assert first % (plan.width * size) == 0


def tiled_memory(shape: tuple[int, int], bits: int, swizzle: int) -> MemoryLayout:
    columns = 8 * swizzle // bits
    physical = (shape[0] // 8, shape[1] // columns, 8, columns)
    return row_major(physical, bits, swizzle).untile((8, columns))


@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("name", ["WGMMA", "WGMMA_8BIT", "WGMMA_TRANSPOSED", "strided"])
@pytest.mark.sampled
def test_access_of_tiles(name: str, bits: int, swizzle: int) -> None:
    shape = (64, 128)
    layout = (
        strided(shape, 4)
        if name == "strided"
        else named.named_layout(name).specification.layout(shape)
    )
    check_plan(layout, tiled_memory(shape, bits, swizzle))
    transposed = tiled_memory((128, 64), bits, swizzle) if 8 * swizzle // bits <= 64 else None
    if transposed is not None:
        check_plan(layout, transposed.transpose((1, 0)))


def test_access_widths_and_conflicts() -> None:
    wgmma = named.named_layout("WGMMA").specification.layout((64, 64))
    plan = plan_access(wgmma, tiled_memory((64, 64), 16, 128))
    assert plan.width == 2 and plan.conflict_factor == 1.0 and plan.swizzle_separable
    assert plan_access(wgmma, tiled_memory((64, 64), 16, 128).with_swizzle(16)).conflict_factor > 4
    copy = named.specification("SMEM_GMEM_COPY", ((64, 64), None, 128), {}, 16).layout((64, 64))
    plan = plan_access(copy, tiled_memory((64, 64), 16, 128))
    assert plan.width_bytes == 16 and plan.conflict_factor == 1.0
    native = named.specification("TCGEN05_TMEM_NATIVE", (2,), {}, 32).layout((128, 64))
    assert plan_access(native, row_major((128, 64), 32)).width == 4
    assert plan_access(native, row_major((128, 64), 32), alignment_bytes=8).width == 2


def test_access_masks() -> None:
    row = named.named_layout("WGMMA_ROW").specification.layout((64,))
    plan = plan_access(row, row_major((64,), 32))
    assert plan.lane_mask == sum(1 << i for i in range(0, 32, 4)) and plan.warp_mask == 0b1111
    column = named.named_layout("WGMMA_COL").specification.layout((16,))
    plan = plan_access(column, row_major((16,), 32))
    assert plan.lane_mask == 0b1111 and plan.warp_mask == 1


def test_access_flat_and_odd_shapes() -> None:
    check_plan(strided((128, 3)), row_major((128, 3), 32))
    check_plan(strided((10, 3)), row_major((10, 3), 32))
    check_plan(strided((128, 4)), row_major((128, 4), 8))
    check_plan(strided((256, 4), 4), row_major((256, 4), 4))


@pytest.mark.parametrize("swizzle", [16, 128])
@pytest.mark.parametrize(
    ("shape", "bits", "width"),
    [
        ((125, 8), 32, 4),
        ((125, 8), 8, 8),
        ((130, 6), 32, 2),
        ((102, 7), 32, 1),
        ((201, 4), 64, 2),
        ((9, 7, 12), 16, 4),
    ],
)
def test_neighbours_in_several_registers(
    shape: tuple[int, ...], bits: int, width: int, swizzle: int
) -> None:
    """Threads that hold whole rows access them by vectors, where other rows are padding, too."""
    rows = padded((*shape[:-1], 1))
    row = (Digit(shape[-1], Owner.REGISTER, rows.registers),)
    layout = RegisterLayout(shape, (*rows.dims[:-1], row), 1)
    assert layout.is_padded
    memory = row_major(shape, bits, swizzle)
    plan = plan_access(layout, memory)
    assert plan.width == width
    found = set()
    for access in plan.accesses:
        assert {layout.guards(*part) for part in access.parts} == {access.guards}
        for warp, lane in itertools.product(range(4), range(32)):
            address = plan.byte_address(access, warp, lane)
            assert address % plan.width_bytes == 0
            for step, part in enumerate(access.parts):
                index = layout.element_at(warp, lane, *part)
                if all(n < extent for n, extent in zip(index, shape, strict=True)):
                    assert memory.byte_address(index) == address + step * bits // 8
                    found.add(index)
    assert found == set(np.ndindex(*shape))
    assert plan_access(layout, memory, bits // 8).width == 1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_access_random(data: st.DataObject) -> None:
    memory = data.draw(memories(data.draw(st.sampled_from([8, 16, 32]))))
    vector = data.draw(st.sampled_from([n for n in (1, 2, 4) if memory.size % n == 0]))
    layout = strided(memory.shape, vector)
    try:
        check_plan(layout, memory)
    except InvalidValueError as error:
        assert "do not divide one another" in str(error)
    check_indexed(layout, memory)


def test_indexed_access() -> None:
    padded = row_major((96, 4), 32).slice(1, 0, 3).layout
    check_indexed(strided((96, 3)), padded)
    check_indexed(strided((8, 12), 4), row_major((8, 16), 32).slice(1, 0, 12).layout)
    wide = plan_indexed_access(strided((8, 12), 4), row_major((8, 12), 32))
    assert wide.width == 4
    check_indexed(
        named.named_layout("WGMMA").specification.layout((64, 64)), tiled_memory((64, 64), 16, 128)
    )


def test_access_errors() -> None:
    with pytest.raises(InvalidValueError, match="differ"):
        plan_access(strided((4,)), row_major((8,), 32))
    uneven = MemoryLayout(((Extent(32, 5), Extent(3, 1)),))
    with pytest.raises(InvalidValueError, match="along dimension 0 the factors"):
        plan_access(strided((96,), 1), uneven)
    with pytest.raises(InvalidValueError, match="whole bytes"):
        plan_access(strided((128,)), row_major((128,), 4))
