"""One copy for all blocks of a cluster: each fetches a part, and the hardware multicasts it.

All blocks of a cluster need the same tile of ``shared``. With ``collective_axes`` the copy reads
the tile from memory once, and writes it to the shared memory of every block. Before a tile may be
overwritten, *all* blocks must have read it: that is what the ``ClusterBarrier`` is for.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS = 64, 128


def add_to_all(x: jax.Array, shared: jax.Array, *, blocks: int) -> jax.Array:
    """``x + shared`` for ``x`` of shape (n, *shared.shape); ``shared`` has 128 columns."""
    count, rows, _ = x.shape
    tiles = rows // ROWS

    def body(x_ref, shared_ref, out_ref, stages, loaded, free):
        program = jax.lax.axis_index("group") * blocks + jax.lax.axis_index("cluster")

        @pl.loop(0, tiles)
        def _(i):
            stage = jax.lax.rem(i, 2)
            window = pl.ds(i * ROWS, ROWS)

            @pl.when(i >= 2)
            def _():
                plgpu.barrier_wait(free.at[stage])  # Every block has released the stage.

            plgpu.copy_gmem_to_smem(
                shared_ref.at[window], stages.at[stage], loaded.at[stage], collective_axes="cluster"
            )
            plgpu.barrier_wait(loaded.at[stage])
            out_ref[program, window] = x_ref[program, window] + stages[stage]

            @pl.when(i + 2 < tiles)
            def _():
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[stage])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[
            plgpu.SMEM((2, ROWS, COLUMNS), x.dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=2),
        ],
        grid=(count // blocks,),
        grid_names=("group",),
        cluster=(blocks,),
        cluster_names=("cluster",),
        kernel_name=f"multicast_{blocks}",
    )
    return kernel(x, shared)


def reference(x: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    return x + shared


EXAMPLES = [
    Example(
        f"multicast_{name}_cluster_{blocks}",
        functools.partial(add_to_all, blocks=blocks),
        random_arrays(((16, 512, COLUMNS), dtype), ((512, COLUMNS), dtype)),
        reference,
        tolerance,
    )
    for blocks, name, dtype, tolerance in (
        (2, "f32", jnp.float32, 1e-6),
        (4, "f32", jnp.float32, 1e-6),
        (4, "i32", jnp.int32, 0.0),
    )
]
