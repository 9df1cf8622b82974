"""Semaphores: 32-bit counters in global memory, signalled and awaited by blocks and devices.

These bind the primitives of ``pl.semaphore_signal`` and ``pl.semaphore_wait``, whose rules take the
scope of the whole system wherever another device can reach the semaphore, and that of the device
otherwise. With ``memory_scope="gpu"`` they bind primitives of their own, with the same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import (
    GMEM,
    as_transformed,
    checks,
    memory_effect,
    memory_space_of,
)
from pallasite_std.primitives import arguments

_SCOPES = ("sys", "gpu")

device_signal_p = _jax.Primitive("device_semaphore_signal")
device_wait_p = _jax.Primitive("device_semaphore_wait")

for _primitive in (device_signal_p, device_wait_p):
    _primitive.multiple_results = True
    _jax.abstract_eval(_primitive)(lambda *avals, args_tree: ((), {memory_effect}))
    arguments.no_discharge(_primitive)


def one_semaphore(value: Any) -> Any:
    """A reference to one semaphore, as a ``TransformedRef``.

    Raises:
      InvalidTypeError: something else than a semaphore.
      InvalidValueError: a group of semaphores, or something not in global memory.
    """
    ref = as_transformed(value, "semaphore")
    aval = _jax.typeof(ref.ref)
    if not _jax.issubdtype(aval.dtype, _jax.semaphore_dtype):
        raise checks.type_error(
            "semaphore is not a semaphore", got=aval, expected="a reference to a SemaphoreType"
        )
    if memory_space_of(aval) is not GMEM:
        raise checks.value_error("semaphore is not in global memory", got=aval)
    if math.prod(ref.shape) != 1:
        raise checks.value_error(
            f"semaphore is a group of {math.prod(ref.shape)} semaphores",
            hint="choose one of the group: semaphore.at[i]",
        )
    return ref


def _count(value: Any, what: str) -> Any:
    aval = _jax.typeof(value)
    if aval.shape != () or aval.dtype.kind not in "iu":
        raise checks.type_error(
            f"{what} is not an integer scalar", got=aval, expected="an int or an i32[] array"
        )
    return jnp.asarray(value, jnp.int32)


def _check_scope(memory_scope: Any) -> None:
    if memory_scope not in _SCOPES:
        raise checks.value_error(
            "memory_scope is unknown", got=repr(memory_scope), expected='"sys" or "gpu"'
        )


@jax.tree_util.register_pytree_node_class
class Coordinates(dict[Hashable, Any]):
    """Coordinates by axis, in any order: JAX sorts the keys of a dictionary, and so cannot take
    names beside tuples of names."""

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Hashable, ...]]:
        """The coordinates, and what they are along."""
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[Hashable, ...], values: Any) -> Coordinates:
        """The inverse."""
        return cls(zip(names, values, strict=True))


def by_axis(device_id: Any) -> Any:
    """The same ``device_id``, with :class:`Coordinates` for a dictionary."""
    return Coordinates(device_id) if isinstance(device_id, Mapping) else device_id


def semaphore_signal(
    semaphore: Any, inc: Any = 1, *, device_id: Any = None, memory_scope: str = "sys"
) -> None:
    """Adds ``inc`` to a semaphore; what this thread wrote before is visible to those who wait.

    Args:
      semaphore: a reference to one semaphore.
      inc: an integer scalar.
      device_id: mesh coordinates of the device whose semaphore it is; this device if None.
      memory_scope: who can wait: "sys" for all devices, "gpu" for this one only.

    Raises InvalidTypeError or InvalidValueError for anything else.

    PTX ISA: ``red.release``.
    """
    _check_scope(memory_scope)
    if device_id is not None and memory_scope == "gpu":
        raise checks.value_error(
            'memory_scope="gpu" does not reach another device', hint='use memory_scope="sys"'
        )
    if memory_scope == "gpu":
        arguments.bind(device_signal_p, one_semaphore(semaphore), _count(inc, "inc"))
        return
    pl.semaphore_signal(
        one_semaphore(semaphore),
        _count(inc, "inc"),
        device_id=jax.tree.map(lambda i: _count(i, "device_id"), by_axis(device_id)),
    )


def semaphore_wait(
    semaphore: Any, value: Any = 1, *, decrement: bool = True, memory_scope: str = "sys"
) -> None:
    """Waits until a semaphore is at least ``value``, and then subtracts it.

    Args:
      semaphore: a reference to one semaphore.
      value: an integer scalar.
      decrement: False leaves the semaphore as it is.
      memory_scope: whose signals count: "sys" for all devices, "gpu" for this one only.

    Raises InvalidTypeError or InvalidValueError for anything else.

    PTX ISA: ``ld.acquire``, ``atom.acquire.cas``.
    """
    _check_scope(memory_scope)
    amount = _count(value, "value")
    if memory_scope == "gpu":
        arguments.bind(device_wait_p, one_semaphore(semaphore), amount, bool(decrement))
        return
    pl.semaphore_wait(one_semaphore(semaphore), amount, decrement=bool(decrement))
