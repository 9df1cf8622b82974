"""Which device a ``device_id`` means: its place in the device mesh, row-major."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext, RegisterArray, RuleContext
from pallasite_multigpu import protocol
from pallasite_multigpu.rules.ranges import LIMIT, range_of

type Index = ir.Value | int
"""An i32, or a number."""


def mesh_axes(kernel: KernelContext, what: str) -> dict[Hashable, int]:
    """The axes of the device mesh, all of them manual, by name, with their sizes.

    Raises:
      InvalidValueError: there is no mesh: the kernel is not inside ``jax.shard_map``.
      UnsupportedError: some axes are not manual.
    """
    mesh = kernel.device_mesh
    if not mesh.manual:
        raise InvalidValueError(
            f"{what} outside of jax.shard_map",
            expected="a kernel that runs on each device of a mesh",
            hint="call the kernel inside jax.shard_map(..., mesh=mesh), over all axes of the mesh",
        )
    axes = dict(mesh.axes)
    automatic = [name for name in axes if name not in mesh.manual]
    if automatic:
        raise UnsupportedError(
            f"{what} where some axes of the device mesh are not manual",
            got=f"manual {sorted(map(str, mesh.manual))} of {list(axes)}",
            expected="jax.shard_map over all axes of the mesh",
            hint="leave axis_names out of jax.shard_map, or name all axes",
        )
    return axes


def device_rank(ctx: RuleContext, device_id: Any, what: str) -> Index:
    """The place in the mesh of the device that a ``device_id`` means.

    Args:
      ctx: the rule's context.
      device_id: a scalar, a tuple or a dictionary of scalars of the kernel.
      what: the operation, for messages.

    Raises:
      InvalidTypeError: a coordinate that is no int32 scalar.
      InvalidValueError: an unknown axis, a wrong number of coordinates, or one that is known to be
        outside of the mesh.
    """
    axes = mesh_axes(ctx.kernel, what)
    names, sizes = list(axes), list(axes.values())
    count = math.prod(sizes)
    if isinstance(device_id, Mapping):
        coordinates = _from_axes(ctx, device_id, axes, what)
    elif isinstance(device_id, tuple | list):
        coordinates = [_index(ctx, one, what) for one in device_id]
        if len(coordinates) != len(sizes):
            raise InvalidValueError(
                f"{what} with another number of coordinates than the device mesh has axes",
                got=f"{len(coordinates)} coordinates",
                expected=f"{len(sizes)}: one for each of {names}",
                hint="name the axes: device_id={axis: index}; those left out stay this device's",
            )
    else:
        rank = _index(ctx, device_id, what)
        why = f"the mesh {axes} has {count} devices"
        _check(ctx, rank, count, f"{what}: the device_id", why)
        return rank
    total: Index = 0
    for name, size, one in zip(names, sizes, coordinates, strict=True):
        place = f"{what}: the coordinate along {name!r}"
        _check(ctx, one, size, place, f"that axis has {size} devices")
        total = _add(_multiply(total, size), one)
    return total


def rank_value(rank: Index) -> ir.Value:
    """A rank as a value (i32)."""
    return ops.i32_constant(rank) if isinstance(rank, int) else rank


def own_coordinate(kernel: KernelContext, axes: Mapping[Hashable, int], name: Hashable) -> ir.Value:
    """This device's coordinate along an axis of the mesh (i32)."""
    position = list(axes).index(name)
    inner = math.prod(list(axes.values())[position + 1 :])
    value = protocol.rank(kernel)
    if position:
        value = ops.remainder_unsigned(value, inner * axes[name])
    return ops.divide_unsigned(value, inner)


def _from_axes(
    ctx: RuleContext, device_id: Mapping[Any, Any], axes: Mapping[Hashable, int], what: str
) -> list[Index]:
    given: dict[Hashable, Index] = {}
    for name, value in device_id.items():
        members = name if isinstance(name, tuple) and name not in axes else (name,)
        unknown = [one for one in members if one not in axes]
        if unknown:
            raise InvalidValueError(
                f"{what}: device_id names {unknown[0]!r}, which is no axis of the device mesh",
                got=list(device_id),
                expected=f"axes of {list(axes)}",
                hint="blocks of this device are not addressed by device_id",
            )
        whole = _index(ctx, value, what)
        size = math.prod(axes[one] for one in members)
        if len(members) > 1:
            place = f"{what}: the coordinate along {name!r}"
            _check(ctx, whole, size, place, f"these axes have {size} devices")
        inner = size
        for one in members:
            inner //= axes[one]
            part = _divide(whole, inner) if len(members) > 1 else whole
            if one in given:
                raise InvalidValueError(
                    f"{what}: device_id names axis {one!r} twice", got=list(device_id)
                )
            given[one] = _remainder(part, axes[one]) if len(members) > 1 else part
    return [given[one] if one in given else own_coordinate(ctx.kernel, axes, one) for one in axes]


def _index(ctx: RuleContext, value: Any, what: str) -> Index:
    if isinstance(value, int | np.integer) or (
        isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu"
    ):
        return int(value)
    if isinstance(value, RegisterArray) and (
        value.shape != () or np.dtype(value.dtype) != np.int32
    ):
        raise InvalidTypeError(
            f"{what}: a device_id is no int32 scalar",
            got=f"{value.dtype}{list(value.shape)}",
            expected="an int, or an i32[] array",
            hint="convert it: x.astype(jnp.int32)",
        )
    scalar = ctx.scalar(value, ops.i32())
    owner = scalar.owner
    if not isinstance(owner, ir.Block) and owner.name == "arith.constant":
        return int(ir.IntegerAttr(owner.attributes["value"]).value)
    return scalar


def _check(ctx: RuleContext, value: Index, size: int, what: str, why: str) -> None:
    """A number has to be in range; where only the kernel knows it, the kernel gives up if not."""
    if isinstance(value, int):
        low, high = value, value
    else:
        rank = protocol.rank(ctx.kernel)
        count = protocol.device_count(ctx.kernel)
        found = range_of(value, lambda one: (0, count - 1) if one == rank else None)
        low, high = found or (-LIMIT, LIMIT)
    if low >= 0 and high < size:
        return
    if low == high:  # Whatever else is beyond the mesh may stand in code that does not run there.
        raise InvalidValueError(
            f"{what} is out of range", got=low, expected=f"0 to {size - 1}: {why}"
        )
    with ops.when(ops.compare("uge", value, size)):
        protocol.trap(ctx, protocol.Trap.DEVICE_ID, value)


def _add(x: Index, y: Index) -> Index:
    if isinstance(x, int):
        return x + y if isinstance(y, int) else (ops.add(y, x) if x else y)
    return ops.add(x, y) if not isinstance(y, int) or y else x


def _multiply(x: Index, y: int) -> Index:
    return x * y if isinstance(x, int) else ops.multiply(x, y)


def _divide(x: Index, y: int) -> Index:
    return x // y if isinstance(x, int) else ops.divide_unsigned(x, y)


def _remainder(x: Index, y: int) -> Index:
    return x % y if isinstance(x, int) else ops.remainder_unsigned(x, y)


def check_all_axes(kernel: KernelContext, collective_axes: Sequence[Hashable], what: str) -> None:
    """Multicast reaches all devices of the mesh, or it cannot be done.

    Raises:
      InvalidValueError: an axis that the device mesh does not have.
      UnsupportedError: some axes only.
    """
    axes = mesh_axes(kernel, what)
    named = [
        one
        for axis in collective_axes
        for one in (axis if axis not in axes and isinstance(axis, tuple) else (axis,))
    ]
    unknown = [one for one in named if one not in axes]
    if unknown:
        raise InvalidValueError(
            f"{what} along {unknown[0]!r}, which is no axis of the device mesh",
            got=list(collective_axes),
            expected=f"all of {list(axes)}",
        )
    missing = [one for one in axes if one not in named and axes[one] > 1]
    if missing:
        raise UnsupportedError(
            f"{what} along some axes of the device mesh only",
            got=list(collective_axes),
            expected=f"all of {list(axes)}",
            hint="use a mesh of just these axes, or a loop over remote_ref",
        )
