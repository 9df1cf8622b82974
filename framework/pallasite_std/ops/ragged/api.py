"""``ragged_matmul`` and ``transposed_ragged_matmul``: the functions that programs call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import select_target
from pallasite_std.ops.arguments import in_32_bits
from pallasite_std.ops.dense.config import MatmulConfig, default_config
from pallasite_std.ops.padding import aligned, padded_columns
from pallasite_std.ops.ragged import kernel
from pallasite_std.ops.ragged.arguments import ragged_call, transposed_ragged_call
from pallasite_std.ops.ragged.gradient import differentiable_ragged

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@in_32_bits
def ragged_matmul(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_b: bool = False,
    out_dtype: Any = None,
    config: MatmulConfig | None = None,
) -> jax.Array:
    """Multiplies each group of rows by its own matrix, as ``jax.lax.ragged_dot`` does.

    The first ``group_sizes[0]`` rows of ``a`` are multiplied by ``b[0]``, the next
    ``group_sizes[1]`` rows by ``b[1]``, and so on; rows after all groups become zeros. Groups may
    be empty. Only the GPU needs to know the sizes. Differentiable by ``a`` and ``b``.

    Args:
      a: (m, k), bfloat16, float16 or float32 (multiplied as tf32).
      b: (groups, k, n), or (groups, n, k) with ``transpose_b``, of the same dtype.
      group_sizes: (groups,), integers whose sum is at most m; negative ones count as 0.
      transpose_b: the matrices are given as (n, k).
      out_dtype: bfloat16, float16 or float32; by default that of ``a``.
      config: the tiling, of the type that the implementation for the target takes.
        By default it is chosen from the shape. Derivatives choose their own.

    Returns:
      (m, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.
    """
    sizes, out_dtype = ragged_call(
        a,
        b,
        group_sizes,
        transpose_b=transpose_b,
        out_dtype=out_dtype,
        config=config,
        config_type=MatmulConfig,
        dtypes=DTYPES,
    )
    result: jax.Array = _ragged(a, b, sizes, transpose_b, out_dtype, config)
    return result


@in_32_bits
def transposed_ragged_matmul(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: Any = None,
    config: MatmulConfig | None = None,
) -> jax.Array:
    """For each group of rows, the transpose of those of ``a`` times those of ``b``.

    This is ``jax.lax.ragged_dot_general`` with the rows as ragged contracting dimension, and what
    the derivative of :func:`ragged_matmul` by its matrices needs. The result of an empty group is
    zero; rows after all groups do not count. Differentiable by ``a`` and ``b``.

    Args:
      a: (m, k), bfloat16, float16 or float32 (multiplied as tf32).
      b: (m, n), of the same dtype.
      group_sizes: (groups,), integers whose sum is at most m; negative ones count as 0.
      out_dtype: bfloat16, float16 or float32; by default that of ``a``.
      config: the tiling, of the type that the implementation for the target takes;
        tile_m is along k. By default it is chosen from the shape. Derivatives choose their own.

    Returns:
      (groups, k, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.
    """
    sizes, out_dtype = transposed_ragged_call(
        a,
        b,
        group_sizes,
        out_dtype=out_dtype,
        config=config,
        config_type=MatmulConfig,
        dtypes=DTYPES,
    )
    result: jax.Array = _transposed(a, b, sizes, out_dtype, config)
    return result


# The kernels --------------------------------------------------------------------------------------


def _ragged_product(
    a: Any, b: Any, sizes: Any, transpose_b: bool, out_dtype: Any, config: Any
) -> Any:
    n = b.shape[1] if transpose_b else b.shape[2]
    (m, k), groups = a.shape, b.shape[0]
    if a.dtype.itemsize != 2 and not transpose_b:
        # Elements of other widths are read along k, where lanes hold neighbours.
        b, transpose_b = b.swapaxes(1, 2), True
    problem = _problem(a, m, n, k, groups, out_dtype, transpose_b)
    config = config or _default(-(-m // groups), n, out_dtype)
    result = _kernel(kernel.build, problem, config)(aligned(a), aligned(b), sizes)
    return result[:, :n]


def _transposed_product(a: Any, b: Any, sizes: Any, out_dtype: Any, config: Any) -> Any:
    (m, k), n = a.shape, b.shape[1]
    problem = _problem(a, m, n, k, sizes.shape[0], out_dtype, False)
    config = config or _default(k, n, out_dtype)
    result = _kernel(kernel.build_transposed, problem, config)(aligned(a), aligned(b), sizes)
    return result[:, :, :n]


_ragged, _transposed = differentiable_ragged(_ragged_product, _transposed_product)


def _problem(
    a: Any, m: int, n: int, k: int, groups: int, out_dtype: Any, transposed: bool
) -> kernel.Problem:
    return kernel.Problem(
        m=m,
        n=padded_columns(n, out_dtype.itemsize),
        k=k,
        groups=groups,
        dtype=np.dtype(a.dtype),
        out_dtype=out_dtype,
        transposed=transposed,
    )


def _default(rows: int, n: int, out_dtype: Any) -> MatmulConfig:
    return default_config(rows, n, out_dtype.itemsize, select_target().max_shared_memory)


@functools.lru_cache(maxsize=256)
def _kernel(build: Any, problem: kernel.Problem, config: MatmulConfig) -> Any:
    return build(problem, config)
