"""Matrix descriptors against their direct evaluation, chunk by chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.errors import InvalidValueError
from pallasite.layouts.memory import Extent, MemoryLayout, row_major
from pallasite_hopper.matrix.descriptors import CHUNK, plan_operand
from pallasite_hopper.simulation.descriptors import ADDRESSES, Tile, pattern
from pallasite_std.api import MatrixStep, check_matrix_starts

SWIZZLES = (16, 32, 64, 128)


def evaluate(layout: MemoryLayout, blocks, offset: int = 0, base: int = 0) -> None:
    """Asserts that descriptors address each element where the layout has it.

    Args:
      layout: of the operand, rows (M or N) by K.
      blocks: (start, size) of the rows of each instruction.
      offset: of its first element, in elements.
      base: address of the allocation, a multiple of 1024.
    """
    size = layout.element_bits // 8
    depth = 32 // size
    plan = plan_operand(layout, tuple(blocks), depth, "a")
    check_matrix_starts(layout, plan.starts, offset * size, (), "a")
    assert len(plan.starts) == len(blocks)
    for (first, count), starts in zip(blocks, plan.starts, strict=True):
        assert len(starts) == layout.shape[1] // depth
        for step, start in enumerate(starts):
            # As the kernel does: the address of the first element, then the start is added.
            descriptor = plan.constant | (base + offset * size >> 4 & 0x3FFF)
            descriptor += start >> 4
            tile = Tile(count, not plan.transposed)
            chunks = pattern(descriptor, tile).addresses
            for row in range(count):
                for k in range(depth):
                    index = (first + row, step * depth + k)
                    wanted = base + layout.swizzle_bytes((offset + layout.offset(index)) * size)
                    if plan.transposed:
                        place = chunks[k * (count // 8) + row // 8] + row % 8 * size
                    else:
                        place = chunks[2 * row + k * size // CHUNK] + k * size % CHUNK
                    assert place == wanted, (index, place, wanted)


@st.composite
def views(draw: st.DrawFn):
    """Parts of tiled matrices, maybe transposed, that the tensor cores can read.

    Returns (layout, offset in elements, blocks of rows).
    """
    swizzle = draw(st.sampled_from(SWIZZLES))
    size = draw(st.sampled_from([1, 2, 4]))
    transposed = size == 2 and draw(st.booleans())
    width = swizzle // size
    depth = 32 // size
    tiles = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stored = (8 * tiles[0], width * tiles[1])
    if transposed and stored[0] < depth or not transposed and stored[1] < depth:
        stored = (8 * max(tiles[0], 2), width * max(tiles[1], -(-depth // width)))
    stored = (stored[0] // 16 * 16 or 16, stored[1]) if transposed else stored
    slots = draw(st.integers(1, 3))
    counts = (slots, stored[0] // 8, stored[1] // width)
    layout = row_major((*counts, 8, width), 8 * size).untile((8, width)).with_swizzle(swizzle)
    part = layout.index(0, draw(st.integers(0, slots - 1)))
    layout, offset = part.layout, part.offset
    if transposed:
        layout = layout.transpose((1, 0))
        run, unit = max(8, 1), width
    else:
        run, unit = 8, 8
    # Along K: a part in whole instructions; within a tile that is contiguous along it, or in tiles.
    steps = layout.shape[1] // depth
    first = draw(st.integers(0, steps - 1))
    number = draw(st.integers(1, steps - first))
    if not transposed and width > depth:
        in_tile = width // depth
        if first // in_tile != (first + number - 1) // in_tile or number == in_tile:
            first, number = first // in_tile * in_tile, -(-number // in_tile) * in_tile
            number = min(number, steps - first) // in_tile * in_tile or in_tile
    part = layout.slice(1, first * depth, number * depth)
    layout, offset = part.layout, offset + part.offset
    # Along M or N: whole groups of 8 rows, or of what is contiguous; or a part of one of these.
    rows = layout.shape[0]
    if transposed and unit > run and draw(st.booleans()):
        start = draw(st.integers(0, rows // run - 1)) * run
        count = draw(st.integers(1, (unit - start % unit) // run)) * run
    else:
        start = draw(st.integers(0, rows // unit - 1)) * unit
        count = draw(st.integers(1, (rows - start) // unit)) * unit
    part = layout.slice(0, start, count)
    layout, offset = part.layout, offset + part.offset
    rows = layout.shape[0]
    cut = draw(st.integers(1, rows // unit)) * unit if rows > unit else rows
    blocks = [(0, cut)] + ([(cut, rows - cut)] if cut < rows else [])
    return layout, offset, blocks


@settings(deadline=None, max_examples=200)
@given(views(), st.integers(0, 200))
def test_views_that_can_be_read(view, base):
    layout, offset, blocks = view
    evaluate(layout, blocks, offset, base * 1024 % (ADDRESSES // 2))


@st.composite
def blocked(draw: st.DrawFn) -> MemoryLayout:
    """Layouts that consist of something like blocks, at any distance, which may not be readable."""
    size = draw(st.sampled_from([1, 2, 4]))
    swizzle = draw(st.sampled_from(SWIZZLES))
    strides = st.sampled_from([1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048])
    depth = 32 // size

    def extents(total: int, inner: list[int]) -> tuple[Extent, ...]:
        found, rest = [], total
        while rest > 1:
            one = draw(st.sampled_from([n for n in (2, 4, 8, 16, rest) if rest % n == 0]))
            stride = inner.pop(0) if inner and draw(st.integers(0, 9)) else draw(strides)
            found.append(Extent(one, stride))
            rest //= one
        return tuple(reversed(found))

    rows, k = draw(st.sampled_from([8, 16, 64])), depth * draw(st.sampled_from([1, 2]))
    row_strides = [swizzle // size, 8 * swizzle // size]
    k_strides = [1, CHUNK // size if swizzle > CHUNK else 128]
    if size == 2 and draw(st.booleans()):
        row_strides, k_strides = k_strides, row_strides
    return MemoryLayout((extents(rows, row_strides), extents(k, k_strides)), swizzle, 8 * size)


@settings(deadline=None, max_examples=300)
@given(blocked())
def test_what_is_accepted_is_read_right(layout):
    """Any layout is either refused or addressed as it is."""
    if layout.shape[1] % (256 // layout.element_bits):
        return
    rows = layout.shape[0]
    try:
        evaluate(layout, [(0, rows)])
    except InvalidValueError:
        return


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_whole_tiles(size, swizzle):
    """The plain case, with its fields by hand (PTX ISA, "Strides")."""
    width = swizzle // size
    layout = row_major((8, 4, 8, width), 8 * size).untile((8, width)).with_swizzle(swizzle)
    if swizzle == 16 or width * 4 % (32 // size) == 0:
        evaluate(layout, [(0, 64)])
    plan = plan_operand(layout, ((0, 64),), 32 // size, "a")
    assert not plan.transposed
    assert plan.constant >> 62 == {16: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    assert (plan.constant >> 32 & 0x3FFF) * 16 == 4 * 8 * swizzle
    leading = (plan.constant >> 16 & 0x3FFF) * 16
    assert leading == (128 if swizzle == 16 else 16)


def test_blocks_too_far_apart():
    layout = MemoryLayout(((Extent(8, 1 << 17), Extent(8, 64)), (Extent(64, 1),)), 128, 16)
    with pytest.raises(InvalidValueError) as error:
        plan_operand(layout, ((0, 64),), 16, "b")
    assert str(error.value).splitlines() == [
        "the blocks of b are too far apart for the tensor cores",
        "  got: stride offset of 262144 bytes",
        "  expected: at most 262128 bytes",
    ]


TILES = row_major((8, 1, 8, 64), 16).untile((8, 64)).with_swizzle(128)


@pytest.mark.parametrize(
    ("offset", "steps", "clean"),
    [
        (0, (), True),
        (1024, (), True),
        (96, (), True),
        (128, (), False),
        (8, (), False),
        (0, (MatrixStep(1024, None),), True),
        (0, (MatrixStep(32, 128),), True),
        (0, (MatrixStep(32, 256),), False),
        (0, (MatrixStep(32, None),), False),
        (0, (MatrixStep(8, 128),), False),
        (64, (MatrixStep(2048, 1 << 14), MatrixStep(16, 64)), True),
    ],
)
def test_starts(offset, steps, clean):
    plan = plan_operand(TILES, ((0, 64),), 16, "a")
    if clean:
        # Steps along K of the whole tile would leave its rows.
        part = TILES.slice(1, 0, 16).layout
        starts = plan_operand(part, ((0, 64),), 16, "a").starts
        check_matrix_starts(part, starts, offset, steps, "a")
        return
    with pytest.raises(InvalidValueError, match="starts inside of a block"):
        check_matrix_starts(TILES, plan.starts, offset, steps, "a")


@settings(deadline=None)
@given(st.sampled_from(SWIZZLES), st.integers(0, 3), st.integers(0, 7))
def test_computed_starts(swizzle, row_tile, chunk):
    """What the check allows, a computed start can have: it is as good as a known one."""
    width = swizzle // 2
    layout = row_major((4, 2, 8, width), 16).untile((8, width)).with_swizzle(swizzle)
    k = chunk * 16 % (2 * width)
    part = layout.slice(0, 8 * row_tile, 8)
    inner = part.layout.slice(1, k, 16)
    evaluate(inner.layout, [(0, 8)], part.offset + inner.offset)
    dynamic = [layout.slice(0, None, 8), part.layout.slice(1, None, 16)]
    steps, total = [], 0
    for one, start, known in zip(dynamic, (8 * row_tile, k), (8, 16), strict=True):
        total += one.element_offset(start)
        for term in one.terms:
            places = known // term.divisor if known % term.divisor == 0 else 1
            places = np.gcd(places, term.modulus) if term.modulus else places
            assert term.values is not None
            steps.append(MatrixStep(int(places) * term.stride * 2, term.values * term.stride * 2))
    assert total == part.offset + inner.offset
    plan = plan_operand(inner.layout, ((0, 8),), 16, "a")
    check_matrix_starts(inner.layout, plan.starts, 0, steps, "a")
