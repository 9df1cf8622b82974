"""Allocating barriers of any kind."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from jaxlib.mlir.dialects import llvm

from pallasite.plugin import (
    BARRIERS,
    BarrierKind,
    BarrierPhase,
    InvalidValueError,
    PluginError,
    Registry,
    UnsupportedError,
    manager,
)
from pallasite.plugin.ir import ops, types
from pallasite.plugin.lowering import (
    EstimatorContext,
    Geometry,
    KernelContext,
    Resources,
    RuleContext,
    StateKey,
)
from pallasite_std.memory.reference_types import BarrierReference


def kind_of(registry: Registry, dtype: Any) -> BarrierKind:
    """The kind of barriers with an element type.

    Raises:
      UnsupportedError: no plugin loaded contributes it.
    """
    kind = registry.barriers.kind(dtype)
    if kind is None:
        raise UnsupportedError(
            f"barriers of the kind {dtype.title}, which no plugin loaded contributes",
            expected="one of " + ", ".join(registry.barriers.kinds),
            hint="return a BarrierKind for it from the hook pallasite_barrier_kinds",
        )
    return kind


def describe_barriers(aval: Any) -> str:
    """The kind of barriers and how many, for messages and tables."""
    return f"{aval.dtype} x {math.prod(aval.shape)}"


def barrier_resources(ctx: EstimatorContext, variable: Any) -> Resources:
    """What the scoped allocation of barriers behind a variable reserves."""
    aval = variable.aval
    phase = phase_of(ctx.registry, aval.dtype, ctx.geometry)
    return Resources(kept={(BARRIERS, (variable, phase.hardware_arrivals)): math.prod(aval.shape)})


def phase_of(registry: Registry, dtype: Any, geometry: Geometry) -> BarrierPhase:
    """How a phase of barriers with an element type completes.

    Raises:
      InvalidValueError: their phases count more arrivals than the kind permits.
      PluginError: the kind counts no arrivals.
    """
    kind = kind_of(registry, dtype)
    phase, arrivals = kind.phase(dtype, geometry), kind.arrivals(dtype)
    if min(phase.hardware_arrivals, arrivals) < 1:
        raise PluginError(
            f"pallasite_barrier_kinds of plugin {manager().label(kind.plugin)}: a phase of"
            f" {kind.title} counts {arrivals} arrivals, {phase.hardware_arrivals} in hardware",
            expected="at least one",
        )
    if phase.hardware_arrivals > kind.most_arrivals:
        each = phase.hardware_arrivals // arrivals
        raise InvalidValueError(
            f"a barrier cannot count {arrivals} arrivals",
            expected=f"num_arrivals of at most {kind.most_arrivals // each}",
        )
    return phase


def _no_barriers(kernel: KernelContext) -> dict[tuple[Any, ...], list[Any]]:
    return {}


_FREE_BARRIERS = StateKey("standard.free-barriers", _no_barriers)
"""Storage and phases of barriers that no scope uses now, by scope, or by kind for any scope."""


@contextlib.contextmanager
def allocate_barriers(ctx: RuleContext, variable: Any) -> Any:
    """Barriers for a scope. If the same scope is lowered again, it gets the same ones.

    Other scopes get others: each thread counts the phases that it awaited, and another scope may
    let other threads wait. Only barriers of code that was thrown away are free for any scope.
    """
    aval = variable.aval
    count = math.prod(aval.shape)
    most = kind_of(ctx.kernel.registry, aval.dtype).most_barriers
    if count > most:
        raise InvalidValueError(
            f"an array of {count} barriers", expected=f"at most {most} in one array"
        )
    phase = phase_of(ctx.kernel.registry, aval.dtype, ctx.kernel.geometry)
    arrivals, dimensions = phase.hardware_arrivals, phase.cluster_dimensions
    free = ctx.kernel.state(_FREE_BARRIERS)
    unused = free.setdefault((aval.dtype, arrivals, dimensions, count), [])
    own = unused
    if not ctx.kernel.on_trial:
        own = free.setdefault((variable, count), [])
    if own or unused:
        storage, phases = (own or unused).pop()
    else:
        storage = ctx.launch.new_barriers(
            count, arrivals, what=describe_barriers(aval), location=ctx.location
        )
        with ctx.launch.at_entry():
            phases = llvm.alloca(types.pointer_type(5), ops.i32_constant(1), ops.i32())
            ops.store(ops.i32_constant(0), phases, alignment=4)
    if dimensions is not None and math.prod(ctx.kernel.geometry.cluster) > 1:
        ctx.launch.uses_cluster_memory = True
    yield BarrierReference(
        storage=storage,
        dtype=aval.dtype,
        shape=tuple(aval.shape),
        index=0,
        phases=phases,
        launch=ctx.launch,
        space=aval.memory_space,
        cluster_dimensions=dimensions,
    )
    own.append((storage, phases))
