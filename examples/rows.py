"""What the kernels over whole rows share: several warpgroups of a block work on one row.

A row that fits into the registers of one warpgroup is read once and never spilled. Longer rows are
split: each of the block's warpgroups holds a part, reduces it, and exchanges its partial result
with the others through shared memory and a barrier on which all of them arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

#: Bytes of a row that one warpgroup holds: 8192 elements of two bytes, 64 per lane.
PART_BYTES = 16384
MAX_WARPGROUPS = 8


def warpgroups_per_row(length: int, dtype: Any) -> int:
    """How many warpgroups share a row: enough that each holds at most 16 KiB of it."""
    count = 1
    while length * jnp.dtype(dtype).itemsize > count * PART_BYTES and count < MAX_WARPGROUPS:
        count *= 2
    return count


class Row:
    """The part of a row that this warpgroup works on, and reductions over the whole row."""

    def __init__(self, length: int, warpgroups: int, partials: Any = None, barrier: Any = None):
        self.warpgroups = warpgroups
        self.partials = partials
        self.barrier = barrier
        self.index = jax.lax.axis_index("row")
        self.part = jax.lax.axis_index("part") if warpgroups > 1 else 0
        part_length = length // warpgroups
        self.window = pl.ds(self.part * part_length, part_length)
        self.exchanges = 0

    def reduce(self, operation: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """``operation`` (``jnp.sum``, ``jnp.max``) over all parts of the row, for every warpgroup.

        Each exchange has a row of ``partials`` of its own, so that a fast warpgroup cannot write
        into one that a slow warpgroup still reads.
        """
        result = operation(x)
        if self.warpgroups == 1:
            return result
        slot, self.exchanges = self.exchanges, self.exchanges + 1
        self.partials[slot, self.part] = result
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)
        return operation(self.partials[slot])


def row_kernel(
    body: Callable[..., None], x: jax.Array, name: str, *, exchanges: int
) -> Callable[..., jax.Array]:
    """A kernel with one block per row of ``x`` whose body gets a :class:`Row` first.

    ``exchanges`` is how often the body calls :meth:`Row.reduce`. The result is like ``x``.
    """
    rows, length = x.shape
    warpgroups = warpgroups_per_row(length, x.dtype)
    arguments: dict[str, Any] = {}
    if warpgroups > 1:
        arguments = dict(
            num_threads=warpgroups,
            thread_name="part",
            scratch_types=dict(
                partials=plgpu.SMEM((exchanges, warpgroups), jnp.float32),
                barrier=plgpu.Barrier(num_arrivals=warpgroups),
            ),
        )

    def with_row(*refs: Any, **scratch: Any) -> None:
        body(Row(length, warpgroups, **scratch), *refs)

    return plgpu.kernel(
        with_row,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=name,
        **arguments,
    )
