"""Moving arrays between any two places of an array by way of the kernel's scratch shared memory.

What register layouts cannot do by renaming registers, memory can: arrays are stored row by row, and
loaded through another view of the same memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    Digit,
    Extent,
    Layout,
    MemoryLayout,
    Owner,
    RegisterLayout,
    default_strided,
    padded,
    row_major,
)
from pallasite.plugin.lowering import RegisterArray, RuleContext, relayout
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.ordering import LOOP, Elements, copy_in_order, elements_of
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.transfers import from_memory, load_array, store_array, to_memory

_EXCHANGE = 32
"""Instructions around an exchange through shared memory, about."""

PURPOSE = "scratch for layout changes and reductions"
"""What reports say of the memory: one region serves all uses."""


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
        starts.append(starts[-1] + bytes_of(layout))
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


def store(ctx: RuleContext, memory: MemoryReference, array: RegisterArray) -> None:
    """Stores an array; others see it after :meth:`RuleContext.synchronize`.

    Args:
      ctx: of the rule.
      memory: a view of scratch memory.
      array: from :func:`storable`, unless that is the whole of it.
    """
    if not array.is_splat and array.size > 1:
        store_array(ctx.launch, memory, array)
        return
    with ops.when(ctx.leader) if memory.layout.size == 1 else contextlib.nullcontext():
        if array.is_splat and memory.layout.size > 1:
            array = array.materialize(padded(memory.shape))
        store_array(ctx.launch, memory, array)


def storable(ctx: RuleContext, array: RegisterArray) -> RegisterArray:
    """The array in a layout that every view of row-major memory can take."""
    if isinstance(array.layout, RegisterLayout) and array.layout.flat:
        return relayout(ctx, array, padded(array.shape))
    return array


def load(ctx: RuleContext, memory: MemoryReference, layout: Layout | None) -> RegisterArray:
    """Loads what a view of scratch memory holds; in a default layout where none is given."""
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
    return default_strided(tuple(shape), types.bit_width(dtype))


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
    array = whole_row(array) or array
    with scratch_array(ctx, array.shape, array.dtype) as memory:
        store(ctx, memory, array)
        ctx.synchronize()
        return load(ctx, view(memory.with_layout(rows)), layout)


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
    # Of a view, all but the pointer is known before there is memory.
    nowhere: Any = None
    rows = row_major(array.shape, bits)
    seen = view(MemoryReference(nowhere, rows, array.dtype, MemorySpace.SMEM, alignment=16))
    array = whole_row(array) or array
    stored = bytes_of(row_major(array.shape, bits))
    parts = parts_of(layout, bits, stored, ctx.target.max_shared_memory)
    if not parts or not _is_long(seen, layout, len(parts)):
        return None
    return ordered(ctx, [array], elements_of(seen), layout, parts)


def ordered(
    ctx: RuleContext,
    arrays: Sequence[RegisterArray],
    elements: Elements,
    layout: RegisterLayout,
    parts: Sequence[RegisterLayout],
) -> RegisterArray:
    """What loops bring into order of arrays that are stored row by row.

    Args:
      ctx: of the rule.
      arrays: of one dtype.
      elements: of the result; counted from the first one of the first array, where each array
        begins at the next multiple of 16 bytes.
      layout: of the result.
      parts: of the layout, by :func:`parts_of`.
    """
    if types.is_bool(arrays[0].dtype):
        # What is stored are zeros and ones.
        narrow = np.dtype(np.uint8)
        stored = [one.map(functools.partial(to_memory, dtype=one.dtype), narrow) for one in arrays]
        found = ordered(ctx, stored, elements, layout, parts)
        return found.map(_truncated, arrays[0].dtype)
    dtype, bits = arrays[0].dtype, types.bit_width(arrays[0].dtype)
    # In the first step of a loop, all threads move something.
    most = max(parts[0].size, LANES * WARPS * elements.unit)
    given = [*((array.shape, dtype) for array in arrays), ((most,), dtype)]
    registers: list[ir.Value] = []
    with scratch_arrays(ctx, *given) as (*memories, target):
        for memory, array in zip(memories, arrays, strict=True):
            store(ctx, memory, array)
        done = 0
        for part in parts:
            ctx.synchronize()
            rows = target.with_layout(row_major(part.shape, bits))
            copy_in_order(ctx, memories[0].pointer, elements, rows, done)
            ctx.synchronize()
            registers += load_array(ctx.launch, rows, part).registers
            done += part.size
    return RegisterArray(tuple(registers), layout, dtype)


def _truncated(value: ir.Value) -> ir.Value:
    return ops.arith.trunci(ops.vector_type(ops.i1(), ops.vector_length(value)), value)


def bytes_of(rows: MemoryLayout) -> int:
    """How many an array takes, with what is left of the last 16."""
    return -(-rows.size * rows.element_bits // 128) * 16


def whole_row(array: RegisterArray) -> RegisterArray | None:
    """The registers of an array whose elements lie in one row, padding included."""
    layout = array.layout
    if not isinstance(layout, RegisterLayout) or not layout.flat or array.is_splat:
        return None
    whole = _registers(layout, layout.registers)
    return None if whole is None else RegisterArray(array.registers, whole, array.dtype)


def _registers(layout: RegisterLayout, count: int) -> RegisterLayout | None:
    """The layout of a row that so many of the first registers of a flat layout hold."""
    digits = layout.dims[0]
    others = tuple(digit for digit in digits if digit.owner is not Owner.REGISTER)
    if len(digits) - len(others) > 1 or (digits != others and digits[0] in others):
        return None
    size = count * math.prod(digit.size for digit in others)
    digits = (Digit(count, Owner.REGISTER, 1), *others)
    return RegisterLayout((size,), (digits,), layout.vector_length, flat=True)


def parts_of(layout: RegisterLayout, bits: int, stored: int, most: int) -> list[RegisterLayout]:
    """The layout as rows, one after the other, of which there is room for one beside what is
    stored; none if the layout is no row, or each takes much code."""
    if not layout.flat:
        rows = bytes_of(row_major(layout.shape, bits))
        return [layout] if stored + rows <= most else []
    if (one := _registers(layout, 1)) is None or bits < 8:
        return []
    room = max(most - stored, 0) // (one.size * bits // 8)
    if not room:
        return []
    count = -(-layout.registers // room)
    sizes = [len(part) for part in np.array_split(np.arange(layout.registers), count)]
    parts = [_registers(layout, size) for size in sizes]
    return [part for part in parts if part is not None]


def _is_long(view: MemoryReference, layout: RegisterLayout, parts: int) -> bool:
    """Whether the code that loads a view is longer than loops that copy it in so many parts, and
    what then loads row-major memory."""
    if view.element_bits < 8 or view.layout.is_contiguous or view.layout.size == 1:
        return False
    rows = row_major(view.shape, view.element_bits)
    direct = padded(view.shape) if layout.flat else layout
    more = 2 * direct.registers + _EXCHANGE if layout.flat else 0
    try:
        loaded = len(plan_access(direct, view.layout, 16).everything) + more
    except InvalidValueError:
        return True  # Lanes do not take what the view has along a dimension.
    return loaded > len(plan_access(layout, rows, 16).everything) + LOOP * parts


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
