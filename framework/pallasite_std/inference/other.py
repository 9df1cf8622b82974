"""Inlined code, ``mma.sync``, and primitives that only read arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError, RuleSet
from pallasite.plugin.inference import AbstractValue, InferenceContext, View
from pallasite.plugin.ir import types
from pallasite.plugin.layouts import RegisterLayout
from pallasite_std.inline.references import physical_layout
from pallasite_std.primitives.inline import RefType, ShapeDtypeStruct, inline_mgpu_p
from pallasite_std.primitives.matrix import mma_p
from pallasite_std.rules.mma import operand_layouts

rules = RuleSet()


@rules.inference(inline_mgpu_p)
def _inline(
    ctx: InferenceContext,
    *operands: AbstractValue,
    args_tree: Any,
    arg_types: tuple[Any, ...],
    return_types: tuple[ShapeDtypeStruct, ...],
    **params: Any,
) -> list[AbstractValue]:
    if ctx.in_warp:  # There, it takes and returns scalars.
        return [ctx.result(aval) for aval in ctx.avals_out]
    flat = args_tree.unflatten(operands)
    positions = args_tree.unflatten(list(range(len(operands))))
    for value, position, declared in zip(flat, positions, arg_types, strict=True):
        if isinstance(declared, RefType):
            why = f"inlined code declares {declared}"
            ctx.uses(value, _declared(declared), why, proposes=declared.transforms)
        elif isinstance(position, int):
            aval = ctx.avals_in[position]
            layout = declared.resolve(tuple(aval.shape), aval.dtype)
            ctx.needs(position, value, layout, f"inlined code declares {declared}")
    results = []
    for aval, declared in zip(ctx.avals_out, return_types, strict=True):
        result = ctx.result(aval)
        layout = declared.layout.resolve(tuple(aval.shape), np.dtype(aval.dtype))
        if isinstance(layout, RegisterLayout):
            ctx.makes(result, layout, f"inlined code returns {declared.layout}")
        results.append(result)
    return results


def _declared(declared: RefType) -> Any:
    def check(view: View) -> None:
        if physical_layout(view.layout, declared.transforms) is None:
            raise InvalidValueError(
                "inlined code declares another memory layout",
                got=str(view.layout),
                expected=str(declared),
            )

    return check


@rules.inference(mma_p)
def _mma(
    ctx: InferenceContext, acc: AbstractValue, a: AbstractValue, b: AbstractValue
) -> AbstractValue:
    bits = types.bit_width(ctx.avals_in[1].dtype)
    layouts = operand_layouts([tuple(aval.shape) for aval in ctx.avals_in], bits)
    for position, (value, layout) in enumerate(zip((acc, a, b), layouts, strict=True)):
        ctx.needs(position, value, layout, "mma reads it")
    result = ctx.result()
    ctx.makes(result, layouts[0], "mma makes it")
    return result
