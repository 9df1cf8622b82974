"""A copy through tiled, swizzled shared memory, with TMA both ways.

The tensor memory accelerator (TMA) moves a whole window with one instruction and counts the bytes
on a barrier. ``TilingTransform`` and ``SwizzleTransform`` set the layout of the tile in shared
memory;
the body still sees its logical shape. Swizzling permutes the 16-byte pieces of each row so that
reading a column has no bank conflicts; a swizzle of 16 bytes means none.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from examples.catalog import Example
from pallasite import gpu as plgpu

ROWS = 64


def swizzled(swizzle: int, dtype: Any) -> tuple[Any, ...]:
    """The transforms of an operand whose rows are cut into pieces of ``swizzle`` bytes."""
    if swizzle == 16:
        return ()
    elements = swizzle // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle))


def double(x: jax.Array, *, swizzle: int) -> jax.Array:
    """``x + x``; each block copies a tile in, doubles it in registers, and copies it out."""
    rows, columns = x.shape
    width = 128 // jnp.dtype(x.dtype).itemsize

    def body(x_ref, out_ref, tile, result, loaded):
        window = (
            pl.ds(jax.lax.axis_index("row") * ROWS, ROWS),
            pl.ds(jax.lax.axis_index("column") * width, width),
        )
        plgpu.copy_gmem_to_smem(x_ref.at[window], tile, loaded)
        plgpu.barrier_wait(loaded)
        v = tile[...]
        result[...] = v + v
        plgpu.commit_smem()  # What was written becomes visible to the copy that reads it.
        plgpu.copy_smem_to_gmem(result, out_ref.at[window])
        plgpu.wait_smem_to_gmem(0)

    shared = plgpu.SMEM((ROWS, width), x.dtype, transforms=swizzled(swizzle, x.dtype))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[shared, shared, plgpu.Barrier()],
        grid=(rows // ROWS, columns // width),
        grid_names=("row", "column"),
        kernel_name=f"double_swizzle_{swizzle}",
    )
    return kernel(x)


EXAMPLES = [
    Example(
        f"tiled_copy_{name}_swizzle_{swizzle}",
        functools.partial(double, swizzle=swizzle),
        lambda key, dtype=dtype: (jax.random.randint(key, (256, 512), -60, 60).astype(dtype),),
        lambda x: x + x,
    )
    for swizzle in (16, 32, 64, 128)
    for name, dtype in (
        ("f32", jnp.float32),
        ("bf16", jnp.bfloat16),
        ("i8", jnp.int8),
    )
]
