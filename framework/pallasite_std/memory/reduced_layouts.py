"""Layouts of arrays of odd shapes that are reduced along some axes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    Digit,
    Owner,
    RegisterLayout,
    default_strided,
    padded,
)
from pallasite_std.memory.rows import row

_EXCHANGE = 3
"""Instructions of a step in which two lanes combine a value."""

_ACROSS_WARPS = 12
"""Instructions by which warps exchange a value; the barriers are as many."""

_GUARD = 5
"""Instructions for accesses that only some threads make, beside these."""

_FEW = 32
"""Words that lanes exchange before another layout is looked for."""

_FEWEST = 4
"""Elements that are reduced, of which lanes have one each, at least."""

_APART = 2.5
"""Instructions that take a register apart into two elements and combine these."""

_PAIRED = 1.5
"""Instructions that make a value half of a word, and take it out again."""

_SMALL = 4 * LANES * WARPS
"""Elements of an array of which a lane has few, at most."""

_BESIDE = 1.5
"""What else is done with an element of which a lane has more than others have to."""

_SECTOR = 32
"""Bytes of memory that are moved together."""


@functools.lru_cache(maxsize=4096)
def suits_reduction(shape: tuple[int, ...], axes: tuple[int, ...], bits: int) -> bool:
    """Whether the default layout does for a reduction: it has neither padding nor counts of lanes
    that are no powers of two, no thread runs across a dimension, and lanes exchange few values, and
    warps none."""
    layout = default_strided(shape, bits)
    threads = [digit for digit in layout.digits if digit.owner.is_thread]
    whole = all(n == 1 or d in axes for d, n in enumerate(shape))
    return (
        not layout.is_padded
        and (whole or not layout.flat)
        and not any(digit.size & (digit.size - 1) for digit in threads)
        and (whole or (_exchanged(layout, axes, bits) <= _FEW and not _crosses(layout, axes)))
    )


def _crosses(layout: RegisterLayout, axes: tuple[int, ...]) -> bool:
    """Whether warps exchange values for a reduction in a layout of an odd shape."""
    if not any(n & (n - 1) for n in layout.shape):
        return False
    warps = (digit for d in axes for digit in layout.dims[d] if digit.owner is Owner.WARP)
    return any(digit.size > 1 for digit in warps)


def _exchanged(layout: RegisterLayout, axes: tuple[int, ...], bits: int) -> int:
    """Words that a lane exchanges with others for a reduction in a layout of an odd shape."""
    if not any(n & (n - 1) for n in layout.shape):
        return 0
    steps, values = 0, max(1, bits // 32)
    for dim, digits in enumerate(layout.dims):
        for digit in digits:
            if dim in axes:
                steps += digit.size.bit_length() - 1 if digit.owner.is_thread else 0
            elif not digit.owner.is_thread:
                values *= digit.size
    return steps * values


@functools.lru_cache(maxsize=4096)
def reduced(
    shape: tuple[int, ...], axes: tuple[int, ...], bits: int, sector: float = 1 / 8
) -> RegisterLayout | None:
    """A layout in which a lane has few instructions for a reduction, where the default is none.

    Args:
      shape: of the array.
      axes: that are reduced.
      bits: of an element.
      sector: instructions that make up for a sector that an access touches.

    Returns:
      The threads in powers of two over the dimensions, each of which is padded to whole numbers;
      or, if all elements are combined, consecutive vectors of the row-major flattened array. None
      for shapes of which :func:`pallasite.plugin.layouts.default_strided` suits.
    """
    if not shape or math.prod(shape) < 2:
        return None
    pairs = _in_pairs(shape, bits)
    if suits_reduction(shape, axes, bits) and not pairs:
        return None
    widths = [n for n in (16, 8, 4, 2, 1) if 8 <= n * bits <= 128]
    if all(n == 1 or d in axes for d, n in enumerate(shape)):
        if math.prod(shape) <= _FEWEST and bits >= 8:
            return _in_each_thread(shape)
        return min((row(shape, n) for n in widths), key=lambda one: _row_work(one, bits))
    last = len(shape) - 1
    tried = [
        (last, one)
        for width in widths
        if shape[-1] % width == 0
        for one in _distributions((*shape[:-1], shape[-1] // width), width)
    ]
    if pairs:
        vectors = (*shape[:-2], -(-shape[-2] // 2), shape[-1])
        tried += [(last - 1, one) for one in _distributions(vectors, 2)]
    alone = [] if pairs else [(dim, one) for dim, one in tried if _is_alone(shape, axes, *one)]
    best = min(
        (_work(shape, axes, bits, sector, dim, *one), dim, one) for dim, one in alone or tried
    )
    return _layout(shape, best[1], *best[2])


def _is_alone(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    width: int,
    lanes: tuple[int, ...],
    warps: tuple[int, ...],
) -> bool:
    """Whether no thread has several elements, and lines are one warp's, of more than the few that a
    thread combines at once: what else is done with elements then costs more than exchanges do."""
    if math.prod(shape[d] for d in axes) < _FEWEST:
        return False
    threads = (a * b for a, b in zip(lanes, warps, strict=True))
    covered = all(n <= own for n, own in zip(shape, threads, strict=True))
    return width == 1 and covered and all(warps[d] == 1 for d in axes)


@functools.lru_cache(maxsize=4096)
def by_rows(shape: tuple[int, ...], bits: int) -> RegisterLayout | None:
    """A layout that suits reductions over rows and over columns: lanes along the last dimension,
    warps along the one before; None for shapes of powers of two, and of one dimension."""
    if len(shape) < 2 or 0 in shape or not any(n & (n - 1) for n in shape):
        return None
    last = len(shape) - 1
    vectors = list(shape)
    along, width = last, 1
    if _in_pairs(shape, bits):
        along, width = last - 1, 2
    else:
        widths = [n for n in (16, 8, 4, 2, 1) if n * bits <= 128 and shape[-1] % n == 0]
        # Lanes have a word at least, if they can.
        width = next(n for n in widths if shape[-1] >= 16 * n or n * bits <= 32 or n == 1)
    vectors[along] = -(-vectors[along] // width)
    lanes, warps = [1] * len(shape), [1] * len(shape)
    lanes[last] = min(LANES, 1 << (vectors[last] - 1).bit_length())
    left = 1 << (vectors[last - 1] - 1).bit_length()
    lanes[last - 1] = min(LANES // lanes[last], left)
    warps[last - 1] = min(WARPS, left // lanes[last - 1])
    return _layout(shape, along, width, tuple(lanes), tuple(warps))


SHORT = 8
"""Elements of a line, at most, that one lane has rather than several."""


@functools.lru_cache(maxsize=4096)
def in_lines(shape: tuple[int, ...], axis: int) -> RegisterLayout | None:
    """A layout in which lanes hold whole lines along an axis, if these are short, or enough of them
    lie side by side for all lanes; None for shapes of powers of two."""
    extent = shape[axis]
    if extent < 2 or 0 in shape or not any(n & (n - 1) for n in shape):
        return None
    if extent > SHORT and math.prod(shape[axis + 1 :]) < LANES * WARPS:
        return None
    rest = tuple(1 if d == axis else n for d, n in enumerate(shape))
    enough = math.prod(rest) // (LANES * WARPS)
    vector = next(n for n in (4, 2, 1) if rest[-1] % n == 0 and n <= max(1, enough))
    others = padded(rest, vector)
    dims = list(others.dims)
    dims[axis] = (Digit(extent, Owner.REGISTER, others.registers),)
    return RegisterLayout(shape, tuple(dims), vector)


def _in_pairs(shape: tuple[int, ...], bits: int) -> bool:
    """Whether two rows share registers: each would begin between two words of memory."""
    return bits == 16 and len(shape) > 1 and shape[-1] % 2 == 1 and shape[-2] > 1


def _in_each_thread(shape: tuple[int, ...]) -> RegisterLayout:
    """All threads hold all elements."""
    dims = [
        (Digit(n, Owner.REGISTER, math.prod(shape[d + 1 :])),) if n > 1 else ()
        for d, n in enumerate(shape)
    ]
    return RegisterLayout(shape, tuple(dims), 1)


def _row_work(layout: RegisterLayout, bits: int) -> int:
    """Of a lane that loads the vectors of a row, and combines their elements."""
    return layout.registers * (2 + layout.vector_length * max(16, bits) // 32)


def _distributions(
    vectors: tuple[int, ...], width: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Vectors of ``width`` elements over the lanes and warps of each dimension."""
    for lanes in _splits(LANES, len(vectors)):
        for warps in _splits(WARPS, len(vectors)):
            counts = zip(vectors, lanes, warps, strict=True)
            if all(a * b == 1 or a * b < 2 * extent for extent, a, b in counts):
                yield width, lanes, warps


def _splits(threads: int, rank: int) -> Iterator[tuple[int, ...]]:
    """Powers of two for the dimensions, whose product is at most so many threads."""
    powers = [1 << bit for bit in range(threads.bit_length())]
    for split in itertools.product(powers, repeat=rank):
        if math.prod(split) <= threads:
            yield split


def _work(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    bits: int,
    sector: float,
    along: int,
    width: int,
    lanes: tuple[int, ...],
    warps: tuple[int, ...],
) -> float:
    """About how many instructions a lane has, and what it waits for memory."""
    values = registers = groups = 1
    unguarded = True
    filled = []
    for dim, extent in enumerate(shape):
        vectors = -(-extent // width) if dim == along else extent
        threads = lanes[dim] * warps[dim]
        own = -(-vectors // threads)
        registers *= own
        cut = dim == along and extent % width != 0
        if own * threads != vectors or (cut and threads > 1):
            groups *= (own > 1) + 1 + cut
            unguarded &= own > 1
            filled += [own] if dim in axes else []
        if dim not in axes:
            values *= own * width if dim == along else own
    steps = sum(lanes[dim].bit_length() - 1 for dim in axes)
    crossing = any(warps[dim] > 1 for dim in axes)
    together = width if along == len(shape) - 1 else 1
    accesses = width // together
    touched = _sectors(shape, bits, together, lanes) * accesses
    # Two elements become one register by one more instruction.
    combined = max(1.0, width * max(16, bits) / 32) + (accesses - 1) / 2
    work = registers * (2 * accesses + combined + touched * sector)
    if accesses > 1 and along in axes and shape[along] > width:
        work += _APART * values
    work += -(-values * max(16, bits) // 32) * (steps * _EXCHANGE + crossing * _ACROSS_WARPS)
    # Halves of words are exchanged in pairs, and padding gets the neutral element.
    alone = width == 1 or along in axes
    work += _PAIRED * values if alone and steps and bits < 32 and values > 1 else 0
    work += sum(registers / own for own in filled)
    if math.prod(shape) <= _SMALL:
        work += _BESIDE * (registers * width - -(-math.prod(shape) // (LANES * WARPS)))
    return work + crossing * _ACROSS_WARPS + _GUARD * (groups - unguarded)


def _sectors(shape: Sequence[int], bits: int, width: int, lanes: Sequence[int]) -> float:
    """About how many sectors of row-major memory the lanes access at a time."""
    touched, size = 1.0, bits / 8
    for dim in reversed(range(len(shape))):
        own = lanes[dim] * (width if dim == len(shape) - 1 else 1)
        touched = min(own * touched, max(1.0, own * size / _SECTOR))
        size *= shape[dim]
    return touched


def _layout(
    shape: tuple[int, ...],
    along: int,
    width: int,
    lanes: tuple[int, ...],
    warps: tuple[int, ...],
) -> RegisterLayout:
    """The layout with so many lanes and warps along each dimension, and vectors along one."""
    dims: list[tuple[Digit, ...]] = []
    strides = [1, 1, 1]
    for dim in reversed(range(len(shape))):
        vector = width if dim == along else 1
        count = -(-shape[dim] // (vector * lanes[dim] * warps[dim]))
        own = []
        owners = (Owner.REGISTER, Owner.WARP, Owner.LANE)
        for place, (size, owner) in enumerate(
            zip((count, warps[dim], lanes[dim]), owners, strict=True)
        ):
            own.append(Digit(size, owner, strides[place]))
            strides[place] *= size
        dims.insert(0, (*own, Digit(vector, Owner.VECTOR, 1)))
    return RegisterLayout(shape, tuple(dims), width)
