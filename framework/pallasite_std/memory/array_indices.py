"""Reading and writing references at indices that are arrays: ``ref[rows, columns]``.

Each lane accesses the elements that it holds one by one. The indices lie in scratch shared memory
meanwhile, so that they may have any layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidTypeError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import RegisterLayout, padded
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value, resolve
from pallasite_std.math.table import BINARY
from pallasite_std.memory.accesses import orders_stores
from pallasite_std.memory.elements import element_indices, once_per_element
from pallasite_std.memory.overwrites import note_indexed_store
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.references import index_reference
from pallasite_std.memory.scratch import (
    linear,
    load_element,
    result_layout,
    scratch_arrays,
    storable,
    store,
    strides,
)
from pallasite_std.memory.transfers import (
    from_memory,
    remote_pointer,
    scalar_address,
    to_memory,
)

_I32 = np.dtype(np.int32)

OWN_INDICES = 128
"""Elements from which on the lanes of a warpgroup all have one, and its indices."""


def split_transforms(transforms: Sequence[Any]) -> tuple[Sequence[Any], Any] | None:
    """The views before the last one, and the last one if it indexes by arrays, else None."""
    last = transforms[-1] if transforms else None
    if isinstance(last, _jax.NDIndexer) and last.int_indexer_shape:
        return transforms[:-1], last
    return None


def split_reference(reference: Any) -> tuple[Any, tuple[Sequence[Any], Any] | None]:
    """What a view is of, and its transforms as :func:`split_transforms` splits them."""
    if isinstance(reference, _jax.TransformedRef):
        return reference.ref, split_transforms(reference.transforms)
    return reference, None


@dataclasses.dataclass(frozen=True)
class _Indexer:
    """Which element of a reference an element of the indexed array is.

    Attributes:
      memory: the reference.
      indices: one for each of its dimensions: a slice, a scalar, or an array's place in memory.
      first: where the dimensions of the index arrays begin among those of the indexed array.
      shape: the shape to which the index arrays are broadcast.
    """

    memory: MemoryReference
    indices: tuple[Any, ...]
    first: int
    shape: tuple[int, ...]

    def element(self, index: Sequence[ir.Value]) -> MemoryReference:
        """The reference to one element, for its index in the indexed array (i32)."""
        rank = len(self.shape)
        batch = index[self.first : self.first + rank]
        others = iter([*index[: self.first], *index[self.first + rank :]])
        chosen: list[Any] = []
        for one in self.indices:
            if isinstance(one, _jax.Slice):
                start = one.start
                place: ir.Value = next(others)
                place = ops.multiply(place, 1 if one.stride is None else int(one.stride))
                if isinstance(start, RegisterArray):
                    start = ops.cast_integer(start.scalar, ops.i32())
                place = ops.add(place, start)
                chosen.append(RegisterArray.splat(place, _I32))
            elif isinstance(one, MemoryReference):
                own = [
                    coordinate if extent > 1 else ops.i32_constant(0)
                    for coordinate, extent in zip(batch, one.shape, strict=True)
                ]
                value = load_element(one, linear(own, strides(one.shape)))
                value = ops.cast_integer(value, ops.i32(), signed=types.is_signed(one.dtype))
                chosen.append(RegisterArray.splat(value, _I32))
            else:
                chosen.append(one)
        return remote_pointer(index_reference(self.memory, chosen))


def _check_integers(dtype: Any) -> None:
    if types.is_integer(dtype) and not types.is_bool(dtype):
        return
    mask = types.is_bool(dtype)
    raise InvalidTypeError(
        f"a reference is indexed by an array of {dtype}",
        expected="integers",
        hint="read the whole array and choose: jnp.where(mask, x, y)" if mask else "x.astype(int)",
    )


@contextlib.contextmanager
def _indexed(ctx: RuleContext, memory: MemoryReference, transform: Any) -> Iterator[_Indexer]:
    indices = list(transform.indices)
    places = [
        place
        for place, index in enumerate(indices)
        if isinstance(index, RegisterArray) and index.shape != ()
    ]
    for place in places:
        _check_integers(indices[place].dtype)
    arrays = [storable(ctx, indices[place]) for place in places]
    is_integer = [not isinstance(index, _jax.Slice) for index in indices]
    numbers = [d for d, one in enumerate(is_integer) if one]
    together = numbers[-1] - numbers[0] + 1 == len(numbers)
    first = sum(not one for one in is_integer[: numbers[0]]) if together else 0
    with scratch_arrays(ctx, *((array.shape, array.dtype) for array in arrays)) as memories:
        for place, own, array in zip(places, memories, arrays, strict=True):
            store(ctx, own, array)
            indices[place] = own
        ctx.synchronize()
        yield _Indexer(memory, tuple(indices), first, tuple(transform.int_indexer_shape))


def _scalar(ctx: RuleContext, reference: Value, transforms: Sequence[Any]) -> MemoryReference:
    memory: MemoryReference = resolve(ctx, reference, transforms, other_blocks=True)
    if memory.element_bits < 8:
        raise UnsupportedError(
            f"single elements of {memory.dtype} are accessed, which share bytes",
            hint="read the whole array, and index that",
        )
    return memory


def read_at(
    ctx: RuleContext, reference: Value, transforms: Sequence[Any], transform: Any
) -> RegisterArray:
    """The elements that an indexer with arrays selects, in the layout that is wanted."""
    memory = _scalar(ctx, reference, transforms)
    shape = tuple(ctx.avals_out[0].shape)
    own = _read_own(ctx, memory, transform, shape)
    if own is not None:
        return own
    layout = padded(shape) if int(np.prod(shape)) == 1 else result_layout(ctx, shape, memory.dtype)
    kind = types.memory_type(memory.dtype)
    found: dict[tuple[int, int], ir.Value] = {}
    with _indexed(ctx, memory, transform) as indexer:
        for register, element, index in element_indices(ctx.launch, layout, guarded=False):
            if layout.is_padded:
                index = [
                    BINARY["min"](one, ops.i32_constant(n - 1), _I32, False)
                    for one, n in zip(index, shape, strict=True)
                ]
            address = scalar_address(indexer.element(index))
            value = ops.load(kind, address, alignment=memory.element_bits // 8)
            found[register, element] = from_memory(value, memory.dtype)
    if layout.size == 1:
        return RegisterArray.splat(found[0, 0], memory.dtype, shape)
    return _of_elements(found, layout, memory)


def _of_elements(
    found: dict[tuple[int, int], ir.Value], layout: RegisterLayout, memory: MemoryReference
) -> RegisterArray:
    nothing = RegisterArray.constant(0, memory.dtype).scalar
    registers = [
        ops.from_elements([found.get((r, e), nothing) for e in range(layout.vector_length)])
        for r in range(layout.registers)
    ]
    return RegisterArray(tuple(registers), layout, memory.dtype)


def _read_own(
    ctx: RuleContext, memory: MemoryReference, transform: Any, shape: tuple[int, ...]
) -> RegisterArray | None:
    """The elements that indices in registers select, one array for each dimension, where lanes
    want what they hold the indices of; else None."""
    arrays = [one for one in transform.indices if isinstance(one, RegisterArray) and one.shape]
    arrays = [one for one in arrays if not one.is_splat]
    layouts = {one.layout for one in arrays}
    if len(arrays) < len(transform.indices) or len(layouts) > 1:
        return None
    (layout,) = layouts
    wanted = ctx.layout_hint
    if not isinstance(layout, RegisterLayout) or layout.flat or layout.is_padded:
        return None
    if int(np.prod(shape)) < OWN_INDICES or any(one.shape != shape for one in arrays):
        return None
    if isinstance(wanted, RegisterLayout) and wanted != layout:
        return None
    kind = types.memory_type(memory.dtype)
    found = {}
    for register in range(layout.registers):
        for element in range(layout.vector_length):
            index = [
                ops.cast_integer(
                    ops.extract(one.registers[register], element),
                    ops.i32(),
                    signed=types.is_signed(one.dtype),
                )
                for one in arrays
            ]
            places = [RegisterArray.splat(one, _I32) for one in index]
            address = scalar_address(remote_pointer(index_reference(memory, places)))
            value = ops.load(kind, address, alignment=memory.element_bits // 8)
            found[register, element] = from_memory(value, memory.dtype)
    return _of_elements(found, layout, memory)


def write_at(
    ctx: RuleContext,
    reference: Value,
    transforms: Sequence[Any],
    transform: Any,
    value: RegisterArray,
    update: Callable[[MemoryReference], Callable[[ir.Value, ir.Value], None]] | None = None,
) -> None:
    """Stores an array where an indexer with arrays says; of equal indices, any one counts.

    Args:
      ctx: of the rule.
      reference: what is written.
      transforms: the views before the indexer.
      transform: the indexer.
      value: the array.
      update: for the memory, a function of an address and a value that updates the element, in
        place of a store.
    """
    memory = _scalar(ctx, reference, transforms)
    ordered = orders_stores(ctx, memory)
    if value.size > 1 and (value.is_splat or getattr(value.layout, "flat", False)):
        value = storable(ctx, value)
        value = value.materialize(padded(value.shape)) if value.is_splat else value
    emit = None if update is None else update(memory)

    def put(index: Sequence[ir.Value], scalar: ir.Value) -> None:
        address = scalar_address(indexer.element(index))
        if emit is not None:
            emit(address, scalar)
        else:
            size = memory.element_bits // 8
            ops.store(to_memory(scalar, memory.dtype), address, alignment=size)

    with _indexed(ctx, memory, transform) as indexer:
        if ordered:
            ctx.synchronize()
        elif update is None:
            note_indexed_store(ctx, memory, transform.indices)
        if value.size == 1:
            with ops.when(ctx.leader):
                put([ops.i32_constant(0)] * len(value.shape), value.scalar)
        else:
            layout = value.layout
            assert isinstance(layout, RegisterLayout)
            with once_per_element(ctx.launch, layout):
                for register, element, index in element_indices(ctx.launch, layout):
                    put(index, ops.extract(value.registers[register], element))
        if ordered:
            ctx.synchronize()
