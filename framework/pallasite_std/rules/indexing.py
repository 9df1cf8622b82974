"""Indexing of arrays by arrays: gather and scatter, through scratch shared memory.

Each lane finds the places of the elements that it holds from the indices, which it reads from
memory as well, so that both arrays can have any layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import primitives
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.inference import AbstractValue, InferenceContext
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import RegisterLayout, padded, row_major
from pallasite.plugin.lowering import LayoutContext, RegisterArray, RuleContext
from pallasite_std.inference.shape import moves
from pallasite_std.math.table import BINARY
from pallasite_std.memory.elements import element_indices, once_per_element, unravel
from pallasite_std.memory.indices import clamped_index, narrow_index
from pallasite_std.memory.ordering import Elements, load_elements
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.row_parts import operand, parts_of
from pallasite_std.memory.rows import moved
from pallasite_std.memory.scratch import (
    element_address,
    linear,
    load,
    load_element,
    ordered,
    result_layout,
    room_for,
    scratch_arrays,
    storable,
    store,
    store_element,
    strides,
    whole_bytes,
)
from pallasite_std.memory.transfers import to_memory
from pallasite_std.rules.atomics import atomic_update

rules = RuleSet()


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where windows of an array begin and how their dimensions relate to it, for both directions.

    Attributes:
      shape: of the array.
      window: for each dimension the size of a window.
      window_dims: dimensions of the windows' array that count elements of a window.
      dropped: dimensions of the array that windows do not have.
      index_map: the dimension of the array that each component of an index is for.
      batching, index_batching: dimensions of the array and of the indices that go together.
      clamp: whether windows are moved into the array, rather than left out.
    """

    shape: tuple[int, ...]
    window: tuple[int, ...]
    window_dims: tuple[int, ...]
    dropped: tuple[int, ...]
    index_map: tuple[int, ...]
    batching: tuple[int, ...]
    index_batching: tuple[int, ...]
    clamp: bool

    def place(
        self, indices: MemoryReference, index: Sequence[ir.Value | int], signed: bool
    ) -> tuple[ir.Value, ir.Value | None]:
        """The element of the array for an element of the windows.

        Args:
          indices: in memory; the components of an index are along the last dimension.
          index: of the element of the windows (i32).
          signed: whether indices can be negative.

        Returns:
          Its number in the row-major array, and whether (i1) the window is inside; None if it is
          for sure. The number is always inside the array.
        """
        batch: list[ir.Value | int] = [
            one for d, one in enumerate(index) if d not in self.window_dims
        ]
        inside: ir.Value | None = None
        total: list[ir.Value | int] = [0] * len(self.shape)
        kept = [d for d in range(len(self.shape)) if d not in self.dropped]
        kept = [d for d in kept if d not in self.batching]
        for d, position in zip(kept, self.window_dims, strict=True):
            total[d] = index[position]
        for d, position in zip(self.batching, self.index_batching, strict=True):
            total[d] = batch[position]
        factors = strides(indices.shape)
        for component, d in enumerate(self.index_map):
            start = load_element(indices, linear([*batch, component], factors))
            most = self.shape[d] - self.window[d]
            if self.clamp:
                start = clamped_index(start, signed, most)
            else:
                start = narrow_index(start, signed)
                fits = ops.compare("ule", start, most)
                inside = fits if inside is None else ops.arith.andi(inside, fits)
                start = ops.arith.select(fits, start, ops.i32_constant(0))
            total[d] = ops.add(start, total[d])
        return linear(total, strides(self.shape)), inside


def _is(mode: Any, *names: str) -> bool:
    return any(mode is getattr(lax.GatherScatterMode, name) for name in names)


def _within(offset: ir.Value, size: int) -> ir.Value:
    """An offset that is inside an array even where the lane holds padding."""
    return ops.arith.select(ops.compare("ult", offset, size), offset, ops.i32_constant(0))


@rules.lowering(primitives.gather_p, Semantics.LANE)
def _gather(
    ctx: RuleContext,
    x: RegisterArray,
    indices: RegisterArray,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **params: Any,
) -> RegisterArray:
    shape = tuple(ctx.avals_out[0].shape)
    numbers = dimension_numbers
    places = _Places(
        shape=x.shape,
        window=tuple(slice_sizes),
        window_dims=tuple(numbers.offset_dims),
        dropped=tuple(numbers.collapsed_slice_dims),
        index_map=tuple(numbers.start_index_map),
        batching=tuple(numbers.operand_batching_dims),
        index_batching=tuple(numbers.start_indices_batching_dims),
        clamp=not _is(mode, "FILL_OR_DROP"),
    )
    signed = types.is_signed(indices.dtype)
    x = whole_bytes(x)
    single = math.prod(shape) == 1
    layout = None if single else result_layout(ctx, shape, x.dtype)
    given = (x.shape, x.dtype), (indices.shape, indices.dtype)
    filler = RegisterArray.constant(_filler(fill_value, x.dtype), x.dtype).scalar
    wanted = ctx.layout_hint or moved(shape, types.bit_width(x.dtype))
    if not single and _by_loop(x.shape, shape, wanted):
        assert isinstance(wanted, RegisterLayout)
        operands = operand(x), operand(indices)
        elements = _windows(places, shape, x, indices, filler)
        parts = parts_of(wanted, operands, elements.windows, room_for(ctx), elements.unit)
        if parts:
            return ordered(ctx, operands, elements, wanted, parts)
    with scratch_arrays(ctx, *given) as (memory, index_memory):
        store(ctx, memory, x)
        store(ctx, index_memory, indices)
        ctx.synchronize()
        if layout is None:
            zeros = [ops.i32_constant(0)] * len(shape)
            only = _element(places, memory, index_memory, zeros, signed, filler)
            return RegisterArray.splat(only, x.dtype, shape)
        found: dict[tuple[int, int], ir.Value] = {}
        for register, element, index in element_indices(ctx.launch, layout, guarded=False):
            own = index
            if layout.is_padded:
                own = [
                    BINARY["min"](one, ops.i32_constant(n - 1), np.dtype(np.int32), False)
                    for one, n in zip(index, shape, strict=True)
                ]
            found[register, element] = _element(places, memory, index_memory, own, signed, filler)
    return _collected(found, layout, x.dtype, filler)


@rules.layout(primitives.gather_p)
def _gather_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


def _gather_moves(avals_in: Sequence[Any], **params: Any) -> bool:
    """Whether the array goes through memory from any layout."""
    return any(extent & (extent - 1) for extent in avals_in[0].shape)


_gather_layout.moves = _gather_moves  # type: ignore[attr-defined]

_FEW = 4
"""Elements of a lane that are moved one by one, at most, where shapes are odd."""


def _by_loop(before: Sequence[int], after: Sequence[int], layout: Any) -> bool:
    """Whether windows of an array of some shape are copied by a loop, which is less code."""
    odd = any(extent & (extent - 1) for extent in (*before, *after))
    registers = isinstance(layout, RegisterLayout)
    return odd and registers and layout.registers * layout.vector_length > _FEW


def _run(places: _Places, shape: Sequence[int]) -> int:
    """Consecutive elements of windows of a shape, and of the array."""
    run = 1
    dims = range(len(places.shape))
    for d in reversed(dims):
        place = len(shape) - (len(places.shape) - d)
        if d in places.dropped or d in places.batching or place not in places.window_dims:
            break
        if places.window[d] != places.shape[d]:
            break
        run *= places.window[d]
    return run


def _windows(
    places: _Places,
    shape: tuple[int, ...],
    x: RegisterArray,
    indices: RegisterArray,
    filler: ir.Value,
) -> Elements:
    """The elements of the windows' array, of that shape."""
    bits = types.bit_width(x.dtype)
    signed = types.is_signed(indices.dtype)
    rows = row_major(indices.shape, types.bit_width(indices.dtype))

    def load(number: ir.Value, unit: int, pointer: ir.Value, starts: Sequence[int]) -> ir.Value:
        first, second = (ops.byte_pointer(pointer, start) for start in starts)
        memory = MemoryReference(second, rows, indices.dtype, MemorySpace.SMEM, alignment=16)
        index = unravel(ops.multiply(number, unit), shape)
        offset, inside = places.place(memory, index, signed)
        found = load_elements(first, offset, unit, x.dtype)
        if inside is None:
            return found
        return ops.arith.select(inside, found, ops.broadcast(to_memory(filler, x.dtype), unit))

    whole = [(0, x.size), (0, indices.size)]
    unit = math.gcd(128 // bits, _run(places, shape))
    return Elements(math.prod(shape), unit, load, lambda first, count: whole)


def _element(
    places: _Places,
    memory: MemoryReference,
    indices: MemoryReference,
    index: Sequence[ir.Value],
    signed: bool,
    filler: ir.Value,
) -> ir.Value:
    """One element of the windows."""
    offset, inside = places.place(indices, index, signed)
    value = load_element(memory, offset)
    return value if inside is None else ops.arith.select(inside, value, filler)


def _collected(
    found: Mapping[tuple[int, int], ir.Value],
    layout: RegisterLayout,
    dtype: np.dtype[Any],
    padding: ir.Value,
) -> RegisterArray:
    """An array of single elements by place."""
    registers = [
        ops.from_elements([found.get((r, e), padding) for e in range(layout.vector_length)])
        for r in range(layout.registers)
    ]
    return RegisterArray(tuple(registers), layout, dtype)


def _filler(fill_value: Any, dtype: np.dtype[Any]) -> Any:
    """What JAX puts where an index is outside: NaN, the smallest signed or largest unsigned."""
    if fill_value is not None:
        return fill_value
    if types.is_bool(dtype):
        return True
    if types.is_float(dtype):
        return np.nan
    bits = types.bit_width(dtype)
    return -(1 << (bits - 1)) if types.is_signed(dtype) else (1 << bits) - 1


def _register_scatter(primitive: Any, operation: str | None) -> None:
    @rules.lowering(primitive, Semantics.LANE)
    def _rule(
        ctx: RuleContext,
        x: RegisterArray,
        indices: RegisterArray,
        updates: RegisterArray,
        *,
        dimension_numbers: Any,
        mode: Any,
        **params: Any,
    ) -> RegisterArray:
        return _scatter(ctx, x, indices, updates, dimension_numbers, mode, operation)


def _scatter(
    ctx: RuleContext,
    x: RegisterArray,
    indices: RegisterArray,
    updates: RegisterArray,
    numbers: Any,
    mode: Any,
    operation: str | None,
) -> RegisterArray:
    dropped = tuple(numbers.inserted_window_dims)
    batching = tuple(numbers.operand_batching_dims)
    sizes = iter(updates.shape[d] for d in numbers.update_window_dims)
    window = tuple(1 if d in (*dropped, *batching) else next(sizes) for d in range(len(x.shape)))
    places = _Places(
        shape=x.shape,
        window=window,
        window_dims=tuple(numbers.update_window_dims),
        dropped=dropped,
        index_map=tuple(numbers.scatter_dims_to_operand_dims),
        batching=batching,
        index_batching=tuple(numbers.scatter_indices_batching_dims),
        clamp=_is(mode, "CLIP"),
    )
    signed = types.is_signed(indices.dtype)
    x, indices = storable(ctx, whole_bytes(x)), storable(ctx, indices)
    updates = storable(ctx, updates)
    given = [(one.shape, one.dtype) for one in (x, indices, updates)]
    with scratch_arrays(ctx, *given) as (memory, index_memory, update_memory):
        store(ctx, memory, x)
        store(ctx, index_memory, indices)
        atomic = operation is None or atomic_update(ctx, memory, operation) is not None
        if not atomic:
            store(ctx, update_memory, updates)
        ctx.synchronize()
        if atomic:
            _each_lane(ctx, places, memory, index_memory, updates, signed, operation)
        else:
            assert operation is not None
            _one_lane(ctx, places, memory, index_memory, update_memory, signed, operation)
        ctx.synchronize()
        same = x.layout if isinstance(x.layout, RegisterLayout) else None
        return load(ctx, memory, ctx.layout_hint or same)


def _each_lane(
    ctx: RuleContext,
    places: _Places,
    memory: MemoryReference,
    indices: MemoryReference,
    updates: RegisterArray,
    signed: bool,
    operation: str | None,
) -> None:
    """Every element is written, or added atomically, by the first lane that holds it."""
    if updates.is_splat or updates.size == 1:
        updates = RegisterArray.splat(updates.scalar, updates.dtype, updates.shape)
        if updates.size > 1:
            updates = updates.materialize(padded(updates.shape))
    if updates.is_splat:
        with ops.when(ctx.leader):
            zeros = [ops.i32_constant(0)] * len(updates.shape)
            _write(ctx, places, memory, indices, zeros, updates.scalar, signed, operation)
        return
    layout = updates.layout
    assert isinstance(layout, RegisterLayout)
    with once_per_element(ctx.launch, layout):
        for register, element, index in element_indices(ctx.launch, layout):
            value = ops.extract(updates.registers[register], element)
            _write(ctx, places, memory, indices, index, value, signed, operation)


def _write(
    ctx: RuleContext,
    places: _Places,
    memory: MemoryReference,
    indices: MemoryReference,
    index: Sequence[ir.Value],
    value: ir.Value,
    signed: bool,
    operation: str | None,
) -> None:
    offset, inside = places.place(indices, index, signed)

    def emit() -> None:
        if operation is None:
            store_element(memory, offset, value)
        else:
            update = atomic_update(ctx, memory, operation)
            assert update is not None
            update(element_address(memory, offset), value)

    if inside is None:
        emit()
    else:
        with ops.when(inside):
            emit()


def _one_lane(
    ctx: RuleContext,
    places: _Places,
    memory: MemoryReference,
    indices: MemoryReference,
    updates: MemoryReference,
    signed: bool,
    operation: str,
) -> None:
    """One lane combines element after element: there are no atomics for the operation."""
    shape = updates.shape

    def body(number: ir.Value, _: list[ir.Value]) -> Sequence[ir.Value]:
        index = []
        for d, factor in enumerate(strides(shape)):
            one = ops.divide_unsigned(number, factor)
            index.append(ops.remainder_unsigned(one, shape[d]))
        offset, inside = places.place(indices, index, signed)
        old = load_element(memory, offset)
        new = BINARY[operation](old, load_element(updates, number), memory.dtype, False)
        if inside is not None:
            new = ops.arith.select(inside, new, old)
        store_element(memory, offset, new)
        return []

    with ops.when(ctx.leader):
        count = ops.i32_constant(int(np.prod(shape)))
        ops.for_loop(ops.i32_constant(0), count, [], body)


for _primitive, _operation in (
    (primitives.scatter_p, None),
    (primitives.scatter_add_p, "add"),
    (primitives.scatter_mul_p, "mul"),
    (primitives.scatter_min_p, "min"),
    (primitives.scatter_max_p, "max"),
    (lax.scatter_sub_p, "sub"),
):
    _register_scatter(_primitive, _operation)


@rules.inference(primitives.gather_p)
def _gather_inference(
    ctx: InferenceContext, x: AbstractValue, indices: AbstractValue, **params: Any
) -> AbstractValue:
    result = ctx.result(varying=True)
    before, after = (tuple(aval.shape) for aval in (ctx.avals_in[0], ctx.avals_out[0]))
    odd = any(extent & (extent - 1) for extent in (*before, *after))
    moves(ctx, 0, x, result, run=1 if odd else None)
    moves(ctx, 1, indices, result)
    return result


def _scatter_inference(
    ctx: InferenceContext,
    x: AbstractValue,
    indices: AbstractValue,
    updates: AbstractValue,
    **params: Any,
) -> AbstractValue:
    result = ctx.result(varying=True)
    for position, value in enumerate((x, indices, updates)):
        moves(ctx, position, value, result)
    return result


for _primitive in (
    primitives.scatter_p,
    primitives.scatter_add_p,
    primitives.scatter_mul_p,
    primitives.scatter_min_p,
    primitives.scatter_max_p,
    lax.scatter_sub_p,
):
    rules.inference(_primitive)(_scatter_inference)


# Sorting ------------------------------------------------------------------------------------------


def _less(x: ir.Value, y: ir.Value, dtype: np.dtype[Any]) -> tuple[ir.Value, ir.Value]:
    """Whether x comes before y, and whether they are equal; NaN is the largest, and all are."""
    less, equal = (BINARY[name](x, y, dtype, False) for name in ("lt", "eq"))
    if types.is_float(dtype):
        x_nan, y_nan = (BINARY["ne"](one, one, dtype, False) for one in (x, y))
        number = ops.arith.xori(x_nan, ops.constant(1, ops.i1()))
        less = ops.arith.ori(less, ops.arith.andi(number, y_nan))
        equal = ops.arith.ori(equal, ops.arith.andi(x_nan, y_nan))
    return less, equal


def ranks(
    ctx: RuleContext,
    keys: Sequence[MemoryReference],
    layout: RegisterLayout,
    dimension: int,
    *,
    descending: bool = False,
) -> dict[tuple[int, int], ir.Value]:
    """For each place, how many elements along a dimension come before its own in a stable order.

    Every element is compared with every other one, in a loop.
    """
    shape = keys[0].shape
    factors = strides(shape)
    own: dict[tuple[int, int], tuple[ir.Value, ir.Value, list[ir.Value]]] = {}
    for register, element, index in element_indices(ctx.launch, layout, guarded=False):
        offset = _within(linear(index, factors), keys[0].layout.size)
        first = list(index)
        first[dimension] = ops.i32_constant(0)
        start = _within(linear(first, factors), keys[0].layout.size)
        own[register, element] = start, index[dimension], [load_element(k, offset) for k in keys]

    def body(number: ir.Value, counts: list[ir.Value]) -> Sequence[ir.Value]:
        results = []
        away = ops.multiply(number, factors[dimension])
        for count, (start, place, values) in zip(counts, own.values(), strict=True):
            offset = _within(ops.add(start, away), keys[0].layout.size)
            before = ops.compare("ult", number, place)
            for key, value in reversed(list(zip(keys, values, strict=True))):
                other = load_element(key, offset)
                pair = (value, other) if descending else (other, value)
                less, equal = _less(*pair, key.dtype)
                before = ops.arith.ori(less, ops.arith.andi(equal, before))
            results.append(ops.add(count, ops.cast_integer(before, ops.i32(), signed=False)))
        return results

    zero = ops.i32_constant(0)
    end = ops.i32_constant(shape[dimension])
    counts = ops.for_loop(zero, end, [zero] * len(own), body)
    return dict(zip(own, counts, strict=True))


def _store_at_ranks(
    ctx: RuleContext,
    memory: MemoryReference,
    array: RegisterArray,
    found: Mapping[tuple[int, int], ir.Value],
    dimension: int,
) -> None:
    """Stores the elements whose rank is inside the memory's shape at their ranks."""
    factors = strides(memory.shape)
    layout = array.layout
    assert isinstance(layout, RegisterLayout)
    with once_per_element(ctx.launch, layout):
        for register, element, index in element_indices(ctx.launch, layout):
            rank = found[register, element]
            place = list(index)
            place[dimension] = rank
            with ops.when(ops.compare("ult", rank, memory.shape[dimension])):
                value = ops.extract(array.registers[register], element)
                store_element(memory, linear(place, factors), value)


def _spread(array: RegisterArray, layout: RegisterLayout) -> RegisterArray:
    return array.materialize(layout) if array.is_splat else array


@rules.lowering(primitives.sort_p, Semantics.LANE)
def _sort(
    ctx: RuleContext,
    *arrays: RegisterArray,
    dimension: int,
    num_keys: int,
    is_stable: bool,
    **params: Any,
) -> list[RegisterArray]:
    if arrays[0].size == 1 or arrays[0].shape[dimension] == 1:
        return list(arrays)
    layout = padded(arrays[0].shape)
    arrays = tuple(_relaid(ctx, whole_bytes(array), layout) for array in arrays)
    with scratch_arrays(ctx, *((a.shape, a.dtype) for a in arrays)) as memories:
        for memory, array in zip(memories, arrays, strict=True):
            store(ctx, memory, array)
        ctx.synchronize()
        found = ranks(ctx, memories[:num_keys], layout, dimension)
        ctx.synchronize()
        for memory, array in zip(memories, arrays, strict=True):
            _store_at_ranks(ctx, memory, array, found, dimension)
        ctx.synchronize()
        hint = ctx.layout_hint
        return [load(ctx, memory, hint or layout) for memory in memories]


def _relaid(ctx: RuleContext, array: RegisterArray, layout: RegisterLayout) -> RegisterArray:
    from pallasite.plugin.lowering import relayout

    return relayout(ctx, _spread(array, layout), layout)


@rules.lowering(primitives.top_k_p, Semantics.LANE)
def _top_k(ctx: RuleContext, x: RegisterArray, *, k: int, **params: Any) -> list[RegisterArray]:
    dimension = params.get("axis", len(x.shape) - 1) % len(x.shape)
    shape = tuple(ctx.avals_out[0].shape)
    index_dtype = np.dtype(ctx.avals_out[1].dtype)
    if x.size == 1 or x.shape[dimension] == 1:
        return [x, RegisterArray.constant(0, index_dtype, shape)]
    layout = padded(x.shape)
    x = _relaid(ctx, whole_bytes(x), layout)
    from pallasite_std.rules.shape import iota

    numbers = iota(ctx, layout, index_dtype, dimension)
    given = (x.shape, x.dtype), (shape, x.dtype), (shape, index_dtype)
    with scratch_arrays(ctx, *given) as (memory, values, places):
        store(ctx, memory, x)
        ctx.synchronize()
        found = ranks(ctx, [memory], layout, dimension, descending=True)
        _store_at_ranks(ctx, values, x, found, dimension)
        _store_at_ranks(ctx, places, numbers, found, dimension)
        ctx.synchronize()
        hint = ctx.layout_hint
        return [load(ctx, values, hint), load(ctx, places, hint)]


@rules.inference(primitives.sort_p)
@rules.inference(primitives.top_k_p)
def _sorted(ctx: InferenceContext, *operands: AbstractValue, **params: Any) -> list[AbstractValue]:
    results = []
    for number, aval in enumerate(ctx.avals_out):
        result = ctx.result(aval, varying=True)
        if number < len(operands):
            moves(ctx, number, operands[number], result)
        results.append(result)
    return results
