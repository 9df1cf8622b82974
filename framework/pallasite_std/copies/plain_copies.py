"""Copies by plain loads and stores of all lanes, of arrays that no copy engine takes.

The engines want rows of global memory that are multiples of 16 bytes apart, and of as many bytes;
and what is longer than a box, in parts that begin at multiples of 128 bytes of shared memory. Where
an array's or a window's extents do not allow that, the lanes of the thread that issues a copy move
its elements one by one, in a loop, and are done when the copy has been issued; whoever waits for it
finds it complete.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import InvalidValueError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import LANES, WARPS, strided
from pallasite.plugin.lowering import RegisterArray, RuleContext
from pallasite_std.copies.tensor_copies import start_value
from pallasite_std.copies.tensor_map_types import MAXIMUM_BOX
from pallasite_std.memory.access import AccessPlan, plan_access
from pallasite_std.memory.padding import load_where
from pallasite_std.memory.proxies import note_store
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.references import index_reference
from pallasite_std.memory.transfers import access_addresses, scalar_address

UNIT = 16
"""Bytes of which rows and the distance between them have to be multiples for the engines."""

WORD = 4
"""Bytes that a lane stores of a row that begins anywhere."""

_TOGETHER = 8
"""So many are loaded from shared memory before they are stored."""

_NO_ROW = 0x7FFF0000
"""The number of a row that no array has."""

_FARTHEST = 1 << 23
"""Bytes, less than which an instruction can add to an address."""


def has_odd_rows(shape: Sequence[int], window: Sequence[int], element_bits: int) -> bool:
    """Whether rows of a window of an array, or the distance between them, are not multiples of 16
    bytes.

    Args:
      shape: of the array.
      window: extents of the window in all of its dimensions.
      element_bits: size of an element.
    """
    rows = [*window[-1:], *(shape[-1:] if len(shape) > 1 else ())] or [1]
    return element_bits >= 8 and any(n * element_bits % (8 * UNIT) for n in rows)


def applies(window: MemoryReference, shared: MemoryReference) -> bool:
    """Whether all lanes copy what the engines refuse: odd rows, or more elements along a dimension
    than one box has, which are not divided into boxes that shared memory has room for."""
    buffer = window.buffer
    if buffer is None or window.window is None:
        return False
    extents = [start.size for start in window.window]
    if has_odd_rows(buffer.shape, extents, window.element_bits):
        return True
    long = any(extent > MAXIMUM_BOX for extent in extents)
    return long and window.element_bits >= 8 and shared.layout.is_contiguous


def copy_to_shared(ctx: RuleContext, window: MemoryReference, shared: MemoryReference) -> None:
    """Copies a window of a kernel argument; zeros arrive for what lies outside of the array.

    All lanes see the elements afterwards, and so do asynchronous copies and matrix products.
    """
    kind = types.memory_type(shared.dtype)
    size = shared.element_bits // 8

    def move(source: MemoryReference, target: MemoryReference, inside: ir.Value) -> None:
        (value,) = load_where(
            inside, [kind], lambda: [ops.load(kind, scalar_address(source), alignment=size)]
        )
        ops.store(value, scalar_address(target), alignment=size)

    _each(ctx, window, shared, move)
    ops.inline_assembly("fence.proxy.async.shared::cta;", "~{memory}")
    ctx.synchronize()


def copy_to_global(ctx: RuleContext, shared: MemoryReference, window: MemoryReference) -> None:
    """Copies to a window of a kernel argument, except for what lies outside of the array."""
    note_store(ctx, window)
    kind = types.memory_type(shared.dtype)
    size = shared.element_bits // 8
    if _has_vectors(window, shared):
        ctx.synchronize()
        for columns in _column_parts(window, shared):
            _store_part(ctx, *(index_reference(one, columns) for one in (window, shared)))
        return

    def move(target: MemoryReference, source: MemoryReference, inside: ir.Value) -> None:
        value = ops.load(kind, scalar_address(source), alignment=size)
        with ops.when(inside):
            ops.store(value, scalar_address(target), alignment=size)

    ctx.synchronize()
    _each(ctx, window, shared, move)


def _has_vectors(window: MemoryReference, shared: MemoryReference) -> bool:
    """Whether rows of a window have vectors of 16 bytes that can be stored at once."""
    size = shared.element_bits // 8
    if not window.window or window.window[-1].squeezed or size not in (1, 2, 4):
        return False
    return not types.is_bool(shared.dtype) and shared.shape[-1] * size >= 2 * UNIT


def _store_vectors(ctx: RuleContext, window: MemoryReference, shared: MemoryReference) -> None:
    """Stores rows that begin anywhere by aligned vectors, and single elements at their ends."""
    buffer = window.buffer
    assert buffer is not None and window.window is not None
    column = start_value(window.window[-1])
    window = _with_pointer(ctx, window)
    size, width = shared.element_bits // 8, shared.shape[-1]
    count, kind = UNIT // size, ir.IntegerType.get_signless(shared.element_bits)
    # From where rows begin, or up to a vector less an element before.
    vectors = (width * size + UNIT - size - 1) // UNIT + 1
    left = ops.arith.subi(ops.i32_constant(buffer.shape[-1]), column)
    end = ops.arith.minsi(left, ops.i32_constant(width))

    def body(index: list[ir.Value]) -> None:
        *rows, vector = index
        zero = ops.i32_constant(0)
        inside = _inside(window, [*rows, zero])
        chosen = [RegisterArray.splat(one, np.dtype(np.int32)) for one in rows]
        row = scalar_address(index_reference(window, [*chosen, 0]))
        low = ops.cast_integer(llvm.ptrtoint(ops.i64(), row), ops.i32())
        before = ops.divide_unsigned(ops.bitwise_and(low, UNIT - 1), size)
        first = ops.arith.subi(ops.multiply(vector, count), before)
        values, there = [], []
        for place in range(count):
            at = ops.add(first, place)
            there.append(
                ops.arith.andi(
                    ops.compare("sge", at, 0), ops.arith.cmpi(ops.arith.CmpIPredicate.slt, at, end)
                )
            )
            at = ops.arith.minsi(ops.arith.maxsi(at, zero), ops.i32_constant(width - 1))
            element = RegisterArray.splat(at, np.dtype(np.int32))
            source = index_reference(shared, [*chosen, element])
            values.append(ops.load(kind, scalar_address(source), alignment=size))
        target = ops.byte_pointer(row, ops.multiply(first, size))
        whole = ops.arith.andi(inside, ops.arith.andi(there[0], there[-1]))
        with ops.when(whole):
            words = ir.VectorType.get((UNIT // 4,), ops.i32())
            ops.store(ops.bitcast(ops.from_elements(values), words), target, alignment=UNIT)
        rest = ops.arith.andi(inside, ops.arith.xori(whole, ops.i1_constant(True)))
        with ops.when(rest):
            for place, (value, own) in enumerate(zip(values, there, strict=True)):
                with ops.when(own):
                    ops.store(value, ops.byte_pointer(target, place * size), alignment=size)

    _over(ctx, (*shared.shape[:-1], vectors), body)


def _unit(window: MemoryReference, shared: MemoryReference) -> int:
    """Bytes that a lane stores at once of rows that begin anywhere: elements of 16 bits, where rows
    begin between words, since words would leave single elements at their ends."""
    size = shared.element_bits // 8
    assert window.buffer is not None
    return size if size == 2 and window.buffer.shape[-1] * size % WORD else WORD


def _column_parts(window: MemoryReference, shared: MemoryReference) -> list[list[Any]]:
    """Indices of parts of a window of as many words as a warp has lanes, if it is a matrix of such
    parts; of all of it otherwise."""
    size, width = shared.element_bits // 8, shared.shape[-1]
    whole = [_jax.Slice(0, extent) for extent in shared.shape]
    part = LANES * WORD // size
    if len(shared.shape) != 2 or width % part or _unit(window, shared) == size:
        return [whole]
    return [[whole[0], _jax.Slice(first, part)] for first in range(0, width, part)]


def _store_part(ctx: RuleContext, window: MemoryReference, shared: MemoryReference) -> None:
    plan = _word_plan(ctx, window, shared)
    if plan is None:
        _store_vectors(ctx, window, shared)
    else:
        _store_words(ctx, window, shared, plan)


def _word_plan(
    ctx: RuleContext, window: MemoryReference, shared: MemoryReference
) -> AccessPlan | None:
    """How all lanes load words or elements of a matrix in shared memory, each of them of rows that
    begin equally far behind words of global memory; None if they cannot."""
    buffer = window.buffer
    if buffer is None or window.window is None or ctx.in_warp or len(shared.shape) != 2:
        return None
    if len(buffer.shape) < 2 or window.window[-2].squeezed:
        return None
    (rows, width), size = shared.shape, shared.element_bits // 8
    unit = _unit(window, shared)
    units = width * size // unit
    if width * size % unit or units not in (8, 16, 32, 64, 128):
        return None
    step = LANES * WARPS // units
    if rows % step:
        return None
    if unit > size and (units > LANES or step * buffer.shape[-1] * size % WORD):
        return None
    try:
        layout = strided(shared.shape, unit // size)
        plan = plan_access(layout, shared.layout, min(UNIT, shared.offset_alignment))
    except InvalidValueError:
        return None
    return plan if plan.width * size == unit else None


def _store_words(
    ctx: RuleContext, window: MemoryReference, shared: MemoryReference, plan: AccessPlan
) -> None:
    """Stores rows that begin anywhere by consecutive words, shifted in registers, and single
    elements at their ends; or by consecutive elements."""
    buffer = window.buffer
    assert buffer is not None and window.window is not None
    starts, window = window.window, _with_pointer(ctx, window)
    width, size = shared.shape[-1], shared.element_bits // 8
    pitch, unit = buffer.shape[-1] * size, _unit(window, shared)
    units, kind = width * size // unit, ir.IntegerType.get_signless(8 * unit)
    step, number = LANES * WARPS // units, _lane(ctx)
    own_row, own_place = ops.divide_unsigned(number, units), ops.remainder_unsigned(number, units)
    column = start_value(starts[-1])
    left = ops.arith.subi(ops.i32_constant(buffer.shape[-1]), column)
    end = ops.multiply(ops.arith.minsi(left, ops.i32_constant(width)), size)
    chosen = RegisterArray.splat(own_row, np.dtype(np.int32))
    address = llvm.ptrtoint(ops.i64(), scalar_address(index_reference(window, [chosen, 0])))
    byte = ops.multiply(own_place, unit)
    if unit > size:
        # Bytes from a word to where rows begin. Word 0 begins as many before.
        behind = ops.bitwise_and(ops.cast_integer(address, ops.i32()), WORD - 1)
        shift = ops.arith.subi(ops.i32_constant(8 * WORD), ops.multiply(behind, 8))
        byte = ops.arith.subi(byte, behind)
    address = ops.add(address, ops.cast_integer(byte, ops.i64()))
    there = ops.arith.andi(
        ops.compare("sge", byte, 0),
        ops.arith.cmpi(ops.arith.CmpIPredicate.sle, ops.add(byte, unit), end),
    )
    there = ops.arith.andi(there, ops.compare("ult", column, buffer.shape[-1]))
    for start, count in zip(starts[:-2], buffer.shape[:-2], strict=True):
        there = ops.arith.andi(there, ops.compare("ult", start_value(start), count))
    row = ops.add(start_value(starts[-2]), own_row)
    row = ops.arith.select(there, row, ops.i32_constant(_NO_ROW))
    extent = min(buffer.shape[-2], _NO_ROW)
    read = access_addresses(ctx.launch, shared, plan)
    letter = "h" if unit == 2 else "r"
    for first in range(0, len(plan.accesses), _TOGETHER):
        accesses = plan.accesses[first : first + _TOGETHER]
        values = [ops.load(kind, read(access), alignment=unit) for access in accesses]
        if unit > size:
            values = [_behind_the_one_before(value, shift) for value in values]
        for access, value in zip(accesses, values, strict=True):
            below = access.parts[0][0] * step
            at, offset = address, below * pitch
            if offset >= _FARTHEST:
                at, offset = ops.add(address, offset), 0
            ops.inline_assembly(
                f"{{ .reg .pred p; .reg .b32 r; add.s32 r, $0, {below}; "
                f"setp.lt.u32 p, r, {extent}; @p st.global.b{8 * unit} [$1+{offset}], $2; }}",
                f"r,l,{letter},~{{memory}}",
                row,
                at,
                value,
            )
    if unit > size:
        _store_ends(ctx, window, shared, end)


def _behind_the_one_before(word: ir.Value, shift: ir.Value) -> ir.Value:
    """The word that begins so many bits behind that of the lane before."""
    lanes = [ops.i32_constant(number) for number in (-1, 1, 0)]
    before = ops.intrinsic(
        ops.i32(), "llvm.nvvm.shfl.sync.up.i32", lanes[0], word, lanes[1], lanes[2]
    )
    shifted: ir.Value = ops.inline_assembly(
        "shf.r.clamp.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        before,
        word,
        shift,
        results=[ops.i32()],
        side_effects=False,
    )
    return shifted


def _store_ends(
    ctx: RuleContext, window: MemoryReference, shared: MemoryReference, end: ir.Value
) -> None:
    """Stores elements of rows before the first whole word and behind the last one.

    Args:
      end: bytes of a row.
    """
    size = shared.element_bits // 8
    kind = ir.IntegerType.get_signless(shared.element_bits)
    at_once = {1: 4, 2: 1}[size]

    def body(index: list[ir.Value]) -> None:
        row, which, place = index
        zero = ops.i32_constant(0)
        chosen = RegisterArray.splat(row, np.dtype(np.int32))
        address = scalar_address(index_reference(window, [chosen, 0]))
        low = ops.cast_integer(llvm.ptrtoint(ops.i64(), address), ops.i32())
        behind = ops.bitwise_and(low, WORD - 1)
        tail = ops.arith.subi(ops.bitwise_and(ops.add(end, behind), -WORD), behind)
        head = ops.compare("eq", which, 0)
        first = ops.arith.select(head, zero, tail)
        last = ops.arith.subi(ops.i32_constant(WORD), behind)
        last = ops.arith.select(ops.compare("ne", behind, 0), last, zero)
        last = ops.arith.select(head, ops.arith.minsi(last, end), end)
        byte = ops.add(first, ops.multiply(place, size))
        there = ops.arith.andi(
            ops.compare("sge", first, 0), ops.arith.cmpi(ops.arith.CmpIPredicate.slt, byte, last)
        )
        there = ops.arith.andi(there, _inside(window, [row, zero]))
        with ops.when(there):
            element = RegisterArray.splat(ops.divide_unsigned(byte, size), np.dtype(np.int32))
            source = scalar_address(index_reference(shared, [chosen, element]))
            value = ops.load(kind, source, alignment=size)
            ops.store(value, ops.byte_pointer(address, byte), alignment=size)

    _over(ctx, (shared.shape[0], 2, at_once), body)


def _with_pointer(ctx: RuleContext, window: MemoryReference) -> MemoryReference:
    if window.peer is not None:
        return window
    assert window.buffer is not None
    return dataclasses.replace(window, pointer=ctx.launch.array_pointer(window.buffer))


def _lanes(ctx: RuleContext) -> int:
    """Of the thread that copies."""
    return LANES if ctx.in_warp else LANES * WARPS


def _lane(ctx: RuleContext) -> ir.Value:
    """The number of the calling lane in it."""
    lane = ctx.launch.lane_id
    return lane if ctx.in_warp else ops.add(lane, ops.multiply(ctx.launch.warp_id, LANES))


def _over(ctx: RuleContext, shape: Sequence[int], body: Callable[[list[ir.Value]], None]) -> None:
    """Calls ``body(index)`` in a loop over the places that the calling lane is for."""
    lane, lanes = _lane(ctx), _lanes(ctx)
    count = math.prod(shape)

    def step_body(step: ir.Value, _: list[ir.Value]) -> Sequence[ir.Value]:
        number = ops.add(ops.multiply(step, lanes), lane)
        with ops.when(ops.compare("ult", number, count)):
            index, rest = [], number
            for extent in reversed(shape):
                index.append(ops.remainder_unsigned(rest, extent))
                rest = ops.divide_unsigned(rest, extent)
            index.reverse()
            body(index)
        return []

    steps = ops.i32_constant(-(-count // lanes))
    ops.for_loop(ops.i32_constant(0), steps, [], step_body)


def _each(
    ctx: RuleContext,
    window: MemoryReference,
    shared: MemoryReference,
    move: Callable[[MemoryReference, MemoryReference, ir.Value], None],
) -> None:
    """Calls ``move(element of the window, element of shared memory, whether it is inside)`` in a
    loop over the elements that the calling lane is for."""
    window = _with_pointer(ctx, window)

    def body(index: list[ir.Value]) -> None:
        chosen = [RegisterArray.splat(one, np.dtype(np.int32)) for one in index]
        inside = _inside(window, index)
        move(index_reference(window, chosen), index_reference(shared, chosen), inside)

    _over(ctx, shared.shape, body)


def _inside(window: MemoryReference, index: Sequence[ir.Value]) -> ir.Value:
    """Whether an element of a window is one of the array."""
    assert window.window is not None and window.buffer is not None
    inside = ops.constant(1, ops.i1())
    own = iter(index)
    for start, extent in zip(window.window, window.buffer.shape, strict=True):
        place = start_value(start)
        if not start.squeezed:
            place = ops.add(place, next(own))
        inside = ops.arith.andi(inside, ops.compare("ult", place, min(extent, 2**31 - 1)))
    return inside
