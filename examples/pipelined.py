"""A software pipeline: while one block of data is processed, the next ones are prefetched.

``emit_pipeline`` cuts the operands as the block specs say, keeps ``max_concurrent_steps`` steps of
copies in flight, and calls the body with references to shared memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS = 16, 128


def fused_multiply_add(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """``x * y + z``; each block of the grid streams a strip of columns through shared memory."""
    rows, columns = x.shape

    def body(x_gmem, y_gmem, z_gmem, out_gmem):
        strip = jax.lax.axis_index("strip")
        spec = plgpu.BlockSpec((ROWS, COLUMNS), lambda step: (step, strip))

        def step(_, x_ref, y_ref, z_ref, out_ref):
            x, y, z = (ref[...].astype(jnp.float32) for ref in (x_ref, y_ref, z_ref))
            out_ref[...] = (x * y + z).astype(out_ref.dtype)

        plgpu.emit_pipeline(
            step,
            grid=(rows // ROWS,),
            in_specs=[spec, spec, spec],
            out_specs=[spec],
            max_concurrent_steps=3,
        )(x_gmem, y_gmem, z_gmem, out_gmem)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(columns // COLUMNS,),
        grid_names=("strip",),
        kernel_name="fused_multiply_add",
    )
    return kernel(x, y, z)


EXAMPLES = [
    Example(
        f"pipelined_{name}",
        fused_multiply_add,
        random_arrays(*[((512, 1024), dtype)] * 3),
        lambda x, y, z: x * y + z,
        tolerance,
    )
    for name, dtype, tolerance in (("f32", jnp.float32, 1e-6), ("bf16", jnp.bfloat16, 4e-3))
]
