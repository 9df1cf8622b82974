"""Which configurations of the operations are measured, where the option ``autotune`` says so.

A candidate runs on as many devices as the mesh around the call has, the first ones of this process,
with arrays of the same shapes on each. Candidates run one by one: devices that wait for each other
must run the same programs in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

import pallasite
from pallasite.plugin import config
from pallasite_multigpu.ops import choice

VERSION = 1
"""Of what is measured: another one makes what was kept before invalid."""
UNROLLED = (4, 8, 16)
"""Vectors that a lane may have in flight."""

measure: Any = None
"""What takes the times, if not the profiler of the GPU."""


def chosen[Configuration: Hashable](
    name: str,
    arrays: Sequence[jax.Array],
    axis: Hashable,
    candidates: Callable[[], Iterable[Configuration]],
    default: Configuration,
    run: Callable[..., Any],
    *key: Any,
) -> Configuration:
    """The configuration that an operation shall use, see ``pallasite.choose``.

    Args:
      name: of the operation.
      arrays: this device's operands.
      axis: of the mesh.
      candidates: gives configurations to choose from.
      default: without measurements.
      run: ``run(configuration, *arrays)``, on each device.
      *key: what else the choice depends on.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes, names = tuple(mesh.axis_sizes), tuple(mesh.axis_names)
    devices = math.prod(sizes)

    def on_each(configuration: Configuration, *operands: jax.Array) -> Any:
        chosen_devices = np.array(jax.devices()[:devices]).reshape(sizes)
        everywhere = jax.sharding.PartitionSpec()
        return jax.shard_map(
            functools.partial(run, configuration),
            mesh=jax.sharding.Mesh(chosen_devices, names),
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )(*operands)

    places = [str(one) for one in (axis if isinstance(axis, tuple) else (axis,))]
    around = [[str(one), size] for one, size in zip(names, sizes, strict=True)]
    options: dict[str, Any] = {}
    if config.get("autotune") == "on" and len(jax.devices()) < devices:
        options["autotune"] = "cached"
    with config.scoped(**options):
        found: Configuration = pallasite.choose(
            f"multigpu.{name}",
            VERSION,
            tuple(arrays),
            candidates,
            default,
            on_each,
            key=[around, places, *key],
            measure=measure,
            one_by_one=True,
        )
    return found


def plans(x: jax.Array, arrays: int, ways: Iterable[bool] = (False,)) -> list[choice.Plan]:
    """Plans that are worth trying.

    Args:
      x: this device's array.
      arrays: how many arrays a lane holds tiles of at the same time.
      ways: whether devices write, rather than read: what there is.
    """
    sizes = [choice.plan(x.dtype.itemsize, x.size, arrays, None, None, n) for n in UNROLLED]
    return [dataclasses.replace(one, writes=writes) for writes in ways for one in sizes]
