"""Moving arrays between registers and memory, by the access plans of the layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import LANES, WARPS, Layout, Owner, RegisterLayout, SplatLayout, even
from pallasite.plugin.lowering import LaunchContext, RegisterArray, gather
from pallasite_std.memory.access import Access, AccessPlan, Tail
from pallasite_std.memory.matrix_access import MatrixPlan, TransferPlan, plan_transfer
from pallasite_std.memory.matrix_transfers import (
    LOAD,
    STORE,
    can_move_matrices,
    load_matrices,
    store_matrices,
)
from pallasite_std.memory.padding import (
    consecutive_threads,
    guarded_groups,
    holds_element,
    leading_threads,
    load_where,
    where_elements,
)
from pallasite_std.memory.pieces import from_pieces, piece_of, piece_type
from pallasite_std.memory.reference_types import MemoryReference, default_layout

type LoadVector = Callable[..., ir.Value]
"""``load(type, pointer, alignment=bytes)`` returns a vector or scalar of elements in memory."""

type StoreVector = Callable[..., None]
"""``store(value, pointer, alignment=bytes)`` stores one."""


def dense_layout(shape: Sequence[int], vector_limit: int) -> RegisterLayout:
    """The layout that a load chooses for an array of this shape that lies densely in memory."""
    size = math.prod(shape)
    width = max(n for n in (128, 64, 32, 16, 8, 4, 2, 1) if n <= vector_limit and size % n == 0)
    while width > 1 and size // width % (LANES * WARPS):
        width //= 2
    return even(tuple(shape), width, vector_limit)


def thread_offset(launch: LaunchContext, plan: AccessPlan) -> ir.Value:
    """The element offset that depends on the thread, computed once for each plan.

    It has 32 bits if all offsets do, else 64.
    """
    largest = sum((term.modulus - 1) * term.stride for term in plan.thread_terms)
    kind = ops.i32() if largest < 2**31 else ops.i64()
    key = f"thread_offset.{plan.thread_terms}"

    def build() -> ir.Value:
        total: ir.Value | None = None
        each = [(t.owner, t.divisor, t.modulus, t.stride) for t in plan.thread_terms]
        if any(access.guards for access in plan.everything) and kind == ops.i32():
            total = consecutive_threads(launch, each)
            if total is not None:
                return total
            total, each = leading_threads(launch, each)
        lane, warp = launch.lane_id, launch.warp_id
        for owner, divisor, modulus, stride in each:
            index = lane if owner is Owner.LANE else warp
            limit = LANES if owner is Owner.LANE else WARPS
            value = ops.divide_unsigned(index, divisor)
            if divisor * modulus < limit or limit % (divisor * modulus):
                value = ops.remainder_unsigned(value, modulus)
            value = ops.multiply(ops.cast_integer(value, kind), stride)
            total = value if total is None else ops.add(total, value)
        return ops.i32_constant(0) if total is None else total

    return launch.emit_once(key, build)


def _swizzle(address: ir.Value, swizzle: int) -> ir.Value:
    mask = swizzle // 16 - 1
    row = ops.bitwise_and(ops.divide_unsigned(address, 128), mask)
    return ops.bitwise_xor(address, ops.multiply(row, 16))


def access_addresses(
    launch: LaunchContext,
    reference: MemoryReference,
    plan: AccessPlan,
    condition: ir.Value | None = None,
) -> Callable[[Access], ir.Value]:
    """A function that emits the address (a pointer) of an access of the calling thread; where a
    condition does not hold, of an access of the first thread."""
    element = types.memory_type(reference.dtype)
    thread = thread_offset(launch, plan)
    bits = reference.element_bits
    # In a kernel of one block, which most of the time waits for memory, code is what matters.
    plain = plan.swizzle == 16 and bits >= 8 and launch.geometry.blocks == 1
    plain = plain and reference.dynamic_offset() is None
    if condition is not None and not plain:
        thread = ops.arith.select(condition, thread, ops.constant(0, thread.type))
    if plan.swizzle == 16:
        offset = ops.cast_integer(thread, reference.index_type, signed=False)
        dynamic = reference.dynamic_offset()
        if dynamic is not None:
            offset = ops.add(offset, dynamic)
        if bits < 8:
            base = ops.byte_pointer(reference.pointer, reference.byte_offset(offset))
            start = reference.byte_offset(reference.offset)
            return lambda access: ops.byte_pointer(base, start + access.offset * bits // 8)
        vectors = [term.stride for term in plan.thread_terms if term.owner is Owner.LANE]
        if plain and vectors in ([2], [4], [8]) and any(one.guards for one in plan.everything):
            # As bytes, of which there is a multiple anyway: in each branch, LLVM would multiply
            # elements again.
            base = ops.byte_pointer(reference.pointer, reference.byte_offset(offset))
        else:
            base = ops.element_pointer(reference.pointer, offset, element)
        if condition is not None and plain:
            base = ops.arith.select(condition, base, reference.pointer)
        return lambda access: ops.element_pointer(base, reference.offset + access.offset, element)
    atom = reference.layout.atom_bytes
    if reference.offset_alignment % atom == 0 and plan.swizzle_separable:
        address = reference.byte_offset(thread)
        swizzled = _swizzle(address, plan.swizzle) if not isinstance(address, int) else address
        start = reference.byte_offset(reference.element_offset())
        base = ops.byte_pointer(reference.pointer, start)
        # Here and not where they are used, which may be the branch of a few threads.
        columns = {
            xor: ops.byte_pointer(base, ops.bitwise_xor(swizzled, xor))
            for xor in dict.fromkeys(access.swizzle_xor for access in plan.everything)
        }

        def emit(access: Access) -> ir.Value:
            return ops.byte_pointer(columns[access.swizzle_xor], access.swizzle_add)

        return emit
    start = reference.byte_offset(reference.element_offset())
    moved = ops.add(reference.byte_offset(thread), start)

    def emit_whole(access: Access) -> ir.Value:
        address = ops.add(moved, access.offset * bits // 8)
        return ops.byte_pointer(reference.pointer, _swizzle(address, plan.swizzle))

    return emit_whole


def check_window(reference: MemoryReference) -> None:
    """A plain access must not leave the array, as far as that is known."""
    if reference.window is None or reference.buffer is None:
        return
    for dim, (start, extent) in enumerate(
        zip(reference.window, reference.buffer.shape, strict=True)
    ):
        outside = start.size > extent if start.dynamic else start.static + start.size > extent
        if outside:
            raise InvalidValueError(
                f"the access leaves dimension {dim} of the array, which has {extent} elements",
                got=f"{start.size} elements" + ("" if start.dynamic else f" from {start.static}"),
                expected="a window inside the array",
                hint="copy_gmem_to_smem fills what lies outside with zeros",
            )


def load_array(
    launch: LaunchContext,
    reference: MemoryReference,
    layout: Layout | None = None,
    vector_limit: int | None = None,
    *,
    load: LoadVector = ops.load,
) -> RegisterArray:
    """Loads the elements that a reference views into registers.

    Args:
      launch: the kernel's launch context.
      reference: in global memory, or the shared memory of a block of the cluster.
      layout: the register layout; by default a strided one with the widest vectors.
      vector_limit: elements per access, at most, where the layout is not given.
      load: emits the load of a vector, or of a scalar, of elements as they are in memory.

    Raises:
      InvalidValueError: the layout and the memory do not fit together.
    """
    check_window(reference)
    reference = remote_pointer(reference)
    any_layout = layout is None or isinstance(layout, SplatLayout)
    if reference.shape == () or (any_layout and reference.layout.size == 1):
        value = _load_scalar(reference, load)
        return RegisterArray.splat(value, reference.dtype, reference.shape)
    if isinstance(layout, SplatLayout):
        raise InvalidValueError(
            "a load into a splat", got=f"shape {list(reference.shape)}", expected="another layout"
        )
    if layout is None:
        layout = default_layout(reference, vector_limit)
    assert isinstance(layout, RegisterLayout)
    plan = _plan(launch, reference, layout, LOAD)
    memory = types.memory_type(reference.dtype)
    if isinstance(plan, MatrixPlan):
        address_of = access_addresses(launch, reference, plan.rows)
        loaded, elements = load_matrices(plan, address_of, memory)
    else:
        loaded, elements = _load_vectors(launch, reference, layout, plan, memory, load)
    sources = [
        [elements[register, element] for element in range(layout.vector_length)]
        for register in range(layout.registers)
    ]
    registers = [from_memory(value, reference.dtype) for value in gather(loaded, sources)]
    return RegisterArray(tuple(registers), layout, reference.dtype)


def _plan(
    launch: LaunchContext, reference: MemoryReference, layout: RegisterLayout, instruction: str
) -> TransferPlan:
    """The plan of a transfer, in which ``instruction`` could move matrices."""
    matrices = can_move_matrices(launch.target, reference, instruction)
    alignment = min(16, reference.offset_alignment)
    return plan_transfer(layout, reference.layout, alignment, matrices=matrices)


def _load_vectors(
    launch: LaunchContext,
    reference: MemoryReference,
    layout: RegisterLayout,
    plan: AccessPlan,
    element: ir.Type,
    load_vector: LoadVector,
) -> tuple[list[ir.Value], dict[tuple[int, int], tuple[int, int]]]:
    """Emits the loads of an array; returns what :func:`load_matrices` does.

    Threads whose place is padding load what the first thread does. The address depends on the
    condition instead of the control flow, and no register has to be filled otherwise.
    """
    vector = ops.vector_type(element, plan.width)
    places: dict[tuple[int, int], tuple[int, int]] = {}
    loaded: list[ir.Value] = []

    def load(accesses: Sequence[Access], condition: ir.Value | None = None) -> list[ir.Value]:
        address_of = access_addresses(launch, reference, plan, condition)
        return [
            load_vector(
                ops.vector_type(element, len(access.parts)),
                address_of(access),
                alignment=access.bytes(plan),
            )
            for access in accesses
        ]

    for guards, accesses in guarded_groups(plan.accesses).items():
        for number, access in enumerate(accesses, start=len(loaded)):
            for position, part in enumerate(access.parts):
                places[part] = (number, position)
        loaded += load(accesses, holds_element(launch, layout, guards))
    for tail in plan.tail:
        if tail.parts[0] not in places:  # No thread loads a whole vector.
            for position, part in enumerate(tail.parts):
                places[part] = (len(loaded), position)
            loaded.append(ops.constant(0, vector))
        number = places[tail.parts[0]][0]
        whole = loaded[number]

        def complete(tail: Tail = tail, whole: ir.Value = whole) -> list[ir.Value]:
            address_of = access_addresses(launch, reference, plan)
            pieces = []
            for access in tail.accesses:
                kind = piece_type(access.bytes(plan))
                piece = load_vector(kind, address_of(access), alignment=access.bytes(plan))
                pieces.append((piece, access.bytes(plan)))
            return [from_pieces(pieces, whole)]

        condition = holds_element(launch, layout, tail.accesses[0].guards)
        (loaded[number],) = load_where(condition, [vector], complete, otherwise=[whole])
    if layout.is_padded:
        # Places that hold an element in no thread.
        nothing = (len(loaded), 0)
        loaded.append(ops.constant(0, vector))
        for register, position in np.ndindex(layout.registers, layout.vector_length):
            places.setdefault((register, position), nothing)
    return loaded, places


def store_array(
    launch: LaunchContext,
    reference: MemoryReference,
    array: RegisterArray,
    *,
    store: StoreVector = ops.store,
    places: Collection[tuple[int, int]] | None = None,
) -> None:
    """Stores an array to the memory that a reference views.

    Where several threads hold an element they store equal values.

    Args:
      launch: the kernel's launch context.
      reference: in global memory, or the shared memory of a block of the cluster.
      array: of the reference's shape and dtype.
      store: emits the store of a vector, or of a scalar, of elements as they are in memory.
      places: registers, and places in these, that have to be stored, if not all.

    Raises:
      InvalidTypeError: another dtype.
      InvalidValueError: another shape, or a layout that does not fit the memory.
    """
    if array.dtype != reference.dtype:
        raise InvalidTypeError(
            "the value and the reference differ in dtype",
            got=str(array.dtype),
            expected=str(reference.dtype),
        )
    if array.shape != reference.shape:
        raise InvalidValueError(
            "the value and the reference differ in shape",
            got=str(list(array.shape)),
            expected=str(list(reference.shape)),
        )
    check_window(reference)
    reference = remote_pointer(reference)
    if reference.layout.size == 1:
        _store_scalar(reference, array.scalar, store)
        return
    if array.is_splat:
        array = array.materialize(default_layout(reference))
    layout = array.layout
    assert isinstance(layout, RegisterLayout)
    plan = _plan(launch, reference, layout, STORE)
    values = [to_memory(register, reference.dtype) for register in array.registers]
    if isinstance(plan, MatrixPlan):
        store_matrices(plan, access_addresses(launch, reference, plan.rows), values)
        return
    address_of = access_addresses(launch, reference, plan)
    only_block = launch.geometry.blocks * launch.geometry.threads == 1
    everything = [
        access
        for access in plan.everything
        if places is None or any(part in places for part in access.parts)
    ]
    for guards, accesses in guarded_groups(everything).items():
        accesses = _together(reference, plan, accesses)
        with where_elements(launch, layout, guards):
            for access in accesses:
                value = piece_of(values, access.parts, plan.element_bits, bool(guards))
                store(value, address_of(access), alignment=access.bytes(plan))
        if guards and only_block and not reference.space.is_shared:
            # Else LLVM repeats what follows in either branch, up to where it branches like that
            # again. This is convergent, and nothing.
            ops.inline_assembly("", "")


def _together(
    reference: MemoryReference, plan: AccessPlan, accesses: Sequence[Access]
) -> list[Access]:
    """Accesses with the same guards, where memory does not begin at a multiple of theirs: those to
    neighbours, of one register, that fill a larger one at a multiple of its size are made at once.
    """
    bits = reference.element_bits
    known = math.gcd(reference.alignment, *(one.divisor * bits // 8 for one in reference.dynamic))
    most = math.gcd(known, 16, *(term.stride * bits // 8 for term in plan.thread_terms))
    if bits < 8 or plan.swizzle != 16 or most <= max(plan.width_bytes, reference.offset_alignment):
        return list(accesses)
    rest, found = sorted(accesses, key=lambda access: access.offset), list[Access]()
    while rest:
        first = (reference.offset + rest[0].offset) * bits // 8
        size = math.gcd(first, most)
        while True:
            parts: tuple[tuple[int, int], ...] = ()
            count = 0
            for one in rest:
                follows = one.offset == rest[0].offset + len(parts)
                same = one.parts[0][0] == rest[0].parts[0][0]
                if not (follows and same) or len(parts) * bits // 8 >= size:
                    break
                parts, count = parts + one.parts, count + 1
            if count == 1 or len(parts) * bits // 8 == size:
                break
            size //= 2
        found.append(dataclasses.replace(rest[0], parts=parts))
        rest = rest[count:]
    return found


def remote_pointer(reference: MemoryReference) -> MemoryReference:
    """A reference to another block's shared memory with a generic pointer to that very memory.

    PTX ISA 9.7.9.23 (``mapa``).
    """
    if reference.remote is None:
        return reference
    pointer = ops.inline_assembly(
        "mapa.u64 $0, $1, $2;",
        "=l,l,r",
        ops.generic_pointer(reference.pointer),
        reference.remote,
        results=[types.pointer_type(0)],
        side_effects=False,
    )
    return dataclasses.replace(reference, pointer=pointer, remote=None)


def _load_scalar(reference: MemoryReference, load: LoadVector) -> ir.Value:
    if reference.element_bits < 8:
        return _load_part_of_byte(reference)
    pointer = scalar_address(reference)
    size = max(1, reference.element_bits // 8)
    constant = {"constant": True} if reference.constant else {}
    value = load(types.memory_type(reference.dtype), pointer, alignment=size, **constant)
    return from_memory(value, reference.dtype)


def _load_part_of_byte(reference: MemoryReference) -> ir.Value:
    bits = reference.element_bits
    offset = reference.element_offset()
    if isinstance(offset, int):
        offset = ops.constant(offset, reference.index_type)
    address = ops.divide_unsigned(offset, 8 // bits)
    if reference.layout.swizzle != 16 and reference.space.is_shared:
        address = _swizzle(address, reference.layout.swizzle)
    byte = ops.load(ops.i8(), ops.byte_pointer(reference.pointer, address), alignment=1)
    place = ops.multiply(ops.remainder_unsigned(offset, 8 // bits), bits)
    shifted = ops.arith.shrui(byte, ops.cast_integer(place, ops.i8()))
    return ops.cast_integer(shifted, types.memory_type(reference.dtype))


def _store_scalar(reference: MemoryReference, value: ir.Value, store: StoreVector) -> None:
    pointer = scalar_address(reference)
    size = max(1, reference.element_bits // 8)
    store(to_memory(value, reference.dtype), pointer, alignment=size)


def scalar_address(reference: MemoryReference) -> ir.Value:
    """A pointer to the one element that a reference views, swizzle included."""
    if reference.element_bits < 8:
        raise InvalidTypeError(
            f"a single element of {reference.dtype} is written or updated",
            expected="elements of at least a byte",
            hint="write whole arrays, whose elements share bytes",
        )
    if reference.layout.swizzle == 16 or not reference.space.is_shared:
        return reference.address()
    offset = reference.byte_offset(reference.element_offset())
    if isinstance(offset, int):
        return ops.byte_pointer(reference.pointer, reference.layout.swizzle_bytes(offset))
    return ops.byte_pointer(reference.pointer, _swizzle(offset, reference.layout.swizzle))


def from_memory(value: ir.Value, dtype: np.dtype[Any]) -> ir.Value:
    """A value as registers hold it: booleans are bytes in memory and bits in registers."""
    if not types.is_bool(dtype):
        return value
    return ops.arith.cmpi(ops.arith.CmpIPredicate.ne, value, ops.constant(0, value.type))


def to_memory(value: ir.Value, dtype: np.dtype[Any]) -> ir.Value:
    """The inverse of :func:`from_memory`."""
    if not types.is_bool(dtype):
        return value
    length = ops.vector_length(value)
    return ops.arith.extui(ops.vector_type(ops.i8(), length), value)
