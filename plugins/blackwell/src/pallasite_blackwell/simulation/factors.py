"""Scale factors of block-scaled products: PTX ISA 9.7.16.10.7.

The factors of 32 rows of A, or columns of B, are in the 32 lanes of a quarter of tensor memory,
four along K in each cell; the next 32 rows are in the next column. Each quarter of the lanes of D
uses the factors in its own quarter, so these have to be there four times.
"""

from __future__ import annotations

import numpy as np

from pallasite_blackwell.simulation.formats import scale_table
from pallasite_blackwell.simulation.placement import Placement
from pallasite_blackwell.simulation.tensor_memory import COLUMNS, TensorMemory
from pallasite_simulator.types import Array

ADDRESS = 0x3FFFFFFF
"""Bits of the address of factors; above are numbers that software keeps there."""


def locate(
    address: int, rows: Array, quarters: Array, first: int, count: int, extent: int
) -> tuple[Array, Array, Array]:
    """Where factors are.

    Args:
      address: of the factors.
      rows: row of A or column of B, of any shape.
      quarters: the quarter of the lanes in which to look, of the same shape.
      first: byte of the first factor in its cell.
      count: how many factors along K.
      extent: rows that there are.

    Returns:
      Lanes, columns and bytes in the cells, of the shape of ``rows`` and one more dimension of
      ``count``.
    """
    place = first + np.arange(count)
    cells = -(-extent // 128) * 4
    lanes = (address >> 16 & 0x7F) + quarters * 32 + rows % 32
    columns = (address & 0xFFFF) + rows // 32
    shape = (*rows.shape, count)
    return (
        np.broadcast_to(lanes[..., None], shape),
        columns[..., None] + place // 4 * cells,
        np.broadcast_to(place % 4, shape),
    )


def read(memory: TensorMemory, block: int, where: tuple[Array, Array, Array], kind: str) -> Array:
    """The values of factors (float64) at places, all of which are in the memory."""
    lanes, columns, places = where
    words = memory.words[block][lanes, np.minimum(columns, COLUMNS - 1)]
    memory.count("read", words.size)
    values: Array = scale_table(kind)[words >> (8 * places).astype(np.uint32) & 255]
    return values


def of_a(address: int, placed: Placement, first: int, count: int) -> tuple[Array, Array, Array]:
    """Places of the factors of A: of shape (parts, rows, count)."""
    rows = np.broadcast_to(np.arange(placed.rows), placed.lanes.shape)
    return locate(address, rows, placed.lanes // 32, first, count, placed.rows)


def of_b(
    address: int, placed: Placement, n: int, first: int, count: int
) -> tuple[Array, Array, Array]:
    """Places of the factors of B: of shape (parts, quarters of a part, columns, count). Each part
    of the columns has its own factors, numbered from its first column."""
    each = n // placed.parts
    quarters = np.arange(4).reshape(placed.parts, -1)[:, :, None]
    columns = np.broadcast_to(np.arange(each), (*quarters.shape[:2], each))
    return locate(address, columns, np.broadcast_to(quarters, columns.shape), first, count, each)
