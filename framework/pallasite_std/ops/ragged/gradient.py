"""Products of groups of rows of which gradients can be taken: each is what the other's need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallasite_std.ops.arguments import in_32_bits, matched, zeros


def differentiable_ragged(
    run: Callable[..., Any], run_transposed: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both products, differentiable by a and b.

    Args:
      run: the product as a function of (a, b, sizes, transpose_b, out_dtype, config).
      run_transposed: the other one as a function of (a, b, sizes, out_dtype, config).

    Derivatives choose their own configurations.
    """

    def product(a: Any, b: Any, sizes: Any, transpose_b: bool, out_dtype: Any, config: Any) -> Any:
        (m, k), groups = a.shape, b.shape[0]
        n = b.shape[1] if transpose_b else b.shape[2]
        if 0 in (m, k, n, groups):
            return zeros((m, n), out_dtype, a, b)
        return run(a, b, sizes, transpose_b, out_dtype, config)

    def forward(a: Any, b: Any, sizes: Any, transpose_b: bool, out_dtype: Any, config: Any) -> Any:
        return ragged(a, b, sizes, transpose_b, out_dtype, config), (a, b, sizes)

    def backward(transpose_b: bool, out_dtype: Any, config: Any, saved: Any, cotangent: Any) -> Any:
        del out_dtype, config
        a, b, sizes = saved
        cotangent = cotangent.astype(a.dtype)
        d_a = ragged(cotangent, b, sizes, not transpose_b, np.dtype(a.dtype), None)
        pair = (cotangent, a) if transpose_b else (a, cotangent)
        d_b = transposed(*pair, sizes, np.dtype(b.dtype), None)
        return d_a, d_b, no_tangent(sizes)

    def transposed_product(a: Any, b: Any, sizes: Any, out_dtype: Any, config: Any) -> Any:
        (m, k), n, groups = a.shape, b.shape[1], sizes.shape[0]
        if 0 in (m, k, n, groups):
            return zeros((groups, k, n), out_dtype, a, b)
        return run_transposed(a, b, sizes, out_dtype, config)

    def transposed_forward(a: Any, b: Any, sizes: Any, out_dtype: Any, config: Any) -> Any:
        return transposed(a, b, sizes, out_dtype, config), (a, b, sizes)

    def transposed_backward(out_dtype: Any, config: Any, saved: Any, cotangent: Any) -> Any:
        del out_dtype, config
        a, b, sizes = saved
        cotangent = cotangent.astype(a.dtype)
        d_a = ragged(b, cotangent, sizes, True, np.dtype(a.dtype), None)
        d_b = ragged(a, cotangent, sizes, False, np.dtype(b.dtype), None)
        return d_a, d_b, no_tangent(sizes)

    ragged: Any = jax.custom_vjp(product, nondiff_argnums=(3, 4, 5))
    ragged.defvjp(in_32_bits(forward), in_32_bits(backward))
    transposed: Any = jax.custom_vjp(transposed_product, nondiff_argnums=(3, 4))
    transposed.defvjp(in_32_bits(transposed_forward), in_32_bits(transposed_backward))

    def with_matched(function: Any) -> Callable[..., Any]:
        def differentiable(a: Any, b: Any, sizes: Any, *static: Any) -> Any:
            return function(*matched(a, b, sizes), *static)

        return differentiable

    return with_matched(ragged), with_matched(transposed)


def no_tangent(sizes: Any) -> Any:
    """The cotangent of group sizes."""
    return np.zeros(sizes.shape, jax.dtypes.float0)
