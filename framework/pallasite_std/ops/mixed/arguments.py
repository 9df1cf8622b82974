"""The arguments of ``mixed_matmul``, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_std.ops.arguments import (
    as_array,
    check_config,
    check_extents_along_k,
    flag,
    float_dtype,
    without_derivatives,
    zeros,
)
from pallasite_std.ops.dense.batching import rows_joined

_ACTIVATIONS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
_OUT_DTYPES = (*_ACTIVATIONS, np.dtype(np.float32))
_WEIGHTS = {
    np.dtype(np.int8): 8,
    np.dtype(np.uint8): 8,
    np.dtype(ml_dtypes.float8_e4m3fn): 8,
    np.dtype(ml_dtypes.float8_e5m2): 8,
    np.dtype(ml_dtypes.int4): 4,
    np.dtype(ml_dtypes.uint4): 4,
}


@dataclasses.dataclass(frozen=True)
class MixedProblem:
    """What is multiplied.

    Attributes:
      m, n, k: extents.
      dtype: of the activations.
      weights: dtype of the weights.
      weight_bits: of one weight.
      out_dtype: of the result.
      transposed: the weights come as (n, k).
      turned: they were given as (k, n).
      group: elements along k that share a factor, or 0.
      column_scale: whether columns have factors.
    """

    m: int
    n: int
    k: int
    dtype: Any
    weights: Any
    weight_bits: int
    out_dtype: Any
    transposed: bool
    turned: bool
    group: int
    column_scale: bool


def mixed_call(
    a: Any,
    b: Any,
    *,
    scales: Any,
    transpose_b: bool,
    out_dtype: Any,
    config: Any,
    config_type: type,
) -> tuple[MixedProblem, tuple[jax.Array, ...]]:
    """What the arguments of ``mixed_matmul`` ask for, and (a, b, scales?).

    Weights of 4 bits come as (n, k).

    Raises:
      InvalidTypeError, InvalidValueError: shapes, dtypes or a configuration that do not fit.
    """
    check_config(config, config_type)
    transpose_b = flag(transpose_b, "transpose_b")
    _check(a, "a", _ACTIVATIONS)
    _check(b, "b", tuple(_WEIGHTS))
    n, depth = b.shape if transpose_b else b.shape[::-1]
    m, k = a.shape
    check_extents_along_k(a, b, k, depth, transpose_b=transpose_b)
    weight_bits = _WEIGHTS[np.dtype(b.dtype)]
    turned = weight_bits == 4 and not transpose_b
    if turned:
        # XLA's kernels for GPUs that convert 4 bits and transpose anything can be wrong (jaxlib
        # 0.11.2, 16 rows or columns): the program may convert to these weights.
        b, transpose_b = jax.lax.optimization_barrier(b).T, True
    scales = None if scales is None else as_array(scales, "scales")
    group = _group(scales, n, k)
    problem = MixedProblem(
        m=m,
        n=n,
        k=k,
        dtype=np.dtype(a.dtype),
        weights=np.dtype(b.dtype),
        weight_bits=weight_bits,
        out_dtype=float_dtype(a.dtype if out_dtype is None else out_dtype, _OUT_DTYPES),
        transposed=transpose_b,
        turned=turned,
        group=group,
        column_scale=scales is not None and not group,
    )
    return problem, (a, b) if scales is None else (a, b, scales)


def multiplied(
    problem: MixedProblem, run: Callable[..., jax.Array], operands: tuple[jax.Array, ...]
) -> jax.Array:
    """The result of a kernel, which has no derivatives; zeros where there are no products.

    Args:
      problem: what is multiplied.
      run: of the problem and the operands; under ``jax.vmap``, the rows of several may be joined.
      operands: of the kernel.
    """
    if 0 in (problem.m, problem.n, problem.k):
        return zeros((problem.m, problem.n), problem.out_dtype, *operands)
    hint = "multiply by weights of the dtype of the activations, with matmul()"

    def product(a: jax.Array, *others: jax.Array) -> jax.Array:
        return run(dataclasses.replace(problem, m=a.shape[0]), a, *others)

    return without_derivatives("mixed_matmul", hint, rows_joined(product))(*operands)


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


def _group(scales: Any, n: int, k: int) -> int:
    """Elements along k of a group, or 0 if scales are of columns."""
    if scales is None or scales.shape == (n,):
        return 0
    groups = scales.shape[0] if len(scales.shape) == 2 else 0
    if len(scales.shape) != 2 or scales.shape[1] != n or (k % groups if groups else k):
        raise InvalidValueError(
            "scales do not fit the weights",
            got=scales.shape,
            expected=f"({n},), or (groups, {n}) where groups divides {k}",
        )
    return int(k // max(1, groups))
