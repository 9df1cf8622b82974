"""Bringing an array from one register layout into another."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import (
    LANES,
    ConversionKind,
    Digit,
    Layout,
    MemoryLayout,
    Owner,
    Rearrangement,
    RegisterLayout,
    SplatLayout,
    conversion,
    describe,
    row_major,
)
from pallasite.plugin.lowering import RegisterArray, RuleContext, gather
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.matrix_access import MatrixPlan, plan_transfer, transfer_passes
from pallasite_std.memory.portions import PURPOSE, has_portions, in_portions
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.transfers import load_array, store_array

USUAL = 226 * 1024
"""Bytes of scratch memory for one array, at most, of chips with 227 KiB."""

_SLICE = 2048
"""Bytes of a slice, at most."""


def relayout(ctx: RuleContext, array: RegisterArray, target: Layout) -> RegisterArray:
    """The array in another layout of the same shape.

    If every thread already holds its elements, this only renames registers. Otherwise the array
    goes through the kernel's scratch shared memory, slice by slice.

    Raises:
      InvalidValueError: a distributed array cannot become a splat, or does not fit the scratch.
    """
    if array.layout == target:
        return array
    if array.is_splat:
        if isinstance(target, SplatLayout):
            return array
        assert isinstance(target, RegisterLayout)
        return array.materialize(target)
    if isinstance(target, SplatLayout) and array.size > 1:
        raise InvalidValueError(
            "an array whose elements may differ is cast to a splat",
            got=f"{describe(array.layout)} for shape {list(array.shape)}",
            expected="another layout",
        )
    plan = conversion(array.layout, target)
    if plan.kind is not ConversionKind.SHARED_MEMORY:
        assert plan.sources is not None
        return RegisterArray(gather(array.registers, plan.sources), target, array.dtype)
    assert isinstance(target, RegisterLayout)
    return _through_shared_memory(ctx, array, target)


def _through_shared_memory(
    ctx: RuleContext, array: RegisterArray, target: RegisterLayout
) -> RegisterArray:
    limit = max(ctx.params.reduction_scratch_bytes, 512)
    bits = types.bit_width(array.dtype)
    extent = array.shape[0] if array.shape else 1
    if array.size * bits // 8 <= limit or extent == 1:
        return _exchange(ctx, array, target)
    # Slices along the first dimension, as small as both layouts can be cut.
    for pieces in range(2, extent + 1):
        if extent % pieces or array.size // pieces * bits // 8 > limit:
            continue
        size = extent // pieces
        try:
            return _in_pieces(ctx, array, target, size)
        except InvalidValueError:
            continue
    return _exchange(ctx, array, target)


@functools.lru_cache(maxsize=1024)
def fits_scratch(source: Layout, target: Layout, bits: int) -> bool:
    """Whether shared memory of usual size has room for an array that changes its layout, as a whole
    or by slices."""
    size = source.size * bits // 8
    if size <= USUAL:
        return True
    extent = source.shape[0] if source.shape else 1
    for pieces in range(2, extent + 1):
        # As small as any slices that relayout makes.
        if extent % pieces == 0 and size // pieces <= _SLICE:
            with contextlib.suppress(InvalidValueError):
                for layout in (source, target):
                    _part(layout, 0, extent // pieces)
                return True
    return False


def _part(layout: Layout, start: int, size: int) -> Rearrangement:
    starts = [start] + [0] * (len(layout.shape) - 1)
    return layout.slice(starts, [size, *layout.shape[1:]])


def _in_pieces(
    ctx: RuleContext, array: RegisterArray, target: RegisterLayout, size: int
) -> RegisterArray:
    starts = range(0, array.shape[0], size)
    sources = [_part(array.layout, start, size) for start in starts]
    targets = [_part(target, start, size) for start in starts]
    registers: list[ir.Value | None] = [None] * target.registers
    for source, part in zip(sources, targets, strict=True):
        piece = RegisterArray(gather(array.registers, source.sources), source.layout, array.dtype)
        assert isinstance(part.layout, RegisterLayout)
        moved = _exchange(ctx, piece, part.layout)
        numbers = part.registers
        if numbers is None:
            raise InvalidValueError("the pieces cut vectors apart")
        for number, register in zip(numbers, moved.registers, strict=True):
            registers[number] = register
    return RegisterArray(tuple(r for r in registers if r is not None), target, array.dtype)


def _exchange(ctx: RuleContext, array: RegisterArray, target: RegisterLayout) -> RegisterArray:
    bits = types.bit_width(array.dtype)
    if bits < 8 and not (in_whole_bytes(array.layout, bits) and in_whole_bytes(target, bits)):
        return as_bytes(array, lambda wide: _exchange(ctx, wide, target))
    size = -(-array.size * bits // 8)
    if has_portions(ctx, size):
        nowhere: Any = None
        rows = row_major(array.shape, bits)
        memory = MemoryReference(nowhere, rows, array.dtype, MemorySpace.SMEM, alignment=16)
        return in_portions(ctx, size, [(memory, array)], memory, target)
    if size > ctx.target.max_shared_memory:
        raise InvalidValueError(
            "an array is too large to change its layout through shared memory",
            got=f"{array.dtype}{list(array.shape)} from {describe(array.layout)} to"
            f" {describe(target)}",
            hint="load it in the layout that is needed",
        )
    with ctx.scratch(size, PURPOSE) as (pointer, _):
        memory = MemoryReference(
            pointer=pointer,
            layout=_best_order(array.layout, target, bits),
            dtype=array.dtype,
            space=MemorySpace.SMEM,
            alignment=16,
        )
        ctx.synchronize()
        store_array(ctx.launch, memory, array)
        ctx.synchronize()
        return load_array(ctx.launch, memory, target)


@functools.lru_cache(maxsize=1024)
def _best_order(source: Layout, target: RegisterLayout, bits: int) -> MemoryLayout:
    """How an array that changes its layout lies in memory: row-major, unless vectors of registers
    are along another dimension, and both accesses are fewer and take less time where its elements
    are neighbours."""
    rows = row_major(source.shape, bits)
    if not isinstance(source, RegisterLayout) or bits < 8:
        return rows
    vectors = {
        dim
        for layout in (source, target)
        if not layout.flat
        for dim, digits in enumerate(layout.dims[:-1])
        if any(digit.owner is Owner.VECTOR for digit in digits)
    }
    best, least = rows, _accesses(source, target, rows)
    for last in sorted(vectors):
        order = [dim for dim in range(len(source.shape)) if dim != last] + [last]
        steps = row_major([source.shape[dim] for dim in order], bits).dims
        found = rows.with_dims([steps[order.index(dim)] for dim in range(len(order))])
        try:
            passes, count = _accesses(source, target, found)
        except InvalidValueError:  # Threads run across the boundaries of rows, not of columns.
            continue
        if passes <= least[0] and count < least[1]:
            best, least = found, (passes, count)
    return best


def _accesses(
    source: RegisterLayout, target: RegisterLayout, memory: MemoryLayout
) -> tuple[float, int]:
    """Passes through shared memory and instructions that store and load an array."""
    passes, count = 0.0, 0
    for layout in (source, target):
        plan = plan_transfer(layout, memory, 16, matrices=True)
        plan = plan.rows if isinstance(plan, MatrixPlan) else plan
        passes += transfer_passes(plan)
        count += len(plan.everything)
    return passes, count


def in_whole_bytes(layout: Layout, bits: int) -> bool:
    """Whether threads hold whole bytes of a row-major array with elements of less."""
    try:
        plan_access(cast(RegisterLayout, layout), row_major(layout.shape, bits), 16)
    except InvalidValueError:
        return False
    return True


def as_bytes(array: RegisterArray, move: Callable[[RegisterArray], RegisterArray]) -> RegisterArray:
    """What moves elements, of less than a byte, whose neighbours belong to other threads: they are
    moved as one byte each."""
    narrow = types.memory_type(array.dtype)

    def widen(value: ir.Value) -> ir.Value:
        return ops.arith.extui(types.register_type(np.uint8, array.vector_length), value)

    wide = RegisterArray(tuple(map(widen, array.registers)), array.layout, np.dtype(np.uint8))
    moved = move(wide)

    def truncate(value: ir.Value) -> ir.Value:
        return ops.arith.trunci(types.vector_type(narrow, moved.vector_length), value)

    return RegisterArray(tuple(map(truncate, moved.registers)), moved.layout, array.dtype)


def rows_in_registers(shape: Sequence[int]) -> RegisterLayout:
    """A layout with the threads along the last dimension and the others in register numbers, so
    that no factor straddles two dimensions."""
    last = shape[-1]
    exact = max(n for n in range(1, LANES + 1) if last % n == 0)
    lanes = exact if 2 * exact > min(last, LANES) else min(LANES, 1 << (last - 1).bit_length())
    rest = -(-last // lanes)
    warps = max(n for n in (1, 2, 4) if n == 1 or rest % n == 0 or rest > 2 * n)
    dims: list[tuple[Digit, ...]] = [(Digit(extent, Owner.REGISTER, 1),) for extent in shape[:-1]]
    dims.append(
        (
            Digit(-(-rest // warps), Owner.REGISTER, 1),
            Digit(warps, Owner.WARP, 1),
            Digit(lanes, Owner.LANE, 1),
        )
    )
    return RegisterLayout(tuple(shape), tuple(dims), 1)
