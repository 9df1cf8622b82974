"""Layouts of arrays of odd shapes whose elements lie in one row."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    Digit,
    Layout,
    Owner,
    RegisterLayout,
    default_strided,
    padded,
)
from pallasite_std.memory.reference_types import MemoryReference, default_layout

_TRANSFER = 6
"""Instructions that move a register, by the work on one element."""

_GUARD = 8
"""Instructions for accesses that only some threads make, beside these."""

_TAIL, _PIECE = 6, 8
"""Instructions for accesses of less than a vector, and for each of them."""

_QUOTIENT = 8
"""Instructions for the remainder of a lane's or warp's number by what is no power of two."""

_SHORT = 200
"""Instructions of a kernel that is mostly addresses and conditions."""

FEW = 8 * LANES * WARPS
"""Elements of an array, at most, that threads access one by one rather than in a row of vectors."""

_STRETCHED = 44
"""Instructions by which what is repeated goes to a row, beside those for registers."""

_LAST = 14
"""Instructions for the accesses to less than a vector at the end of a row that is loaded, combined
with what is repeated, and stored; and for those of which only some threads have elements."""

_BYTE, _PAIR = 7, 3
"""Instructions for an element of two vectors of bytes, each of which is taken out and put in again;
and for a pair, of which both are half of a word."""

_COUNTED = 64
"""Registers, at most, that are looked at; what guards cost does not matter if there are more."""


@functools.lru_cache(maxsize=4096)
def row(shape: tuple[int, ...], vector_length: int, *, alone: bool = False) -> RegisterLayout:
    """Consecutive vectors of the row-major flattened array go to consecutive threads, whatever the
    number of elements: padding follows the last one. If no threads are to have copies
    (``alone``), those without elements have padding, too, where there is any."""
    vectors = -(-math.prod(shape) // vector_length)
    lanes = min(LANES, 1 << (vectors - 1).bit_length())
    warps = min(WARPS, 1 << (-(-vectors // lanes) - 1).bit_length())
    if alone and (vectors % (lanes * warps) or math.prod(shape) % vector_length):
        lanes, warps = LANES, WARPS
    digits = (
        Digit(-(-vectors // (lanes * warps)), Owner.REGISTER, 1),
        Digit(warps, Owner.WARP, 1),
        Digit(lanes, Owner.LANE, 1),
        Digit(vector_length, Owner.VECTOR, 1),
    )
    return RegisterLayout(tuple(shape), (digits,), vector_length, flat=True)


@functools.lru_cache(maxsize=4096)
def better_row(layout: RegisterLayout, widest: int, gain: float = 1.25) -> RegisterLayout | None:
    """A :func:`row` of vectors of at most ``widest`` elements that means less work for each lane
    than another layout, where only element-wise operations follow; or None. If the kernel is not
    short, it is ``gain`` times less."""
    if layout.size <= LANES * WARPS or not layout.size & (layout.size - 1):
        return None
    widths = (n for n in (16, 8, 4, 2, 1) if n <= widest)
    work = functools.partial(_work, widest=widest)
    best = min((row(layout.shape, n, alone=True) for n in widths), key=work, default=layout)
    own, other = work(layout), work(best)
    return best if (other if own < _SHORT else other * gain) < own else None


def moved(shape: tuple[int, ...], bits: int) -> RegisterLayout | None:
    """The layout of an array of an odd shape whose elements loops bring into order, if it is not
    small and nothing needs another one; None for other arrays."""
    if not any(extent & (extent - 1) for extent in shape) or math.prod(shape) <= LANES * WARPS:
        return None
    default = default_strided(shape, bits)
    return better_row(default, 128 // bits) or row(shape, 128 // bits)


def _work(layout: RegisterLayout, widest: int) -> float:
    """About the instructions of a lane, in halves, if at most ``widest`` elements are moved."""
    element = 0.5 if widest > 8 else 1.0
    work = layout.registers * (element * layout.vector_length + _TRANSFER)
    threads = [digit.size for digit in layout.digits if digit.owner.is_thread]
    work += _QUOTIENT * sum(size & (size - 1) != 0 for size in threads)
    if not layout.is_padded:
        return work
    rest = layout.size % layout.vector_length if layout.flat else 0
    if rest:
        words, part = divmod(16 * rest // widest, 4)
        work += _TAIL + _PIECE * (words.bit_count() / 2 + part.bit_count())
    guards = {layout.guards(number, 0) for number in range(min(layout.registers, _COUNTED))}
    return work + _GUARD * len(guards - {None, ()})


@functools.lru_cache(maxsize=4096)
def repeated(
    shape: tuple[int, ...], bits: int, widest: int
) -> tuple[RegisterLayout | None, RegisterLayout | None]:
    """Layouts of an array that is combined with one that is repeated along some dimensions.

    Args:
      shape: of the array.
      bits: of an element.
      widest: elements of a vector, at most.

    Returns:
      A row, if that takes less code, although what is repeated goes through shared memory; and a
      layout in which it does not, or None for the default one.
    """
    own = default_strided(shape, 128 // widest)
    row_ = better_row(own, widest) or (own if own.flat else None)
    rows = whole_rows(shape, widest, bits == 8) if own.flat and own.registers > 1 else None
    other = own if rows is None else rows
    if row_ is None or (not other.flat and _combined(row_, bits) >= _combined(other, bits)):
        return None, rows
    return row_, rows


def _combined(layout: RegisterLayout, bits: int) -> float:
    """Instructions that load an array, combine it with what is repeated, and store it, about."""
    width = layout.vector_length
    operations = float(width)
    if bits == 16 and width > 1:
        operations = width / 2
    elif bits == 8 and width > 1:
        operations = _PAIR if width == 2 else _BYTE * width
    code = layout.registers * (2 + operations) + (_LAST if layout.is_padded else 0)
    return code + (layout.registers + _STRETCHED if layout.flat else 0)


@functools.lru_cache(maxsize=4096)
def whole_rows(
    shape: tuple[int, ...], widest: int, bytes_combined: bool = False
) -> RegisterLayout | None:
    """A layout of an array of an odd shape whose threads do not run across the boundaries of
    dimensions, so that what is repeated along some of these is repeated by registers; None for
    powers of two, and for arrays of one dimension.

    Args:
      shape: of the array.
      widest: elements of a vector, at most.
      bytes_combined: whether its elements are bytes that are combined with others.
    """
    if sum(n > 1 for n in shape) < 2 or not any(n & (n - 1) for n in shape):
        return None
    widths = [n for n in (16, 8, 4, 2, 1) if n <= widest and shape[-1] % n == 0]
    found = [padded(shape, n) for n in widths]
    found += [_in_lanes(shape, n) for n in widths if shape[-1] <= n * LANES]
    if bytes_combined:
        return min(found, key=functools.partial(_combined, bits=8))
    return min(found, key=functools.partial(_work, widest=widest))


def _in_lanes(shape: tuple[int, ...], width: int) -> RegisterLayout:
    """Each warp has as many short rows of vectors as it has lanes for."""
    across = shape[-1] // width
    outer = max(range(len(shape) - 1), key=lambda d: shape[d])
    rows = min(LANES // across, shape[outer])
    warps = min(WARPS, -(-shape[outer] // rows))
    dims: list[tuple[Digit, ...]] = [(Digit(n, Owner.REGISTER, 1),) for n in shape]
    dims[outer] = (
        Digit(-(-shape[outer] // (rows * warps)), Owner.REGISTER, 1),
        Digit(warps, Owner.WARP, 1),
        Digit(rows, Owner.LANE, across),
    )
    dims[-1] = (Digit(across, Owner.LANE, 1), Digit(width, Owner.VECTOR, 1))
    return RegisterLayout(shape, tuple(dims), width)


def suitable_layouts(reference: MemoryReference) -> list[Layout]:
    """The default layout; and a row, in which elements of dense memory are moved by fewer accesses,
    if nothing needs another layout. What else they are needed for is weighed elsewhere."""
    best = default_layout(reference)
    extents = reference.layout.flat_extents
    if len(extents) != 1 or extents[0].stride != 1:
        return [best]
    other = better_row(best, 8 * min(16, reference.offset_alignment) // reference.element_bits, 1.0)
    return [best] if other is None else [best, other]


def same_row(layout: Layout, shape: tuple[int, ...]) -> RegisterLayout | None:
    """The layout of an array of another size whose elements, as far as both have them, lie where
    those of a :func:`row` do; None if a layout is none, or for one element."""
    if not isinstance(layout, RegisterLayout) or not layout.flat or math.prod(shape) < 2:
        return None
    (digits,) = layout.dims
    if [digit.owner for digit in digits[1:]] != [Owner.WARP, Owner.LANE, Owner.VECTOR]:
        return None
    first, *others = digits
    if first.owner is not Owner.REGISTER or first.stride != 1:
        return None
    count = -(-math.prod(shape) // math.prod(digit.size for digit in others))
    return RegisterLayout(
        tuple(shape), ((Digit(count, Owner.REGISTER, 1), *others),), layout.vector_length, flat=True
    )


def is_beginning(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a slice is the first elements of the row-major flattened array."""
    cut = next((d for d, size in enumerate(sizes) if size != shape[d]), len(shape))
    after = zip(shape[cut + 1 :], sizes[cut + 1 :], strict=True)
    return not any(starts) and math.prod(shape[:cut]) == 1 and all(n == m for n, m in after)
