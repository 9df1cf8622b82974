"""What arrivals on mbarriers and waits for them emit, for barriers of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxlib.mlir import ir

from pallasite.plugin import BarrierKind, BarrierOrder, UnsupportedError
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RuleContext
from pallasite_std.barriers.allocation import kind_of
from pallasite_std.memory.reference_types import BarrierReference

SUSPEND_HINT = 0x989680
"""How long a failing try_wait may suspend the thread, in nanoseconds."""

LANES_OF_THREAD = 128


def _orders(ctx: RuleContext, barrier: BarrierReference) -> list[BarrierOrder | BarrierKind]:
    """What says what comes before an arrival and after a wait: the orders that the barrier asks
    for, on the target, and its kind."""
    registry = ctx.kernel.registry
    orders = [registry.barriers.order(name, ctx.target) for name in barrier.dtype.orders]
    return [*orders, kind_of(registry, barrier.dtype)]


def hardware_arrivals(ctx: RuleContext, barrier: BarrierReference) -> int:
    """How many arrivals of the mbarrier one arrival of the program is."""
    kind = kind_of(ctx.kernel.registry, barrier.dtype)
    return barrier.storage.arrivals // kind.arrivals(barrier.dtype)


def arrive(
    ctx: RuleContext,
    barrier: BarrierReference,
    condition: ir.Value | None = None,
    by: str | None = None,
) -> None:
    """One arrival of this thread on a barrier, of whatever kind.

    Args:
      ctx: the rule's context.
      barrier: the barrier.
      condition: a uniform predicate (i1), or None.
      by: who arrives on a barrier of one block, as in ``plgpu.barrier_arrive``.
    """
    kind = kind_of(ctx.kernel.registry, barrier.dtype)
    for one in _orders(ctx, barrier):
        if one.before_arrive is not None:
            one.before_arrive(ctx, barrier)
    (kind.arrive or arrive_in_block)(ctx, barrier, condition, by)


def arrive_in_block(
    ctx: RuleContext,
    barrier: BarrierReference,
    condition: ir.Value | None = None,
    by: str | None = None,
) -> None:
    """One arrival of this thread on a barrier of its block.

    If the barrier counts the 128 lanes for one arrival: arrivals at one address are served one
    after the other, so one lane of each warp arrives for all of its lanes, once they have
    converged. Where only other threads wait for them, lanes should not converge.
    Otherwise, one lane arrives for the thread, once its lanes have converged.
    """
    launch = ctx.launch
    count = hardware_arrivals(ctx, barrier)
    if count != LANES_OF_THREAD:
        ctx.synchronize()
        guard = ctx.leader if condition is None else ops.arith.andi(ctx.leader, condition)
        with ops.when(guard):
            arrive_hardware(barrier, count)
        return
    if by is None and ctx.is_release and condition is None:
        by = "lanes"
    if by == "lanes" and not ctx.in_warp:
        if condition is None:
            arrive_hardware(barrier)
        else:
            with ops.when(condition):
                arrive_hardware(barrier)
        return
    elected = launch.elected_lane
    launch.warp_barrier()
    guard = elected if condition is None else ops.arith.andi(elected, condition)
    with ops.when(guard):
        arrive_hardware(barrier, 128 if ctx.in_warp else 32)


def arrive_hardware(barrier: BarrierReference, count: int = 1) -> None:
    """One lane's arrivals on a barrier of its block, with the semantics of release for it."""
    amount = "" if count == 1 else f", {count}"
    ops.inline_assembly(
        f"mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]{amount};",
        "r,~{memory}",
        barrier.address(),
    )


def arrive_in_cluster(
    ctx: RuleContext,
    barrier: BarrierReference,
    condition: ir.Value | None = None,
    by: str | None = None,
) -> None:
    """One arrival of this thread on the barrier of every block along the collective axes; ``by`` is
    for barriers of one block."""
    launch = ctx.launch
    dimensions = barrier.cluster_dimensions
    assert dimensions is not None
    cluster = launch.geometry.cluster
    groups = [g for g in dimensions if math.prod(cluster[d] for d in g) > 1]
    # All lanes' accesses come before the arrival of the one that signals.
    ctx.synchronize()
    if not groups:
        guard = ctx.leader if condition is None else ops.arith.andi(ctx.leader, condition)
        with ops.when(guard):
            arrive_hardware(barrier)
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
            lambda scope: (
                "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1;\n\t"
                f"mbarrier.arrive.release.{scope}.shared::cluster.b64 _, [remote]; }}"
            ),
            "r,r,~{memory}",
            barrier.address(),
            lane,
        )


def _assembly_of_cluster(
    ctx: RuleContext, text: Callable[[str], str], constraints: str, *operands: ir.Value
) -> None:
    """Assembly, made for a scope, that orders memory accesses for the whole cluster.

    That is slow, and only ordinary accesses need it: where it turns out that blocks touch each
    other's memory by asynchronous copies only, the block's own scope is enough.
    """
    launch = ctx.launch
    ctx.kernel.emit_later(
        lambda *values: ops.inline_assembly(
            text("cluster" if launch.shares_memory_in_cluster else "cta"), constraints, *values
        ),
        *operands,
    )


def _leader_mask(ctx: RuleContext, groups: Sequence[Sequence[int]]) -> ir.Value:
    """The mask of the one block whose coordinates along the collective axes are 0."""
    if len(groups) != 1 or len(groups[0]) != 1:
        raise UnsupportedError(
            "a leader-tracked cluster barrier over several axes", expected="one cluster axis"
        )
    leader = ctx.launch.cluster_rank(dict.fromkeys(groups[0], 0))
    return ops.arith.shli(ops.i32_constant(1), leader)


def phase_bit(barrier: BarrierReference) -> tuple[ir.Value, ir.Value | int]:
    """The parity of the phase that this thread waits for next, and the bit that flips it."""
    word = ops.load(ops.i32(), barrier.phases, alignment=4)
    if isinstance(barrier.index, int):
        return ops.bitwise_and(ops.divide_unsigned(word, 1 << barrier.index), 1), 1 << barrier.index
    bit = ops.bitwise_and(ops.arith.shrui(word, barrier.index), 1)
    return bit, ops.arith.shli(ops.i32_constant(1), barrier.index)


def wait(ctx: RuleContext, barrier: BarrierReference) -> None:
    """Waits for the next phase of a barrier and flips this thread's phase bit."""
    bit, flip = phase_bit(barrier)
    word = ops.load(ops.i32(), barrier.phases, alignment=4)
    ops.store(ops.bitwise_xor(word, flip), barrier.phases, alignment=4)
    spans = spans_cluster(ctx, barrier)

    def text(scope: str) -> str:
        return (
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
        ops.inline_assembly(text("cta"), "r,r,~{memory}", address, bit)
    for one in _orders(ctx, barrier):
        if one.after_wait is not None:
            one.after_wait(ctx, barrier)


def spans_cluster(ctx: RuleContext, barrier: BarrierReference) -> bool:
    """Whether lanes of other blocks arrive on a barrier."""
    return barrier.cluster_dimensions is not None and math.prod(ctx.kernel.geometry.cluster) > 1
