"""Moving arrays between any two places of an array by way of the kernel's scratch shared memory.

What register layouts cannot do by renaming registers, memory can: arrays are stored row by row, and
loaded through another view of the same memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    Extent,
    Layout,
    MemoryLayout,
    Owner,
    RegisterLayout,
    default_strided,
    even,
    padded,
    row_major,
)
from pallasite.plugin.lowering import RegisterArray, RuleContext, relayout
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.ordering import (
    Elements,
    copy_in_order,
    elements_of,
    load_in_order,
    moves_of,
    ordering_code,
)
from pallasite_std.memory.portions import PURPOSE, has_portions, in_portions
from pallasite_std.memory.portions import room_for as room_for
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.row_parts import Held, Operand, Part, bytes_of, operand, parts_of
from pallasite_std.memory.transfers import from_memory, load_array, store_array, to_memory

_EXCHANGE = 32
"""Instructions around an exchange through shared memory, about."""


@contextlib.contextmanager
def scratch_arrays(
    ctx: RuleContext, *arrays: tuple[Sequence[int], np.dtype[Any]]
) -> Iterator[list[MemoryReference]]:
    """Scratch memory for arrays of some shapes and dtypes, row-major. All lanes have finished with
    what it held before.

    Raises:
      InvalidValueError: they do not fit into shared memory.
      UnsupportedError: in a region that single warps run.
    """
    if ctx.in_warp:
        raise UnsupportedError(
            f"{ctx.primitive} of an array inside a warp-mapped region",
            hint="move it out of the region: there, threads have no shared scratch memory",
        )
    layouts = [row_major(tuple(shape), types.bit_width(dtype)) for shape, dtype in arrays]
    starts = [0]
    for layout in layouts:
        starts.append(starts[-1] + bytes_of(layout.shape, layout.element_bits))
    if starts[-1] > ctx.target.max_shared_memory:
        raise InvalidValueError(
            f"{ctx.primitive} moves arrays through shared memory, which they do not fit",
            got=", ".join(f"{np.dtype(dtype)}{list(shape)}" for shape, dtype in arrays)
            + f": {starts[-1]} bytes",
            expected=f"at most {ctx.target.max_shared_memory} bytes",
            hint="work on smaller blocks, or load the array in the layout that is needed:"
            " plgpu.load(ref, ..., layout=...)",
        )
    with ctx.scratch(starts[-1], PURPOSE) as (pointer, _):
        ctx.synchronize()
        yield [
            MemoryReference(
                pointer=ops.byte_pointer(pointer, start),
                layout=layout,
                dtype=np.dtype(dtype),
                space=MemorySpace.SMEM,
                alignment=16,
            )
            for start, layout, (_, dtype) in zip(starts, layouts, arrays, strict=False)
        ]


@contextlib.contextmanager
def scratch_array(
    ctx: RuleContext, shape: Sequence[int], dtype: np.dtype[Any]
) -> Iterator[MemoryReference]:
    """:func:`scratch_arrays` for one array."""
    with scratch_arrays(ctx, (shape, dtype)) as (memory,):
        yield memory


def store(
    ctx: RuleContext,
    memory: MemoryReference,
    array: RegisterArray,
    places: Collection[tuple[int, int]] | None = None,
) -> None:
    """Stores an array; others see it after :meth:`RuleContext.synchronize`.

    Args:
      ctx: of the rule.
      memory: a view of scratch memory.
      array: from :func:`storable`, unless that is the whole of it.
      places: see :func:`store_array`.
    """
    if not array.is_splat and array.size > 1:
        store_array(ctx.launch, memory, array, places=places)
        return
    with ops.when(ctx.leader) if memory.layout.size == 1 else contextlib.nullcontext():
        if array.is_splat and memory.layout.size > 1:
            if memory.layout.is_contiguous and memory.element_bits >= 8:
                memory = reshaped(memory, (memory.layout.size,))  # By whole vectors.
                layout = default_strided(memory.shape, memory.element_bits)
            else:
                layout = padded(memory.shape)
            array = RegisterArray.splat(array.scalar, array.dtype, memory.shape).materialize(layout)
        store_array(ctx.launch, memory, array)


def storable(ctx: RuleContext, array: RegisterArray, *, by_rows: bool = False) -> RegisterArray:
    """The array in a layout that every view of row-major memory can take, or, ``by_rows``, every
    one in which neighbours within rows are neighbours."""
    if isinstance(array.layout, RegisterLayout) and array.layout.flat:
        bits = max(8, types.bit_width(array.dtype))
        widths = [n for n in (1, 2, 4, 8, 16) if n * bits <= 128 and array.shape[-1] % n == 0]
        layouts = [padded(array.shape, n) for n in (widths if by_rows else [1])]
        return relayout(ctx, array, min(layouts, key=lambda layout: layout.registers))
    return array


def load(ctx: RuleContext, memory: MemoryReference, layout: Layout | None) -> RegisterArray:
    """Loads what a view of scratch memory holds; in a default layout where none is given."""
    if types.is_bool(memory.dtype) and memory.layout.size > 1:
        # What is stored are zeros and ones.
        if not isinstance(layout, RegisterLayout):
            layout = result_layout(ctx, memory.shape, memory.dtype)
        narrow = dataclasses.replace(memory, dtype=np.dtype(np.uint8))
        return load(ctx, narrow, layout).map(_truncated, memory.dtype)
    if memory.layout.size == 1:
        return load_array(ctx.launch, memory, None)
    if not isinstance(layout, RegisterLayout):
        layout = result_layout(ctx, memory.shape, memory.dtype)
    if not layout.flat or len(memory.layout.flat_extents) == 1:
        return load_array(ctx.launch, memory, layout)
    # The digits of a flat layout may not fit the rows of the view.
    return relayout(ctx, load_array(ctx.launch, memory, padded(memory.shape)), layout)


def result_layout(ctx: RuleContext, shape: Sequence[int], dtype: Any) -> RegisterLayout:
    """The layout in which an equation makes an array: that which is wanted, or a default one."""
    hint = ctx.layout_hint
    if isinstance(hint, RegisterLayout) and hint.shape == tuple(shape):
        return hint
    bits = types.bit_width(dtype)
    if math.prod(shape) <= LANES * WARPS and bits >= 8 and any(map(_is_odd, ctx.avals_in)):
        return even(tuple(shape), 1)  # No thread has several elements.
    return default_strided(tuple(shape), bits)


def _is_odd(aval: Any) -> bool:
    return any(n & (n - 1) for n in getattr(aval, "shape", ()))


def viewed(
    memory: MemoryReference,
    starts: Sequence[int],
    sizes: Sequence[int],
    steps: Sequence[int] | None = None,
) -> MemoryReference:
    """Every ``steps[d]``-th of the elements from ``starts[d]``; steps may be negative."""
    steps = [1] * len(sizes) if steps is None else steps
    strides = [dim[0].stride if dim else 0 for dim in memory.layout.dims]
    offset = memory.offset
    dims = []
    for stride, start, size, step in zip(strides, starts, sizes, steps, strict=True):
        offset += stride * start
        dims.append((Extent(size, stride * step),))
    layout = MemoryLayout(tuple(dims), memory.layout.swizzle, memory.layout.element_bits)
    return dataclasses.replace(memory, layout=layout, offset=offset)


def reshaped(memory: MemoryReference, shape: Sequence[int]) -> MemoryReference:
    """The same row-major memory in another shape."""
    return memory.with_layout(row_major(tuple(shape), memory.layout.element_bits))


def copied(
    ctx: RuleContext,
    array: RegisterArray,
    view: Callable[[MemoryReference], MemoryReference],
    layout: Layout | None,
    shape: Sequence[int] | None = None,
) -> RegisterArray:
    """An array stored row by row, and loaded as ``view(memory)``.

    Where that takes many narrow accesses, a loop brings the view's elements into row-major order
    before, so that the code does not grow with the array.

    Args:
      ctx: of the rule.
      array: in any layout.
      view: of row-major memory.
      layout: of the result; a default one if it is None or none of registers.
      shape: of the result; by default, that of the equation's.
    """
    found = by_loop(ctx, array, view, layout, shape)
    if found is not None:
        return found
    if not isinstance(layout, RegisterLayout):
        layout = result_layout(ctx, shape or ctx.avals_out[0].shape, array.dtype)
    rows = row_major(array.shape, types.bit_width(array.dtype))
    stored = operand(array)
    seen = view(nowhere(rows, array.dtype))
    (window,) = elements_of(seen, array.size).windows(0, seen.layout.size)
    held = stored.held(window)
    if has_portions(ctx, stored.bytes(held)):
        return portioned(ctx, array.shape, [(nowhere(rows, array.dtype), array)], seen, layout)
    places = None
    if not stored.row and not seen.dynamic and isinstance(array.layout, RegisterLayout):
        places = _places_in(array.layout, seen.offset, seen.layout.flat_extents)
    array = stored.part(held)
    with scratch_array(ctx, array.shape, array.dtype) as memory:
        store(ctx, memory, array, places)
        ctx.synchronize()
        first = ops.byte_pointer(memory.pointer, -_skipped(stored, held))
        memory = dataclasses.replace(memory, pointer=first)
        return load(ctx, view(memory.with_layout(rows)), layout)


def portioned(
    ctx: RuleContext,
    shape: tuple[int, ...],
    stored: Sequence[tuple[MemoryReference, RegisterArray]],
    view: MemoryReference,
    layout: RegisterLayout,
) -> RegisterArray:
    """What a view of row-major memory of some shape, for which there is no room, holds after arrays
    were stored to other views of it; see :func:`~pallasite_std.memory.portions.in_portions`."""
    exchanged = layout.flat and len(view.layout.flat_extents) != 1
    own = padded(view.shape) if exchanged else layout
    pairs = [
        (memory, one.materialize(padded(one.shape)) if one.is_splat or one.size == 1 else one)
        for memory, one in stored
    ]
    size = bytes_of(shape, types.bit_width(view.dtype))
    return relayout(ctx, in_portions(ctx, size, pairs, view, own), layout)


@functools.lru_cache(maxsize=256)
def _places_in(
    layout: RegisterLayout, offset: int, extents: tuple[Extent, ...]
) -> frozenset[tuple[int, int]] | None:
    """The registers, and places in these, that hold elements of a view of a row-major array in some
    thread; None if all do.

    Args:
      layout: of the array.
      offset, extents: of the view.
    """
    seen = np.full((), offset)
    for extent in extents:
        seen = np.add.outer(seen, np.arange(extent.size) * extent.stride)
    if np.unique(seen).size == layout.size:
        return None
    held = np.zeros(layout.size, bool)
    held[seen.ravel()] = True
    numbers = {Owner.WARP: WARPS, Owner.LANE: LANES, Owner.REGISTER: layout.registers}
    shape = (*numbers.values(), layout.vector_length)
    number = dict(zip((*numbers, Owner.VECTOR), np.indices(shape, sparse=True), strict=True))
    steps = [1] if layout.flat else strides(layout.shape)
    sizes = [layout.size] if layout.flat else layout.shape
    where, inside = np.zeros((), int), np.ones((), bool)
    for digits, step, size in zip(layout.weighted_dims, steps, sizes, strict=True):
        index = np.zeros((), int)
        for digit, weight in digits:
            index = index + number[digit.owner] // digit.stride % digit.size * weight
        where, inside = where + index * step, inside & (index < size)
    found = np.broadcast_to(inside & held[np.where(inside, where, 0)], shape).any((0, 1))
    if found.all():
        return None
    return frozenset((int(register), int(place)) for register, place in np.argwhere(found))


def nowhere(rows: MemoryLayout, dtype: np.dtype[Any]) -> MemoryReference:
    """Memory that is not there yet: of a view, all but the pointer is known before."""
    pointer: Any = None
    return MemoryReference(pointer, rows, dtype, MemorySpace.SMEM, alignment=16)


def by_loop(
    ctx: RuleContext,
    array: RegisterArray,
    view: Callable[[MemoryReference], MemoryReference],
    layout: Layout | None,
    shape: Sequence[int] | None = None,
) -> RegisterArray | None:
    """:func:`copied` where a loop is less code, and there is room; else None."""
    shape = tuple(ctx.avals_out[0].shape if shape is None else shape)
    if not isinstance(layout, RegisterLayout):
        layout = result_layout(ctx, shape, array.dtype)
    bits = types.bit_width(array.dtype)
    seen = view(nowhere(row_major(array.shape, bits), array.dtype))
    elements = elements_of(seen, array.size)
    stored = operand(array)
    most = room_for(ctx)
    parts = parts_of(layout, [stored], elements.windows, most, elements.unit)
    fits = stored.bytes((0, stored.registers)) <= most
    if not parts or (fits and not _is_long(seen, layout, ordering_code(parts, elements))):
        return None
    return ordered(ctx, [stored], elements, layout, parts)


def ordered(
    ctx: RuleContext,
    operands: Sequence[Operand],
    elements: Elements,
    layout: RegisterLayout,
    parts: Sequence[Part],
) -> RegisterArray:
    """What loops bring into order of arrays that are stored row by row.

    Args:
      ctx: of the rule.
      operands: the first has the dtype of the result.
      elements: of the result.
      layout: of the result.
      parts: of the layout, by :func:`~pallasite_std.memory.row_parts.parts_of`.
    """
    dtype = operands[0].array.dtype
    if types.is_bool(dtype):
        # What is stored are zeros and ones.
        stored = [
            dataclasses.replace(one, array=_widened(one.array))
            if types.is_bool(one.array.dtype)
            else one
            for one in operands
        ]
        return ordered(ctx, stored, elements, layout, parts).map(_truncated, dtype)
    most = max(max(part.layout.size for part in parts), LANES * WARPS * elements.unit)
    byte = np.dtype(np.uint8)
    room = [
        ((max(one.bytes(part.held[position]) for part in parts),), byte)
        for position, one in enumerate(operands)
    ]
    registers: list[ir.Value] = []
    with scratch_arrays(ctx, *room, ((most,), dtype)) as (*memories, target):
        present: list[Held | None] = [None] * len(operands)
        for part in parts:
            if part is not parts[0] and list(part.held) != present:
                ctx.synchronize()
            starts = []
            for position, (memory, one) in enumerate(zip(memories, operands, strict=True)):
                held = part.held[position]
                if present[position] != held and held[0] < held[1]:
                    _store_part(ctx, memory, one, held)
                present[position] = held
                before = sum(size for (size,), _ in room[:position])
                starts.append(before - _skipped(one, held))
            ctx.synchronize()
            pointer = memories[0].pointer
            if moves_of(part, elements) is not None:
                registers += load_in_order(ctx, elements, pointer, starts, part, dtype)
                continue
            rows = target.with_layout(row_major(part.layout.shape, operands[0].bits))
            copy_in_order(ctx, elements, pointer, starts, rows, part.first)
            ctx.synchronize()
            registers += load_array(ctx.launch, rows, part.layout).registers
    return RegisterArray(tuple(registers), layout, dtype)


def _store_part(ctx: RuleContext, memory: MemoryReference, one: Operand, held: Held) -> None:
    array = one.part(held)
    rows = row_major(array.shape, one.bits)
    store(ctx, dataclasses.replace(memory, layout=rows, dtype=array.dtype), array)


def _skipped(one: Operand, held: Held) -> int:
    """Bytes of an array before the registers that are stored."""
    return held[0] * one.register_elements * one.bits // 8 if one.row else 0


def _widened(array: RegisterArray) -> RegisterArray:
    return array.map(functools.partial(to_memory, dtype=array.dtype), np.dtype(np.uint8))


def _truncated(value: ir.Value) -> ir.Value:
    return ops.arith.trunci(ops.vector_type(ops.i1(), ops.vector_length(value)), value)


def _is_long(view: MemoryReference, layout: RegisterLayout, ordering: int) -> bool:
    """Whether the code that loads a view is longer than so many instructions that bring it into
    order, and what then loads row-major memory."""
    if view.element_bits < 8 or view.layout.size == 1:
        return False
    rows = row_major(view.shape, view.element_bits)
    exchanged = layout.flat and not view.layout.is_contiguous
    direct = padded(view.shape) if exchanged else layout
    more = 2 * direct.registers + _EXCHANGE if exchanged else 0
    try:
        loaded = len(plan_access(direct, view.layout, min(16, view.offset_alignment)).everything)
        loaded += more
    except InvalidValueError:
        return True  # Lanes do not take what the view has along a dimension.
    return loaded > len(plan_access(layout, rows, 16).everything) + ordering


def whole_bytes(array: RegisterArray) -> RegisterArray:
    """The array, unless elements share bytes, which cannot be moved one by one.

    Raises:
      UnsupportedError: they do.
    """
    if types.bit_width(array.dtype) < 8 and not types.is_bool(array.dtype):
        raise UnsupportedError(
            f"single elements of {array.dtype} are moved, which share bytes",
            hint="convert the array to int8 first, and back afterwards",
        )
    return array


def element_address(memory: MemoryReference, offset: ir.Value | int) -> ir.Value:
    """The address of the element so many elements after the first."""
    return ops.element_pointer(memory.pointer, offset, types.memory_type(memory.dtype))


def load_element(memory: MemoryReference, offset: ir.Value | int) -> ir.Value:
    """A single element, as registers hold it."""
    kind = types.memory_type(memory.dtype)
    size = max(1, memory.element_bits // 8)
    return from_memory(
        ops.load(kind, element_address(memory, offset), alignment=size), memory.dtype
    )


def store_element(memory: MemoryReference, offset: ir.Value | int, value: ir.Value) -> None:
    """Stores a single element."""
    size = max(1, memory.element_bits // 8)
    ops.store(to_memory(value, memory.dtype), element_address(memory, offset), alignment=size)


def strides(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next along each dimension of a row-major array."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def linear(index: Sequence[ir.Value | int], factors: Sequence[int]) -> ir.Value:
    """The sum of products of indices (i32) and numbers."""
    total: ir.Value = ops.i32_constant(0)
    for one, factor in zip(index, factors, strict=True):
        total = ops.add(
            total, ops.multiply(one, factor) if not isinstance(one, int) else one * factor
        )
    return total
