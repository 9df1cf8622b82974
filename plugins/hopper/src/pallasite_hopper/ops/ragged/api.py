"""``ragged_matmul`` and ``transposed_ragged_matmul``: the functions that programs call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_hopper.ops.ragged import kernel, transposed_kernel
from pallasite_hopper.ops.ragged.config import RaggedConfig, default_config

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""

_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
_OUT_DTYPES = (*_DTYPES, np.dtype(np.float32))


def ragged_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    config: RaggedConfig | None = None,
) -> jax.Array:
    """Multiplies each group of rows by its own matrix, as ``jax.lax.ragged_dot`` does.

    The first ``group_sizes[0]`` rows of ``lhs`` are multiplied by ``rhs[0]``, the next
    ``group_sizes[1]`` rows by ``rhs[1]``, and so on; rows after all groups become zeros. Groups may
    be empty. Only the GPU needs to know the sizes. Differentiable by ``lhs`` and ``rhs``.

    Args:
      lhs: (m, k), bfloat16 or float16.
      rhs: (groups, k, n), or (groups, n, k) with ``transpose_rhs``, of the same dtype.
      group_sizes: (groups,), integers whose sum is at most m.
      transpose_rhs: the matrices are given as (n, k).
      out_dtype: by default that of ``lhs``; also float32.
      config: how to cut the product up; by default chosen from its shape. Derivatives choose their
        own.

    Returns:
      (m, n).

    Raises:
      InvalidTypeError, InvalidValueError: shapes or dtypes that do not fit together.
    """
    _check(lhs, "lhs", 2)
    _check(rhs, "rhs", 3)
    out_dtype = _out_dtype(out_dtype, lhs.dtype)
    _same_dtype(lhs, rhs)
    sizes = _sizes(group_sizes, rhs.shape[0])
    depth = rhs.shape[2] if transpose_rhs else rhs.shape[1]
    if lhs.shape[1] != depth:
        raise InvalidValueError(
            "lhs and rhs do not have the same extent along k",
            got=f"{lhs.shape[1]} and {depth}, from shapes {lhs.shape} and {rhs.shape},"
            f" transpose_rhs={transpose_rhs}",
        )
    return _ragged(lhs, rhs, sizes, transpose_rhs, out_dtype, config)


def transposed_ragged_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: Any = None,
    config: RaggedConfig | None = None,
) -> jax.Array:
    """For each group of rows, the transpose of those of ``lhs`` times those of ``rhs``.

    This is ``jax.lax.ragged_dot_general`` with the rows as ragged contracting dimension, and what
    the derivative of :func:`ragged_matmul` by its matrices needs. The result of an empty group is
    zero; rows after all groups do not count. Differentiable by ``lhs`` and ``rhs``.

    Args:
      lhs: (m, k), bfloat16 or float16.
      rhs: (m, n), of the same dtype.
      group_sizes: (groups,), integers whose sum is at most m.
      out_dtype: by default that of ``lhs``; also float32.
      config: how to cut the product up, where tile_m is along k and tile_k along the rows; by
        default chosen from its shape. Derivatives choose their own.

    Returns:
      (groups, k, n).

    Raises:
      InvalidTypeError, InvalidValueError: shapes or dtypes that do not fit together.
    """
    _check(lhs, "lhs", 2)
    _check(rhs, "rhs", 2)
    out_dtype = _out_dtype(out_dtype, lhs.dtype)
    _same_dtype(lhs, rhs)
    sizes = _sizes(group_sizes, None)
    if lhs.shape[0] != rhs.shape[0]:
        raise InvalidValueError(
            "lhs and rhs do not have the same number of rows",
            got=f"{lhs.shape[0]} and {rhs.shape[0]}",
        )
    return _transposed(lhs, rhs, sizes, out_dtype, config)


# Derivatives --------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _ragged(
    lhs: Any, rhs: Any, sizes: Any, transpose_rhs: bool, out_dtype: Any, config: Any
) -> Any:
    m, k = lhs.shape
    groups = rhs.shape[0]
    n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    if config is None:
        config = default_config(-(-m // groups), n, out_dtype.itemsize)
    padded = _round_up(n, 8)
    problem = kernel.Problem(
        m=m,
        n=padded,
        k=k,
        groups=groups,
        dtype=np.dtype(lhs.dtype),
        out_dtype=out_dtype,
        transposed=transpose_rhs,
    )
    result = _build(kernel.build, problem, config)(_aligned(lhs), _aligned(rhs), sizes)
    return result if padded == n else result[:, :n]


def _ragged_forward(
    lhs: Any, rhs: Any, sizes: Any, transpose_rhs: bool, out_dtype: Any, config: Any
) -> Any:
    return _ragged(lhs, rhs, sizes, transpose_rhs, out_dtype, config), (lhs, rhs, sizes)


def _ragged_backward(
    transpose_rhs: bool, out_dtype: Any, config: Any, saved: Any, cotangent: Any
) -> Any:
    lhs, rhs, sizes = saved
    cotangent = cotangent.astype(lhs.dtype)
    d_lhs = _ragged(cotangent, rhs, sizes, not transpose_rhs, np.dtype(lhs.dtype), None)
    pair = (cotangent, lhs) if transpose_rhs else (lhs, cotangent)
    d_rhs = _transposed(*pair, sizes, np.dtype(rhs.dtype), None)
    return d_lhs, d_rhs, _no_tangent(sizes)


_ragged.defvjp(_ragged_forward, _ragged_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _transposed(lhs: Any, rhs: Any, sizes: Any, out_dtype: Any, config: Any) -> Any:
    (m, k), n = lhs.shape, rhs.shape[1]
    if config is None:
        config = default_config(k, n, out_dtype.itemsize)
    padded = _round_up(n, 8)
    problem = transposed_kernel.Problem(
        m=m,
        n=padded,
        k=k,
        groups=sizes.shape[0],
        dtype=np.dtype(lhs.dtype),
        out_dtype=out_dtype,
    )
    result = _build(transposed_kernel.build, problem, config)(_aligned(lhs), _aligned(rhs), sizes)
    return result if padded == n else result[:, :, :n]


def _transposed_forward(lhs: Any, rhs: Any, sizes: Any, out_dtype: Any, config: Any) -> Any:
    return _transposed(lhs, rhs, sizes, out_dtype, config), (lhs, rhs, sizes)


def _transposed_backward(out_dtype: Any, config: Any, saved: Any, cotangent: Any) -> Any:
    lhs, rhs, sizes = saved
    cotangent = cotangent.astype(lhs.dtype)
    d_lhs = _ragged(rhs, cotangent, sizes, True, np.dtype(lhs.dtype), None)
    d_rhs = _ragged(lhs, cotangent, sizes, False, np.dtype(rhs.dtype), None)
    return d_lhs, d_rhs, _no_tangent(sizes)


_transposed.defvjp(_transposed_forward, _transposed_backward)


def _no_tangent(sizes: Any) -> Any:
    return np.zeros(sizes.shape, jax.dtypes.float0)


@functools.lru_cache(maxsize=256)
def _build(
    builder: Callable[..., Callable[..., jax.Array]], problem: Any, config: RaggedConfig
) -> Callable[..., jax.Array]:
    return builder(problem, config, MULTIPROCESSORS)


# Arguments ----------------------------------------------------------------------------------------


def _check(array: Any, what: str, rank: int) -> None:
    if not hasattr(array, "shape") or len(array.shape) != rank:
        raise InvalidTypeError(
            f"{what} does not have {rank} dimensions", got=getattr(array, "shape", array)
        )
    if np.dtype(array.dtype) not in _DTYPES:
        raise InvalidTypeError(
            f"{what} has a dtype that this product does not take",
            got=array.dtype,
            expected=" or ".join(str(dtype) for dtype in _DTYPES),
        )
    if 0 in array.shape:
        raise InvalidValueError(f"{what} has no elements", got=array.shape)


def _same_dtype(lhs: Any, rhs: Any) -> None:
    if lhs.dtype != rhs.dtype:
        raise InvalidTypeError(
            "lhs and rhs have different dtypes", got=f"{lhs.dtype} and {rhs.dtype}"
        )


def _out_dtype(out_dtype: Any, dtype: Any) -> np.dtype[Any]:
    result: np.dtype[Any] = np.dtype(dtype if out_dtype is None else out_dtype)
    if result not in _OUT_DTYPES:
        raise InvalidTypeError(
            "the result cannot have this dtype",
            got=result,
            expected=", ".join(str(one) for one in _OUT_DTYPES),
        )
    return result


def _sizes(group_sizes: Any, groups: int | None) -> Any:
    sizes = jnp.asarray(group_sizes)
    fits = sizes.ndim == 1 and sizes.shape[0] > 0 and groups in (None, sizes.shape[0])
    if not fits or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise InvalidTypeError(
            "group_sizes is not a vector with the size of each group",
            got=f"{sizes.dtype}{list(sizes.shape)}",
            expected=f"integers of shape ({'groups' if groups is None else groups},)",
        )
    return sizes.astype(jnp.int32)


def _round_up(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


def _aligned(array: jax.Array) -> jax.Array:
    """An array whose rows the copy engine can read: they are padded to multiples of 16 bytes."""
    rest = _round_up(array.shape[-1], 8) - array.shape[-1]
    if not rest:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, rest)])
