"""Operations that move elements to other places: padding, reversal, parts at traced positions.

They go through scratch shared memory, whatever the layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import primitives

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.ir import types
from pallasite.plugin.layouts import Extent, OffsetTerm, padded
from pallasite.plugin.lowering import LayoutContext, RegisterArray, RuleContext
from pallasite_std.memory.indices import clamped_index
from pallasite_std.memory.reference_types import DynamicOffset, MemoryReference
from pallasite_std.memory.rows import moved
from pallasite_std.memory.scratch import (
    by_loop,
    copied,
    load,
    scratch_array,
    storable,
    store,
    viewed,
    whole_bytes,
)
from pallasite_std.rules.shape import join_moves, same_layout_hint

rules = RuleSet()


@rules.lowering(primitives.rev_p, Semantics.LANE)
def _rev(ctx: RuleContext, x: RegisterArray, *, dimensions: Sequence[int]) -> RegisterArray:
    if x.is_splat or x.size == 1:
        return x
    turned = [d in dimensions and n > 1 for d, n in enumerate(x.shape)]
    starts = [n - 1 if turn else 0 for n, turn in zip(x.shape, turned, strict=True)]
    steps = [-1 if turn else 1 for turn in turned]
    layout = ctx.layout_hint or x.layout
    return copied(ctx, whole_bytes(x), lambda m: viewed(m, starts, x.shape, steps), layout)


rules.layout(primitives.rev_p)(same_layout_hint)


@rules.lowering(primitives.pad_p, Semantics.LANE)
def _pad(
    ctx: RuleContext, x: RegisterArray, value: RegisterArray, *, padding_config: Any
) -> RegisterArray:
    shape = tuple(ctx.avals_out[0].shape)
    # The elements that are left of each dimension: negative padding cuts some off.
    kept, starts, steps = [], [], []
    config = [tuple(map(int, one)) for one in padding_config]
    for extent, size, (low, _, interior) in zip(x.shape, shape, config, strict=True):
        step = interior + 1
        inside = [low + i * step for i in range(extent)]
        chosen = [i for i, place in enumerate(inside) if 0 <= place < size]
        kept.append((chosen[0], len(chosen)) if chosen else (0, 0))
        starts.append(inside[chosen[0]] if chosen else 0)
        steps.append(step)
    filler = RegisterArray.splat(value.scalar, x.dtype, shape)
    if any(count == 0 for _, count in kept):
        return filler
    x = storable(ctx, whole_bytes(x), by_rows=steps[-1:] == [1])
    counts = [count for _, count in kept]
    if tuple(counts) != x.shape:
        first = [start for start, _ in kept]
        if x.is_splat or x.size == 1:
            x = RegisterArray.splat(x.scalar, x.dtype, tuple(counts))
        else:
            target = padded(tuple(counts))
            x = copied(ctx, x, lambda memory: viewed(memory, first, counts), target, counts)
    with scratch_array(ctx, shape, x.dtype) as memory:
        store(ctx, memory, filler)
        ctx.synchronize()
        store(ctx, viewed(memory, starts, counts, steps), x)
        ctx.synchronize()
        return load(ctx, memory, ctx.layout_hint)


def _part(
    ctx: RuleContext, memory: MemoryReference, starts: Sequence[RegisterArray], sizes: Sequence[int]
) -> MemoryReference:
    """The part of an array that begins at traced indices, which are clamped so that it fits."""
    part = viewed(memory, [0] * len(sizes), sizes)
    dynamic = []
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        most = memory.shape[dim] - size
        if most == 0:
            continue
        index = clamped_index(start.scalar, types.is_signed(start.dtype), most)
        stride = memory.layout.dims[dim][0].stride
        dynamic.append(DynamicOffset(index, OffsetTerm(1, None, stride)))
    return dataclasses.replace(part, dynamic=(*part.dynamic, *dynamic))


@rules.lowering(primitives.dynamic_slice_p, Semantics.LANE)
def _dynamic_slice(
    ctx: RuleContext, x: RegisterArray, *starts: RegisterArray, slice_sizes: Sequence[int]
) -> RegisterArray:
    if x.is_splat or x.size == 1:
        return RegisterArray.splat(x.scalar, x.dtype, slice_sizes)
    starts = starts[: len(x.shape)]
    return copied(ctx, whole_bytes(x), lambda m: _part(ctx, m, starts, slice_sizes), None)


@rules.lowering(primitives.dynamic_update_slice_p, Semantics.LANE)
def _dynamic_update_slice(
    ctx: RuleContext, x: RegisterArray, update: RegisterArray, *starts: RegisterArray
) -> RegisterArray:
    x, update = whole_bytes(x), storable(ctx, update)
    with scratch_array(ctx, x.shape, x.dtype) as memory:
        store(ctx, memory, x)
        ctx.synchronize()
        store(ctx, _part(ctx, memory, starts[: len(x.shape)], update.shape), update)
        ctx.synchronize()
        same = x.layout if not x.is_splat else None
        return load(ctx, memory, ctx.layout_hint or same)


@rules.lowering(lax.tile_p, Semantics.LANE)
def _tile(ctx: RuleContext, x: RegisterArray, *, reps: Sequence[int]) -> RegisterArray:
    shape = tuple(ctx.avals_out[0].shape)
    if x.is_splat or x.size == 1:
        return RegisterArray.splat(x.scalar, x.dtype, shape)
    x = whole_bytes(x)
    if any(extent & (extent - 1) for extent in x.shape):
        wanted = ctx.layout_hint or moved(shape, types.bit_width(x.dtype))
        found = by_loop(ctx, x, lambda memory: _tiled(memory, reps), wanted)
        if found is not None:
            return found
    x = storable(ctx, x)
    with scratch_array(ctx, shape, x.dtype) as memory:
        for place in np.ndindex(*reps):
            starts = [i * n for i, n in zip(place, x.shape, strict=True)]
            store(ctx, viewed(memory, starts, x.shape), x)
        ctx.synchronize()
        return load(ctx, memory, ctx.layout_hint)


def _tiled(memory: MemoryReference, reps: Sequence[int]) -> MemoryReference:
    """Copies of an array one beside the other."""
    dims = [(Extent(times, 0), *dim) for times, dim in zip(reps, memory.layout.dims, strict=True)]
    return memory.with_layout(memory.layout.with_dims(dims))


@rules.layout(lax.tile_p)
def _tile_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


_tile_layout.moves = join_moves  # type: ignore[attr-defined]
