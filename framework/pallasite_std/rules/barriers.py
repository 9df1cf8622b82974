"""Arriving on and waiting for mbarriers, and the fence before asynchronous accesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value, resolve_barrier
from pallasite_std.barriers.emission import arrive, phase_bit, spans_cluster, wait
from pallasite_std.primitives import barriers as prim

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


@rules.lowering(prim.barrier_arrive_p, *_ALL, requires=("mbarrier",))
def _barrier_arrive(
    ctx: RuleContext, *operands: Value, args_tree: Any, by: str | None
) -> Sequence[Value]:
    reference, predicate = args_tree.unflatten(operands)
    barrier = resolve_barrier(ctx, reference)
    arrive(ctx, barrier, None if predicate is None else ctx.scalar(predicate), by)
    return ()


@rules.lowering(prim.barrier_wait_p, *_ALL, requires=("mbarrier",))
def _barrier_wait(ctx: RuleContext, *operands: Value, args_tree: Any) -> Sequence[Value]:
    (reference,) = args_tree.unflatten(operands)
    wait(ctx, resolve_barrier(ctx, reference))
    return ()


@rules.lowering(prim.barrier_test_p, *_ALL, requires=("mbarrier",))
def _barrier_test(ctx: RuleContext, *operands: Value, args_tree: Any) -> RegisterArray:
    (reference,) = args_tree.unflatten(operands)
    barrier = resolve_barrier(ctx, reference)
    bit, _ = phase_bit(barrier)
    scope = "cluster" if spans_cluster(ctx, barrier) else "cta"
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


def emit_async_fence(ctx: RuleContext) -> None:
    """What this lane did to shared memory comes before asynchronous accesses that follow.

    PTX ISA 9.7.13.6.
    """
    ops.inline_assembly("fence.proxy.async.shared::cta;", "~{memory}")


@rules.lowering(prim.commit_smem_p, *_ALL, requires=("tma",))
def _commit_smem(ctx: RuleContext) -> Sequence[Value]:
    emit_async_fence(ctx)
    ctx.synchronize()
    return ()
