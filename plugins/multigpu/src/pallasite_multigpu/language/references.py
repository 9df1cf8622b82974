"""References to arrays of other devices: one of them, or all at once.

The reference that a kernel gets to one of its arrays in global memory stands for the array of this
device. ``remote_ref`` is the array of the same call on another device, ``multicast_ref`` those on
all devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import as_transformed, checks, memory_space_of
from pallasite_std.api import Coordinates


@dataclasses.dataclass
class PeerMemRef(_jax.Transform):  # type: ignore[misc]
    """The same array on another device; its type stays as it is.

    Attributes:
      device_id: which device: what ``remote_ref`` takes, with int32 scalars as leaves.
      device_id_type: ``pl.DeviceIdType.MESH`` or ``LOGICAL``.
    """

    device_id: Any
    device_id_type: Any

    def transform_type(self, x: Any) -> Any:
        """The type of the array there."""
        return x

    def commute_ndindexer(self, _: Any, indexer: Any) -> tuple[Any, PeerMemRef]:
        """The same element, if the index comes first."""
        return indexer, self

    def get_indexer_shape(self) -> tuple[int, ...]:
        """What JAX asks of the last view of a semaphore that is signalled or waited for."""
        raise checks.value_error(
            "a signal to, or a wait for, the semaphore of a remote_ref",
            expected="a semaphore of this device: others' can be signalled by their device_id, and"
            " read",
            hint="pl.semaphore_signal(sem, device_id=device), pl.semaphore_read(remote_ref(...))",
        )

    def undo(self, x: Any) -> Any:
        """There is no way back: the other array is another one."""
        del x
        raise checks.unsupported("the view of another device's array is undone")

    def pretty_print(self, context: Any) -> Any:
        """The view as it appears in a printed jaxpr."""
        leaves = [_shown(leaf, context) for leaf in jax.tree.leaves(self.device_id)]
        return _jax.pretty_printer.text(f"{{device {', '.join(leaves)}}}")


@dataclasses.dataclass(frozen=True)
class MulticastRef(_jax.Transform):  # type: ignore[misc]
    """The same array on all devices along axes of the device mesh."""

    collective_axes: tuple[Hashable, ...]

    def transform_type(self, x: Any) -> Any:
        """The type of each of the arrays."""
        return x

    def undo(self, x: Any) -> Any:
        """There is no way back: it stands for several arrays."""
        del x
        raise checks.unsupported("the view of all devices' arrays is undone")

    def pretty_print(self, context: Any) -> Any:
        """The view as it appears in a printed jaxpr."""
        del context
        return _jax.pretty_printer.text(f"{{devices along {list(self.collective_axes)}}}")


for _transform, _data, _meta in (
    (PeerMemRef, ("device_id",), ("device_id_type",)),
    (MulticastRef, (), ("collective_axes",)),
):
    jax.tree_util.register_dataclass(_transform, data_fields=_data, meta_fields=_meta)


reach_devices_p = _jax.Primitive("reach_devices")
"""Says that a kernel uses the memory of other devices; does nothing."""
reach_devices_p.multiple_results = True
_jax.abstract_eval(reach_devices_p)(lambda: ((), {_jax.comms_effect}))


def _shown(leaf: Any, context: Any) -> str:
    del context
    return str(leaf)


def remote_ref(ref: Any, device_id: Any, device_id_type: Any = pl.DeviceIdType.MESH) -> Any:
    """A reference to the array of another device that ``ref`` is on this one.

    It can be read and written, copied from and to, prefetched, changed by atomic operations, and
    passed to inlined code. What the other device does with its array meanwhile is up to the kernel:
    see the memory model in ``docs/multigpu.md``.

    Args:
      ref: a reference to an argument, output or semaphores of the kernel, in global memory, or a
        view of one.
      device_id: an int32 scalar, which counts the devices of the mesh in row-major order; a tuple
        of coordinates, one for each axis of the mesh; or a dictionary of coordinates by axis name
        (a tuple of names stands for these axes joined), in which the axes that are left out have
        this device's own coordinate. All may be known at compile time or not.
      device_id_type: ``pl.DeviceIdType.LOGICAL`` if ``device_id`` may only be such a scalar.

    Raises:
      InvalidTypeError: ``ref`` is no reference, or a coordinate is no int32 scalar.
      InvalidValueError: ``ref`` is not in global memory, or not on this device.
    """
    base = _global(ref, "remote_ref")
    if any(isinstance(one, PeerMemRef) for one in base.transforms):
        raise checks.value_error(
            "remote_ref of a reference to another device's array",
            got=base,
            expected="a reference to this device's array",
        )
    if any(isinstance(one, MulticastRef) for one in base.transforms):
        raise checks.value_error(
            "remote_ref of a multicast reference, which stands for all devices",
            got=base,
            expected="a reference to this device's array",
            hint="take one device or all of them: remote_ref(ref, ...) or multicast_ref(ref, ...)",
        )
    device = device_coordinates(device_id, device_id_type)
    reach_devices_p.bind()
    return _jax.TransformedRef(base.ref, (*base.transforms, PeerMemRef(device, device_id_type)))


def multicast_ref(ref: Any, collective_axes: Hashable | tuple[Hashable, ...]) -> Any:
    """A reference to the arrays of all devices that ``ref`` is on this one.

    What is copied to it arrives in all of them. It cannot be read; see ``multimem_load_reduce``.

    Args:
      ref: a reference to an argument or output of the kernel in global memory, or a view of one.
      collective_axes: all axes of the device mesh.

    Raises:
      InvalidTypeError: ``ref`` is no reference.
      InvalidValueError: ``ref`` is not in global memory, or on another device.
    """
    base = _global(ref, "multicast_ref")
    if any(isinstance(one, PeerMemRef) for one in base.transforms):
        raise checks.value_error(
            "multicast_ref of a reference to another device's array",
            got=base,
            expected="a reference to this device's array",
            hint="take one device or all of them: remote_ref(ref, ...) or multicast_ref(ref, ...)",
        )
    axes = axis_tuple(collective_axes)
    reach_devices_p.bind()
    return _jax.TransformedRef(base.ref, (*base.transforms, MulticastRef(axes)))


def axis_tuple(axes: Hashable | tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """Axes as a tuple; one may be given by itself."""
    return axes if isinstance(axes, tuple) else (axes,)


def device_coordinates(device_id: Any, device_id_type: Any) -> Any:
    """What says which device, with int32 scalars as leaves.

    Raises:
      InvalidTypeError: it has another form, or a leaf that is no int32 scalar.
    """
    forms = "an int32 scalar, a tuple of coordinates, or a dictionary of coordinates by axis"
    if device_id_type not in (pl.DeviceIdType.MESH, pl.DeviceIdType.LOGICAL):
        raise checks.type_error(
            "device_id_type is unknown", got=device_id_type, expected="a pl.DeviceIdType"
        )
    if isinstance(device_id, Mapping):
        if device_id_type is pl.DeviceIdType.LOGICAL:
            raise checks.type_error(
                "a logical device_id is a dictionary", got=device_id, expected="an int32 scalar"
            )
        return Coordinates((name, _coordinate(value, name)) for name, value in device_id.items())
    if isinstance(device_id, tuple | list):
        if device_id_type is pl.DeviceIdType.LOGICAL:
            raise checks.type_error(
                "a logical device_id has several coordinates",
                got=device_id,
                expected="an int32 scalar",
            )
        return tuple(_coordinate(value, number) for number, value in enumerate(device_id))
    if device_id is None:
        raise checks.type_error("device_id says no device", got=None, expected=forms)
    return _coordinate(device_id, None)


def _coordinate(value: Any, place: Any) -> Any:
    what = "device_id" if place is None else f"device_id[{place!r}]"
    if isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_):
        if -(2**31) <= int(value) < 2**31:
            return np.int32(value)
        raise checks.value_error(f"{what} is out of range", got=value, expected="an int32")
    aval = None if isinstance(value, str) else _typeof(value)
    if getattr(aval, "shape", None) != () or getattr(aval, "dtype", None) != jnp.int32:
        raise checks.type_error(
            f"{what} is no int32 scalar",
            got=value if aval is None else aval,
            expected="an int, or an i32[] array",
            hint="convert it: x.astype(jnp.int32)" if hasattr(value, "astype") else None,
        )
    return value


def _typeof(value: Any) -> Any:
    try:
        return _jax.typeof(value)
    except TypeError:
        return None


def _global(ref: Any, what: str) -> Any:
    base = as_transformed(ref, "ref")
    aval = _jax.typeof(base.ref)
    space = memory_space_of(aval)
    if not getattr(space, "is_global", False):
        raise checks.value_error(
            f"{what} of something that is not in global memory",
            got=f"{aval} in {space}",
            expected="an argument, an output or semaphores of the kernel (GMEM)",
            hint="other devices do not reach shared memory: copy to global memory of theirs",
        )
    return base
