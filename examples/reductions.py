"""Sums of the rows and of the columns of a matrix.

Rows: a block holds one row in registers, and ``jnp.sum`` adds up within each lane, across the lanes
of a warp and across warps. Columns: a block traverses a strip of columns with one accumulator per
column in registers, so that no data crosses lanes; the loop carries the accumulators.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

STRIP = 512


def row_sums(x: jax.Array) -> jax.Array:
    """The sum of each row, in float32 (int32 for integers)."""
    rows, _ = x.shape
    total_type = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32

    def body(x_ref, out_ref):
        row = jax.lax.axis_index("row")
        out_ref[row] = jnp.sum(x_ref[row].astype(total_type))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), total_type),
        grid=(rows,),
        grid_names=("row",),
        kernel_name="row_sums",
    )
    return kernel(x)


def column_maxima(x: jax.Array) -> jax.Array:
    """The largest element of each column."""
    rows, columns = x.shape

    def body(x_ref, out_ref):
        strip = pl.ds(jax.lax.axis_index("strip") * STRIP, STRIP)

        def step(row, largest):
            return jnp.maximum(largest, x_ref[row, strip])

        out_ref[strip] = jax.lax.fori_loop(1, rows, step, x_ref[0, strip])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((columns,), x.dtype),
        grid=(columns // STRIP,),
        grid_names=("strip",),
        kernel_name="column_maxima",
    )
    return kernel(x)


EXAMPLES = [
    Example(
        "row_sums_f32",
        row_sums,
        random_arrays(((256, 4096), jnp.float32)),
        lambda x: x.sum(axis=1),
        1e-5,
    ),
    Example(
        "row_sums_i8",
        row_sums,
        random_arrays(((256, 4096), jnp.int8)),
        lambda x: x.sum(axis=1),
    ),
    Example(
        "column_maxima_f16",
        column_maxima,
        random_arrays(((64, 4096), jnp.float16)),
        lambda x: x.max(axis=0),
    ),
]
