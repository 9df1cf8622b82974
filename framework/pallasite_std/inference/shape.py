"""Changes of shape and placement."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from pallasite.plugin import PallasiteError, RuleSet
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import AbstractValue, ArrayValue, InferenceContext, Pairs
from pallasite.plugin.ir import types
from pallasite.plugin.layouts import Layout, RegisterLayout, padded
from pallasite_std.inference import relations
from pallasite_std.inference.costs import TRUTHS, reduction_cost
from pallasite_std.memory.reduced_layouts import SHORT, in_lines
from pallasite_std.memory.rows import whole_rows
from pallasite_std.primitives.layouts import layout_cast_p
from pallasite_std.stacking import stacked

rules = RuleSet()
lax = _jax.lax_primitives


def _related(
    ctx: InferenceContext, x: AbstractValue, pairs: Pairs, position: int = 0
) -> AbstractValue:
    result = ctx.result(None, x) if isinstance(x, ArrayValue) else ctx.result(varying=False)
    ctx.relate(position, x, result, pairs)
    return result


@rules.inference(lax.broadcast_in_dim_p)
def _broadcast_in_dim(
    ctx: InferenceContext,
    x: AbstractValue,
    *dynamic: AbstractValue,
    broadcast_dimensions: Sequence[int],
    **params: Any,
) -> AbstractValue:
    return _stretched(ctx, x, tuple(broadcast_dimensions))


@rules.inference(_jax.broadcast_to_p)
def _broadcast_to(ctx: InferenceContext, x: AbstractValue, **params: Any) -> AbstractValue:
    before, after = len(ctx.avals_in[0].shape), len(ctx.avals_out[0].shape)
    return _stretched(ctx, x, tuple(range(after - before, after)))


def _stretched(ctx: InferenceContext, x: AbstractValue, dims: tuple[int, ...]) -> AbstractValue:
    before, after = tuple(ctx.avals_in[0].shape), tuple(ctx.avals_out[0].shape)
    exact = relations.broadcast(before, after, dims, ctx.proposals)
    whole = isinstance(x, ArrayValue) and x.bits >= 8 and math.prod(before) > 1
    if not whole or not any(n & (n - 1) for n in before):
        return _related(ctx, x, exact)
    last = bool(dims) and dims[-1] == len(after) - 1 and before[-1] == after[-1]
    run = math.gcd(16, after[-1]) if last else 1
    return moved(ctx, x, exact, run, counted=last)


@rules.inference(lax.reshape_p)
@rules.inference(lax.squeeze_p)
def _reshape(
    ctx: InferenceContext, x: AbstractValue, *dynamic: AbstractValue, **params: Any
) -> AbstractValue:
    before, after = tuple(ctx.avals_in[0].shape), tuple(ctx.avals_out[0].shape)
    same = [n for n in before if n > 1] == [n for n in after if n > 1]
    if same and any(n & (n - 1) for n in before) and math.prod(before) > 1:
        # Any layout loses or gets dimensions of one element.
        return _related(ctx, x, relations.reshape(before, after))
    return moved(ctx, x, relations.reshape(before, after))


def moved(
    ctx: InferenceContext,
    x: AbstractValue,
    exact: Pairs = relations.nothing,
    run: int | None = None,
    counted: bool = True,
    by_rows: bool = False,
    varying: bool | None = None,
) -> AbstractValue:
    """The result of an equation that moves the elements of its first operand, through scratch
    memory unless it works between two layouts by renaming registers.

    Args:
      ctx: of the rule.
      x: the operand.
      exact: the layouts between which it renames registers.
      run: consecutive elements that stay so; None if that is not known.
      counted: whether code counts that moves elements one by one in such layouts.
      by_rows: whether the operand is stored to rows that do not follow each other in memory.
      varying: whether elements differ where those of the operand do not.
    """
    result = (
        ctx.result(None, x, varying=varying)
        if isinstance(x, ArrayValue)
        else ctx.result(varying=False)
    )
    moves(ctx, 0, x, result, exact, run, counted, by_rows)
    return result


def moves(
    ctx: InferenceContext,
    position: int,
    x: AbstractValue,
    result: AbstractValue,
    exact: Pairs = relations.nothing,
    run: int | None = None,
    counted: bool = True,
    by_rows: bool = False,
) -> None:
    """The operand at ``position`` becomes part of a result; see :func:`moved`."""
    if isinstance(x, ArrayValue) and isinstance(result, ArrayValue) and math.prod(x.shape) > 1:
        if math.prod(result.shape) == 1:
            return
        relation = relations.Movement(
            exact, tuple(x.shape), tuple(result.shape), x.bits, run, counted, by_rows
        )
        ctx.relate(position, x, result, relation.pairs, relation.work)


@rules.inference(lax.transpose_p)
def _transpose(
    ctx: InferenceContext, x: AbstractValue, *, permutation: Sequence[int]
) -> AbstractValue:
    exact = relations.transpose(tuple(permutation), ctx.proposals)
    if isinstance(x, ArrayValue) and x.bits >= 8 and any(n & (n - 1) for n in x.shape):
        return moved(ctx, x, exact, run=1)
    return _related(ctx, x, exact)


@rules.inference(_jax.slice_p)
def _slice(
    ctx: InferenceContext,
    x: AbstractValue,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Any,
) -> AbstractValue:
    if strides is not None and any(stride != 1 for stride in strides):
        return moved(ctx, x)
    shape = tuple(ctx.avals_in[0].shape)
    sizes = [limit - start for start, limit in zip(start_indices, limit_indices, strict=True)]
    exact = relations.slice_(shape, tuple(start_indices), tuple(sizes), ctx.proposals)
    row = start_indices[-1] if sizes else 0
    run = math.gcd(sizes[-1], shape[-1], row, 16) if sizes else None
    if sizes and sizes[-1] != shape[-1] and 1 < shape[-1] <= SHORT and math.prod(shape):
        lines = in_lines(shape, len(shape) - 1)
        ctx.proposes(x, [] if lines is None else [lines])
    return moved(ctx, x, exact, run=run)


@rules.inference(primitives.rev_p)
def _rev(ctx: InferenceContext, x: AbstractValue, *, dimensions: Sequence[int]) -> AbstractValue:
    shape = ctx.avals_in[0].shape
    run = math.prod(shape[max(dimensions, default=-1) + 1 :])
    # As wide as one access may be.
    return moved(ctx, x, run=math.gcd(run, 16))


@rules.inference(primitives.pad_p)
def _pad(
    ctx: InferenceContext, x: AbstractValue, *_: AbstractValue, **params: Any
) -> AbstractValue:
    if not isinstance(x, ArrayValue) or x.bits < 8:
        return moved(ctx, x, varying=True)
    rows = whole_rows(x.shape, 1)
    ctx.proposes(x, [] if rows is None else [rows])
    return moved(ctx, x, by_rows=True, varying=True)


@rules.inference(primitives.dynamic_slice_p)
def _moved(
    ctx: InferenceContext, x: AbstractValue, *others: AbstractValue, **params: Any
) -> AbstractValue:
    return moved(ctx, x)


@rules.inference(jax.lax.tile_p)
def _tile(ctx: InferenceContext, x: AbstractValue, *, reps: Sequence[int]) -> AbstractValue:
    shape = tuple(ctx.avals_in[0].shape)
    odd = any(n & (n - 1) for n in shape)
    first = next((d for d, times in enumerate(reps) if times > 1), 0)
    return moved(ctx, x, run=math.gcd(16, math.prod(shape[first:])) if odd else None)


@rules.inference(primitives.dynamic_update_slice_p)
def _dynamic_update_slice(
    ctx: InferenceContext, x: AbstractValue, update: AbstractValue, *starts: AbstractValue
) -> AbstractValue:
    result = ctx.result(varying=True)
    moves(ctx, 0, x, result)
    moves(ctx, 1, update, result)
    return result


@rules.inference(lax.concatenate_p)
def _concatenate(ctx: InferenceContext, *arrays: AbstractValue, dimension: int) -> AbstractValue:
    result = ctx.result(varying=True)
    shape = ctx.avals_out[0].shape
    shapes = [tuple(aval.shape) for aval in ctx.avals_in]
    run = None
    if any(n & (n - 1) for one in shapes for n in one):
        run = math.gcd(16, *(math.prod(one[dimension:]) for one in shapes))
    for position, array in enumerate(arrays):
        exact = _part(shapes, tuple(shape), dimension, position)
        moves(ctx, position, array, result, exact, run)
    return result


def stretches(
    ctx: InferenceContext,
    position: int,
    x: AbstractValue,
    result: AbstractValue,
    *,
    in_row: bool = False,
) -> None:
    """An operand with extents of 1 is combined with arrays of the shape of the result; it takes
    less code if these are ``in_row``."""
    if isinstance(x, ArrayValue):
        after = tuple(ctx.avals_out[0].shape)
        exact = relations.broadcast(x.shape, after, tuple(range(len(after))), ctx.proposals)
        relation = relations.Movement(exact, tuple(x.shape), after, x.bits, in_row=in_row)
        if math.prod(x.shape) > 1:
            ctx.relate(position, x, result, relation.pairs, relation.work)


def _part(
    shapes: Sequence[tuple[int, ...]], whole: tuple[int, ...], dimension: int, position: int
) -> Pairs:
    """Of one of several parts: a result's layout has to be one of all of them."""
    ends = list(itertools.accumulate(shape[dimension] for shape in shapes))

    def parts(result: RegisterLayout) -> list[Layout]:
        found: list[Layout] = []
        for shape, end in zip(shapes, ends, strict=True):
            starts = [0] * len(whole)
            starts[dimension] = end - shape[dimension]
            found.append(result.slice(starts, shape).layout)
        return found

    def pairs(operand: Layout | None, result: Layout | None) -> Iterator[tuple[Layout, Layout]]:
        if isinstance(result, RegisterLayout):
            yield parts(result)[position], result
        if isinstance(operand, RegisterLayout):
            yield operand, stacked(operand, dimension, whole)

    def listed(operand: Layout | None, result: Layout | None) -> list[tuple[Layout, Layout]]:
        found = []
        for one in ((None, result), (operand, None)):
            try:
                found += list(pairs(*one))
            except PallasiteError:
                continue
        return found

    return listed


@rules.inference(lax.iota_p)
def _iota(ctx: InferenceContext, *dynamic: AbstractValue, **params: Any) -> AbstractValue:
    result = ctx.result()
    shape = ctx.avals_out[0].shape
    if len(shape) > 1 and any(n & (n - 1) for n in shape):
        width = next(n for n in (4, 2, 1) if shape[-1] % n == 0)
        rows = padded(tuple(shape), width) if math.prod(shape) else None
        if rows is not None and width == 1:
            rows = whole_rows(tuple(shape), width) or rows

        def pairs(one: Layout | None, _: Layout | None) -> list[tuple[Layout, Layout]]:
            return [(layout, layout) for layout in (one, rows) if one and layout]

        ctx.relate(0, result, result, pairs, _counting)
    return result


_QUOTIENTS = 6.0
"""Instructions for an index of each element of an array of several dimensions in one row."""


def _counting(layout: Layout, _: Layout) -> float:
    if not isinstance(layout, RegisterLayout) or not layout.flat:
        return 0.0
    return _QUOTIENTS * layout.registers * layout.vector_length


@rules.inference(layout_cast_p)
def _layout_cast(ctx: InferenceContext, x: AbstractValue, *, new_layout: Any) -> AbstractValue:
    aval = ctx.avals_in[0]
    layout = new_layout.resolve(tuple(aval.shape), aval.dtype)
    distributed = isinstance(layout, RegisterLayout)
    result = ctx.result(None, x, varying=distributed) if isinstance(x, ArrayValue) else ctx.result()
    if isinstance(layout, RegisterLayout):
        ctx.needs(0, x, layout, "the program casts to this layout")
        ctx.makes(result, layout, "the program casts to this layout")
    return result


def _is_in_pairs(ctx: InferenceContext) -> bool:
    """Whether a reduction combines two elements of a register by one instruction, as functions of
    such elements do: sums of narrow floats are wider, and there is no product of two integers."""
    extreme = ctx.equation.primitive in (lax.reduce_max_p, lax.reduce_min_p)
    return extreme and ctx.avals_in[0].dtype in (jnp.float16, jnp.bfloat16)


@rules.inference(lax.reduce_sum_p)
@rules.inference(lax.reduce_prod_p)
@rules.inference(lax.reduce_max_p)
@rules.inference(lax.reduce_min_p)
@rules.inference(lax.reduce_and_p)
@rules.inference(lax.reduce_or_p)
@rules.inference(lax.reduce_xor_p)
@rules.inference(lax.argmax_p)
@rules.inference(lax.argmin_p)
def _reduce(
    ctx: InferenceContext, x: AbstractValue, *, axes: Sequence[int], **params: Any
) -> AbstractValue:
    result = ctx.result(None, x)
    if isinstance(x, ArrayValue):
        pairs = relations.reduction(
            tuple(ctx.avals_in[0].shape), tuple(axes), ctx.proposals, x.bits
        )
        work = functools.partial(
            reduction_cost, axes=tuple(axes), bits=x.bits, in_pairs=_is_in_pairs(ctx)
        )
        shape = ctx.avals_in[0].shape
        if types.is_bool(ctx.avals_in[0].dtype) and any(n & (n - 1) for n in shape):
            # To exchange conditions takes more than to exchange what they are made of.
            x = dataclasses.replace(x, bits=TRUTHS)
        ctx.relate(0, x, result, pairs, work)
    return result
