"""Allocating barriers, and how many hardware arrivals complete their phases."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from jaxlib.mlir.dialects import llvm

from pallasite.plugin import BARRIERS, InvalidValueError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.lowering import (
    BarrierReference,
    EstimatorContext,
    Geometry,
    Resources,
    RuleContext,
)
from pallasite_std.barriers.types import ClusterBarrierType

MAXIMUM_BARRIERS = 32
MAXIMUM_ARRIVALS = 2**20 - 1
"""Of one phase of an mbarrier; each lane of a thread counts."""


def describe_barriers(aval: Any) -> str:
    """The kind of barriers and how many, for messages and tables."""
    return f"{aval.dtype} x {math.prod(aval.shape)}"


def barrier_resources(ctx: EstimatorContext, variable: Any) -> Resources:
    """What the scoped allocation of barriers behind a variable reserves."""
    aval = variable.aval
    arrivals, _ = barrier_arrivals(aval.dtype, ctx.geometry)
    return Resources(kept={(BARRIERS, (variable, arrivals)): math.prod(aval.shape)})


def barrier_arrivals(
    dtype: Any, geometry: Geometry
) -> tuple[int, tuple[tuple[int, ...], ...] | None]:
    """Hardware arrivals per phase, and the cluster dimensions of a cluster barrier.

    An arrival of a user's thread is 128 hardware arrivals, one per lane. A barrier that orders
    tensor-core work gets one from an elected lane. A cluster barrier gets one from each warpgroup
    and block that differs from its own along one collective axis.
    """
    limit = MAXIMUM_ARRIVALS // 128
    if dtype.num_arrivals > limit:
        raise InvalidValueError(
            f"a barrier cannot count {dtype.num_arrivals} arrivals",
            expected=f"num_arrivals of at most {limit}",
        )
    if isinstance(dtype, ClusterBarrierType):
        dimensions = tuple(
            tuple(
                geometry.cluster_dimension(name)
                for name in (axes if isinstance(axes, tuple) else (axes,))
            )
            for axes in dtype.collective_axes
        )
        extents = [math.prod(geometry.cluster[d] for d in group) for group in dimensions]
        return dtype.num_arrivals * (sum(extents) - len(extents) + 1), dimensions
    if dtype.orders_tensor_core:
        return dtype.num_arrivals, None
    return 128 * dtype.num_arrivals, None


@contextlib.contextmanager
def allocate_barriers(ctx: RuleContext, variable: Any) -> Any:
    """Barriers for a scope. If the same scope is lowered again, it gets the same ones.

    Other scopes get others: each thread counts the phases that it awaited, and another scope may
    let other threads wait. Only barriers of code that was thrown away are free for any scope.
    """
    aval = variable.aval
    count = math.prod(aval.shape)
    if count > MAXIMUM_BARRIERS:
        raise InvalidValueError(
            f"an array of {count} barriers", expected=f"at most {MAXIMUM_BARRIERS} in one array"
        )
    arrivals, dimensions = barrier_arrivals(aval.dtype, ctx.kernel.geometry)
    unused = ctx.kernel.free_barriers.setdefault((aval.dtype, arrivals, dimensions, count), [])
    own = unused
    if not ctx.kernel.on_trial:
        own = ctx.kernel.free_barriers.setdefault((variable, count), [])
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
        cluster_dimensions=dimensions,
    )
    own.append((storage, phases))
