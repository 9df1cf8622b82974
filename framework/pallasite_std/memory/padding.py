"""Arrays with padding: which places of a register layout hold elements.

A layout whose digits go beyond an extent has places without an element. Their values are undefined,
and must not reach results: accesses of memory are predicated (:class:`Access.guards
<pallasite_std.memory.access.Access>`), and what combines elements of different places fills the
padding first.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import LANES, WARPS, Owner, RegisterLayout
from pallasite.plugin.lowering import LaunchContext, RegisterArray
from pallasite_std.memory.access import Access

_ALIKE = 4
"""Registers with the same padding, at least, that are filled by masks of their words."""

type Guards = tuple[tuple[int, ...], ...]
"""Pairs of a dimension and a limit, as :meth:`RegisterLayout.guards` returns them; or of a
dimension and the only value that its index may have, followed by True."""


def consecutive_threads(
    launch: LaunchContext, digits: Sequence[tuple[Owner, int, int, int]]
) -> ir.Value | None:
    """The number of the thread (i32), times its stride, if that is what lanes and warps add up to;
    else None.

    Args:
      launch: the kernel's launch context.
      digits: by owner, ``number // divisor % modulus * stride`` is added.
    """
    found = {owner: rest for owner, *rest in digits}
    lane, warp = found.get(Owner.LANE), found.get(Owner.WARP)
    if len(digits) != 2 or lane is None or warp is None:
        return None
    if lane[:2] != [1, LANES] or warp != [1, WARPS, LANES * lane[2]]:
        return None
    number = launch.thread_id
    if launch.geometry.threads > 1:
        number = ops.bitwise_and(number, LANES * WARPS - 1)
    return ops.multiply(number, lane[2])


def leading_threads(
    launch: LaunchContext, digits: Sequence[tuple[Owner, int, int, int]]
) -> tuple[ir.Value | None, list[tuple[Owner, int, int, int]]]:
    """What the warp and the higher bits of the lane add to an index (i32), where that is a multiple
    of a quotient of the thread's number, and the other digits; in a kernel of one block, of which
    code is what matters.

    Args:
      launch: the kernel's launch context.
      digits: as in :func:`consecutive_threads`.
    """
    found, rest = [], []
    warp = next((one for one in digits if one[0] is Owner.WARP), None)
    for one in digits:
        _, divisor, modulus, stride = one
        leads = one[0] is Owner.LANE and modulus > 1 and divisor * modulus == LANES
        if leads and warp is not None and warp[1:] == (1, WARPS, modulus * stride):
            found.append((divisor, stride))
        elif one[0] is Owner.LANE:
            rest.append(one)
    warps = sum(one[0] is Owner.WARP for one in digits)
    if len(found) != 1 or warps != 1 or launch.geometry.blocks * launch.geometry.threads > 1:
        return None, list(digits)
    ((divisor, stride),) = found
    return ops.multiply(ops.divide_unsigned(launch.thread_id, divisor), stride), rest


def thread_part(launch: LaunchContext, layout: RegisterLayout, dim: int) -> ir.Value | None:
    """What lane and warp add to the index along a dimension (i32); None if they add nothing."""
    digits = [(d, w) for d, w in layout.weighted_dims[dim] if d.owner.is_thread]
    if not digits:
        return None

    def build() -> ir.Value:
        total: ir.Value | None = None
        each = [(d.owner, d.stride, d.size, weight) for d, weight in digits]
        if layout.is_padded:
            total = consecutive_threads(launch, each)
            if total is not None:
                return total
            total, each = leading_threads(launch, each)
        lane, warp = launch.lane_id, launch.warp_id
        for owner, divisor, size, weight in each:
            index = lane if owner is Owner.LANE else warp
            limit = LANES if owner is Owner.LANE else WARPS
            value = ops.divide_unsigned(index, divisor)
            reach = divisor * size
            # Where nothing is padding, bounds that LLVM knows save more than this instruction.
            if reach < limit or limit % reach or not layout.is_padded:
                value = ops.remainder_unsigned(value, size)
            value = ops.multiply(value, weight)
            total = value if total is None else ops.add(total, value)
        assert total is not None
        return total

    return launch.emit_once(f"thread_part.{digits}.{layout.is_padded}", build)


def _unless(predicate: str, value: ir.Value, limit: int) -> ir.Value:
    """Where a comparison is false. LLVM would repeat it in each block that branches by it, and
    negate it where most threads go on."""
    outside = ops.inline_assembly(
        f"setp.{predicate}.u32 $0, $1, {limit};",
        "=b,r",
        value,
        results=[ops.i1()],
        side_effects=False,
    )
    return ops.bitwise_xor(outside, ops.i1_constant(True))


def holds_element(launch: LaunchContext, layout: RegisterLayout, guards: Guards) -> ir.Value | None:
    """True (i1) in the threads whose part of the index is below the limits; None if there are no
    limits."""
    condition: ir.Value | None = None
    for dim, limit, *exactly in guards:
        thread = thread_part(launch, layout, dim)
        if thread is None:  # All threads hold the last elements.
            continue
        predicate = "ne" if exactly else "ge"
        digits = [(d, w) for d, w in layout.weighted_dims[dim] if d.owner.is_thread]
        one = launch.emit_once(
            f"{predicate}.{limit}.{digits}", functools.partial(_unless, predicate, thread, limit)
        )
        condition = one if condition is None else ops.arith.andi(condition, one)
    return condition


@contextlib.contextmanager
def where_elements(launch: LaunchContext, layout: RegisterLayout, guards: Guards) -> Iterator[None]:
    """Emits the following code for the threads that hold an element."""
    condition = holds_element(launch, layout, guards)
    if condition is None:
        yield
        return
    with ops.when(condition):
        yield


def guarded_groups(accesses: Sequence[Access]) -> dict[Guards, list[Access]]:
    """Accesses by their guards: each group is one branch of the code."""
    groups: dict[Guards, list[Access]] = {}
    for access in accesses:
        groups.setdefault(access.guards, []).append(access)
    return groups


def load_where(
    condition: ir.Value | None,
    types: Sequence[ir.Type],
    load: Callable[[], Sequence[ir.Value]],
    otherwise: Sequence[ir.Value] | None = None,
) -> list[ir.Value]:
    """What ``load`` emits under a condition; elsewhere other values, or zeros."""
    if condition is None:
        return list(load())
    operation = scf.IfOp(condition, list(types), has_else=True)
    with ir.InsertionPoint(operation.then_block):
        scf.yield_(list(load()))
    with ir.InsertionPoint(operation.else_block):
        zeros = [ops.constant(0, type) for type in types] if otherwise is None else otherwise
        scf.yield_(list(zeros))
    return list(operation.results)


def _select(condition: ir.Value, one: ir.Value, other: ir.Value, bits: int) -> ir.Value:
    """One of two registers of so many bits; the hardware chooses 32 at a time."""
    if bits % 32 or bits // ops.vector_length(one) >= 32:
        return ops.arith.select(condition, one, other)
    # LLVM would turn a choice of words into one of each narrow element.
    words = [
        ops.bitcast(value, ir.VectorType.get((bits // 32,), ops.i32())) for value in (one, other)
    ]
    chosen = [
        ops.inline_assembly(
            "selp.b32 $0, $1, $2, $3;",
            "=r,r,r,b",
            *(ops.extract(value, place) for value in words),
            condition,
            results=[ops.i32()],
            side_effects=False,
        )
        for place in range(bits // 32)
    ]
    return ops.bitcast(ops.from_elements(chosen), one.type)


def _words(value: ir.Value) -> list[ir.Value]:
    """The words (i32) of a vector of narrow elements."""
    count = ops.vector_length(value) * ir.VectorType(value.type).element_type.width // 32
    words = ops.bitcast(value, ir.VectorType.get((count,), ops.i32()))
    return [ops.extract(words, place) for place in range(count)]


def _masks(
    launch: LaunchContext,
    layout: RegisterLayout,
    guards: Sequence[Guards | None],
    filler: ir.Value,
) -> tuple[list[ir.Value], list[ir.Value]]:
    """For each word of a register of narrow elements, the bits of those that there are, and those
    of what takes the place of the others."""
    words = _words(filler)
    each = len(guards) // len(words)
    kept, filled = [], []
    for number, word in enumerate(words):
        mask: ir.Value = ops.i32_constant(0)
        for place, guard in enumerate(guards[number * each : (number + 1) * each]):
            ones = ((1 << 32 // each) - 1) << place * (32 // each)
            ones -= (ones >> 31) << 32  # As a signed number.
            element: ir.Value = ops.i32_constant(0 if guard is None else ones)
            held = holds_element(launch, layout, guard) if guard else None
            if held is not None:
                element = ops.arith.select(held, element, ops.i32_constant(0))
            mask = ops.arith.ori(mask, element)
        kept.append(mask)
        filled.append(ops.bitwise_and(word, ops.bitwise_xor(mask, -1)))
    return kept, filled


def _masked(register: ir.Value, kept: Sequence[ir.Value], filled: Sequence[ir.Value]) -> ir.Value:
    words = [
        ops.arith.ori(ops.bitwise_and(word, mask), other)
        for word, mask, other in zip(_words(register), kept, filled, strict=True)
    ]
    return ops.bitcast(ops.from_elements(words), register.type)


def fill_padding(
    launch: LaunchContext,
    array: RegisterArray,
    value: ir.Value,
    axes: Sequence[int] | None = None,
) -> RegisterArray:
    """The array with a scalar in its padding, along all dimensions or some."""
    layout = array.layout
    if not isinstance(layout, RegisterLayout) or not layout.is_padded:
        return array
    filler = ops.broadcast(value, layout.vector_length)
    bits = 1 if types.is_bool(array.dtype) else types.bit_width(array.dtype)
    bits *= layout.vector_length
    masks: dict[Any, tuple[list[ir.Value], list[ir.Value]]] = {}
    limits = [
        tuple(layout.guards(number, e, axes) for e in range(layout.vector_length))
        for number in range(layout.registers)
    ]
    alike = Counter(limits)
    registers = []
    for register, guards in zip(array.registers, limits, strict=True):
        if all(guard is None for guard in guards):
            register = filler
        elif len(set(guards)) == 1:
            condition = holds_element(launch, layout, guards[0] or ())
            if condition is not None:
                register = _select(condition, register, filler, bits)
        elif alike[guards] >= _ALIKE and bits % 32 == 0 and bits // len(guards) in (8, 16):
            if guards not in masks:
                masks[guards] = _masks(launch, layout, guards, filler)
            register = _masked(register, *masks[guards])
        else:
            elements = []
            for position, guard in enumerate(guards):
                element = ops.extract(register, position)
                if guard is None:
                    element = value
                elif guard:
                    held = holds_element(launch, layout, guard)
                    element = ops.arith.select(held, element, value)
                elements.append(element)
            register = ops.from_elements(elements)
        registers.append(register)
    return RegisterArray(tuple(registers), layout, array.dtype)
