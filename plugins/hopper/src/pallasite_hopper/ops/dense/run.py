"""From a product's operands to the kernel: its configuration, padding, and the call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import pallasite
from pallasite_hopper.ops.dense.config import MatmulConfig, default_config, matmul_configs
from pallasite_hopper.ops.dense.epilogue import Epilogue
from pallasite_hopper.ops.dense.kernel import Problem, build

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""

_VERSION = 1
"""Of the kernel, for what was measured."""

_ROW_BYTES = 16
"""Rows in global memory that the copy engine reads begin at multiples of this."""


@dataclasses.dataclass(frozen=True)
class Call:
    """All of a product that is not an array.

    Attributes:
      problem: shapes and dtypes.
      epilogue: what follows the product.
      config: how to cut it up, or None.
    """

    problem: Problem
    epilogue: Epilogue
    config: MatmulConfig | None


def run(call: Call, a: jax.Array, b: jax.Array, extras: Sequence[jax.Array]) -> jax.Array:
    """The product; ``extras`` are the operands of the epilogue."""
    problem = call.problem
    if problem.size != 2:
        # The matrix units read such elements along k only.
        a = a.T if problem.transpose_a else a
        b = b if problem.transpose_b else b.T
        problem = dataclasses.replace(problem, transpose_a=False, transpose_b=True)
    config = call.config or _choose(problem, call.epilogue, a, b, extras)
    return _run(problem, call.epilogue, config, a, b, extras)


def _choose(
    problem: Problem,
    epilogue: Epilogue,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> MatmulConfig:
    m, n, k, out_size = problem.m, problem.n, problem.k, problem.out_dtype.itemsize
    default = default_config(m, n, k, problem.size, out_size, MULTIPROCESSORS)

    def attempt(config: MatmulConfig, a: jax.Array, b: jax.Array, *extras: jax.Array) -> jax.Array:
        return _run(problem, epilogue, config, a, b, extras)

    activation = epilogue.activation
    chosen: MatmulConfig = pallasite.choose(
        "hopper.matmul",
        _VERSION,
        (a, b, *extras),
        lambda: matmul_configs(m, n, k, problem.dtype_a, problem.out_dtype),
        default,
        attempt,
        key=(
            problem.transpose_a,
            problem.transpose_b,
            str(problem.out_dtype),
            str(problem.accumulator),
            epilogue.row_scale,
            epilogue.column_scale,
            epilogue.bias,
            epilogue.residual,
            None if activation is None else getattr(activation, "__qualname__", "activation"),
        ),
    )
    return chosen


def _run(
    problem: Problem,
    epilogue: Epilogue,
    config: MatmulConfig,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> jax.Array:
    m_multiple, n_multiple = config.tile_m, config.tile_n
    if config.cluster_along == "m":
        m_multiple *= config.cluster
    else:
        n_multiple *= config.cluster
    if config.swap:
        m_multiple, n_multiple = n_multiple, m_multiple
    remaining = iter(extras)
    operands: list[jax.Array] = []
    if epilogue.row_scale != "none":
        operands.append(_vector(next(remaining), m_multiple))
    if epilogue.column_scale != "none":
        operands.append(_vector(next(remaining), n_multiple))
    if epilogue.bias:
        operands.append(_vector(next(remaining), n_multiple))
    if epilogue.residual:
        operands.append(_aligned(next(remaining)))
    a, b = _aligned(a), _aligned(b)
    n = problem.n
    padded = _padded_columns(n, problem.out_dtype.itemsize)
    problem = dataclasses.replace(problem, n=padded)
    if config.swap:
        problem, a, b = problem.swapped(), b, a
    result = _kernel(problem, config, epilogue, MULTIPROCESSORS)(a, b, *operands)
    return result if padded == n else result[:, :n]


_kernel = functools.lru_cache(maxsize=256)(build)


def _vector(vector: jax.Array, multiple: int) -> jax.Array:
    """A vector that can be read in whole tiles; a scalar as an array of one element."""
    if vector.size == 1:
        return vector.reshape(1)
    rest = -vector.shape[0] % multiple
    return jnp.pad(vector, (0, rest)) if rest else vector


def _aligned(matrix: jax.Array) -> jax.Array:
    """A matrix whose rows the copy engine can read: padded by zeros if they are not aligned."""
    columns = _padded_columns(matrix.shape[1], np.dtype(matrix.dtype).itemsize)
    rest = columns - matrix.shape[1]
    return jnp.pad(matrix, ((0, 0), (0, rest))) if rest else matrix


def _padded_columns(columns: int, size: int) -> int:
    multiple = max(1, _ROW_BYTES // size)
    return -(-columns // multiple) * multiple
