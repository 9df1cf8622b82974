"""Changes of shape and placement: broadcasts, reshapes, slices, selects, iota, layout casts."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import (
    Extent,
    Layout,
    Owner,
    RegisterLayout,
    SplatLayout,
    default_strided,
    describe,
    padded,
    proposals_for,
    row_major,
)
from pallasite.plugin.layouts import transforms as tf
from pallasite.plugin.lowering import (
    LayoutContext,
    RegisterArray,
    RuleContext,
    Value,
    elementwise,
    rearrange,
    relayout,
)
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.bounds import bounds_of, holds, indices_of
from pallasite_std.memory.joins import joined
from pallasite_std.memory.portions import has_portions
from pallasite_std.memory.reduced_layouts import SHORT, in_lines
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.relayout import USUAL, as_bytes, in_whole_bytes
from pallasite_std.memory.row_parts import bytes_of
from pallasite_std.memory.rows import better_row, is_beginning, moved, same_row
from pallasite_std.memory.scratch import (
    by_loop,
    copied,
    load,
    nowhere,
    portioned,
    reshaped,
    result_layout,
    scratch_array,
    storable,
    store,
    viewed,
    whole_bytes,
)
from pallasite_std.memory.transfers import dense_layout
from pallasite_std.memory.usual_code import is_wide, most_code
from pallasite_std.primitives.layouts import layout_cast_p
from pallasite_std.rules.opaque import opaque
from pallasite_std.stacking import stacked

rules = RuleSet()
lax = _jax.lax_primitives
_ALL = (Semantics.LANE, Semantics.WARP)


@rules.lowering(lax.broadcast_in_dim_p, *_ALL)
def _broadcast_in_dim(
    ctx: RuleContext,
    x: RegisterArray,
    *dynamic: Value,
    shape: Sequence[int],
    broadcast_dimensions: Sequence[int],
    **params: Any,
) -> RegisterArray:
    shape = tuple(ctx.avals_out[0].shape)
    dims = tuple(broadcast_dimensions)
    if x.size == 1 or x.is_splat:
        return RegisterArray.splat(x.scalar, x.dtype, shape)
    target = ctx.layout_hint
    if target is None or isinstance(target, SplatLayout):
        repeated = _repeated(ctx, x, shape, dims)
        if repeated is not None:
            return repeated
        target = _familiar_broadcast(ctx, x.layout, shape, dims)
    with contextlib.suppress(InvalidValueError):
        if target is None:
            change = tf.broadcast_in_dim(x.layout, shape, dims)
            if ctx.in_warp or not _repeats_much(change.layout):
                return rearrange(x, change)
            raise InvalidValueError("every lane would hold elements that others hold, too")
        return rearrange(x, tf.broadcast_with_target(x.layout, target, dims))
    if ctx.in_warp:
        raise UnsupportedError("a broadcast of an array inside a warp-mapped region")
    if isinstance(target, RegisterLayout) and target.flat:
        found = by_loop(ctx, x, lambda memory: _stretched_view(memory, shape, dims), target)
        if found is not None:
            return found
    # By way of a layout that can be reduced to the operand's dimensions.
    wide = padded(shape) if not isinstance(target, RegisterLayout) or target.flat else target
    own = [x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
    x = _stretchable(ctx, rearrange(x, tf.reshape(x.layout, own)), wide)
    x = _stretched(x, wide)
    return x if target is None else relayout(ctx, x, target)


_LOOP = 60
"""Instructions of a transposition through shared memory, beside those that move whole vectors."""


def _repeated(
    ctx: RuleContext, x: RegisterArray, shape: tuple[int, ...], dims: tuple[int, ...]
) -> RegisterArray | None:
    """An array of an odd shape that nothing else decides about, as a row of vectors that a loop
    fills, if that is less code than what stores it otherwise."""
    bits = types.bit_width(x.dtype)
    if ctx.in_warp or bits < 8 or not any(n & (n - 1) for n in x.shape):
        return None
    row = moved(shape, bits)
    if row is None:
        return None
    with contextlib.suppress(InvalidValueError):
        layout = tf.broadcast_in_dim(x.layout, shape, dims).layout
        assert isinstance(layout, RegisterLayout)
        accesses = plan_access(layout, row_major(shape, bits), 16).everything
        if len(accesses) <= 2 * row.registers + x.layout.registers + _LOOP:
            return None
    return by_loop(ctx, x, lambda memory: _stretched_view(memory, shape, dims), row)


def _stretched_view(
    memory: MemoryReference, shape: Sequence[int], dims: Sequence[int]
) -> MemoryReference:
    """The elements of an array again and again, along further dimensions and those of extent 1."""
    extents: list[tuple[Extent, ...]] = [(Extent(n, 0),) for n in shape]
    for d, own in zip(dims, memory.layout.dims, strict=True):
        if math.prod(extent.size for extent in own) == shape[d]:
            extents[d] = own
    return memory.with_layout(memory.layout.with_dims(extents))


def _repeats_much(layout: Layout) -> bool:
    """Whether lanes hold many more elements than they have to, as others hold the same ones.

    Where extents are powers of two, casts to other layouts only have to choose among these.
    """
    if not any(extent & (extent - 1) for extent in layout.shape):
        return False
    held = layout.registers * layout.vector_length
    return held > 4 * padded(layout.shape).registers and held > 16


def _familiar_broadcast(
    ctx: RuleContext, layout: Layout, shape: tuple[int, ...], dims: tuple[int, ...]
) -> Layout | None:
    """A proposed layout that, reduced over the new dimensions, is the operand's; None if there is
    none, or if the operand would do as it is."""
    for candidate in proposals_for(ctx.kernel.registry, ctx.target).for_broadcast(shape):
        try:
            tf.broadcast_with_target(layout, candidate, dims)
        except InvalidValueError:
            continue
        return candidate
    return None


def stretchable(
    ctx: RuleContext, arrays: Sequence[RegisterArray], shape: Sequence[int]
) -> list[RegisterArray]:
    """Operands of an element-wise operation, in layouts that stretch to that of the result.

    Arrays with extents of 1 that lie otherwise over the threads are brought into the layout of an
    array of the result's shape, reduced over those extents. Arrays of the result's shape get one
    layout, unless one of them has a layout with a name, which somebody has chosen.
    """
    shape = tuple(shape)
    arrays = _in_one_layout(ctx, arrays, shape)
    distributed = [array for array in arrays if not array.is_splat and array.size > 1]
    narrow = [
        array for array in distributed if array.shape != shape and len(array.shape) == len(shape)
    ]
    if not narrow:
        return list(arrays)
    full = next((array.layout for array in distributed if array.shape == shape), None)
    dims = tuple(range(len(shape)))
    planned = ctx.layout_hint
    fits = isinstance(planned, RegisterLayout) and planned.shape == shape
    if not fits and not ctx.in_warp and getattr(narrow[0].layout, "flat", False):
        # Threads that run across the boundaries of dimensions cannot be repeated along one.
        planned = padded(shape)
    if full is None and isinstance(planned, RegisterLayout) and planned.shape == shape:
        # No operand has the layout that is wanted of the result.
        wide = _stretchable(ctx, narrow[0], planned)
        wide = _stretched(wide, planned)
        arrays = [wide if array is narrow[0] else array for array in arrays]
        narrow, full = narrow[1:], planned
    target = tf.broadcast_in_dim(narrow[0].layout, shape, dims).layout if full is None else full
    assert isinstance(target, RegisterLayout)
    return [_stretchable(ctx, a, target) if a in narrow else a for a in arrays]


def _in_one_layout(
    ctx: RuleContext, arrays: Sequence[RegisterArray], shape: tuple[int, ...]
) -> list[RegisterArray]:
    whole = [a for a in arrays if a.shape == shape and isinstance(a.layout, RegisterLayout)]
    layouts = {array.layout for array in whole}
    if len(layouts) < 2 or ctx.in_warp:
        return list(arrays)
    if not all(map(is_anonymous, layouts)):
        return list(arrays)
    target = ctx.layout_hint if ctx.layout_hint in layouts else whole[0].layout
    assert target is not None
    return [relayout(ctx, a, target) if a in whole else a for a in arrays]


def is_anonymous(layout: Layout) -> bool:
    """Whether a layout is one that rules choose by themselves. Those in which each lane holds all
    elements of a small array may have a name without anybody having chosen it."""
    if not isinstance(layout, RegisterLayout):
        return False
    everywhere = all(digit.owner in (Owner.REGISTER, Owner.VECTOR) for digit in layout.digits)
    return everywhere or describe(layout).startswith(("strided", "["))


def _stretched(array: RegisterArray, target: RegisterLayout) -> RegisterArray:
    dims = tuple(range(len(target.shape)))
    return rearrange(array, tf.broadcast_with_target(array.layout, target, dims))


def _stretchable(ctx: RuleContext, array: RegisterArray, target: RegisterLayout) -> RegisterArray:
    dims = tuple(range(len(target.shape)))
    with contextlib.suppress(InvalidValueError):
        tf.broadcast_with_target(array.layout, target, dims)
        return array
    stretched = [d for d in dims if array.shape[d] != target.shape[d]]
    if target.flat:
        # No part of such a layout is that of an array with extents of 1.
        shape, wide = target.shape, padded(target.shape)
        if _repeats(array, stretched, target, wide):
            view = functools.partial(_stretched_view, shape=shape, dims=dims)
            found = by_loop(ctx, array, view, target, shape)
            if found is not None:
                return found
        return relayout(ctx, _stretched(_stretchable(ctx, array, wide), wide), target)
    reduced = tf.expand_dims(tf.reduce(target, stretched), stretched).layout
    return relayout(ctx, array, reduced)


_AROUND = 20
"""Instructions of a conversion through shared memory, beside its accesses."""


def _repeats(array: RegisterArray, stretched: Sequence[int], target: Layout, wide: Layout) -> bool:
    """Whether an array is repeated in shared memory: by wide accesses, or in a loop where the code
    would be too long that stores it in another layout beside the loads and stores of the other
    operand and of the result."""
    bits = types.bit_width(array.dtype)
    if is_wide(math.prod(array.shape[max(stretched) + 1 :]), bits):
        return True
    moved = tf.reduce(wide, stretched).registers + wide.registers + target.registers
    others = 2 * target.registers + target.registers * target.vector_length * bits / 32
    return _AROUND + moved + others > most_code(target.shape, bits)


@rules.lowering(lax.reshape_p, *_ALL)
def _reshape(
    ctx: RuleContext,
    x: RegisterArray,
    *dynamic: Value,
    new_sizes: Any,
    dimensions: Any,
    **params: Any,
) -> RegisterArray:
    if dimensions is not None:
        raise UnsupportedError("a reshape that also permutes dimensions", got=dimensions)
    shape = tuple(ctx.avals_out[0].shape)
    if shape == ():
        return RegisterArray.splat(x.scalar, x.dtype)
    planned = _planned(ctx)
    with contextlib.suppress(InvalidValueError):
        change = tf.reshape(x.layout, shape)
        if planned is None or change.layout in (planned, SplatLayout(shape)):
            return rearrange(x, change)
    if x.is_splat or x.size == 1:
        return RegisterArray.splat(x.scalar, x.dtype, shape)
    bits = types.bit_width(x.dtype)
    wanted = ctx.layout_hint or moved(shape, max(8, bits))

    def move(array: RegisterArray) -> RegisterArray:
        return copied(ctx, array, lambda memory: reshaped(memory, shape), wanted)

    if bits < 8 and not types.is_bool(x.dtype):
        stored = x.layout, wanted or result_layout(ctx, shape, x.dtype)
        if not all(in_whole_bytes(layout, bits) for layout in stored):
            return as_bytes(x, move)
    return move(x)


def _planned(ctx: RuleContext) -> Layout | None:
    """The layout that inference has decided for the result, if there is any inference."""
    return None if ctx.kernel.plan is None else ctx.layout_hint


@rules.layout(lax.reshape_p)
@rules.layout(lax.squeeze_p)
def _reshape_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[Layout | None]:
    layouts: list[Layout | None] = [None] * len(ctx.avals_in)
    before, after = ctx.avals_in[0], ctx.avals_out[0]
    renamed = [n for n in before.shape if n > 1] == [n for n in after.shape if n > 1]
    if len(before.shape) > 1 == len(after.shape) and wanted[0] is None and not renamed:
        layouts[0] = moved(tuple(before.shape), max(8, types.bit_width(before.dtype)))
    return layouts


# Elements in one row are so in other dimensions, too.
_reshape_layout.moves = lambda avals_in, **params: True  # type: ignore[attr-defined]


@rules.lowering(lax.squeeze_p, *_ALL)
def _squeeze(ctx: RuleContext, x: RegisterArray, **params: Any) -> RegisterArray:
    shape = ctx.avals_out[0].shape
    if shape == ():
        return RegisterArray.splat(x.scalar, x.dtype)
    return rearrange(x, tf.reshape(x.layout, shape))


@rules.lowering(lax.transpose_p, *_ALL)
def _transpose(ctx: RuleContext, x: RegisterArray, *, permutation: Sequence[int]) -> RegisterArray:
    layout = x.layout
    moves = tuple(permutation) != tuple(range(len(x.shape)))
    if moves and isinstance(layout, RegisterLayout) and layout.flat:
        if types.is_bool(x.dtype) or types.bit_width(x.dtype) >= 8:
            shape = tuple(ctx.avals_out[0].shape)
            bits = 8 if types.is_bool(x.dtype) else types.bit_width(x.dtype)
            wanted = ctx.layout_hint
            wanted = wanted or moved(shape, bits) or padded(shape)
            return copied(ctx, x, lambda memory: _turned(memory, permutation), wanted)
        x = relayout(ctx, x, padded(x.shape))
    return rearrange(x, tf.transpose(x.layout, permutation))


@rules.layout(lax.transpose_p)
def _transpose_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None]


def _transpose_moves(avals_in: Any, *, permutation: Sequence[int]) -> bool:
    (aval,) = avals_in
    return _row_is_less(tuple(aval.shape), types.bit_width(aval.dtype))


def _row_is_less(shape: tuple[int, ...], bits: int) -> bool:
    """Whether whole vectors, which a loop brings into another order, are much less code than the
    elements one by one."""
    if math.prod(shape) < 2 or bits < 8 or math.prod(shape) * bits // 8 > USUAL:
        return False
    own = default_strided(shape, bits)
    best = better_row(own, 128 // bits)
    if best is None or own.flat:
        return own.flat
    return 2 * own.registers * own.vector_length > 4 * best.registers + _LOOP


_transpose_layout.moves = _transpose_moves  # type: ignore[attr-defined]


def _turned(memory: MemoryReference, permutation: Sequence[int]) -> MemoryReference:
    return memory.with_layout(memory.layout.transpose(tuple(permutation)))


@rules.layout(_jax.slice_p)
def _slice_layout(
    ctx: LayoutContext, wanted: Any, *, limit_indices: Sequence[int], **params: Any
) -> list[Layout | None]:
    """Lanes that hold whole rows rename registers for parts of these."""
    shape = tuple(ctx.avals_in[0].shape)
    cut = [d for d, size in enumerate(ctx.avals_out[0].shape) if size != shape[d]]
    bits = types.bit_width(ctx.avals_in[0].dtype)
    if cut != [len(shape) - 1] or shape[-1] > SHORT or bits < 8:
        return [None]
    return [in_lines(shape, len(shape) - 1)]


def _slice_result(
    avals_in: Any, layouts: Any, *, start_indices: Any, limit_indices: Any, strides: Any
) -> list[Layout | None]:
    (layout,) = layouts
    if layout is None or (strides is not None and any(stride != 1 for stride in strides)):
        return [None]
    sizes = [limit - start for start, limit in zip(start_indices, limit_indices, strict=True)]
    return [layout.slice(start_indices, sizes).layout]


def _slice_moves(avals_in: Any, **params: Any) -> bool:
    """Whether the slice goes through memory, as far as that is known before there are layouts, or
    is the beginning of a row."""
    aval = avals_in[0]
    try:
        layout = default_strided(tuple(aval.shape), types.bit_width(aval.dtype))
        goes = _slice_result(avals_in, [layout], **params) == [None]
    except InvalidValueError:
        return True
    odd = any(extent & (extent - 1) for extent in aval.shape)
    beginning = is_beginning(aval.shape, params["start_indices"], params["limit_indices"])
    beginning &= types.is_bool(aval.dtype) or types.bit_width(aval.dtype) >= 8
    row = beginning or _row_is_less(tuple(aval.shape), types.bit_width(aval.dtype))
    return goes or (odd and row)


_slice_layout.result_layouts = _slice_result  # type: ignore[attr-defined]
_slice_layout.moves = _slice_moves  # type: ignore[attr-defined]


@rules.lowering(_jax.slice_p, Semantics.LANE)
def _slice(
    ctx: RuleContext,
    x: RegisterArray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
) -> RegisterArray:
    sizes = tuple(ctx.avals_out[0].shape)
    if x.is_splat or x.size == 1:
        return RegisterArray.splat(x.scalar, x.dtype, sizes)
    steps = [1] * len(sizes) if strides is None else list(strides)
    steps = [1 if size == 1 else step for size, step in zip(sizes, steps, strict=True)]
    planned = _planned(ctx)
    if all(step == 1 for step in steps):
        with contextlib.suppress(InvalidValueError):
            change = x.layout.slice(start_indices, sizes)
            if planned is None or change.layout == planned:
                return rearrange(x, change)
    row = same_row(x.layout, sizes)
    wanted = ctx.layout_hint or row
    beginning = all(step == 1 for step in steps) and is_beginning(x.shape, start_indices, sizes)
    if beginning and row is not None and wanted == row:
        return RegisterArray(tuple(x.registers[: row.registers]), row, x.dtype)
    # The slice cuts through what one thread number describes.
    return copied(
        ctx,
        whole_bytes(x),
        lambda memory: viewed(memory, start_indices, sizes, steps),
        wanted or moved(sizes, max(8, types.bit_width(x.dtype))),
    )


@rules.lowering(lax.concatenate_p, Semantics.LANE)
def _concatenate(ctx: RuleContext, *arrays: RegisterArray, dimension: int) -> RegisterArray:
    shape = ctx.avals_out[0].shape
    if all(a.is_splat for a in arrays) and len({a.registers[0] for a in arrays}) == 1:
        return RegisterArray.splat(arrays[0].scalar, arrays[0].dtype, shape)
    layouts = [a.layout for a in arrays if isinstance(a.layout, RegisterLayout)]
    target = ctx.layout_hint
    if not isinstance(target, RegisterLayout):
        target = default_strided(shape, types.bit_width(arrays[0].dtype))
        if layouts:
            with contextlib.suppress(UnsupportedError, InvalidValueError):
                target = stacked(layouts[0], dimension, shape)
    parts = None if ctx.in_warp else _fitting_parts(target, arrays, dimension)
    renames = parts is not None and all(
        array.layout in (part, SplatLayout(array.shape))
        for array, part in zip(arrays, parts, strict=True)
    )
    if not (ctx.in_warp or renames or _is_even(arrays) or types.bit_width(arrays[0].dtype) < 8):
        wanted = ctx.layout_hint or moved(tuple(shape), types.bit_width(arrays[0].dtype))
        if isinstance(wanted, RegisterLayout):
            found = joined(ctx, arrays, dimension, wanted)
            if found is not None:
                return found
    if parts is None:
        return beside(ctx, arrays, dimension)
    registers: list[ir.Value | None] = [None] * target.registers
    position = 0
    numbers = {index: number for number, index in enumerate(_first_elements(target))}
    for array, part in zip(arrays, parts, strict=True):
        size = array.shape[dimension]
        if array.is_splat:
            array = array.materialize(part)
        array = relayout(ctx, array, part)
        for register, index in enumerate(_first_elements(part)):
            shifted = list(index)
            shifted[dimension] += position
            registers[numbers[tuple(shifted)]] = array.registers[register]
        position += size
    assert all(register is not None for register in registers)
    return RegisterArray(tuple(r for r in registers if r is not None), target, arrays[0].dtype)


def _fitting_parts(
    target: RegisterLayout, arrays: Sequence[RegisterArray], dimension: int
) -> list[RegisterLayout] | None:
    """The layouts of the parts of an array, if the registers of its layout are those of these."""
    position, parts = 0, []
    for array in arrays:
        starts = [0] * len(target.shape)
        starts[dimension] = position
        try:
            part = target.slice(starts, array.shape).layout
        except InvalidValueError:
            return None
        if not isinstance(part, RegisterLayout) or part.vector_length != target.vector_length:
            return None
        position += array.shape[dimension]
        parts.append(part)
    return parts if sum(part.registers for part in parts) == target.registers else None


def beside(ctx: RuleContext, arrays: Sequence[RegisterArray], dimension: int) -> RegisterArray:
    """Parts of an equation's result that are stored one beside the other."""
    shape = tuple(ctx.avals_out[0].shape)
    arrays = [storable(ctx, whole_bytes(array)) for array in arrays]
    dtype, starts = arrays[0].dtype, []
    for number in range(len(arrays)):
        before = sum(one.shape[dimension] for one in arrays[:number])
        starts.append([before if d == dimension else 0 for d in range(len(shape))])
    rows = row_major(shape, types.bit_width(dtype))
    if has_portions(ctx, bytes_of(shape, rows.element_bits)):
        whole = nowhere(rows, dtype)
        views = [
            (viewed(whole, first, array.shape), array)
            for first, array in zip(starts, arrays, strict=True)
        ]
        hint = ctx.layout_hint
        layout = hint if isinstance(hint, RegisterLayout) else result_layout(ctx, shape, dtype)
        return portioned(ctx, shape, views, whole, layout)
    with scratch_array(ctx, shape, dtype) as memory:
        for first, array in zip(starts, arrays, strict=True):
            store(ctx, viewed(memory, first, array.shape), array)
        ctx.synchronize()
        return load(ctx, memory, ctx.layout_hint)


def _is_even(arrays: Sequence[RegisterArray]) -> bool:
    """Whether all extents are powers of two."""
    return not any(extent & (extent - 1) for array in arrays for extent in array.shape)


def join_moves(avals_in: Any, **params: Any) -> bool:
    """Whether the parts go through memory, from rows of vectors."""
    return not _is_even(avals_in) and all(types.bit_width(one.dtype) >= 8 for one in avals_in)


@rules.layout(lax.concatenate_p)
def _concatenate_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


_concatenate_layout.moves = join_moves  # type: ignore[attr-defined]


def _first_elements(layout: RegisterLayout) -> list[tuple[int, ...]]:
    return [layout.element_at(0, 0, register, 0) for register in range(layout.registers)]


@rules.lowering(lax.select_n_p, *_ALL)
def _select_n(ctx: RuleContext, which: RegisterArray, *cases: RegisterArray) -> RegisterArray:
    shape = ctx.avals_out[0].shape
    if len(cases) == 1:
        return cases[0]
    if types.is_bool(which.dtype):
        return elementwise(
            lambda p, no, yes: ops.arith.select(p, yes, no),
            stretchable(ctx, [which, cases[0], cases[1]], shape),
            cases[0].dtype,
            shape,
        )
    result = cases[-1]
    for number in reversed(range(len(cases) - 1)):
        result = elementwise(
            lambda p, case, rest, number=number: ops.arith.select(
                ops.compare("eq", p, number), case, rest
            ),
            stretchable(ctx, [which, cases[number], result], shape),
            cases[0].dtype,
            shape,
        )
    return result


@rules.lowering(lax.iota_p, Semantics.LANE, Semantics.WARP)
def _iota(
    ctx: RuleContext, *dynamic: Value, dtype: Any, shape: Any, dimension: int, **params: Any
) -> RegisterArray:
    layout = ctx.layout_hint
    shape = tuple(ctx.avals_out[0].shape)
    dtype = np.dtype(dtype)
    if not isinstance(layout, RegisterLayout):
        layout = (
            default_strided(shape, types.bit_width(dtype))
            if ctx.vector_limit is None
            else dense_layout(shape, ctx.vector_limit)
        )
    return iota(ctx, layout, dtype, dimension)


@rules.layout(lax.iota_p)
def _iota_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


# In one row, the indices of each element along several dimensions would be quotients.
_iota_layout.moves = lambda avals_in, shape, **params: len(shape) > 1  # type: ignore[attr-defined]


def iota(
    ctx: RuleContext, layout: RegisterLayout, dtype: np.dtype[Any], dimension: int
) -> RegisterArray:
    """The index of every element along one dimension, in a given layout."""
    from pallasite_std.math.conversion import convert

    launch = ctx.launch
    entry = 0 if layout.flat else dimension
    thread: ir.Value | None = None
    for digit, weight in layout.weighted_dims[entry]:
        if not digit.owner.is_thread:
            continue
        index = launch.lane_id if digit.owner is Owner.LANE else launch.warp_id
        value = ops.remainder_unsigned(ops.divide_unsigned(index, digit.stride), digit.size)
        value = ops.multiply(value, weight)
        thread = value if thread is None else ops.add(thread, value)
    vector = [
        sum(d.value(v) * w for d, w in layout.weighted_dims[entry] if d.owner is Owner.VECTOR)
        for v in range(layout.vector_length)
    ]
    inner = 1
    for extent in layout.shape[dimension + 1 :]:
        inner *= extent
    registers = []
    cache: dict[int, ir.Value] = {}
    for indices in layout.register_indices():
        base = indices[entry]
        if base not in cache:
            elements = []
            for offset in vector:
                number = base + offset
                if thread is None:
                    value = ops.i32_constant(number)
                else:
                    value = ops.add(thread, number)
                if layout.flat:
                    value = ops.divide_unsigned(value, inner)
                    if dimension > 0:
                        value = ops.remainder_unsigned(value, layout.shape[dimension])
                elements.append(value)
            cache[base] = convert(ops.from_elements(elements), np.dtype(np.int32), dtype)
            bounds = bounds_of([base + offset for offset in vector], layout.thread_reach(entry))
            if not layout.flat and holds(dtype, bounds):
                indices_of(ctx.kernel).note(ctx.kernel, cache[base], bounds)
        registers.append(cache[base])
    return RegisterArray(tuple(registers), layout, dtype)


@rules.lowering(layout_cast_p, Semantics.LANE)
def _layout_cast(ctx: RuleContext, x: RegisterArray, *, new_layout: Any) -> RegisterArray:
    target = new_layout.resolve(x.shape, x.dtype)
    return relayout(ctx, x, target)


@rules.layout(layout_cast_p)
def _layout_cast_hint(ctx: LayoutContext, wanted: Any, *, new_layout: Any) -> list[Layout | None]:
    aval = ctx.avals_in[0]
    return [new_layout.resolve(aval.shape, aval.dtype)]


def _layout_cast_result(avals_in: Any, layouts: Any, *, new_layout: Any) -> list[Layout]:
    return [new_layout.resolve(avals_in[0].shape, avals_in[0].dtype)]


_layout_cast_hint.result_layouts = _layout_cast_result  # type: ignore[attr-defined]


@rules.lowering(lax.optimization_barrier_p, *_ALL)
def _optimization_barrier(ctx: RuleContext, *values: Value) -> list[Value]:
    arrays = [value for value in values if isinstance(value, RegisterArray)]
    registers = {hash(one): one for array in arrays for one in array.registers}
    made = dict(zip(registers, opaque(list(registers.values())), strict=True))
    return [
        value.map(lambda one: made[hash(one)]) if isinstance(value, RegisterArray) else value
        for value in values
    ]


@rules.layout(lax.optimization_barrier_p)
def _optimization_barrier_hint(
    ctx: LayoutContext, wanted: Sequence[Layout | None]
) -> list[Layout | None]:
    return list(wanted)


_optimization_barrier_hint.same_layout = True  # type: ignore[attr-defined]


@rules.lowering(_jax.broadcast_to_p, *_ALL)
def _broadcast_to(ctx: RuleContext, x: RegisterArray, *, shape: Any) -> RegisterArray:
    if x.shape == tuple(shape):
        return x
    if x.size == 1:
        return RegisterArray.splat(x.scalar, x.dtype, shape)
    dims = tuple(range(len(shape) - len(x.shape), len(shape)))
    return _broadcast_in_dim(ctx, x, shape=shape, broadcast_dimensions=dims)


@rules.lowering(_jax.stop_gradient_p, *_ALL)
@rules.lowering(_jax.reshard_p, *_ALL)
@rules.lowering(lax.copy_p, *_ALL)
def _copy(ctx: RuleContext, x: Value, **params: Any) -> Value:
    """In a kernel every array is on one device: there is nothing to distribute otherwise."""
    return x


# Elementwise hints: what is wanted of the result is wanted of every operand of the same shape.
def same_layout_hint(
    ctx: LayoutContext, wanted: Sequence[Layout | None], **params: Any
) -> list[Layout | None]:
    """Layout rule of element-wise primitives."""
    hint = wanted[0]
    shape = ctx.avals_out[0].shape
    return [
        hint if hint is not None and getattr(aval, "shape", None) == shape else None
        for aval in ctx.avals_in
    ]


same_layout_hint.same_layout = True  # type: ignore[attr-defined]

for _primitive in (
    lax.select_n_p,
    lax.convert_element_type_p,
    lax.copy_p,
    _jax.reshard_p,
    _jax.stop_gradient_p,
):
    rules.layout(_primitive)(same_layout_hint)
