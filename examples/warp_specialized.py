"""Warp specialization: a producer warpgroup fetches, consumer warpgroups compute.

The block has three threads (warpgroups). The first, the producer, only issues copies, so it
releases most of its registers to the two consumers (``set_max_registers``, a feature of the targets
whose names end in ``a``), which work on alternate tiles. Two barriers per stage transfer its
ownership: ``full`` says that a tile has arrived, ``empty`` that it has been used.
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
STAGES = 2 * WORKERS


def exp_sums(x: jax.Array) -> jax.Array:
    """``exp(x).sum(axis=1)`` for ``x`` of shape (rows, 128)."""
    rows, _ = x.shape
    tiles_per_block = 16
    blocks = rows // (ROWS * tiles_per_block)

    def body(x_ref, out_ref, stages, full, empty):
        first_tile = jax.lax.axis_index("block") * tiles_per_block
        role = jax.lax.axis_index("role")

        @pl.when(role == WORKERS)
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, tiles_per_block)
            def _(i):
                stage = jax.lax.rem(i, STAGES)

                @pl.when(i >= STAGES)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                window = pl.ds((first_tile + i) * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(x_ref.at[window], stages.at[stage], full.at[stage])

        @pl.when(role < WORKERS)
        def _work():
            plgpu.set_max_registers(232, action="increase")

            @pl.loop(0, tiles_per_block // WORKERS)
            def _(step):
                i = step * WORKERS + role
                stage = jax.lax.rem(i, STAGES)
                plgpu.barrier_wait(full.at[stage])
                v = stages[stage]
                plgpu.commit_smem()  # The copy that overwrites the stage comes after this read.
                plgpu.barrier_arrive(empty.at[stage])
                window = pl.ds((first_tile + i) * ROWS, ROWS)
                out_ref[window] = jnp.sum(jnp.exp(v), axis=1)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), x.dtype),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, COLUMNS), x.dtype),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
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
