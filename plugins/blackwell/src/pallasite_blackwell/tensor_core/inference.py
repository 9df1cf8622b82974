"""Layout inference of products and of copies to tensor memory: operands in shared memory."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from pallasite.plugin import InvalidValueError, PallasiteError, RuleSet
from pallasite.plugin.inference import AbstractValue, InferenceContext, View
from pallasite_blackwell.tensor_core import copies
from pallasite_blackwell.tensor_core import products as prim
from pallasite_blackwell.tensor_core.descriptors import CHUNK, plan_operand
from pallasite_blackwell.tensor_core.plan import plan_product
from pallasite_blackwell.tensor_core.types import operand_bits, product_of
from pallasite_blackwell.tensor_memory.rules import memory_layout

rules = RuleSet()

_WIDEST = 128
"""Bytes of the widest swizzle. Narrower ones have fewer rows without bank conflicts, so they cost a
little more."""


def _readable(what: str, rows: Any, depth: int, *, transposed: bool) -> Any:
    def check(view: View) -> float:
        layout = view.layout.transpose((1, 0)) if transposed else view.layout
        plan_operand(layout, tuple(rows), depth, what)
        return float(_WIDEST // layout.swizzle - 1)

    return check


def _aval(ctx: InferenceContext, position: Any) -> Any:
    """The type of a reference with its views, whose positions stand for operands."""
    aval = ctx.avals_in[position.ref]
    for transform in position.transforms:
        aval = transform.transform_type(aval)
    return aval


@rules.inference(prim.tcgen05_mma_p)
def _mma(
    ctx: InferenceContext,
    *operands: AbstractValue,
    args_tree: Any,
    collective_axis: Hashable | None,
) -> None:
    positions = args_tree.unflatten(list(range(len(operands))))
    acc, a, b, _, _, a_scale, _, metadata = positions
    values = args_tree.unflatten(operands)
    acc_aval, a_aval, b_aval = _aval(ctx, acc), _aval(ctx, a), _aval(ctx, b)
    depth = b_aval.shape[0]
    scale = None if a_scale is None else _aval(ctx, a_scale)
    product = product_of(
        a_aval.dtype,
        b_aval.dtype,
        acc_aval.dtype,
        sparse=metadata is not None,
        scale=None if scale is None else scale.dtype,
        block=0 if scale is None else depth // scale.shape[1],
    )
    layout = memory_layout(ctx.avals_in[acc.ref], acc.transforms)
    try:
        plan = plan_product(
            product, layout, tuple(acc_aval.shape), depth, pair=collective_axis is not None
        )
    except PallasiteError:
        return  # Lowering says why.
    if ctx.space_of(values[1]).is_shared:
        check = _readable("a", plan.row_blocks, product.depth_of_a, transposed=False)
        ctx.uses(values[1], check, "tcgen05_mma reads it as a")
    check = _readable("b", plan.column_blocks, product.depth, transposed=True)
    ctx.uses(values[2], check, "tcgen05_mma reads it as b")


@rules.inference(copies.async_copy_scales_to_tmem_p)
@rules.inference(copies.async_copy_sparse_metadata_to_tmem_p)
def _dense(ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, **params: Any) -> None:
    source, _ = args_tree.unflatten(operands)

    def check(view: View) -> float:
        if view.layout.swizzle != CHUNK or not view.layout.is_contiguous:
            raise InvalidValueError("memory that is not contiguous", got=str(view.layout))
        return 0.0

    ctx.uses(source, check, "it is copied to tensor memory as it lies")


@rules.inference(copies.async_copy_smem_to_tmem_p)
def _matrix(ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, **params: Any) -> None:
    source, _ = args_tree.unflatten(operands)

    def check(view: View) -> float:
        copies.plan_matrix_copy(view.layout, operand_bits(view.dtype))
        return float(_WIDEST // view.layout.swizzle - 1)

    ctx.uses(source, check, "it is copied to tensor memory")


@rules.inference(prim.tcgen05_commit_arrive_p)
def _no_layouts(ctx: InferenceContext, *operands: AbstractValue, **params: Any) -> None:
    """It asks nothing of layouts."""
