"""``mixed_matmul``: the function that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_hopper.ops.mixed.config import MixedConfig, default_config
from pallasite_hopper.ops.mixed.kernel import Problem, build

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""

_ACTIVATIONS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
_WEIGHTS = {
    np.dtype(np.int8): 8,
    np.dtype(np.uint8): 8,
    np.dtype(ml_dtypes.float8_e4m3fn): 8,
    np.dtype(ml_dtypes.float8_e5m2): 8,
    np.dtype(ml_dtypes.int4): 4,
    np.dtype(ml_dtypes.uint4): 4,
}


def mixed_matmul(
    a: jax.Array,
    weights: jax.Array,
    *,
    scales: jax.Array | None = None,
    transpose_weights: bool = False,
    out_dtype: Any = None,
    config: MixedConfig | None = None,
) -> jax.Array:
    """The product of activations with narrow weights, ``a @ (weights * scales)``.

    Weights are read as they are and converted in registers, so a product with few rows takes as
    long as reading them. Sums are float32.

    Args:
      a: (m, k), bfloat16 or float16.
      weights: (k, n), or (n, k) with ``transpose_weights``: int8, uint8, int4, uint4,
        float8_e4m3fn or float8_e5m2. Weights of 4 bits given as (k, n) are transposed beforehand,
        at the price of reading and writing them; (n, k) is the faster form of 8 bits, too. int8 and
        4 bits are converted fastest.
      scales: (n,): a factor for each column, applied to the sums; or (groups, n): for each group of
        k / groups consecutive elements along k. Factors of groups are rounded to the dtype of a,
        and weights are multiplied by them before the product, rounded once.
      transpose_weights: the weights are given as (n, k).
      out_dtype: by default that of ``a``.
      config: how to cut the product up; by default chosen from its shape.

    Returns:
      (m, n).

    Raises:
      InvalidTypeError, InvalidValueError: shapes or dtypes that do not fit together.
    """
    _check(a, "a", tuple(_ACTIVATIONS))
    _check(weights, "weights", tuple(_WEIGHTS))
    n, depth = weights.shape if transpose_weights else weights.shape[::-1]
    m, k = a.shape
    if k != depth:
        raise InvalidValueError(
            "a and weights do not have the same extent along k",
            got=f"{k} and {depth}, from shapes {a.shape} and {weights.shape},"
            f" transpose_weights={transpose_weights}",
        )
    weight_bits = _WEIGHTS[np.dtype(weights.dtype)]
    if weight_bits == 4 and not transpose_weights:
        weights, transpose_weights = weights.T, True
    group = _group(scales, n, k)
    out_dtype = np.dtype(a.dtype if out_dtype is None else out_dtype)
    if config is None:
        config = default_config(m, n, k, weight_bits, out_dtype.itemsize, MULTIPROCESSORS)
    if group:
        _check_group(group, config)
    # The copy engine reads rows of multiples of 16 bytes.
    columns = 16 if not transpose_weights else 8
    padded = -(-n // columns) * columns
    a = _padded(a, 1, 8)
    weights = _padded(weights, 1, 128 // weight_bits)
    operands = []
    if scales is not None:
        if group:
            operands.append(_padded(scales.astype(a.dtype), 1, 8))
        else:
            operands.append(_padded(scales.astype(jnp.float32), 0, config.tile_n * config.cluster))
    problem = Problem(
        m=m,
        n=padded,
        k=k,
        dtype=np.dtype(a.dtype),
        weights=np.dtype(weights.dtype),
        weight_bits=weight_bits,
        out_dtype=out_dtype,
        transposed=transpose_weights,
        group=group,
        column_scale=scales is not None and not group,
    )
    result = _kernel(problem, config, MULTIPROCESSORS)(a, weights, *operands)
    return result if padded == n else result[:, :n]


@functools.lru_cache(maxsize=256)
def _kernel(
    problem: Problem, config: MixedConfig, multiprocessors: int
) -> Callable[..., jax.Array]:
    return build(problem, config, multiprocessors)


def _check(array: Any, what: str, dtypes: tuple[Any, ...]) -> None:
    if not hasattr(array, "shape") or len(array.shape) != 2:
        raise InvalidTypeError(
            f"{what} is not a matrix", got=getattr(array, "shape", array), expected="2 dimensions"
        )
    if np.dtype(array.dtype) not in dtypes:
        raise InvalidTypeError(
            f"{what} has a dtype that this product does not take",
            got=array.dtype,
            expected=", ".join(str(dtype) for dtype in dtypes),
        )
    if 0 in array.shape:
        raise InvalidValueError(f"{what} has no elements", got=array.shape)


def _group(scales: Any, n: int, k: int) -> int:
    """Elements along k of a group, or 0 if scales are of columns."""
    if scales is None or scales.shape == (n,):
        return 0
    if len(scales.shape) != 2 or scales.shape[1] != n or k % scales.shape[0]:
        raise InvalidValueError(
            "scales do not fit the weights",
            got=scales.shape,
            expected=f"({n},), or (groups, {n}) where groups divides {k}",
        )
    return int(k // scales.shape[0])


def _check_group(group: int, config: MixedConfig) -> None:
    depth = config.tile_k // config.pieces
    if group % depth or (config.tile_k % group and group % config.tile_k):
        raise InvalidValueError(
            "the groups of scales do not fit the steps along k",
            got=f"groups of {group}, steps of {config.tile_k} in {config.pieces} pieces",
            expected=f"groups of a multiple of {depth} that divides a step or that steps divide",
        )


def _padded(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    rest = -array.shape[axis] % multiple
    if not rest:
        return array
    widths = [(0, rest if one == axis else 0) for one in range(array.ndim)]
    return jnp.pad(array, widths)
