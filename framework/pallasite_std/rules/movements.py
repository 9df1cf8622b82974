"""Arrays that are copied within global memory, in another order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.inference import AbstractValue, InferenceContext
from pallasite.plugin.ir import ops
from pallasite.plugin.layouts import MemoryLayout, RegisterLayout, row_major
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value, resolve
from pallasite_std.memory.access import Access, AccessPlan, plan_access
from pallasite_std.memory.accesses import orders_stores
from pallasite_std.memory.movements import (
    COPIED,
    ROUND,
    UNROLLED,
    Direct,
    Piece,
    copied,
    direct,
    elements,
    portions,
    room_of_copy,
)
from pallasite_std.memory.ordering import Elements, each_step, lane_of_thread, store_in_order
from pallasite_std.memory.padding import where_elements
from pallasite_std.memory.pieces import piece_of
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.scratch import scratch_arrays
from pallasite_std.memory.transfers import access_addresses, load_array
from pallasite_std.primitives.movements import Movement, move_elements_p

rules = RuleSet()


@rules.inference(move_elements_p)
def _inference(ctx: InferenceContext, *references: AbstractValue, **params: Any) -> None:
    """Arrays in global memory lie there as they are."""


@rules.lowering(move_elements_p, Semantics.LANE)
def _move(
    ctx: RuleContext, result: Value, *sources: Value, movement: Movement, bits: int, room: int
) -> Sequence[Value]:
    memories = [resolve(ctx, one) for one in (result, *sources)]
    target, *arrays = (_of_units(memory, bits) for memory in memories)
    plan = direct(movement, bits)
    ordered = orders_stores(ctx, target)
    if plan is not None:
        _by_registers(ctx, plan, target, arrays)
    else:
        _by_shared_memory(ctx, movement, target, arrays, room)
    if ordered:
        ctx.synchronize()
    return ()


def _of_units(memory: MemoryReference, bits: int) -> MemoryReference:
    """The whole of an array as integers of so many bits, and what is left behind the last one."""
    count = memory.layout.size * memory.element_bits // bits
    dtype = np.dtype(f"uint{bits}")
    return dataclasses.replace(memory.with_layout(row_major((count,), bits)), dtype=dtype)


def _by_registers(
    ctx: RuleContext,
    plan: Direct,
    target: MemoryReference,
    arrays: Sequence[MemoryReference],
) -> None:
    loaded = []
    for piece, layout in plan.pieces:
        source = arrays[piece.source].with_layout(piece.memory)
        source = dataclasses.replace(source, offset=piece.start)
        loaded.append(_in_order(piece, load_array(ctx.launch, source, layout)))
    if target.may_be_read:  # Other lanes may have to load first what is stored here.
        ctx.synchronize()
    for (piece, layout), array in zip(plan.pieces, loaded, strict=True):
        _store_copies(ctx, target, piece, piece.stored(layout), array)


def _in_order(piece: Piece, array: RegisterArray) -> RegisterArray:
    """The elements of the result, of which threads have whole rows if the order changes."""
    assert isinstance(array.layout, RegisterLayout)
    if piece.order is None:
        return array
    line = array.shape[1]
    firsts = range(0, array.layout.registers, line)
    registers = [array.registers[first + place] for first in firsts for place in piece.order]
    return RegisterArray(tuple(registers), piece.stored(array.layout), array.dtype)


def _store_copies(
    ctx: RuleContext,
    target: MemoryReference,
    piece: Piece,
    layout: RegisterLayout,
    array: RegisterArray,
) -> None:
    """Stores an array to several places, in as few branches as to one."""
    groups: dict[Any, list[Callable[[], None]]] = {(): []}
    store: Callable[[], None]
    for start in piece.starts:
        place = dataclasses.replace(target.with_layout(piece.target), offset=start)
        plan = plan_access(layout, piece.target, min(16, place.offset_alignment))
        address_of = access_addresses(ctx.launch, place, plan)
        for access in plan.everything:
            store = functools.partial(_store, array, plan, access, address_of)
            groups.setdefault(access.guards, []).append(store)
    for guards, stores in groups.items():
        with where_elements(ctx.launch, layout, guards):
            for store in stores:
                store()


def _store(
    array: RegisterArray,
    plan: AccessPlan,
    access: Access,
    address_of: Callable[[Access], ir.Value],
) -> None:
    value = piece_of(array.registers, access.parts, plan.element_bits)
    ops.store(value, address_of(access), alignment=access.bytes(plan))


def _by_shared_memory(
    ctx: RuleContext,
    movement: Movement,
    target: MemoryReference,
    arrays: Sequence[MemoryReference],
    room: int,
) -> None:
    sizes = tuple(one.layout.size for one in arrays)
    bits = target.element_bits
    parts = portions(movement, sizes, bits, room)
    assert parts, "an array that shared memory has no room for"
    for one in parts:
        memory = MemoryLayout(tuple((extent,) for extent in one.extents), element_bits=bits)
        part = dataclasses.replace(target.with_layout(memory), offset=one.start)
        _portion(ctx, elements(one.movement, sizes, target.dtype), part, arrays)


def _portion(
    ctx: RuleContext, found: Elements, target: MemoryReference, arrays: Sequence[MemoryReference]
) -> None:
    windows = copied(found, [one.layout.size for one in arrays], target.element_bits)
    room = list(map(room_of_copy, windows))
    byte = np.dtype(np.uint8)
    with scratch_arrays(ctx, *[((one,), byte) for one in room]) as memories:
        for memory, array, window in zip(memories, arrays, windows, strict=True):
            _copy(ctx, memory, array, *window)
        ops.inline_assembly("cp.async.wait_all;", "~{memory}")
        ctx.synchronize()
        starts = [sum(room[:n]) - begin for n, (begin, _) in enumerate(windows)]
        store_in_order(ctx, found, memories[0].pointer, starts, target)


def _copy(
    ctx: RuleContext, memory: MemoryReference, array: MemoryReference, begin: int, end: int
) -> None:
    """Starts copies of the bytes of an array to shared memory, by all lanes (PTX ISA 9.7.9.25.3.1,
    ``cp.async``); zeros follow behind them."""
    first = ops.multiply(lane_of_thread(ctx), COPIED)
    source = ops.byte_pointer(array.pointer, begin)
    size = end - begin

    def copy(place: Any, known: int, whole: bool) -> None:
        operands = [
            ops.shared_address(ops.byte_pointer(memory.pointer, place)),
            ops.byte_pointer(source, place),
        ]
        text, constraints = f"[$0+{known}], [$1+{known}], {COPIED}", "r,l"
        if not whole:
            left = ops.arith.subi(ops.i32_constant(size - known), place)
            if size % COPIED == 0:
                there = ops.compare("sgt", left, 0)
                left = ops.arith.select(there, ops.i32_constant(COPIED), ops.i32_constant(0))
            left = ops.arith.minsi(left, ops.i32_constant(COPIED))
            if size <= UNROLLED * ROUND:
                left = ops.arith.maxsi(left, ops.i32_constant(0))
            operands.append(left)
            text, constraints = text + ", $2", constraints + ",r"
        ops.inline_assembly(
            f"cp.async.cg.shared.global {text};", constraints + ",~{memory}", *operands
        )

    if size > UNROLLED * ROUND:
        each_step(first, size, ROUND, lambda place: copy(place, 0, size % COPIED == 0))
        return
    for known in range(0, size, ROUND):
        copy(first, known, known + ROUND <= size)
