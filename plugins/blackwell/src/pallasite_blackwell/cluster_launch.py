"""Cluster launch control: clusters that run take over the work of clusters that still wait.

PTX ISA, ``clusterlaunchcontrol.try_cancel`` and ``clusterlaunchcontrol.query_cancel``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import (
    RegisterArray,
    RuleContext,
    Value,
    resolve,
    resolve_barrier,
)
from pallasite_blackwell.uniformity import all_threads_alike
from pallasite_std.api import cluster_launch, copy_rules
from pallasite_std.api import cluster_launch_rules as common

rules = RuleSet()

_ALL = (Semantics.LANE, Semantics.WARP)
_FEATURE = ("cluster_launch_control", "mbarrier")
_BYTES = 16


@rules.lowering(cluster_launch.try_cluster_cancel_p, *_ALL, requires=_FEATURE)
def _try_cluster_cancel(
    ctx: RuleContext, *operands: Value, args_tree: Any, collective_axes: tuple[Hashable, ...]
) -> Sequence[Value]:
    """One request of the cluster, and one arrival with the bytes of the answer in each block.

    What is taken over is a whole cluster, so all blocks of this one get the answer, whether their
    axes are among the collective ones or not. Likewise, threads that all ask into one place on one
    barrier ask once: what one of them took over would be lost under the other's answer.
    """
    result, barrier = args_tree.unflatten(operands)
    memory = resolve(ctx, result)
    selected = resolve_barrier(ctx, barrier)
    geometry, launch = ctx.kernel.geometry, ctx.launch
    blocks = math.prod(geometry.cluster)
    leader = ctx.leader
    size: ir.Value | int = _BYTES
    asks = leader
    together = geometry.thread_name is not None and geometry.thread_name in collective_axes
    if geometry.threads > 1 and not together:
        together = all_threads_alike(memory.address(), selected.address())
    if together:
        first = ops.compare("eq", launch.warpgroup_id, 0)
        size = ops.arith.select(first, ops.i32_constant(_BYTES), ops.i32_constant(0))
        asks = ops.arith.andi(asks, first)
    multicast = ""
    if blocks > 1:
        launch.uses_cluster_memory = True
        multicast = ".multicast::cluster::all"
        rank = launch.cluster_rank({})
        asks = ops.arith.andi(asks, ops.compare("eq", rank, 0))
    ctx.converge_before_copy()
    with ops.when(leader):
        copy_rules.expect(ctx, selected, size)
    with ops.when(asks):
        ops.inline_assembly(
            "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
            f"{multicast}.b128 [$0], [$1];",
            "r,r,~{memory}",
            ops.shared_address(memory.address()),
            selected.address(),
        )
    return ()


@rules.lowering(cluster_launch.query_cluster_cancel_p, *_ALL, requires=_FEATURE)
def _query_cluster_cancel(
    ctx: RuleContext, *operands: Value, args_tree: Any, grid_names: tuple[Hashable, ...]
) -> Sequence[Value]:
    common.check_query_axes(ctx, grid_names)
    (result,) = args_tree.unflatten(operands)
    memory = resolve(ctx, result)
    *blocks, found = ops.inline_assembly(
        "{ .reg .b128 handle; .reg .pred found;\n\t"
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;\n\t"
        "ld.shared.b128 handle, [$4];\n\t"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 found, handle;\n\t"
        "@found clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128"
        " {$0, $1, $2, _}, handle;\n\t"
        "selp.u32 $3, 1, 0, found; }",
        "=&r,=&r,=&r,=&r,r,~{memory}",
        ops.shared_address(memory.address()),
        results=[ops.i32()] * 4,
    )
    indices = [RegisterArray.splat(_grid_index(ctx, blocks, name), np.int32) for name in grid_names]
    return [*indices, RegisterArray.splat(ops.compare("ne", found, 0), np.bool_)]


def _grid_index(ctx: RuleContext, blocks: Sequence[ir.Value], name: Hashable) -> ir.Value:
    """The index along an axis of the grid of the cluster whose first block has these numbers."""
    geometry = ctx.kernel.geometry
    axis, folded = geometry.grid_names.index(name), geometry.folded()
    dimension = 2 if axis < len(folded) else len(geometry.grid) - 1 - axis
    index = ops.divide_unsigned(blocks[dimension], geometry.cluster[dimension])
    if axis < len(folded):
        index = ops.divide_unsigned(index, math.prod(folded[axis + 1 :]))
        if axis > 0:
            index = ops.remainder_unsigned(index, folded[axis])
    return index
