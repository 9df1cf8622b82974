"""Arrays travel to the next device of a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_multigpu.ops import choice
from pallasite_multigpu.ops.tiles import BLOCKS, Tiles


def shift(arrays: Sequence[jax.Array], axis: Hashable, count: int) -> list[jax.Array]:
    """What the device before this one has: each device writes its arrays to the next one.

    Args:
      arrays: of any dtypes; the same shapes on all devices.
      axis: of the mesh, or a tuple of axes.
      count: devices along it.
    """
    moved = [one for one in arrays if one.size]
    if count == 1 or not moved:
        return list(arrays)
    tiles = [
        choice.plan(one.dtype.itemsize, one.size, 1, None, None).tiles(1, one.size) for one in moved
    ]
    blocks = max(one.blocks for one in tiles)
    tiles = [dataclasses.replace(one, blocks=blocks) for one in tiles]
    results = iter(
        _kernel(moved, axis, count, tiles, blocks)(*(one.reshape(1, -1) for one in moved))
    )
    return [next(results).reshape(one.shape) if one.size else one for one in arrays]


def _kernel(
    arrays: Sequence[Any], axis: Hashable, count: int, tiles: Sequence[Tiles], blocks: int
) -> Callable[..., Any]:
    def body(*refs: Any) -> None:
        sources, results = refs[: len(arrays)], refs[len(arrays) : -1]
        after = lax.rem(lax.axis_index(axis) + 1, count)
        for source, result, parts in zip(sources, results, tiles, strict=True):
            there = plgpu.remote_ref(result, {axis: after})

            def move(rows: Any, columns: Any, source: Any = source, there: Any = there) -> None:
                there[rows, columns] = source[rows, columns]

            parts.each(move)
        arrived = refs[-1]
        pl.semaphore_signal(arrived, 1, device_id={axis: after})
        pl.semaphore_wait(arrived)

    made: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((1, one.size), one.dtype) for one in arrays],
        grid=(blocks,),
        grid_names=(BLOCKS,),
        scratch_types=[plgpu.SemaphoreType.REGULAR],
        kernel_name="shift",
    )
    return made
