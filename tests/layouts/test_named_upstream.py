"""Named layouts place elements as JAX's own Mosaic GPU layouts do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pallasite.layouts import RegisterLayout, named, resolve

fa = pytest.importorskip("jax.experimental.mosaic.gpu.fragmented_array")
tcgen05 = pytest.importorskip("jax.experimental.mosaic.gpu.tcgen05")
mma = pytest.importorskip("jax.experimental.mosaic.gpu.mma")


def upstream_elements(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """[warp, lane, sorted linear index] of what each thread holds, vectors kept in order."""
    tiled_shape = layout.tiling.tile_shape(shape)
    linear = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        rank, first = linear.ndim, linear.ndim - len(tile)
        split = list(linear.shape[:first])
        for extent, t in zip(linear.shape[first:], tile, strict=True):
            split += [extent // t, t]
        counts = [first + 2 * i for i in range(len(tile))]
        order = [*range(first), *counts, *(c + 1 for c in counts)]
        linear = linear.reshape(split).transpose(order)
        assert linear.ndim == rank + len(tile)
    assert linear.shape == tiled_shape

    def coordinates(index: int, dims: Any) -> dict[int, int]:
        sizes = [d.times if isinstance(d, fa.Replicated) else tiled_shape[d] for d in dims]
        values = np.unravel_index(index, sizes) if sizes else ()
        return {d: int(v) for d, v in zip(dims, values, strict=True) if isinstance(d, int)}

    result = []
    for warp, lane in itertools.product(range(4), range(32)):
        index: list[Any] = [slice(None)] * linear.ndim
        for dims, number in ((layout.warp_dims, warp), (layout.lane_dims, lane)):
            for d, value in coordinates(number, dims).items():
                index[d] = slice(value, value + 1)
        held = np.moveaxis(linear[tuple(index)], layout.vector_dim, -1)
        held = held.reshape(-1, held.shape[-1])
        result.append(held[np.lexsort(held.T[::-1])])
    return np.array(result)


def own_elements(layout: RegisterLayout) -> np.ndarray:
    result = []
    for warp, lane in itertools.product(range(4), range(32)):
        held = np.array(
            [
                [
                    np.ravel_multi_index(layout.element_at(warp, lane, r, v), layout.shape)
                    for v in range(layout.vector_length)
                ]
                for r in range(layout.registers)
            ]
        )
        result.append(held[np.lexsort(held.T[::-1])])
    return np.array(result)


CASES = [
    ("WGMMA", (), (128, 16), fa.WGMMA_LAYOUT),
    ("_WGMMA_ACC_32BIT", (), (64, 16), fa.WGMMA_LAYOUT_ACC_32BIT),
    ("WGMMA_8BIT", (), (64, 32), fa.WGMMA_LAYOUT_8BIT),
    ("WGMMA_UPCAST_2X", (), (64, 32), fa.WGMMA_LAYOUT_UPCAST_2X),
    ("WGMMA_UPCAST_4X", (), (64, 64), fa.WGMMA_LAYOUT_UPCAST_4X),
    ("WGMMA_TRANSPOSED", (), (64, 16), fa.WGMMA_TRANSPOSED_LAYOUT),
    ("WGMMA_ROW", (), (128,), fa.WGMMA_ROW_LAYOUT),
    ("WGMMA_COL", (), (32,), fa.WGMMA_COL_LAYOUT),
    ("TCGEN05", (), (128, 16), fa.TCGEN05_LAYOUT),
    ("TCGEN05_TRANSPOSED", (), (128, 16), fa.TCGEN05_TRANSPOSED_LAYOUT),
    ("TCGEN05_ROW", (), (256,), fa.TCGEN05_ROW_LAYOUT),
    ("TCGEN05_TMEM_NATIVE", (), (128, 8), fa.TMEM_NATIVE_LAYOUT),
    ("TCGEN05_TMEM_NATIVE", (4,), (128, 8), fa.tmem_native_layout(4)),
    ("TCGEN05_M64_COLLECTIVE", (32,), (64, 32), tcgen05.fa_m64_collective_layout(32)),
    (
        "TCGEN05_M64_COLLECTIVE_NATIVE",
        (32, 2),
        (64, 32),
        tcgen05.tmem_m64_collective_layout(32, 2).as_tiled_layout(),
    ),
    ("TMA_INDICES", (), (64,), fa.TMA_INDICES_LAYOUT),
    ("TMA_INDICES_4", (), (16,), fa.TMA_INDICES_4_LAYOUT),
]


@pytest.mark.parametrize(("name", "args", "shape", "reference"), CASES)
def test_fixed(name: str, args: Any, shape: tuple[int, ...], reference: Any) -> None:
    layout = resolve(name, args, {}, shape, 16)
    np.testing.assert_array_equal(own_elements(layout), upstream_elements(reference, shape))
    same = resolve(
        "TILED",
        (reference.tiling, reference.warp_dims, reference.lane_dims, reference.vector_dim),
        {},
        shape,
        16,
    )
    assert same == layout


@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("tiles", [(4, 2), (2, 4), (1, 4), (3, 8), (8, 1), (2, 3)])
@pytest.mark.sampled
def test_copy(swizzle: int, bits: int, tiles: tuple[int, int]) -> None:
    shape = (8 * tiles[0], 8 * swizzle // bits * tiles[1])
    try:
        reference = fa.tiled_copy_smem_gmem_layout(*tiles, swizzle, bits)
    except NotImplementedError:
        with pytest.raises(ValueError, match="multiple of 4 tiles"):
            resolve("SMEM_GMEM_COPY", (shape, None, swizzle), {}, shape, bits)
        return
    layout = resolve("SMEM_GMEM_COPY", (shape, None, swizzle), {}, shape, bits)
    np.testing.assert_array_equal(own_elements(layout), upstream_elements(reference, shape))


@pytest.mark.parametrize("m_warps", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_mma(m_warps: int, dtype: str) -> None:
    reference = mma.MMALayouts(np.dtype(dtype), m_warps=m_warps)
    bits = np.dtype(dtype).itemsize * 8
    for name, other in (
        ("MMA_LHS", reference.lhs),
        ("MMA_RHS", reference.rhs),
        ("MMA_ACC", reference.acc),
    ):
        shape = (64, 64)
        layout = resolve(name, (dtype,), {"m_warps": m_warps}, shape, bits)
        np.testing.assert_array_equal(own_elements(layout), upstream_elements(other, shape))


def test_names() -> None:
    assert set(named.STRUCTURAL) < set(named.names(public=True)) < set(named.names())
    assert {name for name, *_ in CASES} <= set(named.names())
