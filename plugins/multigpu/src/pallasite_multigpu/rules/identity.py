"""Where a device is in the mesh: indices along the axes of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value
from pallasite_multigpu.language.references import reach_devices_p
from pallasite_multigpu.rules.devices import mesh_axes, own_coordinate

rules = RuleSet()


@rules.lowering(reach_devices_p, Semantics.LANE, Semantics.WARP)
def _reach_devices(ctx: RuleContext) -> Sequence[Value]:
    """Views of other devices say by themselves what they need."""
    return ()


@rules.lowering(_jax.axis_index_p, Semantics.LANE, Semantics.WARP, overrides=("standard",))
def _axis_index(ctx: RuleContext, *, axis_name: Any, **params: Any) -> Any:
    """The index along axes, of which those of the kernel itself are left to the rule for them."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    geometry = ctx.kernel.geometry
    inner = (*geometry.grid_names, *geometry.cluster_names, geometry.thread_name)
    devices = [
        name in ctx.kernel.device_mesh.manual_sizes
        and name not in inner
        and name != ctx.mode.warp_axis
        for name in names
    ]
    if not any(devices):
        return ctx.next_rule(axis_name=axis_name, **params)
    axes = mesh_axes(ctx.kernel, f"lax.axis_index({axis_name!r})")
    total: ir.Value | None = None
    for name, of_devices in zip(names, devices, strict=True):
        if of_devices:
            value, size = own_coordinate(ctx.kernel, axes, name), axes[name]
        else:
            value = ctx.next_rule(axis_name=name, **params).scalar
            size = _size(ctx, name)
        total = value if total is None else ops.add(ops.multiply(total, size), value)
    return RegisterArray.splat(total, np.int32)


def _size(ctx: RuleContext, name: Any) -> int:
    geometry = ctx.kernel.geometry
    if name in geometry.grid_names:
        return int(geometry.grid[geometry.grid_names.index(name)])
    if name in geometry.cluster_names:
        return int(geometry.cluster_extents[geometry.cluster_names.index(name)])
    return int(geometry.threads)
