"""What the walk of layout inference hands from equation to equation in place of values."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallasite.language.memory import MemorySpace

ANY = 1 << 30
"""The divisor of zero: a multiple of everything that matters."""


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayValue:
    """An array: the number of its variable in the problem, its shape and the bits of an element."""

    variable: int
    shape: tuple[int, ...]
    bits: int


@dataclasses.dataclass(frozen=True, eq=False)
class ScalarValue:
    """A scalar, which has no layout.

    Attributes:
      divisor: what it is known to be a multiple of.
      known: its value, if that is a constant.
    """

    divisor: int = 1
    known: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryValue:
    """A reference to an array in global or shared memory.

    Attributes:
      space: where it lies.
      shape: its logical shape.
      dtype: of its elements.
      choice: the number of its layout's choice in the problem; None if it is row-major for sure.
      members: for a union of allocations, the choices of its members, by where they lie in it.
      name: how the kernel calls it.
    """

    space: MemorySpace
    shape: tuple[int, ...]
    dtype: Any
    choice: int | None = None
    members: dict[Any, int] | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class OtherValue:
    """Anything without a layout: a barrier, a semaphore."""

    aval: Any


type AbstractValue = ArrayValue | ScalarValue | MemoryValue | OtherValue
"""What layout inference knows of a value, instead of the value itself."""
