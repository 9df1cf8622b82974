"""``mixed_matmul``: the function that programs call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import select_target
from pallasite_std.ops.arguments import in_32_bits
from pallasite_std.ops.dense.config import MatmulConfig, default_config
from pallasite_std.ops.dense.epilogue import Epilogue
from pallasite_std.ops.dense.kernel import Weights, build
from pallasite_std.ops.dense.problem import MatmulProblem
from pallasite_std.ops.mixed.arguments import MixedProblem, mixed_call, multiplied
from pallasite_std.ops.padding import aligned, padded, padded_columns

_DEPTHS = (64, 32, 16)
"""Elements of a step along k; a step has weights of one group."""


@in_32_bits
def mixed_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    scales: jax.Array | None = None,
    transpose_b: bool = False,
    out_dtype: Any = None,
    config: MatmulConfig | None = None,
) -> jax.Array:
    """Mixed-precision GEMM of activations with narrow weights, ``a @ (b * scales)``, in one kernel.

    Weights are read as they are and converted in registers. Sums are float32. It has no
    derivatives.

    Args:
      a: (m, k), bfloat16 or float16.
      b: the weights, (k, n), or (n, k) with ``transpose_b``: int8, uint8, int4, uint4,
        float8_e4m3fn or float8_e5m2. Weights of 4 bits given as (k, n) are transposed beforehand,
        at the price of reading and writing them; (n, k) is the faster form of 8 bits, too.
      scales: (n,): a factor for each column, applied to the sums; or (groups, n): for each group of
        k / groups consecutive elements along k. Factors of groups are rounded to the dtype of a,
        and weights are multiplied by them before the product, rounded once; where groups are no
        multiples of 16 elements, the portable implementation does so in memory beforehand.
      transpose_b: the weights are given as (n, k).
      out_dtype: bfloat16, float16 or float32; by default that of ``a``.
      config: the tiling, of the type that the implementation for the target takes.
        By default it is chosen from the shape.

    Returns:
      (m, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.

    PTX ISA: ``mma.sync`` with the converted weights.
    """
    mixed, operands = mixed_call(
        a,
        b,
        scales=scales,
        transpose_b=transpose_b,
        out_dtype=out_dtype,
        config=config,
        config_type=MatmulConfig,
    )
    return multiplied(mixed, functools.partial(_run, config), operands)


def _run(
    config: MatmulConfig | None,
    mixed: MixedProblem,
    a: jax.Array,
    b: jax.Array,
    *scales: jax.Array,
) -> jax.Array:
    factors = list(scales)
    out_size = mixed.out_dtype.itemsize
    if config is None:
        shared_memory = select_target().max_shared_memory
        config = default_config(mixed.m, mixed.n, out_size, shared_memory)
    # Rows of a step that lie along k have multiples of 16 bytes.
    depths = [one for one in _DEPTHS if one * mixed.weight_bits % 128 == 0]
    depth = next((one for one in depths if mixed.group % one == 0), None)
    weights = Weights(depth or _DEPTHS[0], mixed.group)
    transposed = mixed.transposed
    if depth is None:
        # Weights that were turned are turned back, which leaves nothing to transpose.
        transposed = transposed and not mixed.turned
        b = _scaled(mixed, b.T if mixed.turned else b, factors[0], transposed=transposed)
        factors, weights = [], Weights(_DEPTHS[0], 0)
    problem = MatmulProblem(
        m=mixed.m,
        n=padded_columns(mixed.n, out_size),
        k=mixed.k,
        dtype_a=mixed.dtype,
        dtype_b=np.dtype(b.dtype),
        out_dtype=mixed.out_dtype,
        accumulator=np.dtype(np.float32),
        transpose_a=False,
        transpose_b=transposed,
    )
    bits = mixed.weight_bits if depth else 16
    operands = [aligned(a), padded(b, 1, 128 // bits)]
    if weights.group:
        operands.append(padded(factors[0].astype(mixed.dtype), 1, config.tile_n))
    elif factors:
        operands.append(padded(factors[0].astype(jnp.float32), 0, config.tile_n))
    epilogue = Epilogue(column_scale="vector" if factors and not weights.group else "none")
    return _kernel(problem, config, epilogue, weights)(*operands)[:, : mixed.n]


def _scaled(
    mixed: MixedProblem, b: jax.Array, factors: jax.Array, *, transposed: bool
) -> jax.Array:
    """The weights times the factors of their groups."""
    if mixed.weight_bits == 4:
        # XLA's kernels for GPUs that convert 4 bits and transpose anything, be it the factors, can
        # be wrong (jaxlib 0.11.2, 16 rows or columns). This conversion is a kernel of its own.
        b = jax.lax.optimization_barrier(jax.lax.optimization_barrier(b).astype(jnp.int8))
    each = jnp.repeat(factors.astype(mixed.dtype), mixed.group, axis=0)
    return b.astype(mixed.dtype) * (each.T if transposed else each)


_kernel = functools.lru_cache(maxsize=256)(build)
