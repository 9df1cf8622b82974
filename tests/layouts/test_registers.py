"""Register layouts against brute force over every thread, register and vector element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallasite import plugins
from pallasite.errors import InvalidValueError, MissingNameError
from pallasite.layouts import (
    ConversionKind,
    Digit,
    Layout,
    Owner,
    Rearrangement,
    RegisterLayout,
    Replicated,
    SplatLayout,
    Tiling,
    conversion,
    default_strided,
    describe,
    named,
    strided,
    tiled,
)
from pallasite.layouts.proposals import proposals_for
from pallasite.target_selection import find_target

THREADS = list(itertools.product(range(4), range(32)))

NAMED_CASES = [
    ("WGMMA", (128, 32)),
    ("WGMMA_8BIT", (64, 32)),
    ("WGMMA_UPCAST_2X", (64, 32)),
    ("WGMMA_UPCAST_4X", (64, 32)),
    ("WGMMA_TRANSPOSED", (64, 16)),
    ("_WGMMA_ACC_32BIT", (64, 16)),
    ("TCGEN05", (128, 16)),
    ("TCGEN05_TRANSPOSED", (128, 16)),
    ("TCGEN05_TMEM_NATIVE", (128, 8)),
    ("WGMMA_ROW", (128,)),
    ("WGMMA_COL", (32,)),
    ("TMA_INDICES", (64,)),
    ("TMA_INDICES_4", (16,)),
]


def place(layout: Layout, array: np.ndarray) -> np.ndarray:
    """The contents [warp, lane, register, element] of all registers; -1 is padding."""
    shape = (4, 32, layout.registers, layout.vector_length)
    if isinstance(layout, SplatLayout):
        return np.full(shape, array.flat[0], array.dtype)
    # The index of an element is made by arithmetic, which takes arrays of all places at once.
    index = layout.element_at(*np.ogrid[tuple(map(slice, shape))])
    if layout.is_padded and layout.flat:
        # Padding follows the last element.
        strides = [math.prod(layout.shape[d + 1 :]) for d in range(len(layout.shape))]
        linear = sum(one * stride for one, stride in zip(index, strides, strict=True))
        array = np.append(array.ravel(), np.full(linear.max() + 1, -1))
        return np.broadcast_to(array[linear], shape)
    if layout.is_padded:
        padding = [(0, n - m) for n, m in zip(layout.extents, layout.shape, strict=True)]
        array = np.pad(array, padding, constant_values=-1)
    return np.broadcast_to(array[tuple(np.broadcast_to(one, shape) for one in index)], shape)


def rearrange(contents: np.ndarray, change: Rearrangement) -> np.ndarray:
    old = np.array(change.sources)
    return contents[:, :, old[..., 0], old[..., 1]]


def check(layout: Layout, array: np.ndarray, change: Rearrangement, expected: np.ndarray) -> None:
    assert change.layout.shape == expected.shape
    got = rearrange(place(layout, array), change)
    wanted = place(change.layout, expected)
    np.testing.assert_array_equal(np.where(wanted < 0, wanted, got), wanted)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


@st.composite
def layouts(draw: st.DrawFn, rank: int | None = None) -> RegisterLayout:
    """Random placements by digits."""
    rank = draw(st.integers(1, 3)) if rank is None else rank
    digits: list[Digit] = []
    for owner, total in ((Owner.LANE, 32), (Owner.WARP, 4), (Owner.VECTOR, 8)):
        stride = 1
        while stride < total:
            if owner is not Owner.VECTOR and draw(st.booleans()):
                stride *= 2
                continue
            size = draw(st.sampled_from([n for n in (1, 2, 4) if stride * n <= total]))
            digits.append(Digit(size, owner, stride))
            stride *= size
            if owner is Owner.VECTOR and draw(st.booleans()):
                break
            if size == 1:
                stride *= 2 if owner is not Owner.VECTOR else 1
                if owner is Owner.VECTOR:
                    break
    digits += [Digit(n, Owner.REGISTER, 1) for n in draw(st.lists(st.integers(2, 3), max_size=3))]
    digits = draw(st.permutations([d for d in digits if d.size > 1]))
    dims: list[list[Digit]] = [[] for _ in range(rank)]
    for digit in digits:
        dims[draw(st.integers(0, rank - 1))].append(digit)
    shape = tuple(math.prod(d.size for d in dim) for dim in dims)
    if draw(st.booleans()):  # With padding.
        shape = tuple(n if n < 3 else draw(st.integers(2, n)) for n in shape)
    vector = math.prod(d.size for d in digits if d.owner is Owner.VECTOR)
    return RegisterLayout(shape, tuple(map(tuple, dims)), vector)


def cover(layout: RegisterLayout) -> None:
    """Primary threads hold every element exactly once; others repeat a primary thread."""
    contents = place(layout, numbered(layout.shape))
    primary = [
        contents[w, i]
        for w, i in THREADS
        if layout.warp_mask >> w & 1 and layout.lane_mask >> i & 1
    ]
    held = np.sort(np.concatenate([c[c >= 0] for c in primary]))
    np.testing.assert_array_equal(held, np.arange(layout.size))
    known = {c.tobytes() for c in primary}
    assert all(contents[w, i].tobytes() in known for w, i in THREADS)
    indices = layout.register_indices()
    for r in range(layout.registers):
        first = layout.element_at(0, 0, r)
        base = indices[r]
        assert first == (tuple(np.unravel_index(base[0], layout.shape)) if layout.flat else base)


def place_one_by_one(layout: RegisterLayout, array: np.ndarray) -> np.ndarray:
    """The same as :func:`place`, by numbers."""
    result = np.zeros((4, 32, layout.registers, layout.vector_length), array.dtype)
    for warp, lane, register, element in np.ndindex(result.shape):
        index = layout.element_at(warp, lane, register, element)
        assert all(type(one) is int for one in index)
        inside = all(i < n for i, n in zip(index, layout.shape, strict=True))
        result[warp, lane, register, element] = array[index] if inside else -1
    return result


@settings(max_examples=30, deadline=None)
@given(layouts())
def test_all_places_at_once(layout: RegisterLayout) -> None:
    array = numbered(layout.shape)
    np.testing.assert_array_equal(place(layout, array), place_one_by_one(layout, array))


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_random_layouts_cover(layout: RegisterLayout) -> None:
    cover(layout)
    again = RegisterLayout(layout.shape, layout.dims, layout.vector_length)
    assert again == layout and hash(again) == hash(layout)


SHAPES = [
    (1,),
    (7,),
    (128,),
    (999,),
    (128, 3),
    (10, 3),
    (64, 64),
    (96, 4),
    (1, 1),
    (3, 5, 7),
    (2, 384),
]


@pytest.mark.parametrize("shape", [(), *SHAPES])
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_strided(shape: tuple[int, ...], vector: int) -> None:
    if math.prod(shape) % vector:
        with pytest.raises(InvalidValueError, match="vectors of"):
            strided(shape, vector)
        return
    layout = strided(shape, vector)
    array = numbered(layout.shape)
    np.testing.assert_array_equal(place(layout, array), place_one_by_one(layout, array))
    cover(layout)
    if layout.size % (128 * vector) == 0:
        for (w, i), r, v in itertools.product(THREADS[::7], range(layout.registers), range(vector)):
            linear = (r * 128 + w * 32 + i) * vector + v
            assert layout.element_at(w, i, r, v) == np.unravel_index(linear, shape)


def test_default_strided() -> None:
    assert default_strided((64, 64), 16).vector_length == 8
    assert default_strided((128,), 32).vector_length == 1
    assert default_strided((64,), 32).vector_length == 4
    assert default_strided((7,), 32).vector_length == 1
    assert default_strided((128 * 6,), 32).vector_length == 2


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_transpose(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    permutation = data.draw(st.permutations(range(len(layout.shape))))
    array = numbered(layout.shape)
    check(layout, array, layout.transpose(permutation), array.transpose(permutation))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_reshape(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    cuts = sorted(data.draw(st.sets(st.integers(1, 64), max_size=2)))
    shape, rest = [], layout.size
    for cut in cuts:
        factor = math.gcd(cut, rest)
        shape.append(factor)
        rest //= factor
    shape.append(rest)
    array = numbered(layout.shape)
    try:
        change = layout.reshape(shape)
    except InvalidValueError as error:
        assert str(tuple(shape)) in str(error) and str(layout.shape) in str(error)
        assume(False)
    check(layout, array, change, array.reshape(shape))
    back = change.layout.reshape(layout.shape)
    assert back.layout == layout


@pytest.mark.parametrize(
    ("old", "new"), list(itertools.permutations([(128, 3), (384,), (3, 128), (6, 64)], 2))
)
def test_strided_reshape_is_free(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    change = strided(old).reshape(new)
    assert change.layout == strided(new)
    assert change.registers == tuple(range(3))
    check(strided(old), numbered(old), change, numbered(new))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_slice(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    starts = [data.draw(st.integers(0, n - 1)) for n in layout.shape]
    sizes = [data.draw(st.integers(1, n - s)) for n, s in zip(layout.shape, starts, strict=True)]
    array = numbered(layout.shape)
    try:
        change = layout.slice(starts, sizes)
    except InvalidValueError as error:
        assert "whole registers" in str(error)
        return
    part = array[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
    check(layout, array, change, part)


def test_slice_of_register_digits_works() -> None:
    layout = named.named_layout("WGMMA").specification.layout((128, 64))
    array = numbered(layout.shape)
    check(layout, array, layout.slice((64, 16), (64, 24)), array[64:, 16:40])
    with pytest.raises(InvalidValueError, match="multiples of 8"):
        layout.slice((0, 4), (128, 8))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_broadcast_and_target(data: st.DataObject) -> None:
    target = data.draw(layouts(3))
    gone = data.draw(st.sets(st.integers(0, 2), min_size=1, max_size=2))
    dims = [d for d in range(3) if d not in gone]
    small = target.reduce(sorted(gone))
    array = numbered(small.shape)
    expected = np.broadcast_to(np.expand_dims(array, sorted(gone)), target.shape)
    if not isinstance(small, SplatLayout):
        check(small, array, small.broadcast_in_dim(target.shape, dims), expected)
    change = small.broadcast_with_target(target, dims)
    assert change.layout == target
    check(small, array, change, expected)


def test_broadcast_stretches_ones() -> None:
    layout = named.named_layout("WGMMA").specification.layout((64, 8))
    row = RegisterLayout((1, 8), ((), layout.dims[1]), 2)
    array = numbered((1, 8))
    expected = np.broadcast_to(array, (64, 8))
    check(row, array, row.broadcast_in_dim((64, 8), (0, 1)), expected)
    check(row, array, row.broadcast_with_target(layout, (0, 1)), expected)
    with pytest.raises(InvalidValueError, match="reduced over"):
        strided((64,)).broadcast_with_target(layout, (0,))
    flat = strided((5, 3))
    array = numbered((5, 3))
    check(flat, array, flat.broadcast_in_dim((2, 5, 3), (1, 2)), np.broadcast_to(array, (2, 5, 3)))


def run_plan(layout: RegisterLayout, array: np.ndarray, axes: list[int]) -> np.ndarray:
    """Executes a reduction plan (sum) on all threads; [warp, lane, register, element]."""
    plan = layout.reduction_plan(axes)
    values = np.maximum(place(layout, array), 0)
    values = np.stack([values[:, :, list(g)].sum(2) for g in plan.register_groups], axis=2)
    values = np.stack([values[..., list(g)].sum(-1) for g in plan.vector_groups], axis=-1)
    for mask in plan.lane_masks:
        values = values + values[:, [lane ^ mask for lane in range(32)]]
    for rotation in plan.lane_rotations:
        steps = [[rotation.source(i, k) for i in range(32)] for k in range(rotation.size)]
        values = sum(values[:, step] for step in steps)
    return np.stack([values[list(p)].sum(0) for p in plan.warp_partners])


def check_reduction(layout: RegisterLayout, axes: list[int]) -> None:
    array = numbered(layout.shape) + 1
    plan = layout.reduction_plan(axes)
    expected = array.sum(tuple(axes))
    got = run_plan(layout, array, axes)
    wanted = place(plan.layout, np.asarray(expected))
    np.testing.assert_array_equal(np.where(wanted < 0, wanted, got), wanted)
    if not plan.crosses_warps:
        assert all(len(p) == 1 for p in plan.warp_partners)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_reductions(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    rank = len(layout.shape)
    axes = data.draw(st.sets(st.integers(0, rank - 1), min_size=1))
    check_reduction(layout, sorted(axes))


@pytest.mark.parametrize("shape", SHAPES)
def test_strided_reductions(shape: tuple[int, ...]) -> None:
    layout = strided(shape)
    check_reduction(layout, list(range(len(shape))))
    if len(shape) > 1 and not layout.flat:
        check_reduction(layout, [0])
        check_reduction(layout, [1])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_conversion(data: st.DataObject) -> None:
    source = data.draw(layouts(2))
    order = [list(data.draw(st.permutations(dim))) for dim in source.dims]
    target = RegisterLayout(source.shape, tuple(map(tuple, order)), source.vector_length)
    found = conversion(source, target)
    if found.sources is None:
        assert source != target
        return
    array = numbered(source.shape)
    check(source, array, Rearrangement(target, found.sources), array)


def test_conversion_kinds() -> None:
    wgmma = named.named_layout("WGMMA").specification.layout((64, 16))
    narrow = named.named_layout("_WGMMA_ACC_32BIT").specification.layout((64, 16))
    assert conversion(wgmma, wgmma).kind is ConversionKind.SAME
    assert conversion(wgmma, narrow).kind is ConversionKind.REGISTER_PERMUTATION
    assert conversion(narrow, wgmma).kind is ConversionKind.REGISTER_PERMUTATION
    assert conversion(wgmma, strided((64, 16))).kind is ConversionKind.SHARED_MEMORY
    found = conversion(SplatLayout((64, 16)), wgmma)
    assert found.sources is not None and len(found.sources) == wgmma.registers
    with pytest.raises(InvalidValueError, match="cannot become a splat"):
        conversion(wgmma, SplatLayout((64, 16)))


def test_splat_operations() -> None:
    splat = SplatLayout((4, 8))
    assert splat.transpose((1, 0)).layout == SplatLayout((8, 4))
    assert splat.reshape((32,)).layout == SplatLayout((32,))
    assert splat.reduce([0]) == SplatLayout((8,))
    assert splat.broadcast_in_dim((2, 4, 8), (1, 2)).layout == SplatLayout((2, 4, 8))
    assert splat.slice((0, 0), (1, 2)).layout == SplatLayout((1, 2))


@pytest.mark.parametrize(("name", "shape"), NAMED_CASES)
def test_named_cover_and_describe(name: str, shape: tuple[int, ...]) -> None:
    layout = named.resolve(name, (), {}, shape, 16)
    assert isinstance(layout, RegisterLayout)
    cover(layout)
    assert describe(layout) == name


def test_reduced_forms() -> None:
    wgmma = named.named_layout("WGMMA").specification.layout((128, 32))
    assert wgmma.reduce([1]) == named.named_layout("WGMMA_ROW").specification.layout((128,))
    assert wgmma.reduce([0]) == named.named_layout("WGMMA_COL").specification.layout((32,))
    tcgen05 = named.named_layout("TCGEN05").specification.layout((128, 32))
    assert tcgen05.reduce([1]) == named.named_layout("TCGEN05_ROW").specification.layout((128,))


def test_describe_others() -> None:
    assert describe(SplatLayout((3,))) == "splat"
    assert describe(strided((256, 4), 4)) == "strided(vector 4)"


@pytest.mark.parametrize(
    ("target", "more"), [("sm_90a", []), ("sm_100a", ["TCGEN05_M64_COLLECTIVE"])]
)
def test_proposals(target: str, more: list[str]) -> None:
    proposals = proposals_for(plugins.registry(), find_target(target))
    found = [describe(layout) for layout in proposals.for_broadcast((64, 32))]
    assert found == ["WGMMA", "WGMMA_TRANSPOSED", *more]
    assert proposals.for_broadcast((4, 64, 32)) == ()
    turned = [describe(layout) for layout in proposals.for_transpose((64, 8))]
    assert turned == ["WGMMA", "WGMMA_TRANSPOSED"]


def test_errors_name_the_dimension() -> None:
    with pytest.raises(InvalidValueError, match="dimension 1 of shape \\(64, 12\\)"):
        named.resolve("WGMMA", (), {}, (64, 12), 16)
    with pytest.raises(MissingNameError, match="no register layout FOO"):
        named.resolve("FOO", (), {}, (64, 12), 16)
    with pytest.raises(InvalidValueError, match="wrong arguments"):
        named.resolve("WGMMA", (3,), {}, (64, 8), 16)
    with pytest.raises(InvalidValueError, match="is for shape"):
        named.resolve("WG_STRIDED", (), {"shape": (4,), "vec_size": 1}, (64, 8), 16)
    with pytest.raises(InvalidValueError, match="distributed over 8 lanes"):
        tiled((64, 8), Tiling(((64, 8), (16, 8), (8, 8), (2,))), (-7,), (-3,), -1)
    with pytest.raises(InvalidValueError, match="used twice"):
        tiled((128, 4), Tiling(((128, 4), (32, 4))), (-4,), (-2,), -2)
    with pytest.raises(InvalidValueError, match="overlap"):
        RegisterLayout((4,), ((Digit(2, Owner.LANE, 1), Digit(2, Owner.LANE, 1)),))
    assert tiled((4,), Tiling(((4,),)), (Replicated(4),), (Replicated(32),), -1).replication == 128
