"""The arguments of ``matmul``, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_std.ops.activations import CapturingActivation, captured_values
from pallasite_std.ops.arguments import (
    as_array,
    check_config,
    check_extents_along_k,
    dtype_of,
    flag,
)
from pallasite_std.ops.dense.epilogue import Epilogue
from pallasite_std.ops.dense.problem import MatmulCall, MatmulProblem

_PROMOTED = ("bfloat16", "float16", "float32")


def matmul_call(
    a: Any,
    b: Any,
    *,
    transpose_a: bool,
    transpose_b: bool,
    out_dtype: Any,
    accumulator: Any,
    row_scale: Any,
    column_scale: Any,
    bias: Any,
    activation: Any,
    residual: Any,
    config: Any,
    config_type: type,
    check_dtypes: Callable[[Any, Any, Any], None],
) -> tuple[MatmulCall, tuple[Any, Any], tuple[jax.Array, ...]]:
    """What the arguments of ``matmul`` ask for, a and b, and the operands of the epilogue.

    Of two floating-point dtypes of 16 and 32 bits, both operands get the wider one, as in
    ``jax.numpy``.

    Args:
      config_type: of configurations.
      check_dtypes: raises an error for dtypes of a, b and the accumulator that do not go together;
        the last two may be None, which are not known yet.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.
    """
    check_config(config, config_type)
    transpose_a, transpose_b = flag(transpose_a, "transpose_a"), flag(transpose_b, "transpose_b")
    row_scale, column_scale, bias, residual = (
        None if given is None else _of_bytes(as_array(given, what))
        for given, what in (
            (row_scale, "row_scale"),
            (column_scale, "column_scale"),
            (bias, "bias"),
            (residual, "residual"),
        )
    )
    a, b = (jnp.asarray(one) if isinstance(one, np.ndarray) else one for one in (a, b))
    for array, what in ((a, "a"), (b, "b")):
        _check_rank(array, what)
        check_dtypes(array.dtype, None, None)
    if a.dtype != b.dtype and all(np.dtype(one.dtype).name in _PROMOTED for one in (a, b)):
        wider = jnp.promote_types(a.dtype, b.dtype)
        a, b = a.astype(wider), b.astype(wider)
    k, m = a.shape if transpose_a else a.shape[::-1]
    n, k_of_b = b.shape if transpose_b else b.shape[::-1]
    check_extents_along_k(a, b, k, k_of_b, transpose_a=transpose_a, transpose_b=transpose_b)
    if accumulator is None:
        accumulator = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
    accumulator = dtype_of(accumulator, "accumulator")
    check_dtypes(a.dtype, b.dtype, accumulator)
    out_dtype = dtype_of(_result_dtype(a.dtype) if out_dtype is None else out_dtype, "out_dtype")
    captured = () if activation is None else captured_values(activation)
    if captured:
        activation = CapturingActivation(activation, captured)
    call = MatmulCall(
        problem=MatmulProblem(
            m=m,
            n=n,
            k=k,
            dtype_a=np.dtype(a.dtype),
            dtype_b=np.dtype(b.dtype),
            out_dtype=out_dtype,
            accumulator=accumulator,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        ),
        epilogue=Epilogue(
            row_scale=_scale_kind(row_scale, m, "row_scale"),
            column_scale=_scale_kind(column_scale, n, "column_scale"),
            bias=bias is not None,
            residual=residual is not None,
            activation=activation,
            captured=len(captured),
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
    return (
        call,
        (a, b),
        tuple(x for x in (row_scale, column_scale, bias, *captured, residual) if x is not None),
    )


def _check_shape(array: Any, shape: tuple[int, ...], what: str) -> None:
    if array.shape != shape:
        raise InvalidValueError(
            f"{what} does not fit the product", got=str(array.shape), expected=str(shape)
        )


def _of_bytes(array: jax.Array) -> jax.Array:
    """An array of elements that kernels can read one by one."""
    small = jnp.issubdtype(array.dtype, jnp.integer) and jnp.iinfo(array.dtype).bits < 8
    return array.astype(jnp.float32) if small else array


def _check_rank(array: Any, what: str) -> None:
    if not hasattr(array, "shape") or len(array.shape) != 2:
        raise InvalidTypeError(
            f"{what} is not a matrix",
            got=str(getattr(array, "shape", array)),
            expected="2 dimensions",
        )


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
