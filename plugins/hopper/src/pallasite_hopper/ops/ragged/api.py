"""``ragged_matmul`` and ``transposed_ragged_matmul``: the functions that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite
from pallasite_hopper.ops.ragged import kernel, transposed_kernel, transposed_tiles
from pallasite_hopper.ops.ragged.choice import (
    Groups,
    best_configs,
    chosen_config,
    chosen_transposed_config,
)
from pallasite_hopper.ops.ragged.config import RaggedConfig, ragged_configs
from pallasite_std.api import (
    aligned,
    differentiable_ragged,
    in_32_bits,
    padded_columns,
    ragged_call,
    random_array,
    transposed_ragged_call,
)

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""

_VERSION = 2
"""Of the kernels, for what was measured."""


@in_32_bits
def ragged_matmul(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_b: bool = False,
    out_dtype: Any = None,
    config: RaggedConfig | None = None,
) -> jax.Array:
    """Multiplies each group of rows by its own matrix, as ``jax.lax.ragged_dot`` does.

    The first ``group_sizes[0]`` rows of ``a`` are multiplied by ``b[0]``, the next
    ``group_sizes[1]`` rows by ``b[1]``, and so on; rows after all groups become zeros. Groups may
    be empty. Only the GPU needs to know the sizes. Differentiable by ``a`` and ``b``.

    Args:
      a: (m, k), bfloat16 or float16.
      b: (groups, k, n), or (groups, n, k) with ``transpose_b``, of the same dtype.
      group_sizes: (groups,), integers whose sum is at most m; negative ones count as 0.
      transpose_b: the matrices are given as (n, k).
      out_dtype: bfloat16, float16 or float32; by default that of ``a``.
      config: the tiling; one of :func:`ragged_configs`, say. By default it is chosen
        from the shape, or by measuring if the option ``autotune`` says so (see
        :func:`pallasite.choose`), with groups of equal sizes. Derivatives choose their own.

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
        config_type=RaggedConfig,
    )
    return _ragged(a, b, sizes, transpose_b, out_dtype, config)


@in_32_bits
def transposed_ragged_matmul(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: Any = None,
    config: RaggedConfig | None = None,
) -> jax.Array:
    """For each group of rows, the transpose of those of ``a`` times those of ``b``.

    This is ``jax.lax.ragged_dot_general`` with the rows as ragged contracting dimension, and what
    the derivative of :func:`ragged_matmul` by its matrices needs. The result of an empty group is
    zero; rows after all groups do not count. Differentiable by ``a`` and ``b``.

    Args:
      a: (m, k), bfloat16 or float16.
      b: (m, n), of the same dtype.
      group_sizes: (groups,), integers whose sum is at most m; negative ones count as 0.
      out_dtype: bfloat16, float16 or float32; by default that of ``a``.
      config: the tiling, where tile_m is along k and tile_k along the rows; one of
        ``ragged_configs(k, n)``, say. By default it is chosen from the shape, or by measuring if
        the option ``autotune`` says so, with groups of equal sizes. Derivatives choose their own.

    Returns:
      (groups, k, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.
    """
    sizes, out_dtype = transposed_ragged_call(
        a, b, group_sizes, out_dtype=out_dtype, config=config, config_type=RaggedConfig
    )
    return _transposed(a, b, sizes, out_dtype, config)


# The kernels --------------------------------------------------------------------------------------


def _ragged_product(
    a: Any, b: Any, sizes: Any, transpose_b: bool, out_dtype: Any, config: Any
) -> Any:
    if config is None:
        run = functools.partial(_run_ragged, transpose_b, out_dtype)
        n = b.shape[1] if transpose_b else b.shape[2]
        size = out_dtype.itemsize
        (m, k), count = a.shape, b.shape[0]
        groups = Groups(m, n, k, count, size, transpose_b)

        def candidates() -> list[RaggedConfig]:
            usual = ragged_configs(-(-m // count), n, size)
            return list(dict.fromkeys([*best_configs(groups), *usual]))

        key = (transpose_b, out_dtype)
        default = chosen_config(groups)
        config = _choose("ragged_matmul", candidates, default, run, (a, b, sizes), key)
    return _run_ragged(transpose_b, out_dtype, config, a, b, sizes)


def _run_ragged(
    transpose_b: bool, out_dtype: Any, config: RaggedConfig, a: Any, b: Any, sizes: Any
) -> jax.Array:
    n = b.shape[1] if transpose_b else b.shape[2]
    padded = padded_columns(n, 2)
    problem = kernel.Problem(
        m=a.shape[0],
        n=padded,
        k=a.shape[1],
        groups=b.shape[0],
        dtype=np.dtype(a.dtype),
        out_dtype=out_dtype,
        transposed=transpose_b,
    )
    if config.transposed is not None:
        result = _build(transposed_tiles.build, problem, config)(aligned(b), aligned(a), sizes)
    else:
        result = _build(kernel.build, problem, config)(aligned(a), aligned(b), sizes)
    return result if padded == n else result[:, :n]


def _transposed_product(a: Any, b: Any, sizes: Any, out_dtype: Any, config: Any) -> Any:
    if config is None:
        run = functools.partial(_run_transposed, out_dtype)
        extents = a.shape[1], b.shape[1], out_dtype.itemsize

        count, operands = sizes.shape[0], (a, b, sizes)
        mean = -(-a.shape[0] // max(1, count))
        rows, columns, size = extents
        default = chosen_transposed_config(rows, columns, mean, count, size)

        def candidates() -> list[RaggedConfig]:
            return list(dict.fromkeys([default, *ragged_configs(*extents)]))

        name = "transposed_ragged_matmul"
        config = _choose(name, candidates, default, run, operands, (out_dtype,))
    return _run_transposed(out_dtype, config, a, b, sizes)


def _run_transposed(out_dtype: Any, config: RaggedConfig, a: Any, b: Any, sizes: Any) -> jax.Array:
    (m, k), n = a.shape, b.shape[1]
    padded = padded_columns(n, 2)
    problem = transposed_kernel.Problem(
        m=m,
        n=padded,
        k=k,
        groups=sizes.shape[0],
        dtype=np.dtype(a.dtype),
        out_dtype=out_dtype,
    )
    result = _build(transposed_kernel.build, problem, config)(aligned(a), aligned(b), sizes)
    return result if padded == n else result[:, :, :n]


_ragged, _transposed = differentiable_ragged(_ragged_product, _transposed_product)


def _choose(
    name: str,
    candidates: Callable[[], list[RaggedConfig]],
    default: RaggedConfig,
    run: Callable[..., jax.Array],
    operands: tuple[Any, Any, Any],
    key: tuple[Any, ...],
) -> RaggedConfig:
    """``key`` ends with the result's dtype."""
    a, b, sizes = operands

    def make_inputs(random: jax.Array) -> tuple[jax.Array, ...]:
        first, second = jax.random.split(random)
        groups = sizes.shape[0]
        equal = (a.shape[0] + jnp.arange(groups, dtype=jnp.int32)) // groups
        return random_array(first, a), random_array(second, b), equal

    chosen: RaggedConfig = pallasite.choose(
        f"hopper.{name}",
        _VERSION,
        operands,
        candidates,
        default,
        run,
        key=(*key[:-1], str(key[-1])),
        make_inputs=make_inputs,
    )
    return chosen


@functools.lru_cache(maxsize=256)
def _build(
    builder: Callable[..., Callable[..., jax.Array]], problem: Any, config: RaggedConfig
) -> Callable[..., jax.Array]:
    return builder(problem, config, MULTIPROCESSORS)
