"""Blocks of a cluster that share the steps of a tile: which of them each has, and their sums."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite import gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Received:
    """Where a block gets the sums of others.

    Attributes:
      sums: shared memory, for each warpgroup and each of the others.
      summed: barriers that these sums complete.
      unused: what warpgroups of all blocks arrive at when they have read the last stage, if
        ``sums`` is where the stages were; else None.
    """

    sums: Any
    summed: Any
    unused: Any = None

    def wait_until_unused(self) -> None:
        """Waits until sums may be sent."""
        if self.unused is not None:
            plgpu.barrier_arrive(self.unused)
            plgpu.barrier_wait(self.unused)


def steps_of(part: Any, parts: int, steps: int) -> tuple[Any, Any]:
    """The first of a part's steps, and their number."""
    # The first parts have a step more if they are not equal.
    least, more = divmod(steps, parts)
    first = part * least + lax.min(part, jnp.int32(more))
    if not least:  # Parts without a step get one beyond the end, of zeros.
        return first, jnp.int32(1)
    return first, least + (part < more).astype(jnp.int32)


def exchange(
    parts: int, warpgroup: Any, received: Received, sums: Any, write: Callable[[Any, int], None]
) -> None:
    """Adds up what all blocks have for a tile; each writes a part of its columns.

    Every block sends the others their columns of its sums.

    Args:
      parts: how many blocks there are, along the axis ``"part"`` of the cluster.
      warpgroup: which one.
      received: where the sums of others come.
      sums: of a warpgroup.
      write: called with the sums of some columns, and the first of these.
    """
    width = sums.shape[1] // parts

    def as_block(block: int) -> None:
        for distance in range(1, parts):
            other = (block + distance) % parts
            plgpu.async_store_smem(
                sums[:, other * width : (other + 1) * width],
                received.sums.at[warpgroup, distance - 1],
                received.summed.at[warpgroup],
                cluster_idx=jnp.int32(other),
                cluster_dim="part",
            )
        total = sums[:, block * width : (block + 1) * width]
        plgpu.barrier_wait(received.summed.at[warpgroup])
        for place in range(parts - 1):
            total = total + received.sums[warpgroup, place]
        write(total, block * width)

    received.wait_until_unused()
    lax.switch(
        lax.axis_index("part"), [functools.partial(as_block, block) for block in range(parts)]
    )


def collect(
    parts: int, warpgroup: Any, received: Received, sums: Any, write: Callable[[Any, int], None]
) -> None:
    """The same where the first block writes all columns; the others send it their sums."""

    def send(block: int) -> None:
        plgpu.async_store_smem(
            sums,
            received.sums.at[warpgroup, block - 1],
            received.summed.at[warpgroup],
            cluster_idx=jnp.int32(0),
            cluster_dim="part",
        )

    def receive() -> None:
        plgpu.barrier_wait(received.summed.at[warpgroup])
        total = sums
        for place in range(parts - 1):
            total = total + received.sums[warpgroup, place]
        write(total, 0)

    received.wait_until_unused()
    each = [receive, *(functools.partial(send, block) for block in range(1, parts))]
    lax.switch(lax.axis_index("part"), each)
