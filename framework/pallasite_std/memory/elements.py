"""Operations that must happen exactly once for every element of an array.

A register layout may keep an element in several lanes or warps. Loads and stores may repeat what
they do, atomic operations and printing may not: only the first holder of an element acts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxlib.mlir import ir

from pallasite.plugin.ir import ops
from pallasite.plugin.layouts import LANES, WARPS, Owner, RegisterLayout
from pallasite.plugin.lowering import LaunchContext
from pallasite_std.memory.padding import thread_part, where_elements


def _bit(mask: int, index: ir.Value) -> ir.Value:
    if mask & (mask + 1) == 0:
        return ops.compare("ult", index, mask.bit_length())
    shifted = ops.arith.shrui(ops.i32_constant(mask), index)
    return ops.compare("ne", ops.bitwise_and(shifted, 1), 0)


def first_holder(launch: LaunchContext, layout: RegisterLayout) -> ir.Value | None:
    """True (i1) in the threads that are the first to hold their elements; None if all are."""
    lanes, warps = layout.lane_mask, layout.warp_mask
    conditions = []
    if lanes != (1 << LANES) - 1:
        lane = launch.lane_id
        conditions.append(launch.emit_once(f"first_lane.{lanes}", lambda: _bit(lanes, lane)))
    if warps != (1 << WARPS) - 1:
        warp = launch.warp_id
        conditions.append(launch.emit_once(f"first_warp.{warps}", lambda: _bit(warps, warp)))
    if not conditions:
        return None
    return conditions[0] if len(conditions) == 1 else ops.arith.andi(*conditions)


@contextlib.contextmanager
def once_per_element(launch: LaunchContext, layout: RegisterLayout) -> Iterator[None]:
    """Emits the following code for the first owners of elements only."""
    condition = first_holder(launch, layout)
    if condition is None:
        yield
        return
    with ops.when(condition):
        yield


def element_indices(
    launch: LaunchContext, layout: RegisterLayout, *, guarded: bool = True
) -> Iterator[tuple[int, int, list[ir.Value]]]:
    """Yields (register, vector element, index of the element along each dimension, i32) for all
    elements of the calling thread; what is emitted meanwhile runs where there is an element, if
    ``guarded``: else indices of padding are outside the shape."""
    threads = [thread_part(launch, layout, dim) for dim in range(len(layout.dims))]
    for register in range(layout.registers):
        for element in range(layout.vector_length):
            place = {Owner.REGISTER: register, Owner.VECTOR: element}
            parts = []
            for thread, dim in zip(threads, layout.weighted_dims, strict=True):
                known = sum(
                    digit.value(place[digit.owner]) * weight
                    for digit, weight in dim
                    if not digit.owner.is_thread
                )
                parts.append(ops.i32_constant(known) if thread is None else ops.add(thread, known))
            guards = layout.guards(register, element)
            if guards is not None:
                with where_elements(launch, layout, guards if guarded else ()):
                    indices = unravel(parts[0], layout.shape) if layout.flat else parts
                    yield register, element, indices


def unravel(linear: ir.Value, shape: tuple[int, ...]) -> list[ir.Value]:
    """The index of an element by its number in the row-major flattened array (i32)."""
    indices = []
    for position, extent in enumerate(reversed(shape)):
        last = position == len(shape) - 1
        indices.append(linear if last else ops.remainder_unsigned(linear, extent))
        linear = ops.divide_unsigned(linear, extent)
    return indices[::-1]
