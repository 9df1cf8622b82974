"""``matmul``: the function that programs call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_hopper.matrix.types import check_dtypes, ptx_type
from pallasite_hopper.ops.matmul.config import MatmulConfig, default_config
from pallasite_hopper.ops.matmul.epilogue import Epilogue
from pallasite_hopper.ops.matmul.kernel import Problem, build

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""

_ROW_BYTES = 16
"""Rows in global memory that the copy engine reads begin at multiples of this."""


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: Any = None,
    accumulator: Any = None,
    row_scale: jax.Array | None = None,
    column_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    residual: jax.Array | None = None,
    config: MatmulConfig | None = None,
) -> jax.Array:
    """The matrix product ``a @ b`` with what follows it, in one kernel.

    The result is ``activation((a @ b) * row_scale * column_scale + bias) + residual``; what is not
    given is left out.

    Args:
      a: (m, k), or (k, m) with ``transpose_a``.
      b: (k, n), or (n, k) with ``transpose_b``. Dtypes as for ``plgpu.wgmma``: bfloat16, float16,
        float32 (multiplied as tf32), float8_e4m3fn and float8_e5m2, int8 and uint8. Operands whose
        elements do not have 16 bits are read along k; given the other way round, they are
        transposed beforehand.
      out_dtype: by default that of ``a``; for 8-bit floats bfloat16, for integers int32.
      accumulator: dtype of the sums: float32, or float16 for float16 and 8-bit floats; int32 for
        integers.
      row_scale, column_scale: factors of rows (m,) and columns (n,), or scalars.
      bias: (n,).
      activation: a function of a float32 array, such as ``jax.nn.relu``; the same function object
        for each call.
      residual: (m, n), of the dtype of the result.
      config: how to cut the product up; by default chosen from its shape.

    Raises:
      InvalidTypeError, InvalidValueError: shapes or dtypes that do not fit together.
    """
    _check_rank(a, "a")
    _check_rank(b, "b")
    k, m = a.shape if transpose_a else a.shape[::-1]
    n, k_of_b = b.shape if transpose_b else b.shape[::-1]
    if k != k_of_b:
        raise InvalidValueError(
            "a and b do not have the same extent along k",
            got=f"{k} and {k_of_b}, from shapes {a.shape} and {b.shape},"
            f" transpose_a={transpose_a}, transpose_b={transpose_b}",
        )
    if accumulator is None:
        accumulator = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
    check_dtypes(a.dtype, b.dtype, accumulator)
    if out_dtype is None:
        out_dtype = _result_dtype(a.dtype)
    if np.dtype(a.dtype).itemsize != 2:
        a, transpose_a = (a.T, False) if transpose_a else (a, False)
        b, transpose_b = (b, True) if transpose_b else (b.T, True)
    out_dtype = np.dtype(out_dtype)
    problem = Problem(
        m=m,
        n=n,
        k=k,
        dtype_a=np.dtype(a.dtype),
        dtype_b=np.dtype(b.dtype),
        out_dtype=out_dtype,
        accumulator=np.dtype(accumulator),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
    )
    epilogue = Epilogue(
        row_scale=_scale_kind(row_scale, m, "row_scale"),
        column_scale=_scale_kind(column_scale, n, "column_scale"),
        bias=bias is not None,
        residual=residual is not None,
        activation=activation,
    )
    if config is None:
        config = default_config(m, n, k, problem.size, out_dtype.itemsize, MULTIPROCESSORS)
    tile_m, tile_n = config.tile_m, config.tile_n
    if config.swap:
        tile_m, tile_n = tile_n, tile_m
    operands: list[jax.Array] = []
    if row_scale is not None:
        operands.append(_vector(row_scale, tile_m))
    if column_scale is not None:
        operands.append(_vector(column_scale, tile_n))
    if bias is not None:
        if bias.shape != (n,):
            raise InvalidValueError(
                "bias does not fit the product", got=str(bias.shape), expected=str((n,))
            )
        operands.append(_vector(bias, tile_n))
    if residual is not None:
        if residual.shape != (m, n) or residual.dtype != out_dtype:
            raise InvalidValueError(
                "residual does not fit the result",
                got=f"{residual.dtype}{list(residual.shape)}",
                expected=f"{out_dtype}{[m, n]}",
            )
        operands.append(_aligned(residual))
    a, b = _aligned(a), _aligned(b)
    padded = _padded_columns(n, out_dtype.itemsize)
    problem = dataclasses.replace(problem, n=padded)
    if config.swap:
        problem, a, b = problem.swapped(), b, a
    result = _kernel(problem, config, epilogue, MULTIPROCESSORS)(a, b, *operands)
    return result if padded == n else result[:, :n]


_kernel = functools.lru_cache(maxsize=256)(build)


def _check_rank(array: Any, what: str) -> None:
    if not hasattr(array, "shape") or len(array.shape) != 2:
        raise InvalidTypeError(
            f"{what} is not a matrix", got=getattr(array, "shape", array), expected="2 dimensions"
        )
    ptx_type(array.dtype)
    if 0 in array.shape:
        raise InvalidValueError(f"{what} has no elements", got=array.shape)


def _result_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.int32
    return jnp.bfloat16 if np.dtype(dtype).itemsize == 1 else dtype


def _scale_kind(scale: Any, extent: int, what: str) -> str:
    if scale is None:
        return "none"
    if scale.shape in ((), (1,)) and extent != 1:
        return "scalar"
    if scale.shape != (extent,):
        raise InvalidValueError(
            f"{what} does not fit the product", got=scale.shape, expected=f"() or ({extent},)"
        )
    return "vector"


def _vector(vector: jax.Array, multiple: int) -> jax.Array:
    """A vector that can be read in whole tiles, or a scalar as an array of one element."""
    if vector.shape == ():
        return vector.reshape(1)
    rest = -vector.shape[0] % multiple if vector.shape != (1,) else 0
    return jnp.pad(vector, (0, rest)) if rest else vector


def _aligned(matrix: jax.Array) -> jax.Array:
    """A matrix whose rows the copy engine can read: padded by zeros if they are not aligned."""
    columns = _padded_columns(matrix.shape[1], np.dtype(matrix.dtype).itemsize)
    rest = columns - matrix.shape[1]
    return jnp.pad(matrix, ((0, 0), (0, rest))) if rest else matrix


def _padded_columns(columns: int, size: int) -> int:
    multiple = _ROW_BYTES // size
    return -(-columns // multiple) * multiple
