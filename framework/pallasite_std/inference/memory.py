"""Loads, stores, atomics, and asynchronous copies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallasite.plugin import InvalidValueError, PallasiteError, RuleSet
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import (
    UNCERTAIN,
    AbstractValue,
    AccessCheck,
    InferenceContext,
    MemoryValue,
    ScalarValue,
    View,
    view_of,
)
from pallasite.plugin.layouts import row_major
from pallasite_std.copies.plain_copies import has_odd_rows
from pallasite_std.copies.tensor_map_types import TensorMapPlan, WindowDimension
from pallasite_std.copies.tensor_maps import plan_tensor_map
from pallasite_std.memory.array_indices import split_reference, split_transforms
from pallasite_std.memory.matrix_transfers import LOAD as LOAD_MATRICES
from pallasite_std.primitives import barriers
from pallasite_std.primitives import copies as prim
from pallasite_std.primitives.arrays import atomic_p, load_p
from pallasite_std.rules.loads import check_optimized

rules = RuleSet()

_WIDEST = 128
"""Bytes of the widest swizzle."""

_SHORT_ROW = 0.5
"""What a row of a tensor copy costs beyond those that rows of ``_WIDEST`` bytes would need: a wide
row goes through the copy engine and the L2 cache as one, whatever it costs lanes to access it."""

_ISSUE = 4.0
"""An instruction of a tensor copy beyond the first."""


# Loads and stores ---------------------------------------------------------------------------------


@rules.inference(_jax.get_p)
def _get(
    ctx: InferenceContext,
    reference: AbstractValue,
    *leaves: AbstractValue,
    tree: Any,
    **params: Any,
) -> AbstractValue:
    result = ctx.result()
    transforms = jax.tree.unflatten(tree, leaves)
    arrays = split_transforms(transforms)
    if arrays is not None:
        ctx.load(reference, ScalarValue(), arrays[0])  # Element by element.
        return result
    ctx.space_of(reference).infer_read(ctx, reference, transforms, result)
    return result


@rules.inference(load_p)
def _load(
    ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, optimized: bool
) -> AbstractValue:
    (reference,) = args_tree.unflatten(operands)
    result = ctx.result()
    matrices = ctx.walk.kernel.target.has(LOAD_MATRICES)
    check = _check_of("the load", matrices=matrices) if optimized else None
    ctx.load(reference, result, check=check)
    return result


def _check_of(what: str, **options: Any) -> AccessCheck:
    return functools.partial(check_optimized, what=what, **options)


@rules.inference(_jax.swap_p)
def _swap(
    ctx: InferenceContext,
    reference: AbstractValue,
    value: AbstractValue,
    *leaves: AbstractValue,
    tree: Any,
    **params: Any,
) -> AbstractValue:
    transforms = jax.tree.unflatten(tree, leaves)
    _write(ctx, reference, transforms, value)
    result = ctx.result(varying=True)
    ctx.same_layout(value, result)
    return result


@rules.inference(_jax.addupdate_p)
def _addupdate(
    ctx: InferenceContext,
    reference: AbstractValue,
    value: AbstractValue,
    *leaves: AbstractValue,
    tree: Any,
    **params: Any,
) -> None:
    _write(ctx, reference, jax.tree.unflatten(tree, leaves), value)


def _write(
    ctx: InferenceContext, reference: AbstractValue, transforms: Sequence[Any], value: AbstractValue
) -> None:
    arrays = split_transforms(transforms)
    if arrays is not None:
        ctx.store(reference, ScalarValue(), arrays[0])
    else:
        ctx.space_of(reference).infer_write(ctx, reference, transforms, value)


@rules.inference(_jax.masked_load_p)
def _masked_load(
    ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, **params: Any
) -> AbstractValue:
    reference, transforms, mask, other = jax.tree.unflatten(args_tree, operands)
    result = ctx.result()
    ctx.load(reference, result, transforms)
    ctx.same_layout(result, *[value for value in (mask, other) if value is not None])
    return result


@rules.inference(_jax.masked_swap_p)
def _masked_swap(
    ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, **params: Any
) -> AbstractValue:
    reference, transforms, value, mask = jax.tree.unflatten(args_tree, operands)
    ctx.store(reference, value, transforms)
    result = ctx.result(varying=True)
    ctx.same_layout(value, result, *[] if mask is None else [mask])
    return result


@rules.inference(atomic_p)
def _atomic(
    ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, **params: Any
) -> list[AbstractValue]:
    reference, value = args_tree.unflatten(operands)
    base, arrays = split_reference(reference)
    if arrays is not None:
        ctx.store(base, ScalarValue(), arrays[0])
    else:
        ctx.store(reference, value)
    results = [ctx.result(aval, varying=True) for aval in ctx.avals_out]
    ctx.same_layout(value, *results)
    return results


# Copies -------------------------------------------------------------------------------------------


def _collective_blocks(ctx: InferenceContext, axes: Any) -> int:
    geometry = ctx.walk.kernel.geometry
    names: list[Any] = []
    for axis in axes or ():
        names += axis if isinstance(axis, tuple) else (axis,)
    return math.prod(geometry.cluster[geometry.cluster_dimension(name)] for name in names)


def _copies(window: View, **options: Any) -> Callable[[View], float | None]:
    """A check that TMA can copy between a window of global memory and a view of shared memory."""

    @functools.cache
    def dimensions() -> tuple[list[WindowDimension], list[WindowDimension]]:
        """Those of the window, as they are if a computed start suits, and as they are known."""
        if window.window is None:
            raise InvalidValueError("a copy of something else than a window of an array")
        assumed, known = [], []
        for start, divisor in zip(window.window, window.divisors, strict=True):
            if divisor == 0:
                assumed.append(WindowDimension(start.static, start.size, start.squeezed))
                known.append(assumed[-1])
            else:
                assumed.append(WindowDimension(None, start.size, start.squeezed))
                known.append(
                    WindowDimension(
                        None,
                        start.size,
                        start.squeezed,
                        multiple_of=math.gcd(divisor, start.static),
                    )
                )
        return assumed, known

    shape, dtype = window.root.shape, str(window.dtype)

    def check(shared: View) -> float | None:
        assumed, known = dimensions()
        root = row_major(shape, shared.layout.element_bits)
        strides = [
            dim[0].stride if dim else math.prod(shape[i + 1 :]) for i, dim in enumerate(root.dims)
        ]
        arguments = (shape, strides, dtype)
        try:
            plan = plan_tensor_map(*arguments, assumed, shared.layout, **options)
        except InvalidValueError:
            if shared.layout.is_contiguous and not options:
                return 0.0  # One run of bytes needs no tensor map.
            extents = [one.size for one in assumed]
            if not options and has_odd_rows(shape, extents, shared.layout.element_bits):
                return 0.0  # All lanes copy it.
            raise
        try:
            plan = plan_tensor_map(*arguments, known, shared.layout, **options)
        except InvalidValueError:
            return UNCERTAIN + _plan_cost(plan)
        return _plan_cost(plan)

    return check


def _plan_cost(plan: TensorMapPlan) -> float:
    """What a copy costs beyond one by one instruction, in rows as wide as the widest swizzle."""
    size = plan.issue_bytes * len(plan.issues)
    row = plan.box[-1] * plan.element_bits / 8
    short_rows = _SHORT_ROW * max(0.0, size / row - size / _WIDEST)
    return short_rows + _ISSUE * (len(plan.issues) - 1)


def _window(reference: Any) -> View | None:
    transforms: Sequence[Any] = ()
    if isinstance(reference, _jax.TransformedRef):
        reference, transforms = reference.ref, reference.transforms
    if not isinstance(reference, MemoryValue) or not reference.space.is_global:
        return None
    try:
        return view_of(reference, None, transforms)
    except PallasiteError:
        return None


@rules.inference(prim.copy_gmem_to_smem_p)
def _to_shared(
    ctx: InferenceContext,
    *operands: AbstractValue,
    args_tree: Any,
    collective_axes: Any,
    **params: Any,
) -> None:
    source, destination, barrier, _ = args_tree.unflatten(operands)
    window = _window(source)
    if window is None:
        return
    if barrier is None or not ctx.walk.kernel.target.has("tma"):
        ctx.uses(destination, lambda view: None, "a copy by all lanes")
        return
    blocks = _collective_blocks(ctx, collective_axes)
    check = _copies(window, **({"blocks": blocks} if blocks > 1 else {}))
    ctx.propose_height(destination, check)
    ctx.uses(destination, check, "an asynchronous copy writes it")


@rules.inference(prim.copy_smem_to_gmem_p)
def _to_global(
    ctx: InferenceContext,
    *operands: AbstractValue,
    args_tree: Any,
    reduction_op: str | None,
    **params: Any,
) -> None:
    source, destination, _ = args_tree.unflatten(operands)
    window = _window(destination)
    if window is not None:
        check = _copies(window, **({} if reduction_op is None else {"reduction": reduction_op}))
        ctx.propose_height(source, check)
        ctx.uses(source, check, "an asynchronous copy reads it")


@rules.inference(prim.async_store_smem_p)
def _store_in_cluster(
    ctx: InferenceContext,
    *operands: AbstractValue,
    args_tree: Any,
    optimized: bool,
    **params: Any,
) -> None:
    value, reference, *_ = args_tree.unflatten(operands)
    ctx.store(reference, value, check=_check_of("the store") if optimized else None)


@rules.inference(barriers.commit_smem_p)
@rules.inference(prim.barrier_expect_p)
@rules.inference(prim.wait_smem_to_gmem_p)
@rules.inference(prim.wait_gmem_to_smem_p)
@rules.inference(barriers.barrier_wait_p)
@rules.inference(barriers.barrier_arrive_p)
def _no_layouts(ctx: InferenceContext, *operands: AbstractValue, **params: Any) -> None:
    """What they do to memory and barriers is declared elsewhere; they ask nothing of layouts."""
