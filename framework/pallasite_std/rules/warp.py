"""Warp-mapped regions: code that each of the four warps of a user's thread runs for itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import (
    InvalidTypeError,
    InvalidValueError,
    RuleSet,
    Semantics,
    UnsupportedError,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import WarpMesh
from pallasite.plugin.lowering import EstimatorContext, Resources, RuleContext, Value

rules = RuleSet()


def _body(jaxprs: Sequence[Any], meshes: Sequence[Any]) -> tuple[Any, WarpMesh]:
    if len(jaxprs) != 1 or not isinstance(meshes[0], WarpMesh):
        raise UnsupportedError(
            "a region that is mapped over something other than the warps of a thread",
            got=", ".join(type(mesh).__name__ for mesh in meshes),
            expected="one plgpu.WarpMesh",
            hint="plgpu.warp_map(f) runs f once per warp",
        )
    return jaxprs[0], meshes[0]


@rules.resources(_jax.mpmd_map_p)
def _warp_map_resources(
    ctx: EstimatorContext,
    *avals: Any,
    jaxprs: Sequence[Any],
    meshes: Sequence[Any],
    **params: Any,
) -> Resources:
    jaxpr, _ = _body(jaxprs, meshes)
    return ctx.estimate(jaxpr)


@rules.lowering(_jax.mpmd_map_p, Semantics.LANE)
def _warp_map(
    ctx: RuleContext,
    *operands: Value,
    jaxprs: Sequence[Any],
    meshes: Sequence[Any],
    **params: Any,
) -> Sequence[Value]:
    """Lowers the body once: all warps run it, and ask for their number where they differ.

    The barriers around it let warps start asynchronous operations on what other warps have
    written, and let the thread see what single warps did.
    """
    jaxpr, mesh = _body(jaxprs, meshes)
    for position, aval in enumerate(ctx.avals_in):
        if isinstance(aval, _jax.ShapedArray) and aval.shape:
            raise InvalidTypeError(
                "a warp-mapped region captures an array",
                got=f"{aval.str_short()} as captured value {position}",
                expected="references and scalars",
                hint="write the array to shared memory before the region",
            )
    mode = dataclasses.replace(ctx.mode, semantics=Semantics.WARP, warp_axis=mesh.axis_name)
    if ctx.auto_barriers:
        ctx.synchronize()
    ctx.lower(jaxpr, operands, mode=mode)
    if ctx.auto_barriers:
        ctx.synchronize()
    return ()


@rules.lowering(_jax.mpmd_map_p, Semantics.WARP)
def _nested(ctx: RuleContext, *operands: Value, **params: Any) -> Sequence[Value]:
    raise InvalidValueError(
        "a warp-mapped region inside another one",
        expected="one level: inside, a single warp runs the code already",
    )
