"""Lowering of products of the tensor core.

One call becomes, for each tile of the accumulator, a piece of inline assembly that steps through k;
one lane runs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import (
    InvalidTypeError,
    InvalidValueError,
    RuleSet,
    Semantics,
    UnsupportedError,
)
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RuleContext, Value, resolve, resolve_barrier
from pallasite_blackwell.targets import INTEGER_PRODUCTS, targets_with
from pallasite_blackwell.tensor_core import products as prim
from pallasite_blackwell.tensor_core.descriptors import CHUNK, SharedOperand, shared_operand
from pallasite_blackwell.tensor_core.pairs import commit, issuer
from pallasite_blackwell.tensor_core.plan import ProductPlan, Tile, plan_product
from pallasite_blackwell.tensor_core.types import Product, product_of
from pallasite_blackwell.tensor_memory import layouts
from pallasite_blackwell.tensor_memory.layouts import CELL_BITS, ROWS
from pallasite_blackwell.tensor_memory.references import (
    TensorMemoryReference,
    one_matrix,
    resolve_tensor_memory,
)

rules = RuleSet()

_ALL = (Semantics.LANE, Semantics.WARP)
_FEATURE = ("tcgen05",)


@dataclasses.dataclass(frozen=True)
class _InTensorMemory:
    """The left operand in tensor memory."""

    memory: TensorMemoryReference


type _Left = SharedOperand | _InTensorMemory


@rules.lowering(prim.tcgen05_mma_p, *_ALL, requires=_FEATURE)
def _mma(
    ctx: RuleContext, *operands: Value, args_tree: Any, collective_axis: Hashable | None
) -> Sequence[Value]:
    acc, a, b, accumulate, barrier, a_scale, b_scale, metadata = args_tree.unflatten(operands)
    pair = collective_axis is not None
    target = _matrix(ctx, acc, "acc")
    memory = resolve(ctx, b, other_blocks=True)
    right = memory.with_layout(memory.layout.transpose((1, 0)))
    in_shared = not isinstance(a.ref, TensorMemoryReference)
    left: Any = resolve(ctx, a, other_blocks=True) if in_shared else _matrix(ctx, a, "a")
    scales = [
        None if one is None else _matrix(ctx, one, what)
        for what, one in (("a_scale", a_scale), ("b_scale", b_scale))
    ]
    sparse = None if metadata is None else _matrix(ctx, metadata, "a_sparse_metadata")
    depth = right.layout.shape[1]
    product = product_of(
        left.dtype,
        right.dtype,
        target.dtype,
        sparse=sparse is not None,
        scale=None if scales[0] is None else scales[0].dtype,
        block=0 if scales[0] is None else depth // scales[0].shape[1],
    )
    if product.kind == "i8" and not ctx.target.has(INTEGER_PRODUCTS):
        raise UnsupportedError(
            f"products of integers, on {ctx.target.name}",
            expected=f"a target that has them: {targets_with(INTEGER_PRODUCTS)}",
        )
    plan = plan_product(product, target.layout, target.matrix, depth, pair=pair)
    operand: _Left
    if in_shared:
        operand = shared_operand(left, plan.row_blocks, product.depth_of_a, "a")
    else:
        operand = _left_in_tensor_memory(left, product)
    shared_right = shared_operand(right, plan.column_blocks, product.depth, "b")
    _check_contiguous(product, operand, shared_right)
    if scales[0] is not None and scales[1] is not None:
        _check_scales(scales[0], scales[1], target.matrix, pair=pair)
    if sparse is not None:
        _check_metadata(product, sparse, target.matrix[0], depth)
    flag = None if accumulate is None else _known(ctx.scalar(accumulate))
    selected = None if barrier is None else resolve_barrier(ctx, barrier)
    if selected is not None:
        ctx.converge_before_copy()
    with ops.when(issuer(ctx, collective_axis)):
        emission = _Emission(product, plan, operand, shared_right, scales, sparse, flag, pair)
        for tile in plan.tiles:
            emission.emit(tile, target)
        if selected is not None:
            commit(ctx, selected, collective_axis)
    return ()


@rules.lowering(prim.tcgen05_commit_arrive_p, *_ALL, requires=_FEATURE)
def _commit(
    ctx: RuleContext, *operands: Value, args_tree: Any, collective_axis: Hashable | None
) -> Sequence[Value]:
    (barrier,) = args_tree.unflatten(operands)
    selected = resolve_barrier(ctx, barrier)
    ctx.converge_before_copy()
    with ops.when(issuer(ctx, collective_axis)):
        commit(ctx, selected, collective_axis)
    return ()


def _matrix(ctx: RuleContext, value: Any, what: str) -> TensorMemoryReference:
    return one_matrix(resolve_tensor_memory(ctx, value, what), what)


def _known(flag: ir.Value) -> ir.Value | bool:
    """A flag that is a constant, as that."""
    owner = flag.owner
    if not isinstance(owner, ir.Block) and owner.name == "arith.constant":
        return bool(ir.IntegerAttr(owner.attributes["value"]).value)
    return flag


# Checks -------------------------------------------------------------------------------------------


def _left_in_tensor_memory(memory: TensorMemoryReference, product: Product) -> _InTensorMemory:
    rows, _ = memory.matrix
    if rows % ROWS:
        raise UnsupportedError(
            "a in tensor memory has 64 rows", got=f"m={rows}", expected=f"a multiple of {ROWS}"
        )
    expected = layouts.default(CELL_BITS // product.bits)
    if memory.layout != expected:
        raise InvalidValueError(
            "a lies in tensor memory in another way than products read it",
            got=str(memory.layout),
            expected=str(expected),
            hint="plgpu.TMEM((m, k), dtype, packed=True)",
        )
    return _InTensorMemory(memory)


def _check_contiguous(product: Product, left: _Left, right: SharedOperand) -> None:
    if product.bits != 4:
        return
    turned = [("b", right.plan.transposed)]
    if isinstance(left, SharedOperand):
        turned.append(("a", left.plan.transposed))
    for what, transposed in turned:
        if transposed:
            raise InvalidValueError(
                f"elements of 4 bits are not contiguous along k in {what}",
                expected="rows of k",
            )


def _check_scales(
    a_scale: TensorMemoryReference,
    b_scale: TensorMemoryReference,
    shape: tuple[int, int],
    *,
    pair: bool,
) -> None:
    m, n = shape
    folded = m == 64
    rows = max(ROWS, m)
    wanted_b = layouts.SCALES_M64_COLLECTIVE if folded else layouts.SCALES
    for what, scale, layout in (
        ("a_scale", a_scale, layouts.SCALES),
        ("b_scale", b_scale, wanted_b),
    ):
        if scale.layout != layout:
            raise InvalidValueError(
                f"{what} lies in tensor memory in another way than products read it",
                got=str(scale.layout),
                expected=str(layout),
                hint="plgpu.TMEM(..., layout=plgpu.TMEMLayout...)",
            )
    least = 2 * ROWS if folded else n
    if a_scale.shape[0] != rows:
        raise InvalidValueError(
            "a_scale has another number of rows", got=list(a_scale.shape), expected=f"{rows} rows"
        )
    if b_scale.shape[0] < least:
        raise InvalidValueError(
            "b_scale has too few rows",
            got=list(b_scale.shape),
            expected=f"at least {least} rows" + (", those for both blocks" if pair else ""),
        )
    if a_scale.shape[1] % 4:
        raise InvalidValueError(
            "the scales of a row do not fill cells",
            got=f"{a_scale.shape[1]} scales along k",
            expected="a multiple of 4",
        )


def _check_metadata(
    product: Product, metadata: TensorMemoryReference, rows: int, depth: int
) -> None:
    expected = (rows, depth // product.sparse_group * 2)
    if metadata.matrix != expected or metadata.layout != layouts.SPARSE_METADATA:
        raise InvalidValueError(
            "a_sparse_metadata does not fit a",
            got=f"shape {metadata.matrix} in {metadata.layout}",
            expected=f"shape {expected} in {layouts.SPARSE_METADATA}",
            hint="plgpu.TMEM(shape, jnp.uint2, layout=plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT)",
        )
    if np.dtype(metadata.dtype).name not in ("uint2", "int2"):
        raise InvalidTypeError(
            "a_sparse_metadata is not of numbers of 2 bits", got=metadata.dtype, expected="uint2"
        )
    if rows != ROWS:
        raise InvalidValueError(
            "a sparse operand with several tiles of rows", got=f"m={rows}", expected=f"m={ROWS}"
        )


# Emission -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Emission:
    """What the instructions of one call have in common.

    Attributes:
      flag: whether the first of each tile accumulates: a value (i1), False, or None for yes.
    """

    product: Product
    plan: ProductPlan
    left: _Left
    right: SharedOperand
    scales: Sequence[TensorMemoryReference | None]
    metadata: TensorMemoryReference | None
    flag: ir.Value | bool | None
    pair: bool

    def emit(self, tile: Tile, target: TensorMemoryReference) -> None:
        """The instructions for one tile."""
        product = self.product
        values: list[ir.Value] = []
        codes: list[str] = []

        def operand(value: ir.Value, code: str) -> str:
            values.append(value)
            codes.append(code)
            return f"${len(values) - 1}"

        accumulator = operand(target.address(tile.columns, tile.lanes), "r")
        in_shared = isinstance(self.left, SharedOperand)
        lines = ["{", ".reg .b64 b;", f".reg .b{64 if in_shared else 32} a;"]
        lines += [".reg .b32 i;", ".reg .pred p;", ".reg .pred t;"]
        if isinstance(self.left, SharedOperand):
            left = operand(self.left.descriptor, "l")
        else:
            memory = self.left.memory
            columns = tile.row * memory.layout.width((ROWS, memory.shape[1]))
            left = operand(memory.address(columns), "r")
        right = operand(self.right.descriptor, "l")
        lines += self._predicates(operand)
        a_scale, b_scale = self.scales
        if a_scale is not None and b_scale is not None:
            lines += [".reg .b32 x;", ".reg .b32 y;"]
            start = self.plan.column_blocks[tile.column][0] * (2 if self.pair else 1)
            first = operand(a_scale.address(tile.row * (ROWS // 32)), "r")
            second = operand(b_scale.address(start // 32), "r")
        if self.metadata is not None:
            lines.append(".reg .b32 m;")
            third = operand(self.metadata.address(), "r")
        name = f"tcgen05.mma{'.sp' if product.sparse else ''}"
        name += f".cta_group::{2 if self.pair else 1}.{product.qualifiers}"
        for step in range(self.plan.steps):
            scale_id = selector = 0
            text = f"{name} [{accumulator}], {'a' if in_shared else '[a]'}, b, "
            if isinstance(self.left, SharedOperand):
                offset = self.left.plan.starts[tile.row][step] // CHUNK
                lines.append(f"add.s64 a, {left}, {offset};")
            else:
                lines.append(f"add.s32 a, {left}, {8 * step};")
            offset = self.right.plan.starts[tile.column][step] // CHUNK
            lines.append(f"add.s64 b, {right}, {offset};")
            if self.metadata is not None:
                column = step * product.metadata_columns
                selector = column % 2
                lines.append(f"add.s32 m, {third}, {column // 2 * 2};")
                text += "[m], "
            text += "i, "
            if a_scale is not None and b_scale is not None:
                number = step * product.scales_per_step
                scale_id = number % 4
                for register, base, scale in (("x", first, a_scale), ("y", second, b_scale)):
                    quad = scale.layout.width((scale.shape[0], 4))
                    lines.append(f"add.s32 {register}, {base}, {number // 4 * quad};")
                text += "[x], [y], "
            word = product.word(
                tile.rows,
                tile.width,
                transposed_a=isinstance(self.left, SharedOperand) and self.left.plan.transposed,
                transposed_b=self.right.plan.transposed,
                selector=selector,
                scale_id=scale_id,
            )
            lines.append(f"mov.b32 i, {word:#010x};")
            lines.append(text + f"{'p' if step == 0 else 't'};")
        lines.append("}")
        ops.inline_assembly("\n\t".join(lines), ",".join([*codes, "~{memory}"]), *values)

    def _predicates(self, operand: Any) -> list[str]:
        """Sets t to true, and p to whether the first instruction accumulates."""
        lines = ["setp.eq.b32 t, 0, 0;"]
        if isinstance(self.flag, ir.Value):
            wide = ops.cast_integer(self.flag, ops.i32(), signed=False)
            lines.append(f"setp.ne.b32 p, {operand(wide, 'r')}, 0;")
        else:
            lines.append(f"setp.{'ne' if self.flag is False else 'eq'}.b32 p, 0, 0;")
        return lines
