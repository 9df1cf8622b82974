"""How arrays are copied within global memory, in another order.

Either each thread loads elements, and stores them wherever they belong; or the arrays are copied to
shared memory, from where a loop stores the elements in the order of the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    Digit,
    Extent,
    Extents,
    MemoryLayout,
    Owner,
    RegisterLayout,
    default_strided,
    padded,
)
from pallasite_std.memory.access import AccessPlan, plan_access
from pallasite_std.memory.joins import row_elements
from pallasite_std.memory.ordering import Elements, elements_of
from pallasite_std.memory.reduced_layouts import by_rows
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.relayout import rows_in_registers
from pallasite_std.memory.rows import row
from pallasite_std.primitives.movements import Movement, Rows, View

_LOOPS = 44
"""Instructions of a movement through shared memory, about."""

_STEP = 4
"""Those that find out where in an array, or in which one, an element is."""

_DIRECT = 14
"""Instructions of a movement without shared memory beside its accesses."""

_SPREAD, _SPREAD_BY_BITS = 20, 8
"""Those by which a thread finds out which copy of which element it stores, by divisions or by bits
of its number."""

_LOAD_GUARD, _STORE_GUARD, _TAIL = 5, 3, 10
"""Instructions for accesses that only some threads make, and of ends of rows."""

_LINE = 16
"""Elements of a row, at most, that a thread loads as a whole."""

_MOST_COPIES = 64
"""Places, at most, in which one thread stores an element."""

_WIDE = 8
"""Bytes of an access that is not worth wider ones."""

_MOST_CODE = 60
"""Instructions, at most, of a movement without shared memory by wide accesses."""

_MOST_PORTIONS = 12
"""Parts, at most, in which arrays go through shared memory that has no room for them."""

_MOST_WORDS = 128
"""Of registers, at most, that a thread loads before it stores them."""

COPIED = 16
"""Bytes that a lane copies to shared memory at once."""

ROUND = LANES * WARPS * COPIED
"""Bytes that all lanes copy at once."""

UNROLLED = 3
"""Copies of all lanes, at most, that are no loop."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements that are loaded once.

    Attributes:
      source: the number of the array.
      start: their first, in the row-major flattened array.
      memory: how they lie in it.
      target: how they lie in the result, in each place.
      starts: the first of each place, in the result.
      order: where rows are loaded and stored whole, which element of a row each one of the
        result is.
    """

    source: int
    start: int
    memory: MemoryLayout
    target: MemoryLayout
    starts: tuple[int, ...]
    order: tuple[int, ...] | None = None

    def stored(self, layout: RegisterLayout) -> RegisterLayout:
        """The layout of the result's elements, given that of the loaded ones."""
        return layout if self.order is None else _lines(self.target.shape)


@dataclasses.dataclass(frozen=True)
class Portion:
    """A part of a movement for which there is room in shared memory.

    Attributes:
      movement: of its elements.
      start: the first of them, in the row-major flattened result.
      extents: how they lie in the result, in their order.
    """

    movement: Movement
    start: int
    extents: Extents


@dataclasses.dataclass(frozen=True)
class Direct:
    """Loads and stores of a movement.

    Attributes:
      pieces: what is loaded, with the layout of its registers.
      instructions: about how many.
      narrowest: bytes of the narrowest accesses, but for ends of rows.
    """

    pieces: tuple[tuple[Piece, RegisterLayout], ...]
    instructions: int
    narrowest: int

    def words(self, bits: int) -> float:
        """Of registers that a thread loads before it stores them."""
        return sum(one.registers * one.vector_length * bits / 32 for _, one in self.pieces)


def elements(movement: Movement, sizes: Sequence[int], dtype: np.dtype[Any]) -> Elements:
    """The elements of a movement, of arrays of so many in shared memory."""
    if isinstance(movement, View):
        bits = 8 * dtype.itemsize
        nowhere: Any = None
        layout = MemoryLayout((movement.extents,), element_bits=bits)
        view = MemoryReference(
            nowhere, layout, dtype, MemorySpace.SMEM, alignment=16, offset=movement.offset
        )
        return elements_of(view, sizes[0])
    strips = movement.strips
    return row_elements(
        rows=movement.count,
        arrays=len(sizes),
        operands=[one.source for one in strips],
        widths=[one.size for one in strips],
        starts=[one.start for one in strips],
        strides=[one.stride for one in strips],
        dtype=dtype,
    )


@functools.lru_cache(maxsize=1024)
def portions(movement: Movement, sizes: tuple[int, ...], bits: int, room: int) -> list[Portion]:
    """As few parts of a movement of arrays of so many elements as shared memory has room for; none
    at all if these are many.

    Args:
      movement: of elements.
      sizes: of the arrays.
      bits: of an element.
      room: bytes of shared memory.
    """
    dtype = np.dtype(f"uint{bits}")
    for count in range(1, _MOST_PORTIONS + 1):
        for found in _cut(movement, count):
            parts = (elements(one.movement, sizes, dtype) for one in found)
            if all(sum(map(room_of_copy, copied(one, sizes, bits))) <= room for one in parts):
                return found
    return []


def copied(found: Elements, sizes: Sequence[int], bits: int) -> list[tuple[int, int]]:
    """For arrays of so many elements, the first and the last byte, and one more, of each that are
    copied to shared memory for some elements."""
    windows = []
    for size, (first, last) in zip(sizes, found.windows(0, found.size), strict=True):
        begin = first * bits // 8 // COPIED * COPIED
        end = min(-(-last * bits // 8 // COPIED) * COPIED, size * bits // 8)
        windows.append((begin, end))
    return windows


def room_of_copy(window: tuple[int, int]) -> int:
    """Bytes for a window of an array, and for what copies of all lanes write behind it."""
    size = window[1] - window[0]
    step = COPIED if size > UNROLLED * ROUND else ROUND
    return -(-size // step) * step


def _size(movement: Movement) -> int:
    """Elements that are moved."""
    if isinstance(movement, View):
        return math.prod(extent.size for extent in movement.extents)
    return movement.count * movement.width


def _cut(movement: Movement, count: int) -> Iterator[list[Portion]]:
    """A movement in so many parts, cut along each of its dimensions."""
    if isinstance(movement, Rows):
        for whole in _ranges(movement.count, count):
            found = []
            for first, size in whole:
                strips = [
                    dataclasses.replace(one, start=one.start + first * one.stride)
                    for one in movement.strips
                ]
                rows = Extent(size * movement.width, 1)
                start = first * movement.width
                found.append(Portion(Rows(size, tuple(strips)), start, (rows,)))
            yield found
        return
    sizes = [extent.size for extent in movement.extents]
    steps = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    for place, extent in enumerate(movement.extents):
        for whole in _ranges(extent.size, count):
            found = []
            for first, size in whole:
                extents = list(movement.extents)
                extents[place] = Extent(size, extent.stride)
                moved = View(movement.offset + first * extent.stride, tuple(extents))
                own = tuple(
                    Extent(one.size, step) for one, step in zip(extents, steps, strict=True)
                )
                found.append(Portion(moved, first * steps[place], own))
            yield found


def _ranges(size: int, count: int) -> Iterator[list[tuple[int, int]]]:
    """So many numbers in so many ranges, each with its first number and its size; nothing if these
    are too many."""
    if size >= count:
        each = -(-size // count)
        yield [(first, min(each, size - first)) for first in range(0, size, each)]


@functools.lru_cache(maxsize=1024)
def direct(movement: Movement, bits: int) -> Direct | None:
    """Loads and stores by which threads move elements without shared memory, where that is about as
    little code as loops are, or accesses are wide; else None."""
    found = [
        _by_pieces(_pieces(movement, bits), bits),
        _by_pieces(_spread(movement, bits), bits, spread=True),
        *_by_lines(movement, bits),
    ]
    few = [one for one in found if one is not None and one.words(bits) <= _MOST_WORDS]
    best = min(few, key=lambda one: one.instructions, default=None)
    if best is None:
        return None
    most = _MOST_CODE if best.narrowest >= _WIDE else loop_code(movement)
    return best if best.instructions <= most else None


def _by_pieces(pieces: Iterable[Piece], bits: int, *, spread: bool = False) -> Direct | None:
    """Each thread stores what it loads wherever it belongs; the copies may be ``spread`` over the
    threads, too."""
    found = []
    instructions, narrowest = _DIRECT, 16
    for piece in pieces:
        if len(piece.starts) > _MOST_COPIES or piece.memory.size < 2:
            return None
        candidates = [
            (code + (_numbered(layout) if spread else 0), width, layout)
            for code, width, layout in _candidates(piece, bits)
        ]
        best = min(candidates, key=lambda one: one[:2], default=None)
        if best is None:
            return None
        found.append((piece, best[2]))
        instructions += best[0]
        narrowest = min(narrowest, best[1])
    return Direct(tuple(found), instructions, narrowest) if found else None


def _numbered(layout: RegisterLayout) -> int:
    """Instructions by which a thread finds out what its number means."""
    return _SPREAD if layout.flat or not layout.is_padded else _SPREAD_BY_BITS


def _by_lines(movement: Movement, bits: int) -> Iterator[Direct]:
    """Each thread loads short rows, and stores their elements in another order."""
    for count, start, stride, places in _orders(movement):
        first, size = min(places), max(places) + 1 - min(places)
        if count == 1 or size > min(_LINE, stride):
            continue
        rows = ((Extent(count, stride),), (Extent(size, 1),))
        turned = ((Extent(count, len(places)),), (Extent(len(places), 1),))
        piece = Piece(
            0,
            start + first,
            MemoryLayout(rows, element_bits=bits),
            MemoryLayout(turned, element_bits=bits),
            (0,),
            tuple(place - first for place in places),
        )
        layout = _lines(piece.memory.shape)
        load = plan_access(layout, piece.memory, _alignment(piece.start, bits))
        store = plan_access(piece.stored(layout), piece.target)
        code = _DIRECT + _code(load, _LOAD_GUARD) + _code(store, _STORE_GUARD)
        # Elements of less than a word are taken apart, and put together.
        code += layout.registers if bits < 32 else 0
        yield Direct(((piece, layout),), code, min(load.width_bytes, store.width_bytes))


def _orders(movement: Movement) -> Iterator[tuple[int, int, int, list[int]]]:
    """Rows whose elements are those of evenly spaced rows of one array: how many, where the first
    begins, how far they are apart, and which elements each is made of, from there on."""
    if not isinstance(movement, View):
        strips = movement.strips
        if movement.width <= _LINE and len({(one.source, one.stride) for one in strips}) == 1:
            places = [one.start + n for one in strips for n in range(one.size)]
            yield movement.count, 0, strips[0].stride, places
        return
    for cut in range(1, len(movement.extents)):
        outer, inner = movement.extents[:cut], movement.extents[cut:]
        even = all(a.stride == b.size * b.stride for a, b in itertools.pairwise(outer))
        if even and outer[-1].stride > 0 and math.prod(e.size for e in inner) <= _LINE:
            steps = [[n * e.stride for n in range(e.size)] for e in inner]
            places = [sum(place) for place in itertools.product(*steps)]
            yield math.prod(e.size for e in outer), movement.offset, outer[-1].stride, places


def _lines(shape: tuple[int, ...]) -> RegisterLayout:
    """A layout of a matrix in which threads have whole rows."""
    rows = padded((shape[0], 1))
    # Registers are numbered row by row.
    line = (Digit(shape[1], Owner.REGISTER, rows.registers),)
    return RegisterLayout(shape, (rows.dims[0], line), 1)


def loop_code(movement: Movement) -> int:
    """Instructions of a movement through shared memory, about."""
    steps = movement.extents if isinstance(movement, View) else movement.strips
    return _LOOPS + _STEP * (len(steps) - 1)


def _pieces(movement: Movement, bits: int) -> Iterator[Piece]:
    if isinstance(movement, View):
        inner = [math.prod(e.size for e in movement.extents[n + 1 :]) for n in _numbers(movement)]
        pairs = list(zip(movement.extents, inner, strict=True))
        kept = [(e.size, e.stride, step) for e, step in pairs if e.stride]
        again = [[n * step for n in range(e.size)] for e, step in pairs if not e.stride]
        if math.prod(map(len, again)) > _MOST_COPIES:
            again = [range(_MOST_COPIES + 1)]  # type: ignore[list-item]
        starts = tuple(sum(place) for place in itertools.product(*again))
        yield _piece(0, movement.offset, kept, starts, bits)
        return
    before = 0
    places: dict[Any, list[int]] = {}
    for strip in movement.strips:
        places.setdefault(strip, []).append(before)
        before += strip.size
    for strip, starts_ in places.items():
        kept = [(movement.count, strip.stride, movement.width), (strip.size, 1, 1)]
        yield _piece(strip.source, strip.start, kept, tuple(starts_), bits)


def _spread(movement: Movement, bits: int) -> Iterator[Piece]:
    """What is repeated, with the copies over the threads, too, which load the same."""
    if isinstance(movement, View) and any(not extent.stride for extent in movement.extents):
        inner = [math.prod(e.size for e in movement.extents[n + 1 :]) for n in _numbers(movement)]
        kept = [(e.size, e.stride, to) for e, to in zip(movement.extents, inner, strict=True)]
        yield _piece(0, movement.offset, kept, (0,), bits)


def _numbers(movement: View) -> range:
    return range(len(movement.extents))


def _piece(
    source: int,
    start: int,
    kept: Sequence[tuple[int, int, int]],
    starts: tuple[int, ...],
    bits: int,
) -> Piece:
    """Of extents with the steps of both sides; those are joined that are even in both."""
    joined: list[tuple[int, int, int]] = []
    for size, step, to in kept:
        if size == 1:
            continue
        if joined and joined[-1][1:] == (size * step, size * to):
            size *= joined.pop()[0]
        joined.append((size, step, to))
    joined = joined or [(1, 1, 1)]
    memory = MemoryLayout(tuple((Extent(n, s),) for n, s, _ in joined), element_bits=bits)
    target = MemoryLayout(tuple((Extent(n, t),) for n, _, t in joined), element_bits=bits)
    return Piece(source, start, memory, target, starts)


def _candidates(piece: Piece, bits: int) -> Iterator[tuple[int, int, RegisterLayout]]:
    """Layouts of registers, with the instructions of accesses and the bytes of the narrowest."""
    shape = piece.memory.shape
    widths = [n for n in (16, 8, 4, 2, 1) if n * bits <= 128 and n <= piece.memory.size]
    layouts: list[RegisterLayout | None]
    if len(shape) == 1:
        layouts = [row(shape, width) for width in widths]
    else:
        layouts = [by_rows(shape, bits), default_strided(shape, bits), rows_in_registers(shape)]
        layouts += [padded(shape, width) for width in widths if shape[-1] % width == 0]
    for layout in dict.fromkeys(layouts):
        if layout is None:
            continue
        try:
            plans = [plan_access(layout, piece.memory, _alignment(piece.start, bits))]
            plans += [
                plan_access(layout, piece.target, _alignment(start, bits)) for start in piece.starts
            ]
        except InvalidValueError:
            continue
        code = _code(plans[0], _LOAD_GUARD) + _code(plans[1], _STORE_GUARD)
        code += sum(len(plan.everything) for plan in plans[2:])
        yield code, min(plan.width_bytes for plan in plans), layout


def _alignment(start: int, bits: int) -> int:
    return math.gcd(16, start * bits // 8)


def _code(plan: AccessPlan, guard: int) -> int:
    guards = {access.guards for access in plan.accesses} - {()}
    accesses = {(access.offset, access.guards) for access in plan.everything}
    return len(accesses) + guard * len(guards) + _TAIL * len(plan.tail)
