"""Which instructions make a product: tiles of the accumulator, steps along k, where each reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallasite.plugin import InvalidValueError
from pallasite_blackwell.tensor_core.types import Product
from pallasite_blackwell.tensor_memory.layouts import ROWS, Kind, TensorMemoryLayout

_MOST_COLUMNS = 256
"""Of one instruction."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of the accumulator that a sequence of instructions adds to.

    Attributes:
      row, column: number of the block of rows of a and of the block of columns of b.
      lanes, columns: where it begins in tensor memory, from the accumulator's address.
      rows, width: of the instruction, for both blocks of a pair.
    """

    row: int
    column: int
    lanes: int
    columns: int
    rows: int
    width: int


@dataclasses.dataclass(frozen=True)
class ProductPlan:
    """The instructions of a product.

    Attributes:
      row_blocks, column_blocks: (start, size) of rows of a and of columns of b, of this block.
      tiles: of the accumulator.
      steps: instructions along k.
    """

    row_blocks: tuple[tuple[int, int], ...]
    column_blocks: tuple[tuple[int, int], ...]
    tiles: tuple[Tile, ...]
    steps: int


def plan_product(
    product: Product,
    layout: TensorMemoryLayout,
    shape: Sequence[int],
    depth: int,
    *,
    pair: bool,
) -> ProductPlan:
    """The instructions of a product.

    Args:
      product: its types.
      layout, shape: of the accumulator of this block, (m, n) or (m, 2n).
      depth: k, with the elements that a sparse operand lacks.
      pair: whether two blocks make it together.

    Raises:
      InvalidValueError: no instructions do.
    """
    m, n = shape
    blocks = 2 if pair else 1
    columns = n // blocks
    if depth % product.depth or not depth:
        raise InvalidValueError(
            f"k is no multiple of what an instruction multiplies, of {product.a}",
            got=f"k={depth}",
            expected=f"a multiple of {product.depth}",
        )
    expected = _accumulator_layout(m, n, pair=pair)
    if layout != expected:
        raise InvalidValueError(
            "the accumulator lies in tensor memory in another way than products leave it",
            got=str(layout),
            expected=str(expected),
            hint="plgpu.TMEM((m, n), dtype, packed=False), collective=True for pairs of blocks",
        )
    folded = m == 64 and not pair
    if m == 64 and (product.sparse or (product.scale is not None and not pair)):
        raise InvalidValueError(
            "products of 64 rows with "
            + ("a sparse operand" if product.sparse else "scales, by one block"),
            got=f"m={m}",
            expected=f"m a multiple of {ROWS}",
        )
    row_blocks = [(start, min(m, ROWS)) for start in range(0, m, ROWS)]
    width = columns // 2 if folded else columns
    if folded and columns % 2:
        width = 0
    column_blocks = _column_blocks(product, width, m, pair=pair)
    if folded:
        column_blocks += [(width + start, size) for start, size in column_blocks]
    tiles = []
    for number, _ in enumerate(row_blocks):
        for position, (start, size) in enumerate(column_blocks):
            below = folded and start >= width
            tiles.append(
                Tile(
                    row=number,
                    column=position,
                    lanes=16 if below else 0,
                    columns=number * n + (start - width if below else start) * blocks,
                    rows=min(m, ROWS) * blocks,
                    width=size * blocks,
                )
            )
    return ProductPlan(
        tuple(row_blocks), tuple(column_blocks), tuple(tiles), depth // product.depth
    )


def _accumulator_layout(m: int, n: int, *, pair: bool) -> TensorMemoryLayout:
    if m == 64:
        kind = Kind.M64_COLLECTIVE if pair else Kind.HALF_LANE
        return TensorMemoryLayout(kind, 1, n)
    return TensorMemoryLayout(Kind.DEFAULT, 1)


def _column_blocks(product: Product, width: int, m: int, *, pair: bool) -> list[tuple[int, int]]:
    """(first, number) of the columns of this block that each instruction makes."""
    blocks = 2 if pair else 1
    most = _MOST_COLUMNS // blocks
    unit = _unit(product)
    if width <= 0 or width % unit:
        raise InvalidValueError(
            f"no instructions make so many columns, of {product.a} with m={m}"
            + (" by a pair of blocks" if pair else ""),
            got=f"n={width * (2 if m == 64 and not pair else 1)}",
            expected=f"a multiple of {unit * (2 if m == 64 and not pair else 1)}"
            + (" in each block" if pair else ""),
        )
    if pair and width > most:
        # The columns of both blocks alternate from one instruction to the next.
        raise InvalidValueError(
            "a product by a pair of blocks has too many columns",
            got=f"n={width} in each block",
            expected=f"at most {most}",
            hint="several calls, each for a part of the columns",
        )
    found, start = [], 0
    while start < width:
        size = min(most, width - start)
        found.append((start, size))
        start += size
    return found


def _unit(product: Product) -> int:
    """What columns of one block are a multiple of (PTX ISA, "Shapes of matrices")."""
    return 16 if product.kind == "i8" or (product.sparse and product.scale is None) else 8
