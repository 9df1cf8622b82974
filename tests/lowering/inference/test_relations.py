"""What relations list is what lowering does: the layouts that operations give to their results."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallasite import plugins
from pallasite.errors import InvalidValueError
from pallasite.layouts import named, strided
from pallasite.layouts.proposals import proposals_for
from pallasite.layouts.reduction import reduction_plan
from pallasite.layouts.registers import Layout, RegisterLayout, SplatLayout
from pallasite.target_selection import find_target
from pallasite_std.inference import relations

PROPOSALS = proposals_for(plugins.registry(), find_target("sm_100a"))
MATRICES = ("WGMMA", "WGMMA_TRANSPOSED", "WGMMA_UPCAST_2X", "TCGEN05", "TCGEN05_TMEM_NATIVE")
SHAPES = ((64, 16), (64, 128), (128, 32), (128, 128), (256, 64), (16, 512))


def matrix(name: str, shape: tuple[int, ...]) -> Layout:
    args = (shape[-1],) if name == "TCGEN05_TMEM_NATIVE" else ()
    return named.resolve(name, args, {}, shape, 32)


@st.composite
def layouts(draw, shape: tuple[int, ...]) -> RegisterLayout:
    """A layout that arrays of a shape may have in kernels."""
    found: list[RegisterLayout] = []
    for name in MATRICES:
        try:
            found.append(matrix(name, shape))
        except InvalidValueError:
            continue
    for vector in (1, 2, 4, 8):
        try:
            found.append(strided(shape, vector))
        except InvalidValueError:
            continue
    return draw(st.sampled_from(found))


@st.composite
def parts(draw, shape: tuple[int, ...]) -> Layout:
    """A layout of an array that is what a reduction leaves of one of this shape."""
    axis = draw(st.integers(0, len(shape) - 1))
    return draw(layouts(shape)).reduce((axis,))


shapes = st.sampled_from(SHAPES)


def known(pairs, operand, result):
    """All pairs, for each way of asking."""
    found = [
        *pairs(operand, None),
        *(pairs(None, result) if result is not None else ()),
        *(pairs(operand, result) if result is not None else ()),
    ]
    assert all(isinstance(one, RegisterLayout) for pair in found for one in pair)
    return found


@given(st.data(), shapes)
def test_transposition(data, shape):
    operand, result = data.draw(layouts(shape)), data.draw(layouts(shape[::-1]))
    found = known(relations.transpose((1, 0), PROPOSALS), operand, result)
    for before, after in found:
        assert before.transpose((1, 0)).layout == after
    assert any(after == result for _, after in found)
    assert any(before == operand for before, _ in found)


@given(st.data(), shapes)
def test_reshape(data, shape):
    rows, columns = shape
    after_shape = data.draw(
        st.sampled_from(
            [(rows * columns,), (rows // 8, 8, columns), (rows, columns // 8, 8), (1, *shape)]
        )
    )
    operand = data.draw(layouts(shape))
    for before, after in known(relations.reshape(shape, after_shape), operand, None):
        assert before.reshape(after_shape).layout == after
    backward = relations.reshape(after_shape, shape)
    for before, after in known(backward, operand.reshape(after_shape).layout, operand):
        assert before.reshape(shape).layout == after


@given(st.data(), shapes, st.integers(0, 1))
def test_reduction(data, shape, axis):
    operand, result = data.draw(layouts(shape)), data.draw(layouts(shape)).reduce((axis,))
    assume(isinstance(result, RegisterLayout))
    found = known(relations.reduction(shape, (axis,), PROPOSALS), operand, result)
    assert found
    for before, after in found:
        assert reduction_plan(before, (axis,)).layout == after


@given(st.data(), shapes, st.integers(0, 1))
def test_broadcast(data, shape, axis):
    """Lowering stretches an operand to a given layout if it fits, else to one of its own."""
    kept = 1 - axis
    operand = data.draw(layouts(shape)).reduce((axis,))
    assume(isinstance(operand, RegisterLayout))
    result = data.draw(layouts(shape))
    found = known(relations.broadcast((shape[kept],), shape, (kept,), PROPOSALS), operand, result)
    for before, after in found:
        own = before.broadcast_in_dim(shape, (kept,)).layout
        assert own == after or before.broadcast_with_target(after, (kept,)).layout == after
    own = result.reduce((axis,))
    if not isinstance(own, SplatLayout):
        assert any(after == result for _, after in found)


@given(st.data(), shapes, st.integers(0, 1))
def test_stretched_extents_of_one(data, shape, axis):
    """Operands of element-wise operations: ``x[:, None] + y``."""
    narrow = tuple(1 if dim == axis else extent for dim, extent in enumerate(shape))
    assume(math.prod(narrow) > 1)
    result = data.draw(layouts(shape))
    for before, after in relations.broadcast(narrow, shape, (0, 1), PROPOSALS)(None, result):
        assert (before.shape, after) == (narrow, result)
        assert before.broadcast_with_target(after, (0, 1)).layout == after


@settings(deadline=None)
@given(st.data(), shapes)
def test_slice(data, shape):
    sizes = tuple(data.draw(st.sampled_from([n for n in (8, 16, 32, 64) if n <= e])) for e in shape)
    starts = tuple(
        data.draw(st.sampled_from(range(0, e - size + 1, 8)))
        for e, size in zip(shape, sizes, strict=True)
    )
    operand = data.draw(layouts(shape))
    for before, after in relations.slice_(shape, starts, sizes, PROPOSALS)(operand, None):
        assert before.slice(starts, sizes).layout == after


@settings(deadline=None)
@given(st.data(), shapes)
def test_slice_from_its_result(data, shape):
    sizes = tuple(data.draw(st.sampled_from([n for n in (8, 16, 32, 64) if n <= e])) for e in shape)
    result = data.draw(layouts(sizes))
    starts = (0,) * len(shape)
    for before, after in relations.slice_(shape, starts, sizes, PROPOSALS)(None, result):
        assert (before.shape, after) == (shape, result)
        assert before.slice(starts, sizes).layout == after


def test_a_part_of_a_left_operand_is_cut_from_one():
    relation = relations.slice_((64, 128), (0, 32), (64, 32), PROPOSALS)
    pair = matrix("WGMMA", (64, 128)), matrix("WGMMA", (64, 32))
    assert relation(None, pair[1])[0] == pair


def test_a_reduction_of_a_matrix_product_keeps_its_rows():
    operand = matrix("WGMMA", (64, 128))
    row = named.resolve("WGMMA_ROW", (), {}, (64,), 32)
    assert list(relations.reduction((64, 128), (1,), PROPOSALS)(operand, None)) == [(operand, row)]
    assert (operand, row) in relations.reduction((64, 128), (1,), PROPOSALS)(None, row)


def test_a_row_is_broadcast_to_the_layout_that_is_asked_for():
    row = named.resolve("WGMMA_ROW", (), {}, (64,), 32)
    pairs = relations.broadcast((64,), (64, 128), (0,), PROPOSALS)
    assert pairs(None, matrix("WGMMA", (64, 128)))[0] == (row, matrix("WGMMA", (64, 128)))
    assert pairs(row, None)[0] == (row, matrix("WGMMA", (64, 128)))


@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_not_known_gives_no_pairs(axis):
    assert not list(relations.reduction((64, 64), (axis,), PROPOSALS)(None, None))
    assert not list(relations.broadcast((64,), (64, 64), (axis,), PROPOSALS)(None, None))
    assert not list(relations.transpose((1, 0), PROPOSALS)(None, None))
