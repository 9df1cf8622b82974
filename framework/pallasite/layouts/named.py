"""Named register layouts: a data table, and names for layouts in messages.

The placements are those that the hardware's matrix and copy instructions prescribe, written as
tilings (see :func:`pallasite.layouts.construct.tiled`). Registers are numbered row-major over the
logical dimensions, which is not always the order in which an instruction lists its operands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallasite.errors import InvalidValueError
from pallasite.layouts.construct import Replicated, Tiling, strided, tiled
from pallasite.layouts.registers import Layout, RegisterLayout, SplatLayout


@dataclasses.dataclass(frozen=True)
class TiledSpecification:
    """The parameters of :func:`~pallasite.layouts.construct.tiled` but for the shape."""

    tiling: Tiling
    warp_dims: tuple[int | Replicated, ...]
    lane_dims: tuple[int | Replicated, ...]
    vector_dim: int = -1

    def layout(self, shape: Sequence[int]) -> RegisterLayout:
        """The layout for a shape whose trailing extents are multiples of the first tile."""
        return tiled(shape, self.tiling, self.warp_dims, self.lane_dims, self.vector_dim)

    @property
    def base_tile(self) -> tuple[int, ...]:
        """The shape of which trailing extents must be multiples."""
        return self.tiling.tiles[0]


def _specification(
    tiles: tuple[tuple[int, ...], ...],
    warp_dims: tuple[int | Replicated, ...],
    lane_dims: tuple[int | Replicated, ...],
    vector_dim: int = -1,
) -> TiledSpecification:
    return TiledSpecification(Tiling(tiles), warp_dims, lane_dims, vector_dim)


def _matrix(rows: int, columns: int, *minor: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Strips of ``rows`` / 4 rows for each warp, made of matrices of 8 rows."""
    return ((rows, columns), (rows // 4, columns), (8, columns), *minor)


FIXED: Mapping[str, TiledSpecification] = {
    "WGMMA": _specification(_matrix(64, 8, (2,)), (-7,), (-3, -2)),
    "_WGMMA_ACC_32BIT": _specification(_matrix(64, 8, (2,), (1,)), (-8,), (-4, -3)),
    "WGMMA_8BIT": _specification(_matrix(64, 16, (4,)), (-7,), (-3, -2)),
    "WGMMA_TF32": _specification(_matrix(64, 4, (1,)), (-7,), (-3, -2)),
    "WGMMA_UPCAST_2X": _specification(_matrix(64, 16, (8,), (4,)), (-8,), (-4, -2, -3)),
    "WGMMA_UPCAST_4X": _specification(_matrix(64, 32, (8,)), (-7,), (-3, -2)),
    "WGMMA_TRANSPOSED": _specification(
        _matrix(64, 8, (2, 2), (2, 1)), (-10,), (-6, -3, -5), vector_dim=-2
    ),
    "WGMMA_ROW": _specification(((64,), (16,), (8,), (1,)), (-4,), (-2, Replicated(4))),
    "WGMMA_COL": _specification(((8,), (2,)), (Replicated(4),), (Replicated(8), -2)),
    "TCGEN05": _specification(_matrix(128, 8, (2,)), (-7,), (-3, -2)),
    "TCGEN05_TRANSPOSED": _specification(
        _matrix(128, 8, (2, 2), (2, 1)), (-10,), (-6, -3, -5), vector_dim=-2
    ),
    "TCGEN05_ROW": _specification(((128,), (32,), (8,), (1,)), (-4,), (-2, Replicated(4))),
    "TMA_INDICES": _specification(((16,), (4,)), (-2,), (Replicated(32),)),
    "TMA_INDICES_4": _specification(((4,),), (Replicated(4),), (Replicated(32),)),
}
"""Layouts without parameters. TCGEN05_COL is the same placement as WGMMA_COL."""


def tmem_native(vector_length: int = 2) -> TiledSpecification:
    """One of 128 rows for each lane; columns in vectors of ``vector_length``."""
    return _specification(((128, vector_length), (32, vector_length)), (-4,), (-2,))


def m64_collective(columns: int) -> TiledSpecification:
    """64 rows, where the warps 2 and 3 hold the right half of the columns."""
    _check_columns(columns)
    return _specification(((64, columns), (32, columns // 2), (8, 8), (2,)), (-6, -7), (-3, -2))


def m64_collective_native(columns: int, packing: int = 1) -> TiledSpecification:
    """Like :func:`m64_collective`, with one row for each lane."""
    _check_columns(columns)
    if packing not in (1, 2, 4, 8):
        raise InvalidValueError(f"packing {packing} is not 1, 2, 4 or 8")
    return _specification(((64, columns), (32, columns // 2), (packing,)), (-4, -5), (-3,))


def _check_columns(columns: int) -> None:
    if columns < 16 or columns % 16:
        raise InvalidValueError(f"{columns} columns are not a multiple of 16")


def _check_m_warps(m_warps: int) -> None:
    if m_warps not in (1, 2, 4):
        raise InvalidValueError(f"m_warps is {m_warps}", expected="1, 2 or 4")


def mma_left(bits: int, m_warps: int = 4) -> TiledSpecification:
    """Left operand of warp-level matrix products; ``m_warps`` warps along the rows."""
    _check_m_warps(m_warps)
    word = 32 // bits
    tiles = ((m_warps * 16, 8 * word), (16, 4 * word), (8, 4 * word), (word,))
    return _specification(tiles, (-7, Replicated(4 // m_warps)), (-3, -2))


def mma_right(bits: int, m_warps: int = 4) -> TiledSpecification:
    """Right operand of warp-level matrix products."""
    _check_m_warps(m_warps)
    word, n_warps = 32 // bits, 4 // m_warps
    tiles = ((8 * word, n_warps * 8), (4 * word, 8), (word, 1))
    return _specification(tiles, (Replicated(m_warps), -5), (-3, -4), vector_dim=-2)


def mma_accumulator(bits: int, m_warps: int = 4) -> TiledSpecification:
    """Accumulator of warp-level matrix products; the same for every element width."""
    del bits
    _check_m_warps(m_warps)
    tiles = ((m_warps * 16, (4 // m_warps) * 8), (16, 8), (8, 8), (2,))
    return _specification(tiles, (-7, -6), (-3, -2))


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
            "cannot be spread over 4 warps",
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
    return _specification(tiles, (-9, -8), (-7, -6, -3, -2))


PARAMETERIZED: Mapping[str, Callable[..., TiledSpecification]] = {
    "TCGEN05_TMEM_NATIVE": tmem_native,
    "TCGEN05_M64_COLLECTIVE": m64_collective,
    "TCGEN05_M64_COLLECTIVE_NATIVE": m64_collective_native,
}
_MMA = {"MMA_LHS": mma_left, "MMA_RHS": mma_right, "MMA_ACC": mma_accumulator}
SPECIAL = ("WG_SPLAT", "WG_STRIDED", "TILED", "SMEM_GMEM_COPY", *_MMA)
NAMES: tuple[str, ...] = (*FIXED, *PARAMETERIZED, *SPECIAL)

BROADCAST_CANDIDATES = (
    "WGMMA",
    "WGMMA_TRANSPOSED",
    "TCGEN05",
    "TCGEN05_TRANSPOSED",
    "TCGEN05_TMEM_NATIVE",
    "TCGEN05_M64_COLLECTIVE",
)
"""Layouts tried, in this order, as the result of a broadcast that has no layout hint."""


def specification(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], bits: int
) -> TiledSpecification:
    """The tiling behind a named layout.

    Raises:
      InvalidValueError: no such name, or arguments that the layout does not take.
    """
    try:
        if name in FIXED:
            if args or kwargs:
                raise TypeError(f"{name} takes no arguments")
            return FIXED[name]
        if name in PARAMETERIZED:
            return PARAMETERIZED[name](*args, **kwargs)
        if name in _MMA:
            return _mma(name, bits, *args, **kwargs)
        if name == "SMEM_GMEM_COPY":
            return _copy(bits, *args, **kwargs)
        if name == "TILED":
            return _tiled(*args, **kwargs)
    except TypeError as error:
        raise InvalidValueError(f"wrong arguments for the layout {name}: {error}") from error
    raise InvalidValueError(
        f"there is no register layout {name}", expected=f"one of {', '.join(NAMES)}"
    )


def _mma(name: str, bits: int, dtype: Any, *, m_warps: int = 4) -> TiledSpecification:
    del dtype  # The caller has turned it into bits.
    return _MMA[name](bits, m_warps)


def _copy(bits: int, shape: Sequence[int], dtype: Any, swizzle: int) -> TiledSpecification:
    del dtype
    return smem_gmem_copy(shape, bits, swizzle)


def _tiled(
    tiling: Any, warp_dims: Sequence[Any], lane_dims: Sequence[Any], vector_dim: int
) -> TiledSpecification:
    """Any objects with ``tiles`` and ``times`` will do for the tiling and for replication."""

    def own(dims: Sequence[Any]) -> tuple[int | Replicated, ...]:
        return tuple(Replicated(d.times) if hasattr(d, "times") else int(d) for d in dims)

    tiles = tiling.tiles if hasattr(tiling, "tiles") else tiling
    return TiledSpecification(Tiling(tiles), own(warp_dims), own(lane_dims), vector_dim)


def resolve(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: Sequence[int],
    itemsize_bits: int,
) -> Layout:
    """The layout that a user names, for an array of ``shape`` and ``itemsize_bits`` per element.

    Args:
      name: one of :data:`NAMES`.
      args: positional arguments given with the name, such as a vector length.
      kwargs: keyword arguments given with the name.
      shape: shape of the array.
      itemsize_bits: bits of an element of the array.

    Raises:
      InvalidValueError: an unknown name, wrong arguments, or a shape that does not fit.
    """
    shape = tuple(shape)
    if name not in ("WG_SPLAT", "WG_STRIDED"):
        return specification(name, args, kwargs, itemsize_bits).layout(shape)
    keys = ("shape", "vec_size") if name == "WG_STRIDED" else ("shape",)
    given = dict(zip(keys, args, strict=False)) | dict(kwargs)
    if len(args) > len(keys) or set(given) - set(keys) or (len(keys) == 2 and keys[1] not in given):
        raise InvalidValueError(
            f"wrong arguments for the layout {name}: {tuple(args)} {dict(kwargs)}",
            expected=f"{name}({', '.join(f'{key}=' for key in keys)})",
        )
    if tuple(given.get("shape", shape)) != shape:
        raise InvalidValueError(
            f"the layout {name} is for shape {tuple(given['shape'])}, but the array has {shape}"
        )
    return SplatLayout(shape) if name == "WG_SPLAT" else strided(shape, given["vec_size"])


@functools.lru_cache(maxsize=1024)
def _candidate(name: str, shape: tuple[int, ...]) -> RegisterLayout | None:
    args = (shape[-1],) if name.startswith("TCGEN05_M64") and shape else ()
    try:
        return specification(name, args, {}, 32).layout(shape)
    except InvalidValueError:
        return None


def turnable(shape: Sequence[int]) -> list[RegisterLayout]:
    """The named layouts in which lanes of a warp access both rows and columns of a tile, so that
    one with a swizzle is accessed without bank conflicts either way."""
    found = (_candidate(name, tuple(shape)) for name in ("WGMMA", "WGMMA_TRANSPOSED"))
    return [layout for layout in found if layout is not None]


def broadcast_candidates(shape: Sequence[int]) -> list[tuple[str, RegisterLayout]]:
    """The named layouts of :data:`BROADCAST_CANDIDATES` that fit a two-dimensional result."""
    if len(shape) != 2:
        return []
    found = ((name, _candidate(name, tuple(shape))) for name in BROADCAST_CANDIDATES)
    return [(name, layout) for name, layout in found if layout is not None]


@functools.lru_cache(maxsize=1024)
def describe(layout: Layout) -> str:
    """A short name for messages: ``WGMMA``, ``strided(vector 4)``, ``splat``, or the digits."""
    if isinstance(layout, SplatLayout):
        return "splat"
    assert isinstance(layout, RegisterLayout)
    for name in (*FIXED, *PARAMETERIZED):
        if _candidate(name, layout.shape) == layout:
            return name
    if layout == strided(layout.shape, layout.vector_length):
        return f"strided(vector {layout.vector_length})"
    return str(layout)
