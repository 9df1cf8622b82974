"""A linear layer with a softmax epilogue, with inferred layouts.

Under warpgroup semantics the compiler chooses the layouts of arrays in registers and shared memory:
the operands of ``wgmma`` are tiled and swizzled, the bias is loaded in the accumulator's column
layout, and the tile of the result is swizzled so that its store has no bank conflicts. It also
inserts the fence between that store and the copy. ``pallasite inspect`` reports its choices:

    pallasite inspect examples/inferred_layouts.py::linear_softmax_bf16 --layouts --target sm_90a
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, DEPTH = 64, 64


def linear_softmax(x: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    """``softmax(x @ weights + bias)`` along the rows, for up to 256 columns of weights."""
    (m, k), (_, n) = x.shape, weights.shape

    def body(x_ref, weights_ref, bias_ref, out_ref, x_tile, weights_tile, result, loaded):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)

        def multiply(acc):
            @pl.loop(0, k // DEPTH)
            def _(step):
                depth = pl.ds(step * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(x_ref.at[rows, depth], x_tile, loaded)
                plgpu.copy_gmem_to_smem(weights_ref.at[depth], weights_tile, loaded)
                plgpu.barrier_wait(loaded)
                plgpu.wgmma(acc, x_tile, weights_tile)
                plgpu.wgmma_wait(0)

            return acc[...]

        logits = pl.run_scoped(multiply, plgpu.ACC((ROWS, n), jnp.float32))
        logits += bias_ref[...][None, :]
        powers = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
        result[...] = (powers / jnp.sum(powers, axis=1, keepdims=True)).astype(out_ref.dtype)
        plgpu.copy_smem_to_gmem(result, out_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_types=[
            plgpu.SMEM((ROWS, DEPTH), x.dtype),
            plgpu.SMEM((DEPTH, n), weights.dtype),
            plgpu.SMEM((ROWS, n), x.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(m // ROWS,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name="linear_softmax",
    )
    return kernel(x, weights, bias)


def reference(x: np.ndarray, weights: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The same in high precision."""
    powers = x @ weights + bias
    powers = np.exp(powers - powers.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


EXAMPLES = [
    Example(
        "linear_softmax_bf16",
        linear_softmax,
        random_arrays(
            ((128, 192), jnp.bfloat16), ((192, 128), jnp.bfloat16), ((128,), jnp.float32)
        ),
        reference,
        tolerance=4e-3,
        needs=frozenset({"wgmma"}),
    )
]
