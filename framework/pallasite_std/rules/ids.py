"""Where a program is: grid indices, axis indices."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, manager
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext, RegisterArray, RuleContext, Value
from pallasite_std.memory.divisibility import with_divisor

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


def grid_index(kernel: KernelContext, axis: int) -> ir.Value:
    """The index of this program along a grid axis (i32), in units of the user's grid.

    The hardware counts blocks; blocks of one cluster share an index.
    """
    geometry, launch = kernel.geometry, kernel.launch
    folded = geometry.folded()

    def build() -> ir.Value:
        dimension = 2 if axis < len(folded) else len(geometry.grid) - 1 - axis
        index = ops.divide_unsigned(launch.block_id(dimension), geometry.cluster[dimension])
        if axis < len(folded):
            index = ops.divide_unsigned(index, math.prod(folded[axis + 1 :]))
            if axis > 0:
                index = ops.remainder_unsigned(index, folded[axis])
        return index

    launch.block_id(2 if axis < len(folded) else len(geometry.grid) - 1 - axis)
    return launch.emit_once(f"grid_index.{axis}", build)


def _scalar(value: ir.Value) -> RegisterArray:
    return RegisterArray.splat(value, np.int32)


@rules.lowering(_jax.program_id_p, *_ALL)
def _program_id(ctx: RuleContext, *, axis: int) -> RegisterArray:
    ids = ctx.mode.program_ids
    if ids is not None and ids[axis] is not None:
        given: RegisterArray = ids[axis]  # type: ignore[assignment]
        return given
    return axis_index(ctx, axis_names(ctx)[axis])


def axis_names(ctx: RuleContext) -> list[Hashable]:
    """All axes of the kernel's mesh: grid, cluster, threads."""
    geometry = ctx.kernel.geometry
    names: list[Hashable] = [*geometry.grid_names, *geometry.cluster_names]
    if geometry.thread_name is not None:
        names.append(geometry.thread_name)
    return names


@rules.lowering(_jax.num_programs_p, *_ALL)
def _num_programs(ctx: RuleContext, *, axis: int) -> RegisterArray:
    geometry = ctx.kernel.geometry
    sizes = [*geometry.grid, *geometry.cluster_extents, geometry.threads]
    return _scalar(ops.i32_constant(sizes[axis]))


def axis_index(ctx: RuleContext, name: Hashable) -> RegisterArray:
    """The index of this program along a named axis (i32).

    Raises:
      InvalidValueError: no axis has that name here.
    """
    geometry, launch = ctx.kernel.geometry, ctx.launch
    if ctx.mode.warp_axis is not None and name == ctx.mode.warp_axis:
        return _scalar(launch.warp_id)
    if name in geometry.grid_names:
        return _scalar(grid_index(ctx.kernel, geometry.grid_names.index(name)))
    if name in geometry.cluster_names:
        return _scalar(launch.cluster_block_id(geometry.cluster_dimension(name)))
    if name == geometry.thread_name and name is not None:
        return _scalar(launch.warpgroup_id)
    if name in ctx.kernel.device_mesh.manual_sizes:
        raise InvalidValueError(
            f"the index along the device axis {name!r} needs the multi-GPU plugin",
            hint="pass the index to the kernel as an input; "
            + str(manager().remedy("names", "remote_ref")),
        )
    raise InvalidValueError(
        f"there is no axis {name!r} here",
        expected=f"one of {[*axis_names(ctx), *ctx.kernel.device_mesh.manual_sizes]}",
    )


@rules.lowering(_jax.axis_index_p, *_ALL)
def _axis_index(ctx: RuleContext, *, axis_name: Any, **params: Any) -> RegisterArray:
    if not isinstance(axis_name, tuple):
        return axis_index(ctx, axis_name)
    total: ir.Value | None = None
    for name in axis_name:
        value = axis_index(ctx, name).scalar
        if total is None:
            total = value
        else:
            total = ops.add(ops.multiply(total, _axis_size(ctx, name)), value)
    return _scalar(ops.i32_constant(0) if total is None else total)


def _axis_size(ctx: RuleContext, name: Hashable) -> int:
    geometry = ctx.kernel.geometry
    if name in geometry.grid_names:
        return geometry.grid[geometry.grid_names.index(name)]
    if name in geometry.cluster_names:
        return geometry.cluster_extents[geometry.cluster_names.index(name)]
    if name == geometry.thread_name:
        return geometry.threads
    return ctx.kernel.device_mesh.manual_sizes[name]


@rules.lowering(_jax.multiple_of_p, *_ALL)
def _multiple_of(ctx: RuleContext, x: Value, *, values: tuple[int, ...]) -> Value:
    # The promise lets address arithmetic keep wide accesses; LLVM learns it from the multiplication
    # of the quotient, which is exact.
    factor = math.lcm(*values)
    if not isinstance(x, RegisterArray) or factor <= 1:
        return x
    if factor & (factor - 1):
        return x.map(lambda value: with_divisor(value, factor))
    shift = factor.bit_length() - 1

    def align(value: ir.Value) -> ir.Value:
        amount = ops.constant(shift, value.type)
        return ops.arith.shli(ops.arith.shrsi(value, amount), amount)

    return x.map(align)
