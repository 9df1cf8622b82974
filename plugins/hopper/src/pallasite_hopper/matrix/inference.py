"""The layouts that wgmma requires."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallasite.plugin import RuleSet
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import AbstractValue, InferenceContext, View
from pallasite.plugin.ir import types
from pallasite_hopper.matrix import products as prim
from pallasite_hopper.matrix.descriptors import plan_operand
from pallasite_hopper.matrix.fragments import accumulator_layout, left_layout, result_layout
from pallasite_hopper.matrix.rules import ROWS, column_blocks, part_of, position_of_a
from pallasite_hopper.matrix.types import accumulator_type, depth_of

rules = RuleSet()

_WIDEST = 128
"""Bytes of the widest swizzle. Narrower ones have fewer rows without bank conflicts, so they cost a
little more."""


def _readable(what: str, rows: list[tuple[int, int]], *, transposed: bool) -> Any:
    def check(view: View) -> float:
        depth = depth_of(view.dtype)
        layout = view.layout.transpose((1, 0)) if transposed else view.layout
        plan_operand(layout, tuple(rows), depth, what)
        return float(_WIDEST // layout.swizzle - 1)

    return check


@rules.inference(prim.wgmma_p)
def _wgmma(ctx: InferenceContext, *operands: AbstractValue, args_tree: Any) -> AbstractValue:
    acc, a, b, _ = args_tree.unflatten(operands)
    aval = ctx.avals_out[0]
    result = ctx.result(varying=True)
    layout = accumulator_layout(tuple(aval.shape), np.dtype(aval.dtype))
    ctx.makes(result, layout, "wgmma adds to it", pinned=True)
    ctx.same_layout(acc.ref, result)
    _, _, m, n = part_of(tuple(aval.shape), acc.transforms)
    columns = column_blocks(n, accumulator_type(np.dtype(aval.dtype)))
    if isinstance(a, _jax.TransformedRef):
        rows = [(row, ROWS) for row in range(0, m, ROWS)]
        ctx.uses(a, _readable("a", rows, transposed=False), "wgmma reads it as a")
    else:
        position = position_of_a(args_tree, len(operands))
        left = ctx.avals_in[position]
        needed = left_layout(tuple(left.shape), types.bit_width(left.dtype))
        ctx.needs(position, a, needed, "wgmma reads it from registers as a")
    ctx.uses(b, _readable("b", columns, transposed=True), "wgmma reads it as b")
    return result


@rules.inference(prim.wgmma_added_wait_p)
def _added_wait(ctx: InferenceContext, *, n: int, before: str) -> None:
    ctx.added("wait for wgmma", before)


@rules.inference(prim.wgmma_accumulator_read_p)
def _read(ctx: InferenceContext, acc: AbstractValue, **params: Any) -> list[AbstractValue]:
    after = ctx.result(ctx.avals_out[0], acc)
    ctx.same_layout(acc, after)
    contents = ctx.result(ctx.avals_out[1], acc)
    layout = result_layout(tuple(ctx.avals_in[0].shape))
    ctx.makes(contents, layout, "it is read from an accumulator")
    return [after, contents]


@rules.inference(prim.wgmma_accumulator_store_p)
def _store(ctx: InferenceContext, acc: AbstractValue, value: AbstractValue) -> AbstractValue:
    aval = ctx.avals_in[1]
    layout = accumulator_layout(tuple(aval.shape), np.dtype(aval.dtype))
    ctx.needs(1, value, layout, "it becomes an accumulator")
    result = ctx.result(None, value)
    ctx.makes(result, layout, "it becomes an accumulator", pinned=True)
    return result
