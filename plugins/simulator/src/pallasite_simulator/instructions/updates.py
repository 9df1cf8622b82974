"""What atomic operations do to places in memory: PTX ISA 9.7.13.5 (atom) and 9.7.13.6 (red).

Several lanes may update one place: they do so in the order of lanes. On floats, the operations do
what an H200 does with subnormal numbers and NaN, which depends on the state space.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from pallasite_simulator.instructions.contention import (
    Binary,
    Groups,
    accumulate,
    exchange_where,
    group_by_place,
    previous,
    scan,
    scan_invertible,
    stepwise,
)
from pallasite_simulator.types import TYPES, Array, PtxType

NAN = {
    np.dtype(np.float16): 0x7FFF,
    np.dtype(ml_dtypes.bfloat16): 0x7FFF,
    np.dtype(np.float32): 0x7FFFFFFF,
}
"""Bits of the NaN that operations on floats give; those on ``f64`` keep that of an operand."""

PACKED = {"f16x2": "f16", "bf16x2": "bf16"}
"""Packed types to the type of their parts, which are updated one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """One operation on elements of one type.

    Attributes:
      dtype: of the elements; 128-bit ones are pairs of ``uint64``.
      combine: from what is there and a value, what is there then.
      run: for :class:`Groups`, what is in the places (given: before) after each of the values.
      at: does it without telling what was there before, for integers.
    """

    dtype: np.dtype[Any]
    combine: Binary
    run: Callable[[Groups, Array, Array], Array]
    at: Callable[[Array, Array, Array], None] | None = None


def element_type(kind: PtxType) -> PtxType:
    """The type of what is updated at once: a part of a packed type, else the type."""
    return TYPES[PACKED.get(kind.name, kind.name)]


@functools.cache
def update_of(operation: str, kind: PtxType, space: str) -> Update:
    """The update of a name, on elements of a type, in ``"global"`` or ``"shared"`` memory.

    Names are those of ``atom`` but ``cas``: ``add``, ``min``, ``max``, ``inc``, ``dec``, ``and``,
    ``or``, ``xor`` and ``exch``.
    """
    if operation == "exch":
        return Update(kind.dtype, lambda held, values: values, lambda groups, held, values: values)
    if operation in ("inc", "dec"):
        step = _INCREMENTS[operation]
        return Update(kind.dtype, step, functools.partial(_count, operation, step))
    if kind.kind != "float":
        ufunc = _INTEGERS[operation]
        run = functools.partial(scan, ufunc)
        if operation in _INVERSES:
            run = functools.partial(scan_invertible, ufunc, _INVERSES[operation])
        return Update(kind.dtype, ufunc, run, ufunc.at)
    if operation != "add":
        combine: Binary = functools.partial(_extreme, operation == "min")
        return Update(kind.dtype, combine, functools.partial(scan, combine))
    combine = _sum
    if kind.name == "f32" and space == "global":
        combine = _flushed_sum
    elif kind.name == "f64":
        combine = _wide_sum if space == "global" else _wide_shared_sum
    return Update(
        kind.dtype,
        combine,
        functools.partial(accumulate, functools.partial(_partial_sums, combine)),
    )


def update(memory: Array, places: Array, values: Array, what: Update) -> tuple[Array, bool]:
    """Updates places, in order of lanes.

    Args:
      memory: of elements.
      places: indices of elements, one for each lane.
      values: one for each lane.

    Returns:
      What each lane found there, and whether the memory is different now.
    """
    groups = group_by_place(places)
    if groups is None:
        found = memory[places]
        final = what.combine(found, values)
        memory[places] = final
        return found, not _same(found, final)
    held = memory[groups.places]
    running = what.run(groups, held, values[groups.order])
    final = running[groups.starts + groups.lengths - 1]
    memory[groups.places] = final
    found = np.empty_like(running)
    found[groups.order] = previous(groups, held, running)
    return found, not _same(held, final)


def update_unread(memory: Array, places: Array, values: Array, what: Update) -> bool:
    """As :func:`update`, if the old value is not needed; returns whether it is different
    now."""
    if what.at is None:
        return update(memory, places, values, what)[1]
    before = memory[places]
    what.at(memory, places, values)
    return not _same(before, memory[places])


def compare_and_swap(
    memory: Array, places: Array, wanted: Array, values: Array
) -> tuple[Array, Array]:
    """``cas``: stores values where what is there is what is wanted, in order of lanes.

    Elements are unsigned integers, or rows of them.

    Returns:
      What each lane found, and which lanes changed what they found.
    """
    groups = group_by_place(places)
    if groups is None:
        found = memory[places]
        changed = _equal(found, wanted) & ~_equal(wanted, values)
        memory[places[changed]] = values[changed]
        return found, changed
    held = memory[groups.places]
    ordered, order = values[groups.order], groups.order
    sorted_found, changes = exchange_where(groups, held, wanted[order], ordered, _equal)
    # Of several changes of one place, the last one is assigned last.
    memory[places[order[changes]]] = ordered[changes]
    found, changed = np.empty_like(sorted_found), np.empty_like(changes)
    found[order], changed[order] = sorted_found, changes
    return found, changed


# Details ------------------------------------------------------------------------------------------


def _equal(left: Array, right: Array) -> Array:
    same: Array = left == right
    return same.all(axis=1) if same.ndim > 1 else same


def _same(left: Array, right: Array) -> bool:
    """Whether all bits are the same."""
    bits = f"u{left.itemsize}"
    return bool((left.view(bits) == right.view(bits)).all())


_INTEGERS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}

_INVERSES: dict[str, Any] = {"add": np.subtract, "xor": np.bitwise_xor}


def _increment(held: Array, limit: Array) -> Array:
    return np.where(held >= limit, np.uint32(0), held + np.uint32(1))


def _decrement(held: Array, limit: Array) -> Array:
    return np.where((held == 0) | (held > limit), limit, held - np.uint32(1))


_INCREMENTS: dict[str, Binary] = {"inc": _increment, "dec": _decrement}


def _count(operation: str, step: Binary, groups: Groups, held: Array, limits: Array) -> Array:
    """Repeated ``inc`` or ``dec``: in closed form where all limits of a place are the same."""
    first = limits[groups.starts]
    if not np.array_equal(limits, first[groups.group]):
        return accumulate(functools.partial(stepwise, step), groups, held, limits)
    start, limit = held.astype(np.int64)[groups.group], limits.astype(np.int64)
    times = groups.rank + 1
    outside = start > limit
    if operation == "inc":
        counted = np.where(outside, times - 1, start + times)
    else:
        counted = np.where(outside, limit - (times - 1), start - times)
    return (counted % (limit + 1)).astype(np.uint32)


def _with_nan(result: Array) -> Array:
    """Replaces all NaN by the one of the hardware, in place."""
    wrong = np.isnan(result)
    if wrong.any():
        bits = result.view(f"u{result.itemsize}")
        bits[wrong] = NAN[result.dtype]
    return result


def _sum(held: Array, values: Array) -> Array:
    with np.errstate(all="ignore"):
        return _with_nan(held + values)


def _flush(values: Array) -> Array:
    """Subnormal numbers become zeros of the same sign."""
    small = np.abs(values) < np.finfo(np.float32).tiny
    if not small.any():
        return values
    return np.where(small, np.copysign(np.float32(0), values), values)


def _flushed_sum(held: Array, values: Array) -> Array:
    """``f32`` in global memory."""
    with np.errstate(all="ignore"):
        return _with_nan(_flush(_flush(held) + _flush(values)))


def _wide_sum(held: Array, values: Array) -> Array:
    """``f64`` in global memory: a NaN stays as it is, and that of the instruction goes first."""
    with np.errstate(all="ignore"):
        result: Array = held + values
    for operand in (held, values):
        wrong = np.isnan(operand)
        result[wrong] = operand[wrong]
    return result


def _wide_shared_sum(held: Array, values: Array) -> Array:
    """``f64`` in shared memory: a NaN becomes a quiet one, and that in memory goes first."""
    with np.errstate(all="ignore"):
        result: Array = held + values
    bits = result.view(np.uint64)
    for operand in (values, held):
        wrong = np.isnan(operand)
        bits[wrong] = operand.view(np.uint64)[wrong] | np.uint64(1 << 51)
    return result


def _partial_sums(combine: Binary, matrix: Array) -> Array:
    """Sums of all beginnings of rows, each addition rounded as ``combine`` rounds."""
    flushed = combine is _flushed_sum
    with np.errstate(all="ignore"):
        sums: Array = np.add.accumulate(_flush(matrix) if flushed else matrix, axis=1)
        irregular = np.isnan(sums)
        if flushed:
            size = np.abs(sums)
            irregular |= (size > 0) & (size < np.finfo(np.float32).tiny)
    rows = np.flatnonzero(irregular.any(axis=1))
    if len(rows):
        sums[rows] = stepwise(combine, matrix[rows])
    return sums


def _extreme(smallest: bool, held: Array, values: Array) -> Array:
    """``min`` and ``max`` of floats: a number if there is one, and -0 is less than 0."""
    signed = np.dtype(f"i{held.itemsize}")
    magnitude = np.iinfo(signed).max

    def rank(floats: Array) -> Array:
        bits = floats.view(signed)
        ordered: Array = bits ^ ((bits >> (8 * signed.itemsize - 1)) & magnitude)
        return ordered

    left, right = rank(held), rank(values)
    chosen = (left <= right if smallest else left >= right) & ~np.isnan(held)
    return _with_nan(np.where(chosen | np.isnan(values), held, values))
