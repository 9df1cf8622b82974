"""The devices along axes of the mesh, as operations are given them."""

from __future__ import annotations

from collections.abc import Hashable

import jax

from pallasite.plugin import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite.plugin.jax_internals import match_varying_axes


def devices_along(axis_name: Hashable) -> int:
    """How many devices there are along an axis of the mesh, or along several, joined.

    Raises:
      InvalidTypeError: the axis has no name.
      InvalidValueError: the axis is ``jax.vmap``'s, or named twice.
      UnsupportedError: ``jax.shard_map`` is not over all axes of the mesh.
      NameError: there is no axis of that name.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    for name in names:
        if isinstance(name, int) or not isinstance(name, Hashable):
            raise InvalidTypeError(
                "axis_name does not name an axis",
                got=repr(axis_name),
                expected="the name of an axis of the mesh, or a tuple of names",
            )
    if len(set(names)) < len(names):
        raise InvalidValueError(
            "axis_name names an axis twice", got=repr(axis_name), expected="each axis once"
        )
    count = int(jax.lax.axis_size(axis_name))
    if count == 1:
        return 1
    mesh = jax.sharding.get_abstract_mesh()
    for name in names:
        if name not in mesh.axis_names:
            raise InvalidValueError(
                f"the axis {name!r} is not of devices",
                got="an axis of jax.vmap",
                expected=f"axes of the mesh of jax.shard_map, {list(mesh.axis_names)}",
                hint="reduce or gather along it before: it is a dimension of arrays",
            )
    others = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if others:
        raise UnsupportedError(
            "a collective operation where some axes of the device mesh are not manual",
            got=f"manual {list(mesh.manual_axes)} of {list(mesh.axis_names)}",
            expected="jax.shard_map over all axes of the mesh",
            hint="leave axis_names out of jax.shard_map, or name all axes",
        )
    return count


def varying_along(axis_name: Hashable, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays, as of types that vary over the axes and over what any of them varies over.

    What devices exchange differs from device to device, also where their operands do not, and the
    gradient of such an operand is the sum of all devices'. Types only differ where
    ``jax.shard_map`` checks them.
    """
    devices_along(axis_name)
    matched: tuple[jax.Array, ...] = match_varying_axes(*arrays, jax.lax.axis_index(axis_name))
    return matched[:-1]
