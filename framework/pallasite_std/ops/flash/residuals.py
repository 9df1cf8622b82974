"""What is kept of each query for the gradients of attention.

Programs get log-sum-exp, (batch, q_heads, queries). Kernels may leave its two parts instead,
(batch, q_heads, 2, queries or more): the largest score, as the product with the factor of the
problem takes it, and the natural logarithm of the sum of the weights relative to it. In one number
of float32 the latter is lost where the former is large, as with a bias of -1e9 for all keys: such a
row has well-defined weights, and gradients.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallasite_std.ops.flash.arguments import Extras
from pallasite_std.ops.softmax import COARSE, LOG2_E


def unit(scale: float, soft_cap: float | None, extras: Extras) -> float:
    """Of the scores that kernels compare: their scale, unless they have it already."""
    scaled = soft_cap is not None or extras.bias is not None or extras.slopes is not None
    return 1.0 if scaled else scale


def joined(kept: Any, scale: float) -> Any:
    """Log-sum-exp, of either form; ``scale``: see :func:`unit`."""
    if kept is None or kept.ndim == 3:
        return kept
    return kept[:, :, 0] * scale + kept[:, :, 1]


def two_numbers(kept: Any, scale: float) -> Any:
    """The parts, of either form. Where one number does not tell weights, there are none."""
    if kept.ndim == 4:
        return kept
    lost = jnp.abs(kept) >= COARSE
    parts = jnp.where(lost, 0.0, kept / scale), jnp.where(lost, -jnp.inf, 0.0)
    return jnp.stack(parts, axis=2)


def in_parts(kept: Any, scale: float) -> tuple[Any, Any]:
    """The largest scores and, in exponents of 2, what :func:`softmax.normalized` subtracts besides:
    infinite for queries without weights."""
    kept = two_numbers(kept, scale)
    largest, logarithms = kept[:, :, 0], kept[:, :, 1]
    return largest, jnp.where(jnp.isneginf(logarithms), jnp.inf, logarithms * LOG2_E)
