"""How rows of the gradients of norms are fetched before their turn, and whether registers do."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallasite_std.ops.rows.kernel import Staging
from pallasite_std.ops.rows.tiling import LANES, RowTiling, size_of

PAIRED = 10
"""Elements that a lane may have of a row if two rows are worked on at a time and the weight stays
in registers, too; that is better where there are two sums."""
UNIT = 16
"""Bytes of which rows that are copied in one piece consist."""
MOST_STAGES = 4
LANE_REGISTERS = 512
"""Registers of a multiprocessor by lanes of a warpgroup."""
_TEMPORARIES = (28, 1.5, 88)
"""Registers of a lane besides sums: some, more for each element of its columns, and at most."""


def needed_registers(tiling: RowTiling, sums: int) -> float:
    """Registers of a lane that the gradients need, about."""
    least, each, most = _TEMPORARIES
    elements = tiling.height * tiling.chunk / LANES
    return min(least + each * elements, most) + sums * elements + (sums > 1)


def available_registers(tiling: RowTiling, resident: int) -> int:
    """Registers of a lane if a multiprocessor has so many blocks: multiples of 8."""
    return LANE_REGISTERS // (tiling.threads * resident) // 8 * 8


def staged_rows(
    tiling: RowTiling, rows: int, sums: int, dtypes: tuple[np.dtype[Any], ...], shared_memory: int
) -> tuple[int, Staging | None]:
    """How many blocks a multiprocessor has, and how their rows are fetched before their turn: None
    where they cannot be, or shared memory does not suffice.

    Args:
      tiling: whose warpgroups hold the rows.
      rows: of the matrices.
      sums: that each lane keeps for its columns.
      dtypes: of the matrices that are read.
      shared_memory: bytes that a block may use for it; a multiprocessor has little more.
    """
    most = max(1, round(8 / tiling.threads))
    sizes = [size_of(dtype) for dtype in dtypes]
    if any(tiling.chunk * size % UNIT for size in sizes):
        return most, None
    stage = sum(sizes) * tiling.height * tiling.columns
    for resident in range(most, 0, -1):
        if resident > 1 and needed_registers(tiling, sums) > available_registers(tiling, resident):
            continue
        room = (shared_memory - 4096) // (resident * stage)
        paired = tiling.threads > 1 and sums > 1 and tiling.chunk <= PAIRED * LANES
        # What pads the elements of lanes takes registers, too.
        paired = paired and tiling.chunk % (2 * LANES) == 0
        if paired and room >= 4 and rows >= 2:
            return resident, Staging(min(MOST_STAGES, room // 2), dtypes, together=2)
        if room >= 2:
            return resident, Staging(min(MOST_STAGES, room), dtypes)
    return most, None
