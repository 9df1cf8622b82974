"""``matmul``: the function that programs call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallasite.plugin import InvalidValueError
from pallasite_std.ops.arguments import in_32_bits
from pallasite_std.ops.dense.arguments import matmul_call
from pallasite_std.ops.dense.config import MatmulConfig
from pallasite_std.ops.dense.gradient import differentiable_product
from pallasite_std.ops.dense.run import run
from pallasite_std.primitives.matrix import MMA_ACCUMULATORS, can_multiply


@in_32_bits
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
    """The GEMM ``a @ b`` with a fused epilogue.

    The result is ``activation((a @ b) * row_scale * column_scale + bias) + residual``; what is not
    given is left out.

    Args:
      a: (m, k), or (k, m) with ``transpose_a``.
      b: (k, n), or (n, k) with ``transpose_b``. Dtypes: bfloat16, float16, float32 (multiplied as
        tf32), float8_e4m3fn and float8_e5m2, int8 and uint8. Operands whose elements do not have 16
        bits are read along k; given the other way round, they are transposed beforehand. Of two
        floating-point dtypes of 16 and 32 bits, both operands are converted to the wider one.
      out_dtype: by default that of the operands; for 8-bit floats bfloat16, for integers int32.
      accumulator: dtype of the sums: float32, or float16 for float16 and 8-bit floats (the portable
        kernel sums up in float32 and rounds once); int32 for integers.
      row_scale, column_scale: factors of rows (m,) and columns (n,), or numbers.
      bias: (n,).
      activation: a function of float32 arrays that is applied to each element, such as
        ``jax.nn.relu``; the same function object for each call.
      residual: (m, n), of the dtype of the result.
      config: the tiling, of the type that the implementation for the target takes.
        By default it is chosen from the shape, or by measuring if the option ``autotune`` says so
        (see :func:`pallasite.choose`).

    Derivatives are taken of a, b, scales, bias, residual, and what the activation captures, if they
    are of floating-point dtypes.

    Returns:
      (m, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.

    PTX ISA: ``mma.sync``, ``cp.async.bulk.tensor``.
    """
    call, (a, b), extras = matmul_call(
        a,
        b,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        out_dtype=out_dtype,
        accumulator=accumulator,
        row_scale=row_scale,
        column_scale=column_scale,
        bias=bias,
        activation=activation,
        residual=residual,
        config=config,
        config_type=MatmulConfig,
        check_dtypes=_check_dtypes,
    )
    return _product(call, a, b, extras)


_product = differentiable_product(run)


def _check_dtypes(a: Any, b: Any, accumulator: Any) -> None:
    """Raises InvalidValueError for dtypes that no instruction combines."""
    left = np.dtype(a).name
    if left not in MMA_ACCUMULATORS:
        raise InvalidValueError(
            "the tensor cores do not multiply this dtype",
            got=left,
            expected=", ".join(MMA_ACCUMULATORS),
        )
    if b is None:
        return
    right, sums = np.dtype(b).name, np.dtype(accumulator).name
    if not can_multiply(left, right):
        raise InvalidValueError(
            "a and b have dtypes that are not multiplied with each other",
            got=f"a: {left}, b: {right}",
            expected="the same dtype (or two kinds of 8-bit float, or int8 and uint8)",
            hint="convert one of them beforehand",
        )
    accepted = [MMA_ACCUMULATORS[left]]
    if left.startswith("float8") or left == "float16":
        accepted.append("float16")
    if sums not in accepted:
        raise InvalidValueError(
            f"products of {left} are not accumulated in {sums}",
            got=f"an accumulator of dtype {sums}",
            expected=" or ".join(accepted),
        )
