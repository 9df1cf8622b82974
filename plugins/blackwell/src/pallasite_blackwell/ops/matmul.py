"""``pallasite.ops.matmul`` on targets with tensor memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

import pallasite
from pallasite.plugin import select_target
from pallasite_blackwell.ops.config import MatmulConfig, default_config, matmul_configs
from pallasite_blackwell.ops.kernel import build
from pallasite_blackwell.targets import INTEGER_PRODUCTS
from pallasite_blackwell.tensor_core.types import product_of
from pallasite_std.api import (
    Epilogue,
    MatmulCall,
    MatmulProblem,
    aligned,
    differentiable_product,
    in_32_bits,
    is_portable_config,
    matmul_call,
    padded_columns,
)

_VERSION = 1
"""Of the kernel, for what was measured."""


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
    """The GEMM ``a @ b`` with a fused epilogue, on the tensor core with tensor memory.

    The result is ``activation((a @ b) * row_scale * column_scale + bias) + residual``; what is not
    given is left out.

    Args:
      a: (m, k), or (k, m) with ``transpose_a``.
      b: (k, n), or (n, k) with ``transpose_b``. Dtypes as for ``plgpu.tcgen05_mma`` without scales:
        bfloat16, float16, float32 (multiplied as tf32), float8_e4m3fn and float8_e5m2, int8 and
        uint8. Operands of float32 are read along k; given the other way round, they are transposed
        beforehand. Of two floating-point dtypes of 16 and 32 bits, both operands are converted to
        the wider one.
      out_dtype: by default that of the operands; for 8-bit floats bfloat16, for integers int32.
      accumulator: dtype of the sums: float32, or float16 for float16 and 8-bit floats; int32 for
        integers.
      row_scale, column_scale: factors of rows (m,) and columns (n,), or numbers.
      bias: (n,).
      activation: a function of float32 arrays that is applied to each element, such as
        ``jax.nn.relu``; the same function object for each call.
      residual: (m, n), of the dtype of the result.
      config: the tiling. By default it is chosen from the shape, or by measuring if the option
        ``autotune`` says so (see :func:`pallasite.choose`).

    Derivatives are taken of a, b, scales, bias, residual, and what the activation captures, if they
    are of floating-point dtypes.

    Returns:
      (m, n), of ``out_dtype``.

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.

    PTX ISA: ``tcgen05.mma``, ``cp.async.bulk.tensor``.
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


def refuses_matmul(a: Any, *args: Any, **kwargs: Any) -> str | None:
    """Integers where the tensor core has none, configurations of the portable product."""
    del args
    if is_portable_config(kwargs.get("config")):
        return "a configuration of the portable implementation"
    if str(getattr(a, "dtype", "")) in ("int8", "uint8"):
        target = select_target()
        if not target.has(INTEGER_PRODUCTS):
            return f"products of integers, which {target.name} lacks"
    return None


def _check_dtypes(a: Any, b: Any, accumulator: Any) -> None:
    from pallasite.plugin.language import checks

    if b is None:
        if str(a) not in _ACCUMULATORS:
            raise checks.type_error(
                "the tensor core does not multiply this dtype",
                got=a,
                expected=", ".join(_ACCUMULATORS),
            )
        return
    product_of(a, b, accumulator)


_ACCUMULATORS = {
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "float32",
    "float8_e4m3fn": "float32",
    "float8_e5m2": "float32",
    "int8": "int32",
    "uint8": "int32",
}


def run(call: MatmulCall, a: jax.Array, b: jax.Array, extras: Sequence[jax.Array]) -> jax.Array:
    """The product; ``extras`` are the operands of the epilogue."""
    problem = call.problem
    if problem.size == 4:
        # The tensor core reads such elements along k only.
        a = a.T if problem.transpose_a else a
        b = b if problem.transpose_b else b.T
        problem = dataclasses.replace(problem, transpose_a=False, transpose_b=True)
    config = call.config or _choose(problem, call.epilogue, a, b, extras)
    return _run(problem, call.epilogue, config, a, b, extras)


def _choose(
    problem: MatmulProblem,
    epilogue: Epilogue,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> MatmulConfig:
    m, n, size = problem.m, problem.n, problem.out_dtype.itemsize

    def attempt(config: MatmulConfig, a: jax.Array, b: jax.Array, *extras: jax.Array) -> jax.Array:
        return _run(problem, epilogue, config, a, b, extras)

    chosen: MatmulConfig = pallasite.choose(
        "blackwell.matmul",
        _VERSION,
        (a, b, *extras),
        lambda: matmul_configs(m, n, size),
        default_config(m, n, size, select_target().multiprocessors),
        attempt,
        key=(*problem.key(), *epilogue.key()),
    )
    return chosen


def _run(
    problem: MatmulProblem,
    epilogue: Epilogue,
    config: MatmulConfig,
    a: jax.Array,
    b: jax.Array,
    extras: Sequence[jax.Array],
) -> jax.Array:
    operands = epilogue.padded_operands(extras, config.tile_m * config.blocks, config.tile_n)
    a, b = aligned(a), aligned(b)
    n = problem.n
    padded = padded_columns(n, problem.out_dtype.itemsize)
    problem = dataclasses.replace(problem, n=padded)
    result = _kernel(problem, config, epilogue, select_target().multiprocessors)(a, b, *operands)
    return result if padded == n else result[..., :n]


_kernel = functools.lru_cache(maxsize=256)(build)
_product = differentiable_product(run)
