"""How rows are distributed over blocks, warpgroups and registers."""

from __future__ import annotations

import dataclasses

import numpy as np

LANES, WARPS = 128, 4
MOST_WARPGROUPS = 8
VECTOR_BYTES = 16
BUSY_ROWS = 512
"""So many rows keep the multiprocessors of a chip busy with one warpgroup for each."""


@dataclasses.dataclass(frozen=True)
class RowTiling:
    """The part of a matrix that a block, and a warpgroup of it, works on.

    Attributes:
      height: rows of a block; 1 if several warpgroups share a row.
      threads: warpgroups that share a row.
      chunk: columns that a warpgroup has in registers at a time.
      columns: of the matrix.
      ragged: whether the warpgroups hold a whole row, of which the last one has fewer columns.
    """

    height: int
    threads: int
    chunk: int
    columns: int
    ragged: bool = False

    @property
    def resident(self) -> bool:
        """Whether the warpgroups hold a whole row, so that it is read once."""
        return self.ragged or self.chunk * self.threads == self.columns


@dataclasses.dataclass(frozen=True)
class Registers:
    """How many elements of a row a lane may hold: 32 bits each, for all arrays live together.

    Attributes:
      alone: if one warpgroup works on a row.
      shared: if several do, up to four.
      crowded: if eight do, which leaves 64 registers for each lane; five to seven may hold more.
      area: elements that a block of short rows should have.
      four: bytes of a row that registers do not hold, up to which four warpgroups share it; longer
        ones eight, with which the L2 cache still has what is read again.
    """

    alone: int = 64
    shared: int = 64
    crowded: int = 32
    area: int = 4096
    four: int = 112 * 1024

    def limit(self, threads: int) -> int:
        """Columns of one of so many warpgroups."""
        if threads == 1:
            return self.alone * LANES
        if threads <= 4:
            return self.shared * LANES
        return max(self.crowded, 4 * self.shared // threads) * LANES


def row_tiling(rows: int, columns: int, itemsize: int, registers: Registers) -> RowTiling:
    """The tiling of a matrix of which each row is reduced.

    Few warpgroups for a row are best as long as there are rows enough: they wait for each other
    less. Those that share a row have vectors of their own.

    Args:
      rows, columns: extents.
      itemsize: of an element in memory, in bytes.
      registers: limits.
    """
    if columns <= registers.area // 2:
        height = 1
        while 2 * height * columns <= registers.area and 2 * height <= rows:
            height *= 2
        return RowTiling(height, 1, columns, columns)
    vector = max(1, VECTOR_BYTES // itemsize)
    fitting = [
        threads
        for threads in range(1, MOST_WARPGROUPS + 1)
        if columns % (threads * vector) == 0 and columns // threads <= registers.limit(threads)
    ]
    if fitting:
        # A power of two, if there is one.
        threads = min(fitting, key=lambda count: (count.bit_count() > 1, count))
        while 2 * threads in fitting and rows * threads < BUSY_ROWS:
            if columns // (2 * threads) < LANES * vector:
                break
            threads *= 2
        return RowTiling(1, threads, columns // threads, columns)
    if columns <= registers.limit(1):
        return RowTiling(1, 1, columns, columns)
    short = columns * itemsize <= registers.four
    threads = 4 if short and rows >= BUSY_ROWS else MOST_WARPGROUPS
    return RowTiling(1, min(threads, columns // (16 * LANES)), 16 * LANES, columns)


RAGGED = True
"""Whether warpgroups share few rows also if the last one then has fewer columns."""

SPREAD = True
"""Whether few short rows are spread over as many blocks as have a row for each warp. Norms of 40 to
1000 rows of 24 to 512 elements took 0.76 to 0.92 of the time so on an H200."""

_SPREAD_BLOCKS = 128
"""Blocks that are enough then."""

SHARED_FROM: int | None = None
"""Elements of a lane from which on warpgroups share few rows that one would hold."""

_MOST_ELEMENTS, _LEAST_ELEMENTS = 32, 4
"""Elements of a lane at most, and at least, where warpgroups share few rows."""


def few_rows_tiling(rows: int, tiling: RowTiling, itemsize: int) -> RowTiling:
    """The tiling of rows that may be too few for others to hide what reading them again takes.

    Of rows that one warpgroup holds, it took 1.1 to 1.3 of the time (4295 columns, on an H200).

    Args:
      rows: of the matrix.
      tiling: of many rows.
      itemsize: of an element in memory, in bytes.
    """
    columns, vector = tiling.columns, max(1, VECTOR_BYTES // itemsize)
    if SPREAD and tiling.height > WARPS and rows < _SPREAD_BLOCKS * tiling.height:
        height = 1 << (max(WARPS, rows // _SPREAD_BLOCKS).bit_length() - 1)
        return dataclasses.replace(tiling, height=height)
    shared = SHARED_FROM is not None and tiling.threads == 1 and columns > SHARED_FROM * LANES
    if not RAGGED or (tiling.resident and not shared) or rows >= BUSY_ROWS:
        return tiling
    unit = LANES * (1 if columns % vector else vector)
    for threads in range(MOST_WARPGROUPS, 1, -1):
        chunk = -(-columns // (threads * unit)) * unit
        if chunk > _MOST_ELEMENTS * LANES:
            break
        if chunk >= _LEAST_ELEMENTS * LANES and (threads - 1) * chunk < columns:
            return RowTiling(1, threads, chunk, columns, ragged=threads * chunk > columns)
    return tiling


def streaming_tiling(rows: int, columns: int, registers: Registers) -> RowTiling:
    """The tiling of a matrix of which each row is read once, chunk by chunk."""
    if columns <= registers.area:
        return row_tiling(rows, columns, 1, registers)
    if columns <= registers.limit(1) and rows >= BUSY_ROWS:
        # All of it is in flight at once.
        return RowTiling(1, 1, columns, columns)
    threads = 1 if columns <= 65536 else 2
    while rows * threads < BUSY_ROWS and threads < MOST_WARPGROUPS and columns > threads * 8192:
        threads *= 2
    chunk = (16 if threads == 1 else 32) * LANES
    if columns <= 4 * chunk and columns % chunk and columns % (8 * LANES) == 0:
        # What is left after the chunks would be a good part of the row.
        chunk = 8 * LANES
    return RowTiling(1, threads, chunk, columns)


def size_of(dtype: object) -> int:
    """Bytes of an element."""
    return int(np.dtype(dtype).itemsize)  # type: ignore[call-overload]
