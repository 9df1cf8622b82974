"""Copies by plain loads and stores of all lanes, of arrays that no copy engine takes.

The engines want rows of global memory that are multiples of 16 bytes apart, and of as many bytes;
and what is longer than a box, in parts that begin at multiples of 128 bytes of shared memory. Where
an array's or a window's extents do not allow that, the lanes of the thread that issues a copy move
its elements one by one, in a loop, and are done when the copy has been issued; whoever waits for it
finds it complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin.ir import ops, types
from pallasite.plugin.lowering import RegisterArray, RuleContext
from pallasite_std.copies.tensor_copies import start_value
from pallasite_std.copies.tensor_map_types import MAXIMUM_BOX
from pallasite_std.memory.padding import load_where
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.references import index_reference
from pallasite_std.memory.transfers import scalar_address

UNIT = 16
"""Bytes of which rows and the distance between them have to be multiples for the engines."""


def has_odd_rows(shape: Sequence[int], window: Sequence[int], element_bits: int) -> bool:
    """Whether rows of a window of an array, or the distance between them, are not multiples of 16
    bytes.

    Args:
      shape: of the array.
      window: extents of the window in all of its dimensions.
      element_bits: size of an element.
    """
    rows = [*window[-1:], *(shape[-1:] if len(shape) > 1 else ())]
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
    kind = types.memory_type(shared.dtype)
    size = shared.element_bits // 8

    def move(target: MemoryReference, source: MemoryReference, inside: ir.Value) -> None:
        value = ops.load(kind, scalar_address(source), alignment=size)
        with ops.when(inside):
            ops.store(value, scalar_address(target), alignment=size)

    ctx.synchronize()
    _each(ctx, window, shared, move)


def _each(
    ctx: RuleContext,
    window: MemoryReference,
    shared: MemoryReference,
    move: Callable[[MemoryReference, MemoryReference, ir.Value], None],
) -> None:
    """Calls ``move(element of the window, element of shared memory, whether it is inside)`` in a
    loop over the elements that the calling lane is for."""
    buffer = window.buffer
    assert buffer is not None and window.window is not None
    if window.peer is None:
        window = dataclasses.replace(window, pointer=ctx.launch.array_pointer(buffer))
    lane = ctx.launch.lane_id
    if not ctx.in_warp:
        lane = ops.add(lane, ops.multiply(ctx.launch.warp_id, 32))
    lanes = 32 if ctx.in_warp else 128
    shape, count = shared.shape, shared.layout.size

    def body(step: ir.Value, _: list[ir.Value]) -> Sequence[ir.Value]:
        number = ops.add(ops.multiply(step, lanes), lane)
        with ops.when(ops.compare("ult", number, count)):
            index, rest = [], number
            for extent in reversed(shape):
                index.append(ops.remainder_unsigned(rest, extent))
                rest = ops.divide_unsigned(rest, extent)
            index.reverse()
            chosen = [RegisterArray.splat(one, np.dtype(np.int32)) for one in index]
            inside = _inside(window, index)
            move(index_reference(window, chosen), index_reference(shared, chosen), inside)
        return []

    steps = ops.i32_constant(-(-count // lanes))
    ops.for_loop(ops.i32_constant(0), steps, [], body)


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
