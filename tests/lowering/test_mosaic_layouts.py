"""Our layouts as those of ``jax.experimental.mosaic.gpu``, register by register."""

from __future__ import annotations

import itertools
import math

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu import core as upstream

from pallasite.errors import InvalidValueError
from pallasite.layouts.registers import RegisterLayout, SplatLayout
from pallasite_std.inline.arrays import register_layout, register_numbers
from pallasite_std.primitives.layouts import Layout

WITH_ARGUMENTS = {
    "WG_SPLAT": [((),), ((3, 5),)],
    "WG_STRIDED": [((128,), 1), ((64, 32), 4)],
    "TCGEN05_TMEM_NATIVE": [(), (4,)],
    "TCGEN05_M64_COLLECTIVE": [(64,)],
    "TCGEN05_M64_COLLECTIVE_NATIVE": [(64,), (32, 2)],
    "SMEM_GMEM_COPY": [((128, 64), jnp.float32, 128), ((64, 256), jnp.bfloat16, 64)],
    "MMA_LHS": [(jnp.bfloat16,), (jnp.float8_e4m3fn,)],
    "MMA_RHS": [(jnp.bfloat16,), (jnp.float32,)],
    "MMA_ACC": [(jnp.float32,)],
}
OWN = ("WGMMA_TF32",)
NAMED = [
    (layout, args)
    for layout in Layout
    if layout.name not in (*OWN, "TILED")
    for args in WITH_ARGUMENTS.get(layout.name, [()])
]


@pytest.mark.parametrize(("layout", "args"), NAMED, ids=lambda value: str(value))
def test_same_as_upstream(layout, args):
    theirs = upstream.Layout[layout.name]
    expected = theirs(*args).to_mgpu() if args else theirs.to_mgpu()
    named = layout(*args) if args else layout
    assert named.to_mgpu() == expected
    assert layout.to_mgpu(*args) == expected


@pytest.mark.parametrize("m_warps", [1, 2, 4])
def test_arguments_by_name(m_warps):
    for name in ("MMA_LHS", "MMA_RHS", "MMA_ACC"):
        expected = upstream.Layout[name](jnp.bfloat16, m_warps=m_warps).to_mgpu()
        assert Layout[name](jnp.bfloat16, m_warps=m_warps).to_mgpu() == expected
    assert Layout.WG_STRIDED(shape=[256], vec_size=2).to_mgpu() == mgpu.WGStridedFragLayout(
        (256,), 2
    )


def test_tilings():
    own = Layout.TILED(mgpu.WGMMA_LAYOUT.tiling, (-7,), (-3, -2), -1)
    assert own.to_mgpu() == mgpu.WGMMA_LAYOUT


@pytest.mark.parametrize("name", ["WGMMA", "WGMMA_UPCAST_2X", "TCGEN05", "WGMMA_TRANSPOSED"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reduced(name, axis):
    expected = upstream.Layout[name].reduce(axis).to_mgpu()
    assert Layout[name].reduce(axis).to_mgpu() == expected
    assert Layout[name].reduce(axis - 2).to_mgpu() == expected


def test_reduced_splats():
    assert Layout.WG_SPLAT((3, 5)).reduce(0).to_mgpu() == mgpu.WGSplatFragLayout((5,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.WGMMA.to_mgpu(2), "takes no arguments"),
        (lambda: Layout.WG_STRIDED.to_mgpu(), "these arguments is none of a FragmentedArray"),
        (lambda: Layout.WG_STRIDED((64,), 1).to_mgpu(), "a multiple of 128 vectors"),
        (lambda: Layout.WG_STRIDED((256,), 2).to_mgpu((256,)), "has its arguments"),
        (lambda: Layout.WGMMA.reduce(0).to_mgpu(1), "has its arguments"),
        (lambda: Layout.WG_STRIDED((256,), 2).reduce(0).to_mgpu(), "only tiled layouts and splats"),
        (lambda: Layout.WGMMA.reduce(2).to_mgpu(), "dimensions from 0 to 1"),
    ],
)
def test_messages(make, message):
    with pytest.raises(InvalidValueError, match=message):
        make()


def _thread_digits(layout, dims, number):
    """Where a warp or lane is along each dimension of the tiled shape."""
    shape = layout.tiled_tiling_shape
    sizes = [shape[d] if isinstance(d, int) else d.times for d in dims]
    found = [0] * len(shape)
    for dim, digit in zip(dims, np.unravel_index(number, sizes or [1]), strict=False):
        if isinstance(dim, int):
            found[dim] = int(digit)
    return found


def _element(layout, shape, place, warp, lane, position):
    """What a register of a FragmentedArray holds, from the definition of its layout."""
    if isinstance(layout, mgpu.WGStridedFragLayout):
        vector = place[0] * 128 + warp * 32 + lane
        return tuple(map(int, np.unravel_index(vector * layout.vec_size + position, shape)))
    index = list(place)
    for dims, number in ((layout.warp_dims, warp), (layout.lane_dims, lane)):
        for dim, digit in enumerate(_thread_digits(layout, dims, number)):
            index[dim - layout.tiled_tiling_rank] += digit
    index[layout.vector_dim] += position
    return layout.tiling.untile_indices(tuple(index))


@st.composite
def layouts(draw):
    """A layout of a FragmentedArray, and a shape."""
    layout, args = draw(st.sampled_from(NAMED))
    if layout is Layout.WG_STRIDED:
        shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=2))) + (128,)
        width = draw(st.sampled_from([1, 2, 4]))
        shape = (*shape[:-1], shape[-1] * width)
        return mgpu.WGStridedFragLayout(shape, width), shape
    made = layout.to_mgpu(*args)
    if isinstance(made, mgpu.WGSplatFragLayout):
        return made, made.shape
    if draw(st.booleans()) and len(made.base_tile_shape) == 2:
        made = made.reduce([draw(st.sampled_from([0, 1]))])
    times = [draw(st.sampled_from([1, 2, 3])) for _ in made.base_tile_shape]
    shape = tuple(n * extent for n, extent in zip(times, made.base_tile_shape, strict=True))
    return made, (*draw(st.sampled_from([(), (2,)])), *shape)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(0, 3), st.integers(0, 31))
def test_registers_hold_the_same_elements(case, warp, lane):
    layout, shape = case
    own = register_layout(layout, shape)
    if isinstance(layout, mgpu.WGSplatFragLayout):
        assert own == SplatLayout(shape)
        return
    assert isinstance(own, RegisterLayout)
    numbers = register_numbers(layout, shape)
    assert len(numbers) == own.registers == math.prod(layout.registers_shape(shape))
    places = itertools.islice(np.ndindex(layout.registers_shape(shape)), 64)
    for place, number in zip(places, numbers, strict=False):
        for position in (0, own.vector_length - 1):
            theirs = _element(layout, shape, place, warp, lane, position)
            assert own.element_at(warp, lane, number, position) == theirs
