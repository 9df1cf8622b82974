"""``matmul``: the function that programs call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_hopper.matrix.types import check_dtypes, ptx_type
from pallasite_hopper.ops.arguments import check_config
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.epilogue import Epilogue
from pallasite_hopper.ops.dense.gradient import differentiable
from pallasite_hopper.ops.dense.kernel import Problem
from pallasite_hopper.ops.dense.run import Call


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: Any = None,
    accumulator: Any = None,
    row_scale: jax.Array | float | None = None,
    column_scale: jax.Array | float | None = None,
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
      row_scale, column_scale: factors of rows (m,) and columns (n,), or numbers.
      bias: (n,).
      activation: a function of a float32 array, such as ``jax.nn.relu``; the same function object
        for each call.
      residual: (m, n), of the dtype of the result.
      config: how to cut the product up; one of :func:`matmul_configs`, say. By default it is chosen
        from the shape, or by measuring if the option ``autotune`` says so (see
        :func:`pallasite.choose`).

    Gradients are taken of a, b, scales, bias and residual if they are floating-point arrays.

    Returns:
      (m, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.

    PTX ISA: ``wgmma.mma_async``, ``cp.async.bulk.tensor``.
    """
    check_config(config, MatmulConfig)
    row_scale, column_scale, bias, residual = (
        None if given is None else jnp.asarray(given)
        for given in (row_scale, column_scale, bias, residual)
    )
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
    call = Call(
        problem=Problem(
            m=m,
            n=n,
            k=k,
            dtype_a=np.dtype(a.dtype),
            dtype_b=np.dtype(b.dtype),
            out_dtype=np.dtype(out_dtype),
            accumulator=np.dtype(accumulator),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        ),
        epilogue=Epilogue(
            row_scale=_scale_kind(row_scale, m, "row_scale"),
            column_scale=_scale_kind(column_scale, n, "column_scale"),
            bias=bias is not None,
            residual=residual is not None,
            activation=activation,
        ),
        config=config,
    )
    if bias is not None:
        _check_shape(bias, (n,), "bias")
    if residual is not None:
        _check_shape(residual, (m, n), "residual")
        if residual.dtype != call.problem.out_dtype:
            raise InvalidTypeError(
                "residual does not have the dtype of the result",
                got=str(residual.dtype),
                expected=str(call.problem.out_dtype),
            )
    extras = tuple(x for x in (row_scale, column_scale, bias, residual) if x is not None)
    return differentiable(call, a, b, extras)


def _check_shape(array: Any, shape: tuple[int, ...], what: str) -> None:
    if array.shape != shape:
        raise InvalidValueError(
            f"{what} does not fit the product", got=str(array.shape), expected=str(shape)
        )


def _check_rank(array: Any, what: str) -> None:
    if not hasattr(array, "shape") or len(array.shape) != 2:
        raise InvalidTypeError(
            f"{what} is not a matrix",
            got=str(getattr(array, "shape", array)),
            expected="2 dimensions",
        )
    ptx_type(array.dtype)
    if 0 in array.shape:
        raise InvalidValueError(f"{what} has no elements", got=str(array.shape))


def _result_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.int32
    return jnp.bfloat16 if np.dtype(dtype).itemsize == 1 else dtype


def _scale_kind(scale: Any, extent: int, what: str) -> str:
    if scale is None:
        return "none"
    if scale.shape in ((), (1,)):
        return "scalar"
    if scale.shape != (extent,):
        raise InvalidValueError(
            f"{what} does not fit the product", got=str(scale.shape), expected=f"() or ({extent},)"
        )
    return "vector"
