"""Arriving on and waiting for mbarriers, and the fence before asynchronous accesses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics, UnsupportedError
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import (
    BarrierReference,
    RegisterArray,
    RuleContext,
    Value,
    resolve_barrier,
)
from pallasite_std.primitives import barriers as prim

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)

SUSPEND_HINT = 0x989680
"""How long a failing try_wait may suspend the thread, in nanoseconds."""


@rules.lowering(prim.barrier_arrive_p, *_ALL, requires=("mbarrier",))
def _barrier_arrive(
    ctx: RuleContext, *operands: Value, args_tree: Any, by: str | None
) -> Sequence[Value]:
    reference, predicate = args_tree.unflatten(operands)
    barrier = resolve_barrier(ctx, reference)
    condition = None if predicate is None else ctx.scalar(predicate)
    orders = getattr(barrier.dtype, "orders_tensor_core", False)
    before = ctx.kernel.extra.get("before_tensor_core_arrive")
    if orders and before is None:
        raise UnsupportedError(
            "a barrier that orders tensor-core work needs the plugin of a generation that has it",
            hint="pip install 'pallasite[blackwell]', or leave orders_tensor_core out",
        )
    if barrier.cluster_dimensions is not None:
        _arrive_in_cluster(ctx, barrier, condition, before if orders else None)
        return ()
    if orders and before is not None:
        ctx.synchronize()
        before(ctx)
        guard = ctx.leader if condition is None else ops.arith.andi(ctx.leader, condition)
        with ops.when(guard):
            _arrive(barrier, 1)
        return ()
    arrive(ctx, barrier, condition, by)
    return ()


def arrive(
    ctx: RuleContext,
    barrier: BarrierReference,
    condition: ir.Value | None = None,
    by: str | None = None,
) -> None:
    """One arrival of this thread on a barrier of its block.

    The barrier counts 128 lanes for one arrival. Arrivals at one address are served one after the
    other, so one lane of each warp arrives for all of its lanes, once they have met. Where nobody
    but other threads waits for them, lanes had better not meet.
    """
    launch = ctx.launch
    if by is None and ctx.is_release and condition is None:
        by = "lanes"
    if by == "lanes" and not ctx.in_warp:
        if condition is None:
            _arrive(barrier, 1)
        else:
            with ops.when(condition):
                _arrive(barrier, 1)
        return
    elected = launch.elected_lane
    launch.warp_barrier()
    guard = elected if condition is None else ops.arith.andi(elected, condition)
    with ops.when(guard):
        _arrive(barrier, 128 if ctx.in_warp else 32)


def _arrive(barrier: BarrierReference, count: int) -> None:
    amount = "" if count == 1 else f", {count}"
    ops.inline_assembly(
        f"mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]{amount};",
        "r,~{memory}",
        barrier.address(),
    )


def _arrive_in_cluster(
    ctx: RuleContext, barrier: BarrierReference, condition: ir.Value | None, before: Any
) -> None:
    """One arrival of this thread on the barrier of every block along the collective axes."""
    launch = ctx.launch
    dimensions = barrier.cluster_dimensions
    assert dimensions is not None
    cluster = launch.geometry.cluster
    groups = [g for g in dimensions if math.prod(cluster[d] for d in g) > 1]
    # All lanes' accesses come before the arrival of the one that signals.
    ctx.synchronize()
    if before is not None:
        before(ctx)
    if not groups:
        guard = ctx.leader if condition is None else ops.arith.andi(ctx.leader, condition)
        with ops.when(guard):
            _arrive(barrier, 1)
        return
    launch.uses_cluster_memory = True
    if ctx.in_warp:
        lane = launch.lane_id
    else:
        lane = launch.emit_once(
            "warpgroup_lane",
            lambda: ops.bitwise_and(launch.thread_id, 127),
        )
    mask: ir.Value | None = None
    if getattr(barrier.dtype, "leader_tracked", False):
        mask = _leader_mask(ctx, groups)
    else:
        for group in groups:
            wide = ops.cast_integer(launch.multicast_mask(group), ops.i32(), signed=False)
            mask = wide if mask is None else ops.arith.ori(mask, wide)
    assert mask is not None
    total = math.prod(cluster)
    inside = ops.compare("ult", lane, total)
    bit = ops.bitwise_and(ops.arith.shrui(mask, ops.bitwise_and(lane, 15)), 1)
    guard = ops.arith.andi(inside, ops.compare("ne", bit, 0))
    if condition is not None:
        guard = ops.arith.andi(guard, condition)
    with ops.when(guard):
        _assembly_of_cluster(
            ctx,
            "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1;\n\t"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }",
            "r,r,~{memory}",
            barrier.address(),
            lane,
        )


def _assembly_of_cluster(
    ctx: RuleContext, text: str, constraints: str, *operands: ir.Value
) -> None:
    """Assembly that orders memory accesses for the whole cluster.

    That is slow, and only ordinary accesses need it: where it turns out that blocks touch each
    other's memory by asynchronous copies only, the block's own scope is enough.
    """
    operation = ops.inline_assembly_operation(text, constraints, *operands)
    if not ctx.kernel.on_trial:
        ctx.launch.cluster_scoped.append(operation)


def _leader_mask(ctx: RuleContext, groups: Sequence[Sequence[int]]) -> ir.Value:
    """The mask of the one block whose coordinates along the collective axes are 0."""
    if len(groups) != 1 or len(groups[0]) != 1:
        raise UnsupportedError(
            "a leader-tracked cluster barrier over several axes", expected="one cluster axis"
        )
    launch = ctx.launch
    cluster = launch.geometry.cluster
    strides = (1, cluster[0], cluster[0] * cluster[1])
    rank: ir.Value | None = None
    for dimension in range(3):
        if dimension in groups[0] or cluster[dimension] == 1:
            continue
        term = ops.multiply(launch.cluster_block_id(dimension), strides[dimension])
        rank = term if rank is None else ops.add(rank, term)
    one = ops.i32_constant(1)
    return one if rank is None else ops.arith.shli(one, rank)


def _phase_bit(barrier: BarrierReference) -> tuple[ir.Value, ir.Value | int]:
    word = ops.load(ops.i32(), barrier.phases, alignment=4)
    if isinstance(barrier.index, int):
        return ops.bitwise_and(ops.divide_unsigned(word, 1 << barrier.index), 1), 1 << barrier.index
    bit = ops.bitwise_and(ops.arith.shrui(word, barrier.index), 1)
    return bit, ops.arith.shli(ops.i32_constant(1), barrier.index)


def wait(ctx: RuleContext, barrier: BarrierReference) -> None:
    """Waits for the next phase of a barrier and flips this thread's phase bit."""
    bit, flip = _phase_bit(barrier)
    word = ops.load(ops.i32(), barrier.phases, alignment=4)
    ops.store(ops.bitwise_xor(word, flip), barrier.phases, alignment=4)
    spans = _spans_cluster(ctx, barrier)
    scope = "cluster" if spans else "cta"
    text = (
        "{ .reg .pred complete;\n\t"
        "WAIT_${:uid}:\n\t"
        f"mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 complete, [$0], $1,"
        f" {SUSPEND_HINT};\n\t"
        "@!complete bra WAIT_${:uid};\n\t}"
    )
    address = barrier.address()
    if spans:
        _assembly_of_cluster(ctx, text, "r,r,~{memory}", address, bit)
    else:
        ops.inline_assembly(text, "r,r,~{memory}", address, bit)
    after = ctx.kernel.extra.get("after_tensor_core_wait")
    if getattr(barrier.dtype, "orders_tensor_core", False) and after is not None:
        after(ctx)


def _spans_cluster(ctx: RuleContext, barrier: BarrierReference) -> bool:
    return barrier.cluster_dimensions is not None and math.prod(ctx.kernel.geometry.cluster) > 1


@rules.lowering(prim.barrier_wait_p, *_ALL, requires=("mbarrier",))
def _barrier_wait(ctx: RuleContext, *operands: Value, args_tree: Any) -> Sequence[Value]:
    (reference,) = args_tree.unflatten(operands)
    wait(ctx, resolve_barrier(ctx, reference))
    return ()


@rules.lowering(prim.barrier_test_p, *_ALL, requires=("mbarrier",))
def _barrier_test(ctx: RuleContext, *operands: Value, args_tree: Any) -> RegisterArray:
    (reference,) = args_tree.unflatten(operands)
    barrier = resolve_barrier(ctx, reference)
    bit, _ = _phase_bit(barrier)
    scope = "cluster" if _spans_cluster(ctx, barrier) else "cta"
    complete = ops.inline_assembly(
        "{ .reg .pred complete;\n\t"
        f"mbarrier.test_wait.parity.acquire.{scope}.shared::cta.b64 complete, [$1], $2;\n\t"
        "selp.u32 $0, 1, 0, complete; }",
        "=r,r,r,~{memory}",
        barrier.address(),
        bit,
        results=[ops.i32()],
    )
    return RegisterArray.splat(ops.compare("ne", complete, 0), np.bool_)


@rules.lowering(prim.commit_smem_p, *_ALL, requires=("tma",))
def _commit_smem(ctx: RuleContext) -> Sequence[Value]:
    ops.inline_assembly("fence.proxy.async.shared::cta;", "~{memory}")
    ctx.synchronize()
    return ()
