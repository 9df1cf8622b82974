"""What tests of ``pallasite.ops`` share: random operands, targets, and ways to choose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallasite

ON_GPU = jax.default_backend() == "gpu"

PORTABLE = ("sm_90",) * 3 if ON_GPU else ("sm_90", "sm_100a", "sm_120a")
"""Targets for which the standard library serves; a GPU runs what it can."""

TARGETS = ("sm_90", "sm_90a") if ON_GPU else (*PORTABLE, "sm_90a")

on = pallasite.target


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


def error(result: jax.Array, expected: np.ndarray) -> float:
    """The relative error in the 2-norm."""
    assert result.shape == expected.shape
    assert np.isfinite(exact(result)).all()
    return float(np.linalg.norm(exact(result) - expected) / max(1e-30, np.linalg.norm(expected)))
