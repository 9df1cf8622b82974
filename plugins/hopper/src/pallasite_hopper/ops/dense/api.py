"""``matmul``: the function that programs call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallasite_hopper.matrix.types import check_dtypes, ptx_type
from pallasite_hopper.ops.dense.batched import run_many
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.run import run
from pallasite_std.api import differentiable_product, in_32_bits, matmul_call


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
      b: (k, n), or (n, k) with ``transpose_b``. Dtypes as for ``plgpu.wgmma``: bfloat16, float16,
        float32 (multiplied as tf32), float8_e4m3fn and float8_e5m2, int8 and uint8. Operands whose
        elements do not have 16 bits are read along k; given the other way round, they are
        transposed beforehand. Of two floating-point dtypes of 16 and 32 bits, both operands are
        converted to the wider one.
      out_dtype: by default that of the operands; for 8-bit floats bfloat16, for integers int32.
      accumulator: dtype of the sums: float32, or float16 for float16 and 8-bit floats; int32 for
        integers.
      row_scale, column_scale: factors of rows (m,) and columns (n,), or numbers.
      bias: (n,).
      activation: a function of float32 arrays that is applied to each element, such as
        ``jax.nn.relu``; the same function object for each call.
      residual: (m, n), of the dtype of the result.
      config: the tiling; one of :func:`matmul_configs`, say. By default it is chosen
        from the shape, or by measuring if the option ``autotune`` says so (see
        :func:`pallasite.choose`).

    Derivatives are taken of a, b, scales, bias, residual, and what the activation captures, if they
    are of floating-point dtypes.

    Returns:
      (m, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.

    PTX ISA: ``wgmma.mma_async``, ``cp.async.bulk.tensor``.
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


_product = differentiable_product(run, run_many)


def _check_dtypes(a: Any, b: Any, accumulator: Any) -> None:
    if b is None:
        ptx_type(a)
    else:
        check_dtypes(a, b, accumulator)
