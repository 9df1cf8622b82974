"""Code of the user's that builds MLIR, spliced into a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import (
    InvalidTypeError,
    InvalidValueError,
    PallasiteError,
    RuleSet,
    Semantics,
    note_code,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.layouts import Layout, RegisterLayout, SplatLayout, describe
from pallasite.plugin.lowering import LayoutContext, RegisterArray, RuleContext, Value, resolve
from pallasite_std.inline import arrays as mosaic
from pallasite_std.inline import operations
from pallasite_std.inline.launch import InlineLaunch, name_architecture
from pallasite_std.inline.references import memref, physical_layout
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.primitives.inline import RefType, ShapeDtypeStruct, inline_mgpu_p

rules = RuleSet()


@rules.lowering(inline_mgpu_p, Semantics.LANE, Semantics.WARP)
def _inline(
    ctx: RuleContext,
    *operands: Value,
    args_tree: Any,
    arg_types: tuple[Any, ...],
    in_tree: Any,
    return_types: tuple[ShapeDtypeStruct, ...],
    return_tree: Any,
    function: Any,
    values: str,
) -> Sequence[Value]:
    """Calls ``function(launch context, *args)`` with references and arrays of the kind asked for.

    The memory layout of a reference is checked against the declared transforms. Views that the
    program makes, such as one slot of a buffer, are part of the reference and are not declared.
    Where the code runs per warp, the arrays are scalars.
    """
    flat = args_tree.unflatten(operands)
    if ctx.in_warp:
        arrays: list[Any] = [value for value in flat if isinstance(value, RegisterArray)]
        for array in [*arrays, *return_types]:
            if array.shape != ():
                raise InvalidValueError(
                    "inlined code in a warp-mapped region takes or returns an array",
                    got=f"{np.dtype(array.dtype)}{list(array.shape)}",
                    expected="scalars and references",
                )
    memory: dict[ir.Value, MemoryReference] = {}
    checked = [
        _reference(ctx, value, wanted, number, memory if values == "mosaic" else None)
        if isinstance(wanted, RefType)
        else _array(value, wanted, number, values)
        for number, (value, wanted) in enumerate(zip(flat, arg_types, strict=True))
    ]
    if not str(getattr(function, "__module__", "")).startswith("pallasite_std."):
        note_code(f"inlined code {_name(function)}")
    launch: Any = ctx.launch
    first = None
    if values == "mosaic":
        name_architecture(ctx)
        launch = InlineLaunch(ctx, memory)
        first = operations.begin()
    try:
        results = function(launch, *jax.tree.unflatten(in_tree, checked))
    except PallasiteError:
        raise
    except Exception as error:
        if _jax.raised_by_user(error):
            raise
        raise InvalidValueError(
            f"inlined code {_name(function)} failed: {type(error).__name__}: {error}",
            location=_jax.last_user_frame(error),
        ) from error
    leaves, tree = jax.tree.flatten(results, is_leaf=_is_array)
    if tree != return_tree:
        raise InvalidTypeError(
            f"inlined code {_name(function)} returned another structure than return_type",
            got=tree,
            expected=str(return_tree),
        )
    arrays = [
        _result(value, wanted, number)
        for number, (value, wanted) in enumerate(zip(leaves, return_types, strict=True))
    ]
    return arrays if first is None else operations.expand(ctx, first, arrays)


@rules.layout(inline_mgpu_p)
def _inline_hints(
    ctx: LayoutContext, wanted: Any, *, args_tree: Any, arg_types: Any, **params: Any
) -> list[Layout | None]:
    """What makes an argument should make it in the layout that is declared."""
    hints: list[Layout | None] = [None] * len(ctx.avals_in)
    positions = args_tree.unflatten(list(range(len(ctx.avals_in))))
    for position, declared in zip(positions, arg_types, strict=True):
        if isinstance(position, int) and not isinstance(declared, RefType):
            aval = ctx.avals_in[position]
            hints[position] = declared.resolve(aval.shape, aval.dtype)
    return hints


def _is_array(value: Any) -> bool:
    return isinstance(value, RegisterArray) or mosaic.is_fragmented(value)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "function")


def _reference(
    ctx: RuleContext,
    value: Value,
    wanted: RefType,
    number: int,
    memrefs: dict[ir.Value, MemoryReference] | None,
) -> Any:
    """The reference, or if there is a table to enter it in, the memref that stands for it."""
    memory = resolve(ctx, value, other_blocks=True)
    layout = physical_layout(memory.layout, wanted.transforms)
    if layout is None:
        raise InvalidValueError(
            f"argument {number} of inlined code lies in memory in another way than declared",
            got=f"{memory.dtype}{list(memory.shape)} at {memory.layout}",
            expected=f"RefType(transforms={wanted.transforms})",
            hint="declare the transforms of the allocation, in the same order",
        )
    if memrefs is None:
        return memory
    made = memref(memory, layout, f"argument {number} of inlined code")
    memrefs[made] = memory
    return made


def _array(value: Value, wanted: Any, number: int, values: str) -> Any:
    if not isinstance(value, RegisterArray):
        raise InvalidTypeError(
            f"argument {number} of inlined code is not an array in registers",
            got=type(value).__name__,
        )
    layout = wanted.resolve(value.shape, value.dtype)
    if value.is_splat and isinstance(layout, RegisterLayout):
        value = value.materialize(layout)
    if isinstance(layout, SplatLayout) and value.size == 1:
        value = RegisterArray.splat(value.scalar, value.dtype, value.shape)
    if value.layout != layout:
        raise InvalidValueError(
            f"argument {number} of inlined code has another layout than declared",
            got=f"{value.dtype}{list(value.shape)} with layout {describe(value.layout)}",
            expected=describe(layout),
            hint="cast it first: plgpu.layout_cast(x, layout)",
        )
    if values == "pallasite":
        return value
    return mosaic.fragmented(value, mosaic.fragmented_layout(wanted, layout))


def _result(value: Any, wanted: ShapeDtypeStruct, number: int) -> RegisterArray:
    what = f"result {number} of inlined code"
    dtype = np.dtype(wanted.dtype)
    if mosaic.is_fragmented(value):
        value = mosaic.register_array(value, dtype, what)
    if not isinstance(value, RegisterArray):
        raise InvalidTypeError(
            f"{what} is not an array in registers",
            got=type(value).__name__,
            expected="jax.experimental.mosaic.gpu.FragmentedArray, or"
            " pallasite.lowering.arrays.RegisterArray",
        )
    if value.dtype != dtype or value.shape != wanted.shape:
        raise InvalidTypeError(
            f"{what} has another shape or dtype than return_type says",
            got=f"{value.dtype}{list(value.shape)}",
            expected=f"{dtype}{list(wanted.shape)}",
        )
    layout = wanted.layout.resolve(wanted.shape, dtype)
    if value.is_splat and isinstance(layout, RegisterLayout):
        return value.materialize(layout)
    if value.layout != layout:
        raise InvalidValueError(
            f"{what} has another layout than return_type says",
            got=describe(value.layout),
            expected=describe(layout),
        )
    return value
