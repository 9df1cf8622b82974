"""Attention for every target: one block for 64 queries, one pass over keys and values.

The softmax is computed online: when a row's maximum grows, what has been summed up so far is scaled
down. Both products are ``plgpu.mma``, which all targets have. The weights of the second come from
the first without leaving their registers, since a lane holds the same elements of an accumulator
and of a left operand.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

QUERIES, KEYS = 64, 64
STAGES = 2


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """``softmax(q @ k.T / sqrt(width)) @ v`` for each head.

    q, k and v have the shape (heads, length, width) and are 16-bit floats; the length is a multiple
    of 64, the width one of 16.
    """
    heads, length, width = q.shape
    steps = k.shape[1] // KEYS
    scale = math.log2(math.e) / math.sqrt(width)

    def body(q_ref, k_ref, v_ref, out_ref, q_tile, k_tiles, v_tiles, q_loaded, loaded):
        head = lax.axis_index("head")
        queries = pl.ds(lax.axis_index("query") * QUERIES, QUERIES)

        def fetch(step):
            stage = lax.rem(step, STAGES)
            keys = pl.ds(step * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(k_ref.at[head, keys], k_tiles.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(v_ref.at[head, keys], v_tiles.at[stage], loaded.at[stage])

        plgpu.copy_gmem_to_smem(q_ref.at[head, queries], q_tile, q_loaded)
        for step in range(min(STAGES - 1, steps)):
            fetch(step)
        plgpu.barrier_wait(q_loaded)
        q_rows = q_tile[...]

        def attend(step, carry):
            acc, largest, total = carry
            stage = lax.rem(step, STAGES)
            plgpu.barrier_wait(loaded.at[stage])

            @pl.when(step + STAGES - 1 < steps)
            def _():
                fetch(step + STAGES - 1)

            zero = jnp.zeros((QUERIES, KEYS), jnp.float32)
            logits = plgpu.mma(zero, q_rows, k_tiles[stage].T) * scale
            new_largest = jnp.maximum(largest, jnp.max(logits, axis=1))
            powers = jnp.exp2(logits - new_largest[:, None])
            shrink = jnp.exp2(largest - new_largest)
            total = total * shrink + jnp.sum(powers, axis=1)
            acc = plgpu.mma(acc * shrink[:, None], powers.astype(v.dtype), v_tiles[stage])
            return acc, new_largest, total

        start = (
            jnp.zeros((QUERIES, width), jnp.float32),
            jnp.full((QUERIES,), -jnp.inf, jnp.float32),
            jnp.zeros((QUERIES,), jnp.float32),
        )
        acc, _, total = lax.fori_loop(0, steps, attend, start)
        q_tile[...] = (acc / total[:, None]).astype(out_ref.dtype)
        plgpu.copy_smem_to_gmem(q_tile, out_ref.at[head, queries])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=[
            plgpu.SMEM((QUERIES, width), q.dtype),
            plgpu.SMEM((STAGES, KEYS, width), k.dtype),
            plgpu.SMEM((STAGES, KEYS, width), v.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
        grid=(heads, length // QUERIES),
        grid_names=("head", "query"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name="warp_attention",
    )
    return kernel(q, k, v)


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    logits = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[2])
    powers = np.exp(logits - logits.max(axis=2, keepdims=True))
    return (powers / powers.sum(axis=2, keepdims=True)) @ v


EXAMPLES = [
    Example(
        f"warp_attention_{name}",
        attention,
        random_arrays(*[((2, 256, 64), dtype)] * 3),
        reference,
        tolerance=tolerance,
    )
    for name, dtype, tolerance in (("bf16", jnp.bfloat16, 1e-2), ("f16", jnp.float16, 2e-3))
]
