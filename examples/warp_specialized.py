"""Warpgroups with different jobs: one fetches, the others compute.

The block has three threads (warpgroups). The first only starts copies, so it gives most of its
registers to the other two (``set_max_registers``, a feature of the targets whose names end in
``a``), which work on alternate tiles. Two barriers per slot hand it back and forth: ``full`` says
that a tile has arrived, ``empty`` that it has been used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS = 32, 128
WORKERS = 2
SLOTS = 2 * WORKERS


def exp_sums(x: jax.Array) -> jax.Array:
    """``exp(x).sum(axis=1)`` for ``x`` of shape (rows, 128)."""
    rows, _ = x.shape
    tiles_per_block = 16
    blocks = rows // (ROWS * tiles_per_block)

    def body(x_ref, out_ref, slots, full, empty):
        first_tile = jax.lax.axis_index("block") * tiles_per_block
        role = jax.lax.axis_index("role")

        @pl.when(role == WORKERS)
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, tiles_per_block)
            def _(i):
                slot = jax.lax.rem(i, SLOTS)

                @pl.when(i >= SLOTS)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                window = pl.ds((first_tile + i) * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(x_ref.at[window], slots.at[slot], full.at[slot])

        @pl.when(role < WORKERS)
        def _work():
            plgpu.set_max_registers(232, action="increase")

            @pl.loop(0, tiles_per_block // WORKERS)
            def _(step):
                i = step * WORKERS + role
                slot = jax.lax.rem(i, SLOTS)
                plgpu.barrier_wait(full.at[slot])
                v = slots[slot]
                plgpu.commit_smem()  # The copy that overwrites the slot comes after this read.
                plgpu.barrier_arrive(empty.at[slot])
                window = pl.ds((first_tile + i) * ROWS, ROWS)
                out_ref[window] = jnp.sum(jnp.exp(v), axis=1)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), x.dtype),
        scratch_types=[
            plgpu.SMEM((SLOTS, ROWS, COLUMNS), x.dtype),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WORKERS + 1,
        thread_name="role",
        kernel_name="exp_sums",
    )
    return kernel(x)


EXAMPLES = [
    Example(
        "warp_specialized_f32",
        exp_sums,
        random_arrays(((2048, COLUMNS), jnp.float32)),
        lambda x: np.exp(x).sum(axis=1),
        1e-5,
    )
]
