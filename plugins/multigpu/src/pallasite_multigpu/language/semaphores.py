"""Signals to semaphores of several devices.

Bound arguments: ``semaphore_signal_parallel`` (references, amounts, device ids);
``semaphore_signal_multicast`` (reference, amount).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks, memory_effect
from pallasite_multigpu.language.references import axis_tuple, device_coordinates
from pallasite_std.api import arguments, one_semaphore

semaphore_signal_parallel_p = _jax.Primitive("semaphore_signal_parallel")
semaphore_signal_parallel_p.multiple_results = True

semaphore_signal_multicast_p = _jax.Primitive("semaphore_signal_multicast")
semaphore_signal_multicast_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class SemaphoreSignal:
    """One of the signals of ``semaphore_signal_parallel``.

    Attributes:
      ref: a reference to one semaphore.
      device_id: the device whose semaphore it is, as ``remote_ref`` takes it; None for this one.
      inc: what is added, an integer scalar.
    """

    ref: Any
    _: dataclasses.KW_ONLY
    device_id: Any
    inc: Any = 1


@_jax.abstract_eval(semaphore_signal_parallel_p)
def _parallel_abstract_eval(*avals: Any, args_tree: Any) -> Any:
    _, _, devices = args_tree.unflatten(avals)
    remote = {_jax.comms_effect} if any(one is not None for one in devices) else set()
    return (), {memory_effect, *remote}


@_jax.abstract_eval(semaphore_signal_multicast_p)
def _multicast_abstract_eval(
    *avals: Any, args_tree: Any, collective_axes: tuple[Hashable, ...]
) -> Any:
    del avals, args_tree, collective_axes
    return (), {memory_effect, _jax.comms_effect}


for _primitive in (semaphore_signal_parallel_p, semaphore_signal_multicast_p):
    arguments.no_discharge(_primitive)


def semaphore_signal_parallel(*signals: SemaphoreSignal) -> None:
    """Signals semaphores in no order, after all that this thread has done.

    That is what ``pl.semaphore_signal`` does for each of them, but the devices may see the signals
    in any order, and what was written before is made visible once for all of them.

    Args:
      *signals: ``SemaphoreSignal(ref, device_id=..., inc=1)`` each.

    Raises:
      InvalidTypeError: an argument of another kind.
      InvalidValueError: a group of semaphores, or something not in global memory.

    PTX ISA: ``fence.acq_rel.sys``, ``red.relaxed.sys``.
    """
    for one in signals:
        if not isinstance(one, SemaphoreSignal):
            raise checks.type_error(
                "semaphore_signal_parallel takes signals",
                got=one,
                expected="plgpu.SemaphoreSignal(ref, device_id=...)",
            )
    if not signals:
        return
    devices = [
        None if one.device_id is None else device_coordinates(one.device_id, pl.DeviceIdType.MESH)
        for one in signals
    ]
    arguments.bind(
        semaphore_signal_parallel_p,
        [one_semaphore(one.ref) for one in signals],
        [_amount(one.inc) for one in signals],
        devices,
    )


def semaphore_signal_multicast(
    semaphore: Any, value: Any = 1, *, collective_axes: Hashable | tuple[Hashable, ...]
) -> None:
    """Adds ``value`` to a semaphore on all devices, this one included.

    Args:
      semaphore: a reference to one semaphore.
      value: an integer scalar.
      collective_axes: all axes of the device mesh.

    Raises:
      InvalidTypeError: an argument of another kind.
      InvalidValueError: a group of semaphores, or something not in global memory.

    PTX ISA: ``multimem.red.release.sys``.
    """
    arguments.bind(
        semaphore_signal_multicast_p,
        one_semaphore(semaphore),
        _amount(value),
        collective_axes=axis_tuple(collective_axes),
    )


def _amount(value: Any) -> Any:
    aval = _jax.typeof(value)
    if aval.shape != () or aval.dtype.kind not in "iu":
        raise checks.type_error(
            "what is added to a semaphore is not an integer scalar",
            got=aval,
            expected="an int or an i32[] array",
        )
    return jnp.asarray(value, jnp.int32)
