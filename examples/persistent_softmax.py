"""Softmax of long 16-bit rows by persistent blocks, which prefetch the next rows.

A row of 32768 elements takes most of a multiprocessor's registers, so no second block can load
while the first computes. So a block works on many rows, and TMA copies the next ones to shared
memory in advance: a buffer is filled again as soon as all warpgroups have its row in registers. The
rows below are half as long, for the buffers to fit the shared memory of every target.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from examples.softmax import reference
from pallasite import gpu as plgpu

WARPGROUPS = 4
BUFFERS = 2


def persistent_softmax(x: jax.Array, blocks: int = 132) -> jax.Array:
    """Softmax of the rows of ``x``; ``blocks`` is best the GPU's number of multiprocessors."""
    rows, length = x.shape
    blocks = min(blocks, rows)

    def body(x_ref, out_ref, buffers, partial, loaded, written):
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        window = pl.ds(warpgroup * (length // WARPGROUPS), length // WARPGROUPS)

        def fetch(step):
            row = block + step * blocks

            @pl.when((warpgroup == 0) & (row < rows))
            def _():
                stage = lax.rem(step, BUFFERS)
                plgpu.copy_gmem_to_smem(x_ref.at[row], buffers.at[stage], loaded.at[stage])

        def exchange(which, value, combine):
            partial[which, warpgroup] = value
            plgpu.barrier_arrive(written)
            plgpu.barrier_wait(written)
            total = partial[which, 0]
            for other in range(1, WARPGROUPS):
                total = combine(total, partial[which, other])
            return total

        for step in range(BUFFERS):
            fetch(jnp.int32(step))

        @pl.loop(0, (rows - block + blocks - 1) // blocks)
        def _(step):
            stage = lax.rem(step, BUFFERS)
            plgpu.barrier_wait(loaded.at[stage])
            v = buffers[stage, window].astype(jnp.float32)
            largest = exchange(0, jnp.max(v), jnp.maximum)
            fetch(step + BUFFERS)  # every warpgroup has read the buffer before the exchange
            e = jnp.exp(v - largest)
            total = exchange(1, jnp.sum(e), jnp.add)
            out_ref[block + step * blocks, window] = (e * (1 / total)).astype(x.dtype)

    return plgpu.kernel(
        body,
        out_type=x,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((BUFFERS, length), x.dtype),
            plgpu.SMEM((2, WARPGROUPS), jnp.float32),
            plgpu.Barrier(num_barriers=BUFFERS),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        kernel_name="persistent_softmax",
    )(x)


EXAMPLES = [
    Example(
        f"persistent_softmax_{name}",
        persistent_softmax,
        random_arrays(((300, 16384), dtype)),
        reference,
        tolerance,
    )
    for name, dtype, tolerance in (("bf16", jnp.bfloat16, 4e-3), ("f16", jnp.float16, 1e-3))
]
