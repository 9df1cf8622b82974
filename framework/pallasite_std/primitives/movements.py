"""Copies within global memory, in another order: a primitive that only a pass makes.

Bound arguments: the reference to the result, and those to the arrays that its elements come from,
each once; all are whole arrays in global memory, of one dtype. The parameter ``movement`` says
which unit of ``bits``, of one element or several, comes from where; ``room`` is how many bytes of
shared memory there are.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.layouts import Extent, Extents

move_elements_p = _jax.Primitive("move_elements")
move_elements_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class View:
    """Elements of one array.

    Attributes:
      offset: of the first one, in the row-major flattened array.
      extents: those of the result, major to minor, with steps in the array.
    """

    offset: int
    extents: Extents

    @property
    def run(self) -> int:
        """How many, at most, are always beside each other, at a multiple of so many."""
        *outer, last = self.extents
        if last.stride != 1:
            return 1
        return math.gcd(self.offset, last.size, *(extent.stride for extent in outer))

    def of_units(self, count: int) -> View:
        """The movement of units of so many elements."""
        *outer, last = self.extents
        extents = [Extent(e.size, e.stride // count) for e in outer]
        return View(self.offset // count, (*extents, Extent(last.size // count, last.stride)))


@dataclasses.dataclass(frozen=True)
class Strip:
    """Rows of elements of an array.

    Attributes:
      source: the number of the array.
      start: the first element of the first row, in the row-major flattened array.
      stride: elements from row to row.
      size: of each row.
    """

    source: int
    start: int
    stride: int
    size: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows one beside the other.

    Attributes:
      count: of rows.
      strips: what each row is made of, from its first element to its last.
    """

    count: int
    strips: tuple[Strip, ...]

    @property
    def width(self) -> int:
        """Elements of a row of the result."""
        return sum(strip.size for strip in self.strips)

    @property
    def run(self) -> int:
        """See :attr:`View.run`."""
        return math.gcd(*(n for one in self.strips for n in (one.start, one.stride, one.size)))

    def of_units(self, count: int) -> Rows:
        """See :meth:`View.of_units`."""
        strips = [
            Strip(one.source, one.start // count, one.stride // count, one.size // count)
            for one in self.strips
        ]
        return Rows(self.count, tuple(strips))


type Movement = View | Rows


@_jax.abstract_eval(move_elements_p)
def _abstract_eval(*avals: Any, movement: Movement, bits: int, room: int) -> Any:
    del movement, bits, room
    reads = {_jax.ReadEffect(number) for number in range(1, len(avals))}
    return (), {_jax.WriteEffect(0), *reads}
