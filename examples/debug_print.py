"""Looking into a kernel: printing layouts while it is compiled, and values while it runs.

``plgpu.print_layout`` shows which lane holds which element, at compile time. ``pl.debug_print`` in
a kernel prints on the GPU: one line per thread of the kernel for scalars, one line per element for
an array. ``{}`` marks the place of the value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

BLOCK = 256


def scale_and_print(x: jax.Array) -> jax.Array:
    """``2 * x``; prints the first element of each block."""

    def body(x_ref, out_ref):
        block = jax.lax.axis_index("block")
        window = pl.ds(block * BLOCK, BLOCK)
        v = x_ref[window]
        plgpu.print_layout("v is distributed as {}", v)
        pl.debug_print("block {} begins with {}", block, x_ref[block * BLOCK])
        out_ref[window] = v * 2

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // BLOCK,),
        grid_names=("block",),
        kernel_name="scale_and_print",
    )
    return kernel(x)


EXAMPLES = [
    Example(
        "debug_print_f32",
        scale_and_print,
        random_arrays(((2 * BLOCK,), jnp.float32)),
        lambda x: 2 * x,
        1e-6,
    )
]
