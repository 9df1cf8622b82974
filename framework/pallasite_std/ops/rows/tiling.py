"""How rows are distributed over blocks, warpgroups and registers."""

from __future__ import annotations

import dataclasses

import numpy as np

LANES = 128
MOST_WARPGROUPS = 8
VECTOR_BYTES = 16


@dataclasses.dataclass(frozen=True)
class RowTiling:
    """The part of a matrix that a block, and a warpgroup of it, works on.

    Attributes:
      height: rows of a block; 1 if several warpgroups share a row.
      threads: warpgroups that share a row.
      chunk: columns that a warpgroup has in registers at a time.
      columns: of the matrix.
    """

    height: int
    threads: int
    chunk: int
    columns: int

    @property
    def resident(self) -> bool:
        """Whether the warpgroups hold a whole row, so that it is read once."""
        return self.chunk * self.threads >= self.columns


def row_tiling(rows: int, columns: int, itemsize: int, registers: int) -> RowTiling:
    """The tiling of a matrix of which each row is reduced.

    Args:
      rows, columns: extents.
      itemsize: of an element in memory, in bytes.
      registers: elements of a row that a lane may hold: 32 bits each, for all arrays that are live
        together, so a fraction of the register file.
    """
    limit = registers * LANES
    if columns <= limit // 2:
        # Short rows: a warp or less for each, so that reductions need no shared memory.
        height = 1
        while height < 16 and 2 * height * columns <= min(limit, 2048) and 2 * height <= rows:
            height *= 2
        return RowTiling(height, 1, columns, columns)
    vector = max(1, VECTOR_BYTES // itemsize)
    counts = [2**n for n in range(MOST_WARPGROUPS.bit_length())]
    for aligned in (True, False):
        for threads in counts:
            part = columns // threads
            if columns % threads or part > limit or (aligned and part % vector):
                continue
            if threads == 1 or part >= LANES * vector // 2:
                return RowTiling(1, threads, part, columns)
    if columns <= 2 * limit:
        return RowTiling(1, 1, columns, columns)
    threads = next((n for n in counts if columns <= 4 * n * limit), MOST_WARPGROUPS)
    return RowTiling(1, threads, max(LANES * vector, limit // 2), columns)


def size_of(dtype: object) -> int:
    """Bytes of an element."""
    return np.dtype(dtype).itemsize  # type: ignore[call-overload, no-any-return]
