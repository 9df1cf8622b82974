"""Loads from tensor memory and stores to it: which instructions, and which registers they move.

An instruction moves words of 32 bits between cells and registers of a warp in one of a few shapes
(PTX ISA, ``tcgen05.ld``). Which one moves a register layout is found by asking both layouts where
elements lie, so every layout that some shape moves will do, whatever it was made for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError
from pallasite.plugin.layouts import LANES, WARPS, Owner, RegisterLayout, describe
from pallasite_blackwell.tensor_memory.layouts import CELL_BITS, Cells, TensorMemoryLayout

MOST_WORDS = 32
"""Registers that one instruction moves: more are legal, but then LLVM and ptxas spill."""

_PARTS, _FEWEST_WORDS = 8, 8
"""A matrix of more than one load is loaded in so many parts, but of no fewer registers each."""

_HALF_BITS = 16

type _Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape of the instructions.

    Attributes:
      name: in PTX.
      rows: lanes of tensor memory that it reaches, 32 or 16.
      columns: that ``.x1`` spans.
      words: registers of ``.x1``.
    """

    name: str
    rows: int
    columns: int
    words: int

    def place(self, lane: int, word: int) -> tuple[int, int]:
        """The row and the column that a lane's register holds."""
        match self.name:
            case "32x32b":
                return lane, word
            case "16x64b":
                return lane // 4 + 8 * (lane % 2), lane // 2 % 2 + 2 * word
            case "16x128b":
                return lane // 4 + 8 * (word % 2), lane % 4 + 4 * (word // 2)
            case _:
                return lane // 4 + 8 * (word // 2 % 2), word % 2 + 2 * (lane % 4) + 8 * (word // 4)


SHAPES = (
    Shape("32x32b", 32, 1, 1),
    Shape("16x256b", 16, 8, 4),
    Shape("16x128b", 16, 4, 2),
    Shape("16x64b", 16, 2, 1),
)


@dataclasses.dataclass(frozen=True)
class Move:
    """One instruction.

    Attributes:
      column, lane: of the first cell, from the first of the matrix.
      count: of the shape's units: ``.x<count>``.
      words: for each of its registers, the (register, vector element) of each element in it, from
        the low bits on.
    """

    column: int
    lane: int
    count: int
    words: tuple[tuple[tuple[int, int], ...], ...]

    def split(self, most: int, columns: int) -> Iterator[Move]:
        """Instructions of at most so many units, which span so many columns each."""
        number = len(self.words) // self.count
        for start in range(0, self.count, most):
            count = min(most, self.count - start)
            words = self.words[start * number : (start + count) * number]
            yield Move(self.column + start * columns, self.lane, count, words)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """How a matrix is moved.

    Attributes:
      shape: of the instructions.
      packs: whether two columns with 16 bits each go to one register.
      moves: the instructions.
    """

    shape: Shape
    packs: bool
    moves: tuple[Move, ...]

    @functools.cached_property
    def loads(self) -> tuple[Move, ...]:
        """The instructions, in smaller parts, for loads.

        What one instruction loads is there as a whole, and stays until the last of it is used. Of
        smaller parts, ptxas reuses the registers of those that were converted and stored.
        """
        words = sum(len(move.words) for move in self.moves)
        if words <= MOST_WORDS:
            return self.moves
        most = max(1 << (words // _PARTS).bit_length() >> 1, _FEWEST_WORDS)
        count = max(1, most // self.shape.words)
        columns = self.shape.columns * (2 if self.packs else 1)
        return tuple(part for move in self.moves for part in move.split(count, columns))


@functools.lru_cache(maxsize=256)
def plan_transfer(
    registers: RegisterLayout, layout: TensorMemoryLayout, shape: tuple[int, int], bits: int
) -> Transfer:
    """The instructions that move a matrix.

    Args:
      registers: the register layout of the array.
      layout: of the matrix in tensor memory.
      shape: of both.
      bits: of an element.

    Raises:
      InvalidValueError: no instructions do.
    """
    found = find_transfer(registers, layout, shape, bits)
    if found is None:
        raise InvalidValueError(
            "tensor memory is not moved to or from registers of this layout",
            got=f"layout {describe(registers)}, matrix in {layout}",
            expected=f"layout {describe(default_registers(layout, shape, bits))}",
            hint="leave the layout open, or convert: plgpu.layout_cast(x, layout)",
        )
    return found


@functools.lru_cache(maxsize=256)
def find_transfer(
    registers: RegisterLayout, layout: TensorMemoryLayout, shape: tuple[int, int], bits: int
) -> Transfer | None:
    """See :func:`plan_transfer`; None if no instructions move it."""
    cells = layout.cells(shape)
    held = _held(registers)
    # Half as many registers and instructions, where two elements fit one register.
    for packs in (True, False) if bits == _HALF_BITS and layout.packing == 1 else (False,):
        for kind in SHAPES:
            moves = _moves(kind, packs, cells, held)
            if moves is not None:
                return Transfer(kind, packs, moves)
    return None


def _held(layout: RegisterLayout) -> _Numbers:
    """The number of the element in each warp, lane, register and place of its vector."""
    owners = {Owner.WARP: 0, Owner.LANE: 1, Owner.REGISTER: 2, Owner.VECTOR: 3}
    sizes = (WARPS, LANES, layout.registers, layout.vector_length)
    result = np.zeros(sizes, np.int64)
    step = 1
    for digit in reversed(layout.digits):
        axis = owners[digit.owner]
        values = np.arange(sizes[axis]) // digit.stride % digit.size * step
        result += values.reshape([-1 if i == axis else 1 for i in range(4)])
        step *= digit.size
    return result


def _moves(kind: Shape, packs: bool, cells: Cells, held: _Numbers) -> tuple[Move, ...] | None:
    spread = 2 if packs else 1
    width = cells.shape[1]
    unit = kind.columns * spread
    if width % unit:
        return None
    places = np.array(
        [[kind.place(lane, word) for word in range(kind.words)] for lane in range(LANES)]
    )
    quarter = np.arange(WARPS)[:, None, None] * (128 // WARPS)
    words: dict[tuple[int, int], list[tuple[tuple[int, int], ...]]] = {}
    finder = _Finder(held)
    for lane in range(0, 32, kind.rows):
        for column in range(0, width, unit):
            rows = quarter + lane + places[None, :, :, 0]
            columns = column + places[None, :, :, 1] * spread
            parts = [
                cells[rows, columns + place, sub]
                for place in range(spread)
                for sub in range(cells.shape[2])
            ]
            for word in range(kind.words):
                found = finder.find([part[:, :, word] for part in parts])
                if found is None:
                    return None
                words.setdefault((lane, column // unit), []).append(found)
    if not finder.complete:
        return None
    return tuple(_instructions(kind, width // unit, unit, words))


class _Finder:
    """Finds which place of each lane holds given elements."""

    def __init__(self, held: _Numbers):
        self._held = held
        self._first = {
            int(number): place for place, number in reversed(list(np.ndenumerate(held[0, 0])))
        }
        self._seen: set[tuple[int, int]] = set()

    def find(self, elements: Sequence[_Numbers]) -> tuple[tuple[int, int], ...] | None:
        """The places, for the elements of one word in all warps and lanes."""
        places = []
        for wanted in elements:
            place = self._first.get(int(wanted[0, 0]))
            if place is None or (self._held[:, :, place[0], place[1]] != wanted).any():
                return None
            places.append((int(place[0]), int(place[1])))
        self._seen.update(places)
        return tuple(places)

    @property
    def complete(self) -> bool:
        """Whether every place has been found."""
        _, _, registers, elements = self._held.shape
        return bool(len(self._seen) == registers * elements)


def _instructions(
    kind: Shape,
    units: int,
    unit: int,
    words: dict[tuple[int, int], list[tuple[tuple[int, int], ...]]],
) -> Iterator[Move]:
    """As few instructions as the limit on registers allows, each of a power of two of units."""
    most = MOST_WORDS // kind.words
    for lane in range(0, 32, kind.rows):
        done = 0
        while done < units:
            count = min(most, 1 << ((units - done).bit_length() - 1))
            moved = [w for number in range(done, done + count) for w in words[lane, number]]
            yield Move(done * unit, lane, count, tuple(moved))
            done += count


# Register layouts ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def default_registers(
    layout: TensorMemoryLayout, shape: tuple[int, int], bits: int
) -> RegisterLayout:
    """The register layout that a load makes where nothing else is asked for.

    Raises:
      InvalidValueError: tensor memory in this layout is not loaded.
    """
    if layout.is_opaque:
        raise InvalidValueError(
            f"tensor memory laid out as {layout} is loaded or stored",
            expected="what products read of it, copied by plgpu.async_copy_sparse_metadata_to_tmem",
        )
    for registers in candidates(layout, shape, bits):
        return registers
    raise InvalidValueError(
        "elements of tensor memory do not fill registers",
        got=f"elements of {bits} bits, {layout.packing} in a cell",
        expected=f"16 or {CELL_BITS} bits, or full cells: packed=True",
    )


@functools.lru_cache(maxsize=256)
def candidates(
    layout: TensorMemoryLayout, shape: tuple[int, int], bits: int
) -> tuple[RegisterLayout, ...]:
    """The register layouts in which a matrix is commonly loaded, the one to prefer first."""
    if layout.is_opaque:
        return ()
    found = []
    for make in _makers(layout, shape, bits):
        try:
            registers = make()
        except InvalidValueError:
            continue
        if registers not in found and find_transfer(registers, layout, shape, bits) is not None:
            found.append(registers)
    return tuple(found)


def _makers(layout: TensorMemoryLayout, shape: tuple[int, int], bits: int) -> list[Any]:
    from pallasite_blackwell import layouts as registers
    from pallasite_blackwell.tensor_memory.names import native_registers

    columns = shape[1]
    return [
        lambda: registers.ROWS.layout(shape),
        lambda: registers.FRAGMENT_64.layout(shape),
        lambda: registers.m64_collective(columns).layout(shape),
        lambda: registers.native(max(1, CELL_BITS // bits) if bits < CELL_BITS else 2).layout(
            shape
        ),
        lambda: native_registers(layout, shape),
    ]
