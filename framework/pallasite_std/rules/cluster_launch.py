"""Cluster launch control on targets that do not have it: there is never work to take over."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError, RuleSet, Semantics
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value, resolve_barrier
from pallasite_std.barriers.emission import arrive
from pallasite_std.primitives import cluster_launch as prim

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


@rules.lowering(prim.try_cluster_cancel_p, *_ALL, requires=("mbarrier",))
def _try_cluster_cancel(
    ctx: RuleContext, *operands: Value, args_tree: Any, collective_axes: tuple[Hashable, ...]
) -> Sequence[Value]:
    check_cancel_axes(ctx, collective_axes)
    _, barrier = args_tree.unflatten(operands)
    arrive(ctx, resolve_barrier(ctx, barrier))
    return ()


@rules.lowering(prim.query_cluster_cancel_p, *_ALL)
def _query_cluster_cancel(
    ctx: RuleContext, *operands: Value, args_tree: Any, grid_names: tuple[Hashable, ...]
) -> Sequence[Value]:
    check_query_axes(ctx, grid_names)
    indices = [RegisterArray.splat(ops.i32_constant(0), np.int32) for _ in grid_names]
    return [*indices, RegisterArray.splat(ops.i1_constant(False), np.bool_)]


def check_cancel_axes(ctx: RuleContext, collective_axes: tuple[Hashable, ...]) -> None:
    """Raises unless the blocks of a cluster ask together; a request is one of the whole cluster."""
    geometry = ctx.kernel.geometry
    given: set[Hashable] = set()
    for axis in collective_axes:
        given |= set(axis) if isinstance(axis, tuple) else {axis}
    sizes = zip(geometry.cluster_names, geometry.cluster_extents, strict=True)
    missing = [name for name, size in sizes if size > 1 and name not in given]
    if missing:
        raise InvalidValueError(
            "a block of a cluster asks for the work of another cluster by itself",
            got=f"collective_axes={collective_axes}",
            expected=f"all axes of the cluster, also {', '.join(map(repr, missing))}",
        )


def check_query_axes(ctx: RuleContext, grid_names: tuple[Hashable, ...]) -> None:
    """Raises for names that are not of axes of the grid."""
    geometry = ctx.kernel.geometry
    for name in grid_names:
        if name not in geometry.grid_names:
            raise InvalidValueError(
                f"{name!r} is not an axis of the grid",
                expected=f"some of {list(geometry.grid_names)}",
            )
