"""Norms of random rows, and what they are in float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallasite import ops


def norm_and_reference(
    rows: int, columns: int, dtype: Any, *, centered: bool, residual: bool, quantize: Any
) -> tuple[np.ndarray, np.ndarray]:
    """A layer norm (``centered``) or RMSNorm, dequantized, and the exact one; the sum with a
    residual is compared bit by bit."""
    draw = np.random.default_rng(columns)
    x, other = (jnp.asarray(draw.normal(size=(rows, columns)) + one, dtype) for one in (1, 0.5))
    weight, bias = (jnp.asarray(draw.normal(size=columns), dtype) for _ in range(2))
    options = dict(residual=other if residual else None, quantize=quantize)
    if centered:
        results = ops.layer_norm(x, weight, bias, **options)
    else:
        results = ops.rms_norm(x, weight, **options)
    results = results if isinstance(results, tuple) else (results,)
    total = x + other if residual else x
    if residual:
        np.testing.assert_array_equal(np.asarray(results[-1]), np.asarray(total))
    wide, w, b = (np.asarray(one, np.float64) for one in (total, weight, bias))
    if centered:
        wide = wide - wide.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + (1e-5 if centered else 1e-6))
    value = np.asarray(results[0], np.float64)
    if quantize is not None:
        value = value * np.asarray(results[1], np.float64)[:, None]
    return value, wide * scale * w + (b if centered else 0.0)
