"""What tests of ``pallasite.ops`` share: random operands, targets, and ways to choose."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

import pallasite

PORTABLE = ("sm_90", "sm_100a", "sm_120a")
"""Targets for which the standard library serves."""

TARGETS = (*PORTABLE, "sm_90a")


def on(target: str) -> contextlib.AbstractContextManager[None]:
    """Calls operations for a target; a GPU runs its own portable target instead of other chips'."""
    if target in PORTABLE and jax.default_backend() == "gpu":
        target = "sm_90"
    return pallasite.target(target)


def random(seed: int, shape: tuple[int, ...], dtype: object) -> jax.Array:
    """Normally distributed numbers, or all values of an 8-bit integer."""
    generator = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind in "iu" and kind.itemsize == 1:
        limits = np.iinfo(kind)
        return jnp.asarray(generator.integers(limits.min, limits.max + 1, shape).astype(kind))
    return jnp.asarray(generator.standard_normal(shape).astype(kind))


def exact(array: jax.Array) -> np.ndarray:
    """The same numbers in float64."""
    return np.asarray(array).astype(np.float64)


def error(result: jax.Array, expected: np.ndarray, size: np.ndarray | None = None) -> float:
    """The error in the 2-norm, relative to what is expected or, where that is smaller since terms
    happen to cancel, to the size that it has otherwise."""
    assert result.shape == expected.shape
    assert np.isfinite(exact(result)).all()
    scale = max(np.linalg.norm(one) for one in (expected, size) if one is not None)
    return float(np.linalg.norm(exact(result) - expected) / max(1e-30, scale))
