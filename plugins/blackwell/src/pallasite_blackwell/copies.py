"""Copies that a pair of blocks shares and that only the first block's barrier counts.

The two blocks of a pair act as one for the tensor core, which the first block's thread drives. So
it is enough, and saves a cluster barrier, that all bytes are announced to and counted by the
barrier of the first block (PTX ISA, ``cp.async.bulk.tensor`` with ``.cta_group::2``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value, resolve, resolve_barrier
from pallasite_std.api import (
    CopyPartition,
    MemoryReference,
    Partitioned,
    acquire_stores,
    copy_gmem_to_smem_p,
    index_reference,
)
from pallasite_std.api import copy_rules as copies
from pallasite_std.api import tensor_copies as tma

rules = RuleSet()


def _is_tracked_by_leader(avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    return params["leader_tracked"] is not None


@rules.lowering(
    copy_gmem_to_smem_p,
    Semantics.LANE,
    Semantics.WARP,
    requires=("cta_pair",),
    operands=_is_tracked_by_leader,
)
def _copy_gmem_to_smem(ctx: RuleContext, *operands: Value, **params: Any) -> Sequence[Value]:
    dimensions = copies.collective_dimensions(ctx, params["collective_axes"])
    blocks = math.prod(ctx.launch.geometry.cluster[d] for d in dimensions)
    if blocks == 1:
        results: Sequence[Value] = ctx.next_rule(*operands, **params | {"leader_tracked": None})
        return results
    leader_tracked: CopyPartition = params["leader_tracked"]
    if blocks != 2:
        raise UnsupportedError(
            f"a copy that its leader tracks, shared by {blocks} blocks",
            expected="a cluster axis of 2 blocks",
        )
    src, dst, barrier, predicate = params["args_tree"].unflatten(operands)
    destination = resolve(ctx, dst)
    source = resolve(ctx, src, pointer=False)
    selected = resolve_barrier(ctx, barrier)
    tma.check_shared_alignment(destination)
    launch = ctx.launch
    launch.uses_cluster_memory = True
    index = launch.cluster_index(dimensions)
    partitioned = isinstance(leader_tracked, Partitioned)
    if isinstance(leader_tracked, Partitioned):
        source = _share(source, leader_tracked.axis, index, destination.shape)
    else:
        launch.multicast_mask(dimensions)
    copy = tma.plan_copy(ctx, source, destination.layout, blocks=1 if partitioned else 2)
    leader_rank = launch.cluster_rank(dict.fromkeys(dimensions, 0))
    ctx.converge_before_copy()
    size: ir.Value | int = 2 * copy.plan.expected_bytes
    wanted = None if predicate is None else ctx.scalar(predicate)
    if wanted is not None:
        size = ops.arith.select(wanted, ops.i32_constant(size), ops.i32_constant(0))
    leader = ctx.leader
    # Branches that are not nested become predicates, by which one lane copies for its warp.
    with ops.when(ops.arith.andi(leader, ops.compare("eq", index, 0))):
        copies.expect(ctx, selected, size)
    address = ops.inline_assembly(
        "mapa.shared::cluster.u32 $0, $1, $2;",
        "=r,r,r",
        selected.address(),
        leader_rank,
        results=[ops.i32()],
    )
    with ops.when(leader if wanted is None else ops.arith.andi(leader, wanted)):
        acquire_stores(ctx, source)
        tma.issue_load(
            ctx,
            copy,
            destination,
            address,
            collective=dimensions,
            space="shared::cta" if partitioned else "shared::cluster",
            modifier=".cta_group::2",
        )
    return ()


def _share(
    source: MemoryReference, axis: int, index: ir.Value, shape: Sequence[int]
) -> MemoryReference:
    """This block's part of the window along ``axis``."""
    indices: list[Any] = [_jax.Slice(0, extent) for extent in source.shape]
    start = RegisterArray.splat(ops.multiply(index, shape[axis]), np.int32)
    indices[axis] = _jax.Slice(start, shape[axis])
    return index_reference(source, indices)
