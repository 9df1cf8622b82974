"""Named layouts of the portable instructions, and what is proposed to layout inference.

The placements are those that matrix and copy instructions prescribe. Registers are numbered
row-major over the logical dimensions, which is not always the order in which an instruction lists
its operands.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from pallasite.plugin import InvalidValueError, LayoutProposal, NamedLayout
from pallasite.plugin.layouts import (
    RegisterLayout,
    Replicated,
    TiledSpecification,
    fragment_tiles,
    tiled_specification,
)


def _check_m_warps(m_warps: int) -> None:
    if m_warps not in (1, 2, 4):
        raise InvalidValueError(f"m_warps is {m_warps}", expected="1, 2 or 4")


def mma_left(bits: int, m_warps: int = 4) -> TiledSpecification:
    """Left operand of warp-level MMA (PTX ISA, ``mma.sync``); ``m_warps`` warps along
    the rows, elements of ``bits`` bits."""
    _check_m_warps(m_warps)
    word = 32 // bits
    tiles = ((m_warps * 16, 8 * word), (16, 4 * word), (8, 4 * word), (word,))
    return tiled_specification(tiles, (-7, Replicated(4 // m_warps)), (-3, -2))


def mma_right(bits: int, m_warps: int = 4) -> TiledSpecification:
    """Right operand of warp-level MMA."""
    _check_m_warps(m_warps)
    word, n_warps = 32 // bits, 4 // m_warps
    tiles = ((8 * word, n_warps * 8), (4 * word, 8), (word, 1))
    return tiled_specification(tiles, (Replicated(m_warps), -5), (-3, -4), vector_dim=-2)


def mma_accumulator(bits: int, m_warps: int = 4) -> TiledSpecification:
    """Accumulator of warp-level MMA; the same for every element width."""
    del bits
    _check_m_warps(m_warps)
    tiles = ((m_warps * 16, (4 // m_warps) * 8), (16, 8), (8, 8), (2,))
    return tiled_specification(tiles, (-7, -6), (-3, -2))


def smem_gmem_copy(shape: Sequence[int], bits: int, swizzle: int) -> TiledSpecification:
    """Copies between global memory and shared memory tiled by (8, 8 * swizzle / bits).

    Consecutive lanes walk along the columns of a tile, its rows, then over the tiles, so that
    neither side wastes transactions.

    Raises:
      InvalidValueError: the shape does not tile, or has no multiple of 4 tiles.
    """
    columns = 8 * swizzle // bits
    if len(shape) < 2 or shape[-2] % 8 or shape[-1] % columns:
        raise InvalidValueError(
            f"shape {tuple(shape)} is not a multiple of the tiles (8, {columns})"
        )
    row_tiles, column_tiles = shape[-2] // 8, shape[-1] // columns
    warp_rows = 4 if row_tiles % 4 == 0 else 2 if row_tiles % 2 == 0 else 1
    warp_columns = 4 // warp_rows
    if column_tiles % warp_columns:
        raise InvalidValueError(
            f"shape {tuple(shape)} has {row_tiles * column_tiles} tiles of (8, {columns}), which "
            "cannot be distributed over 4 warps",
            expected="a multiple of 4 tiles",
        )
    row_tiles, column_tiles = row_tiles // warp_rows, column_tiles // warp_columns
    lane_bytes = min(16, swizzle // 4)
    rows = cols = 1
    while lane_bytes * rows * cols < 16 and (column_tiles // cols) % 2 == 0:
        cols *= 2
    while lane_bytes * rows * cols < 16 and (row_tiles // rows) % 2 == 0:
        rows *= 2
    lane_bytes *= rows * cols
    if lane_bytes * 8 < bits:
        raise InvalidValueError(f"elements of {bits} bits are too wide for swizzle {swizzle}")
    vector = lane_bytes * 8 // bits
    steps = max(1, 8 * columns // (vector * 32))
    tiles = (
        (warp_rows * rows * 8, warp_columns * cols * columns),
        (rows * 8, cols * columns),
        (8, columns),
        (8 // steps, columns),
        (vector,),
    )
    return tiled_specification(tiles, (-9, -8), (-7, -6, -3, -2))


_MMA = {"MMA_LHS": mma_left, "MMA_RHS": mma_right, "MMA_ACC": mma_accumulator}


def _of_operand(make: Any, bits: int, dtype: Any, *, m_warps: int = 4) -> TiledSpecification:
    del dtype  # Its bits are what is passed.
    specification: TiledSpecification = make(bits, m_warps)
    return specification


def _copy(bits: int, shape: Sequence[int], dtype: Any, swizzle: int) -> TiledSpecification:
    del dtype
    return smem_gmem_copy(shape, bits, swizzle)


NAMED = (
    *(
        NamedLayout(name=name, specification=functools.partial(_of_operand, make), dtype_argument=0)
        for name, make in _MMA.items()
    ),
    # For copies between shared and global memory: SMEM_GMEM_COPY(shape, dtype, swizzle).
    NamedLayout(name="SMEM_GMEM_COPY", specification=_copy, dtype_argument=1),
    # Row numbers of a copy that gathers.
    NamedLayout(
        name="TMA_INDICES",
        specification=tiled_specification(((16,), (4,)), (-2,), (Replicated(32),)),
    ),
    NamedLayout(
        name="TMA_INDICES_4",
        specification=tiled_specification(((4,),), (Replicated(4),), (Replicated(32),)),
    ),
)

_FRAGMENTS = (
    tiled_specification(fragment_tiles(64, 8, (2,)), (-7,), (-3, -2)),
    tiled_specification(fragment_tiles(64, 8, (2, 2), (2, 1)), (-10,), (-6, -3, -5), vector_dim=-2),
)
"""Matrices of 8 x 8 elements as ``ldmatrix`` and ``stmatrix`` move them, 16 rows for each warp: two
neighbours of a row in a register, or two of a column."""


def _fragments(shape: tuple[int, ...]) -> Iterable[RegisterLayout]:
    for specification in _FRAGMENTS:
        try:
            yield specification.layout(shape)
        except InvalidValueError:
            continue


def _fragments_of_matrix(shape: tuple[int, ...]) -> Iterable[RegisterLayout]:
    return _fragments(shape) if len(shape) == 2 else ()


PROPOSALS = (
    LayoutProposal(name="matrix-fragments", propose=_fragments_of_matrix, uses=("broadcast",)),
    LayoutProposal(name="turnable-fragments", propose=_fragments, uses=("transpose",)),
)
