"""Asynchronous copies between global and shared memory, and waiting for them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin.ir import ops
from pallasite.plugin.layouts import LANES, WARPS, row_major, strided
from pallasite.plugin.lowering import RuleContext, Value, resolve_barrier
from pallasite_std.barriers.emission import LANES_OF_THREAD, hardware_arrivals
from pallasite_std.copies import copy_plans as plans
from pallasite_std.copies import plain_copies as plain
from pallasite_std.copies import tensor_copies as tma
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.divisibility import remembered
from pallasite_std.memory.reference_types import BarrierReference, MemoryReference
from pallasite_std.memory.resolution import resolve
from pallasite_std.memory.transfers import access_addresses
from pallasite_std.primitives import copies as prim
from pallasite_std.primitives.copy_options import CopyPartition, OOBFillMode, Partitioned

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


def collective_dimensions(ctx: RuleContext, axes: Any) -> tuple[int, ...]:
    """CUDA cluster dimensions of collective axes; nested tuples count as their members."""
    names: list[Any] = []
    for axis in axes or ():
        names += axis if isinstance(axis, tuple) else (axis,)
    return tuple(ctx.kernel.geometry.cluster_dimension(name) for name in names)


def _guard(ctx: RuleContext, predicate: Value) -> ir.Value:
    leader = ctx.leader
    if predicate is None:
        return leader
    return ops.arith.andi(leader, ctx.scalar(predicate))


def expect(ctx: RuleContext, barrier: BarrierReference, size: int | ir.Value) -> None:
    """One arrival of the user's thread that also announces ``size`` bytes.

    One lane does it for all: it announces the bytes first and then makes all the arrivals that the
    barrier counts for one of a thread. The caller elects that lane.
    """
    count = hardware_arrivals(ctx, barrier)
    amount = ops.i32_constant(size) if isinstance(size, int) else size
    ops.inline_assembly(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;\n\t"
        f"mbarrier.arrive.release.cta.shared::cta.b64 _, [$0], {count};",
        "r,r,~{memory}",
        barrier.address(),
        amount,
    )


@rules.lowering(prim.copy_gmem_to_smem_p, *_ALL)
def copy_gmem_to_smem(
    ctx: RuleContext,
    *operands: Value,
    args_tree: Any,
    collective_axes: Any,
    leader_tracked: CopyPartition | None,
    oob_mode: OOBFillMode | None,
    arrive: bool,
    evict_first: bool,
) -> Sequence[Value]:
    """The rule of the copy from global to shared memory; plugins' rules may fall back on it."""
    src, dst, barrier, predicate = args_tree.unflatten(operands)
    destination = resolve(ctx, dst, own_line=True)
    if barrier is None or not ctx.target.has("tma"):
        if collective_axes or leader_tracked is not None:
            raise UnsupportedError(
                f"a copy that blocks share without a barrier, or on {ctx.target.name}",
                expected="a barrier, and a target with TMA (sm_90 or later)",
            )
        if not arrive:
            raise UnsupportedError(
                f"a copy that does not arrive, on {ctx.target.name}",
                expected="a target with TMA (sm_90 or later)",
            )
        with destination.at_line:
            _copy_by_threads(ctx, resolve(ctx, src), destination, barrier, predicate)
        return ()
    _check_gather(ctx, src)
    source = resolve(ctx, src, pointer=False)
    selected = resolve_barrier(ctx, barrier)
    dimensions = collective_dimensions(ctx, collective_axes)
    blocks = math.prod(ctx.kernel.geometry.cluster[d] for d in dimensions)
    if leader_tracked is not None and blocks > 1:
        raise _refuse_leader(ctx, leader_tracked)
    if blocks > 1:
        copy = plans.tensor_load(ctx, source, destination, dimensions, blocks)
        ctx.launch.uses_cluster_memory = True
        ctx.launch.cluster_index(dimensions)
        ctx.launch.multicast_mask(dimensions)
    else:
        try:
            with remembered():
                copy = plans.plan_load(ctx, source, destination, oob_mode, evict_first)
        except InvalidValueError:
            if not plain.applies(source, destination):
                raise
            with destination.at_line:
                _plain_load(ctx, source, destination, selected, predicate, arrive)
            return ()
    if arrive:
        ctx.converge_before_copy()
    leader = ctx.leader
    if predicate is None:
        with destination.at_line, ops.when(leader):
            if arrive:
                expect(ctx, selected, copy.size)
            copy.issue(selected.address())
        return ()
    wanted = ctx.scalar(predicate)
    size = ops.arith.select(wanted, ops.i32_constant(copy.size), ops.i32_constant(0))
    with destination.at_line, ops.when(leader):
        expect(ctx, selected, size)
        with ops.when(wanted):
            copy.issue(selected.address())
    return ()


def _plain_load(
    ctx: RuleContext,
    source: MemoryReference,
    destination: MemoryReference,
    barrier: BarrierReference,
    predicate: Value,
    arrive: bool,
) -> None:
    """The load by all lanes, after which one arrives for a copy that is complete."""
    wanted = None if predicate is None else ctx.scalar(predicate)
    if not ctx.in_warp:
        ctx.synchronize()
    with contextlib.nullcontext() if wanted is None else ops.when(wanted):
        plain.copy_to_shared(ctx, source, destination)
    leader = ctx.leader
    if arrive:
        with ops.when(leader):
            expect(ctx, barrier, 0)
        return
    size = destination.layout.size * destination.element_bits // 8
    if wanted is not None:
        leader = ops.arith.andi(leader, wanted)
    with ops.when(leader):
        ops.inline_assembly(
            "fence.acq_rel.cta;\n\tmbarrier.complete_tx.relaxed.cta.shared::cta.b64 [$0], $1;",
            "r,r,~{memory}",
            barrier.address(),
            ops.i32_constant(size),
        )


@rules.lowering(prim.barrier_expect_p, *_ALL, requires=("tma",))
def _barrier_expect(
    ctx: RuleContext, *operands: Value, args_tree: Any, num_bytes: int
) -> Sequence[Value]:
    barrier, predicate = args_tree.unflatten(operands)
    selected = resolve_barrier(ctx, barrier)
    ctx.converge_before_copy()
    with ops.when(_guard(ctx, predicate)):
        expect(ctx, selected, num_bytes)
    return ()


def _check_gather(ctx: RuleContext, src: Any) -> None:
    gathers = any(getattr(view, "int_indexer_shape", ()) for view in getattr(src, "transforms", ()))
    if gathers and not ctx.target.has("tma_gather"):
        raise UnsupportedError(
            f"a copy that gathers rows, which {ctx.target.name} cannot do",
            expected="a target whose TMA gathers (sm_100 and later), or indices that are scalars"
            " and slices",
        )


def _refuse_leader(ctx: RuleContext, mode: CopyPartition) -> UnsupportedError:
    name = "PARTITIONED" if isinstance(mode, Partitioned) else "REPLICATED"
    return UnsupportedError(
        f"CopyPartition.{name}: {ctx.target.name} cannot signal a peer's barrier from a copy",
        expected="a target with pairs of blocks (sm_100a and its relatives)",
        hint="leave leader_tracked out: every block then waits on its own barrier",
    )


def _copy_by_threads(
    ctx: RuleContext,
    source: MemoryReference,
    destination: MemoryReference,
    barrier: Value,
    predicate: Value,
) -> None:
    """The copy by ``cp.async`` of all lanes (PTX ISA 9.7.9.25.3); closes one group per call."""
    if ctx.in_warp:
        raise UnsupportedError(
            "a copy by a single warp without TMA", hint="issue the copy outside of the warp region"
        )
    bits = destination.element_bits
    size = destination.layout.size
    plans = None
    for width_bytes in (16, 8, 4):
        width = width_bytes * 8 // bits
        if width < 1 or size % (width * LANES * WARPS):
            continue
        try:
            layout = strided(destination.shape, width)
            pair = (
                plan_access(layout, source.layout, min(16, source.offset_alignment)),
                plan_access(layout, destination.layout, min(16, destination.offset_alignment)),
            )
        except InvalidValueError:
            continue
        if all(plan.width == width for plan in pair):
            plans = (width_bytes, *pair)
            break
    if plans is None:
        raise InvalidValueError(
            "the copy cannot be distributed over the lanes",
            got=f"{destination.dtype}{list(destination.shape)}",
            expected="at least 4 contiguous, aligned bytes for each of the 128 lanes",
        )
    width_bytes, from_plan, to_plan = plans
    if ctx.auto_barriers:
        ctx.synchronize()
    read = access_addresses(ctx.launch, source, from_plan)
    write = access_addresses(ctx.launch, destination, to_plan)
    by_part = {access.parts: access for access in to_plan.accesses}
    cache = "cg" if width_bytes == 16 else "ca"
    condition = None if predicate is None else ctx.scalar(predicate)
    for access in from_plan.accesses:
        address = ops.shared_address(write(by_part[access.parts]))
        pointer = read(access)
        text = f"cp.async.{cache}.shared.global [$0], [$1], {width_bytes}"
        if condition is None:
            ops.inline_assembly(text + ";", "r,l,~{memory}", address, pointer)
        else:
            count = ops.arith.select(condition, ops.i32_constant(width_bytes), ops.i32_constant(0))
            ops.inline_assembly(text + ", $2;", "r,l,r,~{memory}", address, pointer, count)
    if barrier is not None:
        selected = resolve_barrier(ctx, barrier)
        if hardware_arrivals(ctx, selected) != LANES_OF_THREAD:
            raise UnsupportedError(
                f"a copy by all lanes that completes on a {selected.dtype.title}",
                expected="a plgpu.Barrier, on which each lane arrives",
            )
        ops.inline_assembly(
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];",
            "r,~{memory}",
            selected.address(),
        )
    ops.inline_assembly("cp.async.commit_group;", "~{memory}")


@rules.lowering(prim.copy_smem_to_gmem_p, *_ALL, requires=("tma",))
def _copy_smem_to_gmem(
    ctx: RuleContext,
    *operands: Value,
    args_tree: Any,
    commit_group: bool,
    reduction_op: str | None,
    discard: bool,
) -> Sequence[Value]:
    src, dst, predicate = args_tree.unflatten(operands)
    issue = None
    with remembered():
        source = resolve(ctx, src, discards=discard, own_line=True)
        destination = resolve(ctx, dst, pointer=False, copied_to=True)
        try:
            issue = plans.plan_store(ctx, source, destination, reduction_op)
        except InvalidValueError:
            if reduction_op is not None or not plain.applies(destination, source):
                raise
    if issue is None:
        wanted = None if predicate is None else ctx.scalar(predicate)
        with source.at_line, contextlib.nullcontext() if wanted is None else ops.when(wanted):
            plain.copy_to_global(ctx, source, destination)
        if commit_group:
            _commit()
        return ()
    with source.at_line, ops.when(_guard(ctx, predicate)):
        issue()
    if commit_group:
        _commit()
    return ()


def _commit() -> None:
    # Every lane closes a group, so that all of them count alike; most groups are empty.
    ops.inline_assembly("cp.async.bulk.commit_group;", "~{memory}")


@rules.lowering(prim.commit_group_p, *_ALL, requires=("tma",))
def _commit_group(ctx: RuleContext) -> Sequence[Value]:
    _commit()
    return ()


@rules.lowering(prim.wait_smem_to_gmem_p, *_ALL, requires=("tma",))
def _wait_smem_to_gmem(ctx: RuleContext, *, n: int, wait_read_only: bool) -> Sequence[Value]:
    kind = ".read" if wait_read_only else ""
    ops.inline_assembly(f"cp.async.bulk.wait_group{kind} {n};", "~{memory}")
    ctx.synchronize()
    return ()


@rules.lowering(prim.wait_gmem_to_smem_p, Semantics.LANE)
def _wait_gmem_to_smem(ctx: RuleContext, *, n: int, **params: Any) -> Sequence[Value]:
    ops.inline_assembly(f"cp.async.wait_group {n};", "~{memory}")
    ctx.synchronize()
    return ()


@rules.lowering(prim.async_prefetch_p, *_ALL, requires=("tma",))
def _async_prefetch(
    ctx: RuleContext,
    *operands: Value,
    args_tree: Any,
    collective_axes: Any,
    leader_tracked: CopyPartition | None,
) -> Sequence[Value]:
    ref, predicate = args_tree.unflatten(operands)
    source = resolve(ctx, ref, pointer=False)
    dimensions = collective_dimensions(ctx, collective_axes)
    blocks = math.prod(ctx.kernel.geometry.cluster[d] for d in dimensions)
    copy = tma.plan_copy(ctx, source, row_major(source.shape, source.element_bits))
    with ops.when(_guard(ctx, predicate)):
        tma.issue_prefetch(ctx, copy, dimensions, blocks)
    return ()
