"""Arrays in one row, part by part.

Which registers of a result are made at once, and which registers of its operands have to be in
shared memory for these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from pallasite.plugin.ir import types
from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    Digit,
    Owner,
    RegisterLayout,
    row_major,
)
from pallasite.plugin.lowering import RegisterArray

type Windows = Callable[[int, int], Sequence[tuple[int, int]]]
"""``windows(first, count)``: where in each operand so many elements of the result come from, as the
first element and the one behind the last."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that is stored row by row.

    Attributes:
      array: padding included, if it is in one row.
      row: whether each register of all threads is a part of that row, which can be stored alone.
    """

    array: RegisterArray
    row: bool

    @property
    def registers(self) -> int:
        """How many each thread holds."""
        return self.array.layout.registers

    @property
    def bits(self) -> int:
        """Bits of an element in memory."""
        return types.bit_width(self.array.dtype)

    @property
    def register_elements(self) -> int:
        """Elements of one register of all threads, in a row."""
        return self.array.layout.size // self.registers

    def bytes(self, held: Held) -> int:
        """How many the registers take in shared memory, in multiples of 16, or 16 of none."""
        if not self.row:
            return bytes_of(self.array.shape, self.bits)
        return bytes_of((max(1, (held[1] - held[0]) * self.register_elements),), self.bits)

    def part(self, held: Held) -> RegisterArray:
        """The registers as an array."""
        first, last = held
        if (first, last) == (0, self.registers):
            return self.array
        assert isinstance(self.array.layout, RegisterLayout)
        layout = first_registers(self.array.layout, last - first)
        assert layout is not None
        return RegisterArray(self.array.registers[first:last], layout, self.array.dtype)

    def held(self, window: tuple[int, int]) -> Held:
        """The registers that hold some of the elements."""
        if not self.row:
            return (0, self.registers)
        each = self.register_elements
        return window[0] // each, -(-window[1] // each)


type Held = tuple[int, int]
"""The first of consecutive registers, and the one behind the last."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive registers of a result.

    Attributes:
      layout: of these.
      first: the number of their first element.
      held: the registers of each operand that are stored.
      row: whether the elements are in one row, padding included.
    """

    layout: RegisterLayout
    first: int
    held: tuple[Held, ...]
    row: bool


def bytes_of(shape: tuple[int, ...], bits: int) -> int:
    """How many an array takes, with what is left of the last 16."""
    rows = row_major(shape, bits)
    return -(-rows.size * rows.element_bits // 128) * 16


def operand(array: RegisterArray) -> Operand:
    """An array as it is stored row by row."""
    layout = array.layout
    if not isinstance(layout, RegisterLayout) or array.is_splat or not is_row(layout):
        return Operand(array, False)
    whole = first_registers(layout, layout.registers)
    if whole is None:
        return Operand(array, False)
    return Operand(RegisterArray(array.registers, whole, array.dtype), True)


def is_row(layout: RegisterLayout) -> bool:
    """Whether a layout is one of the flattened array, with padding or across dimensions."""
    if layout.flat:
        return True
    major = next((d for d, extent in enumerate(layout.shape) if extent > 1), 0)
    minor = zip(layout.extents[major + 1 :], layout.shape[major + 1 :], strict=True)
    return layout.is_padded and all(held == extent for held, extent in minor)


def first_registers(layout: RegisterLayout, count: int) -> RegisterLayout | None:
    """The layout of a row that so many of the first registers of one of the flattened array hold;
    None if they do not follow each other in it."""
    digits = layout.digits
    others = tuple(digit for digit in digits if digit.owner is not Owner.REGISTER)
    if len(digits) - len(others) > 1 or (digits != others and digits[0] in others):
        return None
    size = count * math.prod(digit.size for digit in others)
    digits = (Digit(count, Owner.REGISTER, 1), *others)
    return RegisterLayout((size,), (digits,), layout.vector_length, flat=True)


def parts_of(
    layout: RegisterLayout,
    operands: Sequence[Operand],
    windows: Windows,
    most: int,
    unit: int = 1,
) -> list[Part]:
    """As few parts of a result as there is room for, each beside what it is made of.

    Args:
      layout: of the result.
      operands: of which what is needed is stored.
      windows: where that is.
      most: bytes that there are.
      unit: elements that a thread moves at once.

    Returns:
      None at all if there is no room.
    """
    bits = operands[0].bits
    whole = first_registers(layout, layout.registers) if is_row(layout) and bits >= 8 else None
    for count in range(1, 2 if whole is None else layout.registers + 1):
        parts: list[Part] = []
        first = 0
        for number in range(count):
            registers = layout.registers // count + (number < layout.registers % count)
            own = layout if whole is None else first_registers(layout, registers)
            assert own is not None
            size = min(own.size, layout.size - first)
            needed = windows(first, size) if size > 0 else [(0, 0)] * len(operands)
            held = tuple(o.held(w) for o, w in zip(operands, needed, strict=True))
            parts.append(Part(own, first, held, whole is not None))
            first += own.size
        everything = tuple((0, one.registers) for one in operands)
        if count > 1:
            once = [dataclasses.replace(part, held=everything) for part in parts]
            if _fits(once, operands, bits, unit, most):
                return once
        if _fits(parts, operands, bits, unit, most):
            return parts
    return []


def _fits(
    parts: Sequence[Part], operands: Sequence[Operand], bits: int, unit: int, most: int
) -> bool:
    stored = sum(
        max(one.bytes(part.held[position]) for part in parts)
        for position, one in enumerate(operands)
    )
    # In the first step of a loop, all threads move something.
    most_elements = max(LANES * WARPS * unit, *(part.layout.size for part in parts))
    return stored + bytes_of((most_elements,), bits) <= most
