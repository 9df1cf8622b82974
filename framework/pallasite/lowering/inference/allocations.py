"""Allocations of scopes, as layout inference sees them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.ir import types
from pallasite.language.memory import (
    AbstractRefUnion,
    MemorySpace,
    memory_space_of,
    union_members,
)
from pallasite.layouts.memory import MemoryLayout, row_major
from pallasite.lowering.inference.context import InferenceContext
from pallasite.lowering.inference.values import AbstractValue, MemoryValue, OtherValue
from pallasite.memory_events import EventKind


def first_value(
    ctx: InferenceContext, aval: Any, initial: AbstractValue | None = None
) -> AbstractValue:
    """The value at the beginning of the scope of a reference that stands for one."""
    sources = [] if initial is None else [initial]
    value = ctx.result(aval.inner_aval, *sources, varying=False)
    layout = memory_space_of(aval).value_layout(aval)
    if layout is not None:
        ctx.makes(value, layout, "it is an accumulator", pinned=True)
    return value


def allocation(ctx: InferenceContext, variable: Any, name: str) -> AbstractValue:
    """The memory that a scope allocates for a variable, as its memory space has it."""
    space = memory_space_of(variable.aval)
    if not isinstance(space, MemorySpace):
        return OtherValue(variable.aval)
    return space.infer_allocation(ctx, variable, name)


def shared_allocation(
    ctx: InferenceContext,
    variable: Any,
    name: str,
    layouts: Sequence[MemoryLayout] | None = None,
) -> AbstractValue:
    """An allocation of numbers in shared memory; see ``InferenceContext.shared_allocation``."""
    aval = variable.aval
    space = memory_space_of(aval)
    path = (*ctx.path, id(ctx.equation))
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    if isinstance(aval, AbstractRefUnion):
        members: dict[Any, int] = {}
        for offset, member_shape, member_dtype in union_members(aval):
            value = MemoryValue(space, member_shape, member_dtype, name=name)
            candidates = open_layout(value, types.bit_width(member_dtype))
            key = (offset, str(member_dtype), member_shape)
            members[key] = ctx.walk.allocation(
                path, variable, value, candidates, ctx.place, member=key
            )
        union = MemoryValue(space, shape, dtype, None, members, name)
        ctx.event(EventKind.ALLOCATE, union)
        return union
    value = MemoryValue(space, shape, dtype, name=name)
    candidates = list(layouts or open_layout(value, types.bit_width(dtype)))
    number = ctx.walk.allocation(path, variable, value, candidates, ctx.place)
    allocation = MemoryValue(space, shape, dtype, number, name=name)
    ctx.event(EventKind.ALLOCATE, allocation)
    return allocation


def open_layout(value: MemoryValue, bits: int) -> list[MemoryLayout]:
    """Layouts that an allocation in shared memory may have: row-major, then tiled ones.

    Tiles are what TMA and the tensor cores know: 8 rows of the width of a swizzle.
    """
    return [row_major(value.shape, bits), *tiled(value.shape, bits, 8)]


@functools.lru_cache(maxsize=256)
def tiled(shape: tuple[int, ...], bits: int, height: int) -> tuple[MemoryLayout, ...]:
    """The layouts in tiles of so many rows that are as wide as a swizzle."""
    found: list[MemoryLayout] = []
    if len(shape) < 2 or bits > 32:
        return ()
    rows, columns = shape[-2:]
    for swizzle in (128, 64, 32, 16):
        width = swizzle * 8 // bits
        if rows % 8 or rows % height or columns % width or (swizzle == 16 and bits == 32):
            continue
        shape_of_tiles = (*shape[:-2], rows // height, columns // width, height, width)
        found.append(row_major(shape_of_tiles, bits).untile((height, width)).with_swizzle(swizzle))
    return tuple(found)
