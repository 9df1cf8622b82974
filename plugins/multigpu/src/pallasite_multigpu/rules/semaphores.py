"""Signals to semaphores of other devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallasite.plugin import InvalidTypeError, RuleSet, Semantics, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import EstimatorContext, Resources, RuleContext, Value, nothing
from pallasite_multigpu import protocol
from pallasite_multigpu.language import semaphores as prim
from pallasite_multigpu.network import calls
from pallasite_multigpu.protocol.kernel import COMMUNICATION, table_of
from pallasite_multigpu.rules.devices import check_all_axes, device_rank, rank_value
from pallasite_multigpu.views.peers import Peer, at_peer, everywhere
from pallasite_std.api import MemoryReference, semaphore_rules

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


def _names_a_device(avals: Sequence[Any], params: Any) -> bool:
    *_, device, _ = jax.tree.unflatten(params["args_tree"], list(range(len(avals))))
    return device is not None


@rules.lowering(_jax.semaphore_signal_p, *_ALL, operands=_names_a_device)
def _signal(
    ctx: RuleContext, *operands: Value, args_tree: Any, device_id_type: Any
) -> Sequence[Value]:
    """``pl.semaphore_signal`` with ``device_id``."""
    reference, transforms, amount, device, core = jax.tree.unflatten(args_tree, operands)
    if core is not None:
        raise UnsupportedError(
            "semaphore_signal with core_index", hint="a GPU's blocks have no core numbers"
        )
    if device_id_type not in (pl.DeviceIdType.MESH, pl.DeviceIdType.LOGICAL):
        raise InvalidTypeError(
            "semaphore_signal with an unknown device_id_type",
            got=device_id_type,
            expected="pl.DeviceIdType.MESH or LOGICAL",
        )
    memory = semaphore_rules.one_semaphore(ctx, reference, transforms)
    there = _on(ctx, memory, device, "semaphore_signal")
    if not ctx.kernel.state(COMMUNICATION).network:
        semaphore_rules.signal(ctx, there, amount)
        return ()
    value = ctx.scalar(amount, ops.i32())
    if ctx.auto_barriers:
        ctx.synchronize()
    with ops.when(ctx.leader):
        _by_network(ctx, there, value)
    return ()


def _by_network(ctx: RuleContext, there: MemoryReference, value: ir.Value) -> None:
    assert isinstance(there.peer, Peer)
    calls.signal(ctx, table_of(ctx.kernel), there.peer.rank, there.address(), value)


def _on(ctx: RuleContext, memory: MemoryReference, device: Any, what: str) -> MemoryReference:
    rank = device_rank(ctx, device, what)
    there = at_peer(ctx, memory, rank_value(rank))
    protocol.communicates(ctx.kernel)
    return there


@rules.resources(prim.semaphore_signal_parallel_p)
def _parallel_resources(ctx: EstimatorContext, *operands: Any, args_tree: Any) -> Resources:
    _, _, devices = args_tree.unflatten(operands)
    if all(one is None for one in devices):
        return nothing()
    return Resources({semaphore_rules.REMOTE_SIGNALS: 1})


@rules.lowering(prim.semaphore_signal_parallel_p, *_ALL)
def _signal_parallel(ctx: RuleContext, *operands: Value, args_tree: Any) -> Sequence[Value]:
    """All wait for one fence, behind which the signals are relaxed."""
    references, amounts, devices = args_tree.unflatten(operands)
    places = []
    far: list[MemoryReference | None] = []
    for reference, device in zip(references, devices, strict=True):
        memory = semaphore_rules.one_semaphore(ctx, reference, ())
        if device is not None:
            memory = _on(ctx, memory, device, "semaphore_signal_parallel")
        network = device is not None and ctx.kernel.state(COMMUNICATION).network
        far.append(memory if network else None)
        places.append((semaphore_rules.scope_of(ctx, memory), memory.address()))
    values = [ctx.scalar(amount, ops.i32()) for amount in amounts]
    if ctx.auto_barriers:
        ctx.synchronize()
    widest = "sys" if any(scope == "sys" for scope, _ in places) else "gpu"
    with ops.when(ctx.leader):
        ops.inline_assembly(f"fence.acq_rel.{widest};", "~{memory}")
        for (scope, pointer), value, there in zip(places, values, far, strict=True):
            if there is not None:
                _by_network(ctx, there, value)
                continue
            ops.inline_assembly(
                f"red.relaxed.{scope}.global.add.s32 [$0], $1;", "l,r,~{memory}", pointer, value
            )
    return ()


@rules.resources(prim.semaphore_signal_multicast_p)
def _multicast_resources(ctx: EstimatorContext, *operands: Any, **params: Any) -> Resources:
    return Resources({semaphore_rules.REMOTE_SIGNALS: 1})


@rules.lowering(prim.semaphore_signal_multicast_p, *_ALL)
def _signal_multicast(
    ctx: RuleContext,
    *operands: Value,
    args_tree: Any,
    collective_axes: tuple[Hashable, ...],
) -> Sequence[Value]:
    """PTX ISA, ``multimem.red``; the fence orders it before accesses by the usual addresses."""
    reference, amount = args_tree.unflatten(operands)
    check_all_axes(ctx.kernel, collective_axes, "semaphore_signal_multicast")
    memory = semaphore_rules.one_semaphore(ctx, reference, ())
    pointer = everywhere(ctx, memory, "semaphore_signal_multicast").address()
    protocol.communicates(ctx.kernel)
    value = ctx.scalar(amount, ops.i32())
    if ctx.auto_barriers:
        ctx.synchronize()
    with ops.when(ctx.leader):
        ops.inline_assembly(
            "multimem.red.release.sys.global.add.u32 [$0], $1;", "l,r,~{memory}", pointer, value
        )
    ops.inline_assembly("fence.proxy.alias;", "~{memory}")
    return ()
