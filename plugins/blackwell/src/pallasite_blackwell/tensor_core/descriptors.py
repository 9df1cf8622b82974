"""Matrices in shared memory as the tensor core sees them: matrix descriptors.

A descriptor says where a matrix starts, how it is swizzled and how far its blocks are apart (PTX
ISA, "Shared Memory Descriptor" of ``tcgen05``). Blocks are 8 rows along the slow direction and,
along the contiguous one, 16 bytes or the width of the swizzle. The strides are read off the memory
layout by asking it where elements lie, so every view that has the right form will do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError
from pallasite.plugin.ir import ops
from pallasite.plugin.layouts import MemoryLayout
from pallasite_std.api import (
    DynamicOffset,
    MatrixStep,
    MemoryReference,
    check_matrix_starts,
    places_of,
)

type Places = np.ndarray[Any, np.dtype[np.int64]]
"""Offsets of elements."""

CHUNK = 16
"""Bytes that are never taken apart."""

VERSION = 1 << 46
"""Tells descriptors of this generation from those of the one before."""

_GROUP = 8
"""Chunks (or swizzled rows) that make a block."""

_MODES = {16: 0, 128: 2, 64: 4, 32: 6}
"""The descriptor's field of the swizzle."""

_TRANSPOSABLE = (8, 16)
"""Bits of elements that may be contiguous along m or n."""

_LOW = (1 << 32) - 1

_FIELD = (1 << 18) - CHUNK
"""Offsets have 14 bits and count in chunks."""


@dataclasses.dataclass(frozen=True)
class MatrixOperand:
    """How one operand's descriptors are made.

    Attributes:
      constant: all of the descriptor but the start address.
      transposed: the elements along m or n are contiguous, not those along k.
      starts: offsets in bytes from the first element: of each block of rows, of each step along k.
    """

    constant: int
    transposed: bool
    starts: tuple[tuple[int, ...], ...]


def encoded(leading: int, stride: int, swizzle: int) -> int:
    """A descriptor without a start address, of offsets in bytes."""
    return leading // CHUNK << 16 | stride // CHUNK << 32 | VERSION | _MODES[swizzle] << 61


@functools.lru_cache(maxsize=512)
def plan_operand(
    layout: MemoryLayout, rows: tuple[tuple[int, int], ...], depth: int, what: str
) -> MatrixOperand:
    """The descriptors for an operand.

    Args:
      layout: of the matrix, its first dimension along m or n, its second along k.
      rows: (start, size) of the rows that each instruction reads.
      depth: elements along k that each instruction reads.
      what: the operand's name, for messages.

    Raises:
      InvalidValueError: the tensor core cannot read it as it lies.
    """
    bits = layout.element_bits
    extent_k = layout.shape[1]
    places = places_of(layout)
    fields = _fields(places, rows, depth, bits, layout.swizzle)
    transposed = False
    if fields is None and bits in _TRANSPOSABLE:
        fields = _fields_transposed(places, rows, depth, bits, layout.swizzle)
        transposed = fields is not None
    if fields is None or any(field % CHUNK for field in fields):
        raise _unreadable(layout, rows, depth, what)
    if transposed:
        _check_chunks(rows, bits, what)
    leading, stride = fields
    for name, field in (("leading", leading), ("stride", stride)):
        if not 0 <= field <= _FIELD:
            raise InvalidValueError(
                f"the blocks of {what} are too far apart for the tensor core",
                got=f"{name} offset of {field} bytes",
                expected=f"at most {_FIELD} bytes",
            )
    starts = tuple(
        tuple(int(places[start, k]) * bits // 8 for k in range(0, extent_k, depth))
        for start, _ in rows
    )
    return MatrixOperand(encoded(leading, stride, layout.swizzle), transposed, starts)


def _common(found: list[int | None]) -> int | None:
    """The one step of all instructions; those that take none do not count."""
    known = {step for step in found if step is not None}
    return known.pop() if len(known) == 1 else None if known else 0


def _tiles(
    places: Places, rows: tuple[tuple[int, int], ...], depth: int
) -> Iterator[tuple[int, Places]]:
    """For each instruction the number of its rows, and offsets relative to its first element."""
    for start, count in rows:
        for k in range(0, places.shape[1], depth):
            tile = places[start : start + count, k : k + depth]
            yield count, tile - tile[0, 0]


def _bytes(elements: int, bits: int) -> int:
    return elements * bits // 8


def _fields(
    places: Places, rows: tuple[tuple[int, int], ...], depth: int, bits: int, swizzle: int
) -> tuple[int, int] | None:
    """(leading, stride) offsets of a matrix that is contiguous along k; None if it is not."""
    chunk, row_step = CHUNK * 8 // bits, swizzle * 8 // bits
    leadings: list[int | None] = []
    strides: list[int | None] = []
    k = np.arange(depth)
    for count, tile in _tiles(places, rows, depth):
        row = np.arange(count)
        leading = int(tile[0, chunk]) if depth > chunk else chunk
        stride = int(tile[_GROUP, 0]) if count > _GROUP else None
        expected = (
            (row % _GROUP * row_step + row // _GROUP * (stride or 0))[:, None]
            + k % chunk
            + k // chunk * leading
        )
        if (tile != expected).any() or (swizzle != CHUNK and leading != chunk):
            return None
        leadings.append(leading)
        strides.append(stride)
    leading_field, stride_field = _common(leadings), _common(strides)
    if leading_field is None or stride_field is None:
        return None
    return _bytes(leading_field, bits), _bytes(stride_field, bits)


def _fields_transposed(
    places: Places, rows: tuple[tuple[int, int], ...], depth: int, bits: int, swizzle: int
) -> tuple[int, int] | None:
    """(leading, stride) offsets of a matrix that is contiguous along m or n."""
    run = swizzle * 8 // bits
    along_rows: list[int | None] = []
    along_k: list[int | None] = []
    k = np.arange(depth)
    for count, tile in _tiles(places, rows, depth):
        row = np.arange(count)
        between_rows = int(tile[run, 0]) if count > run else None
        between_k = int(tile[0, _GROUP])
        expected = (row % run + row // run * (between_rows or 0))[:, None] + (
            k % _GROUP * run + k // _GROUP * between_k
        )
        if (tile != expected).any():
            return None
        along_rows.append(between_rows)
        along_k.append(between_k)
    rows_field, k_field = _common(along_rows), _common(along_k)
    if rows_field is None or k_field is None:
        return None
    found = _bytes(rows_field, bits), _bytes(k_field, bits)
    # Without swizzling the two fields change places.
    return found if swizzle != CHUNK else (found[1], found[0])


def _check_chunks(rows: tuple[tuple[int, int], ...], bits: int, what: str) -> None:
    """What is contiguous along m or n is read in whole chunks (PTX ISA, "Transpose and negate
    operations" of ``tcgen05``)."""
    along, stored = ("n", "(n, k)") if what == "b" else ("m", "(m, k)")
    for _, size in rows:
        if _bytes(size, bits) % CHUNK:
            raise InvalidValueError(
                f"elements of {bits} bits are contiguous along {along} in {what}, of too few"
                f" {'columns' if what == 'b' else 'rows'}",
                got=f"a part of {size} {'columns' if what == 'b' else 'rows'}",
                expected=f"a multiple of {CHUNK * 8 // bits} in each part; with m=64, the parts are"
                " the halves of n",
                hint=f"store {what} as {stored}"
                + (", and pass plgpu.transpose_ref(b, (1, 0))" if what == "b" else ""),
            )


def _unreadable(
    layout: MemoryLayout, rows: tuple[tuple[int, int], ...], depth: int, what: str
) -> InvalidValueError:
    # In the program, k is the first dimension of b.
    shown = layout.transpose((1, 0)) if what == "b" else layout
    bits = layout.element_bits
    got = f"{shown.shape} laid out as {shown}"
    turned = (
        _bytes(layout.contiguous_run(1), bits) < CHUNK <= _bytes(layout.contiguous_run(0), bits)
    )
    if bits not in _TRANSPOSABLE and turned:
        stored = "(n, k)" if what == "b" else "(m, k)"
        return InvalidValueError(
            f"elements of {bits} bits are not contiguous along k in {what}",
            got=got,
            expected="rows of k; only elements of 8 or 16 bits may be contiguous along m or n",
            hint=f"store {what} as {stored}"
            + (", and pass plgpu.transpose_ref(b, (1, 0))" if what == "b" else ""),
        )
    if turned:
        _check_chunks(rows, bits, what)
    run = layout.swizzle * 8 // bits
    cut = [start for start, _ in rows if start % run]
    if cut and layout.contiguous_run(0) == run:
        return InvalidValueError(
            f"the instructions of the product read {what} in parts that cut its tiles",
            got=f"a part that begins at {cut[0]}, tiles of {run} elements",
            expected="tiles that divide the parts; with m=64, the parts are the halves of n",
            hint="a narrower swizzle",
        )
    contiguous = max(range(2), key=shown.contiguous_run)
    extent = _bytes(shown.shape[contiguous], bits)
    least = CHUNK if turned else _bytes(depth, bits)
    widths = [width for width in (128, 64, 32, CHUNK) if extent % width == 0 and width >= least]
    hint = None
    if widths:
        hint = f"plgpu.TilingTransform({(_GROUP, widths[0] * 8 // bits)})"
        hint += f", plgpu.SwizzleTransform({widths[0]})" if widths[0] > CHUNK else ","
        hint = f"plgpu.SMEM(..., transforms=({hint}))"
    return InvalidValueError(
        f"the tensor core cannot read {what} from shared memory as it lies there",
        got=got,
        expected="tiles of 8 rows as wide as the swizzle, or of 16 bytes without swizzle; along k"
        f" a swizzle of at least the {_bytes(depth, bits)} bytes that an instruction reads",
        hint=hint,
    )


@dataclasses.dataclass(frozen=True)
class SharedOperand:
    """An operand in shared memory: its plan, and the descriptor of its first element (i64)."""

    plan: MatrixOperand
    descriptor: ir.Value


def shared_operand(
    memory: MemoryReference, rows: Sequence[tuple[int, int]], depth: int, what: str
) -> SharedOperand:
    """An operand of a product.

    Args:
      memory: where it lies, with its first dimension along m or n.
      rows, depth, what: see :func:`plan_operand`.

    Raises:
      InvalidValueError: the tensor core cannot read it.
    """
    plan = plan_operand(memory.layout, tuple(rows), depth, what)
    bits = memory.element_bits
    steps = [_step(part, bits) for part in memory.dynamic]
    check_matrix_starts(memory.layout, plan.starts, _bytes(memory.offset, bits), steps, what)
    return SharedOperand(plan, start_descriptor(memory, plan.constant, what))


def start_descriptor(memory: MemoryReference, constant: int, what: str) -> ir.Value:
    """The descriptor (i64) of the first element of memory; ``constant`` is the rest of it."""
    if memory.remote is not None:
        raise InvalidValueError(
            f"{what} is in the shared memory of another block",
            expected="the block's own shared memory",
        )
    unit = CHUNK * 8 // memory.element_bits
    static, moving = memory.element_offset(), None
    if all(part.term.stride % unit == 0 for part in memory.dynamic):
        # The part that loops change is added last; no address is so large that it would carry.
        static, moving = memory.offset, memory.dynamic_offset(unit)
    address = ops.add(ops.shared_address(memory.pointer), memory.byte_offset(static))
    low = ops.bitwise_and(ops.divide_unsigned(address, CHUNK), (1 << 14) - 1)
    low = ops.arith.ori(low, ops.i32_constant(_signed(constant & _LOW)))
    if moving is not None:
        low = ops.add(low, moving)
    wide = ops.cast_integer(low, ops.i64(), signed=False)
    return ops.arith.ori(wide, ops.i64_constant(constant & ~_LOW))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _step(part: DynamicOffset, bits: int) -> MatrixStep:
    """What a part of the offset that is computed in the kernel adds, in bytes."""
    values, stride = part.term.values, part.term.stride
    reach = None if values is None else _bytes(values * stride, bits)
    return MatrixStep(_bytes(part.divisor, bits), reach)
