"""Slices of arrays that are concatenated, in one movement through scratch shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.inference import AbstractValue, InferenceContext
from pallasite.plugin.ir import types
from pallasite.plugin.layouts import RegisterLayout
from pallasite.plugin.lowering import LayoutContext, RegisterArray, RuleContext
from pallasite_std.inference.shape import moves
from pallasite_std.memory.joins import joined_slices
from pallasite_std.memory.rows import moved
from pallasite_std.memory.scratch import copied, result_layout, viewed
from pallasite_std.primitives.slices import Slice, joined_slices_p
from pallasite_std.rules.shape import beside

rules = RuleSet()


@rules.lowering(joined_slices_p, Semantics.LANE)
def _joined_slices(
    ctx: RuleContext, *arrays: RegisterArray, parts: Sequence[Slice], dimension: int
) -> RegisterArray:
    shape, dtype = tuple(ctx.avals_out[0].shape), arrays[0].dtype
    wanted = ctx.layout_hint or moved(shape, types.bit_width(dtype))
    if not isinstance(wanted, RegisterLayout):
        wanted = result_layout(ctx, shape, dtype)
    found = joined_slices(ctx, arrays, parts, dimension, wanted)
    if found is not None:
        return found
    pieces = []
    for part in parts:
        array = arrays[part.operand]
        starts, sizes = [0] * len(shape), list(array.shape)
        starts[dimension], sizes[dimension] = part.start, part.size

        def view(memory: Any, starts: Any = starts, sizes: Any = sizes) -> Any:
            return viewed(memory, starts, sizes)

        pieces.append(copied(ctx, array, view, moved(tuple(sizes), types.bit_width(dtype)), sizes))
    return beside(ctx, pieces, dimension)


@rules.layout(joined_slices_p)
def _layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


_layout.moves = lambda avals_in, **params: True  # type: ignore[attr-defined]


@rules.inference(joined_slices_p)
def _inference(
    ctx: InferenceContext, *arrays: AbstractValue, parts: Sequence[Slice], dimension: int
) -> AbstractValue:
    result = ctx.result(varying=True)
    inner = math.prod(ctx.avals_out[0].shape[dimension + 1 :])
    run = math.gcd(16, *(n * inner for part in parts for n in (part.start, part.size)))
    for position, array in enumerate(arrays):
        moves(ctx, position, array, result, run=run)
    return result
