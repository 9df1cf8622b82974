"""Functions of arrays that transformations of JAX make, within kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def looped_rows(x: Any, most: int, is_float: bool) -> Any:
    """A loop for each row, which runs as often as the row's number says, up to a limit."""

    def step(number: Any, row: Any) -> Any:
        if is_float:
            return row * jnp.asarray(0.5, row.dtype) + jnp.asarray(0.25, row.dtype)
        return row + number.astype(row.dtype)

    trips = jnp.arange(x.shape[0]) % (most + 1)
    return jax.vmap(lambda row, n: lax.fori_loop(0, n, step, row))(x, trips)


def _of_parts(x: Any) -> Any:
    """Every second element of the last dimension, and the others backwards."""
    return jnp.sum(x[..., ::2] ** 2) + jnp.sum(x[..., ::-3] * 3)


def _of_branch(x: Any) -> Any:
    return jnp.sum(lax.cond(jnp.max(x) > 1, lambda x: x * x, lambda x: jnp.flip(x) * 2, x))


def _of_order(x: Any) -> Any:
    """Elements that are equal have equal weights."""
    return jnp.sum(jnp.sort(x, axis=-1) ** 2)


def _of_loop(x: Any) -> Any:
    return jnp.sum(lax.fori_loop(0, 3, lambda n, c: c * 0.5 + x, x))


SUMS: dict[str, Callable[[Any], Any]] = {
    "parts": _of_parts,
    "branch": _of_branch,
    "order": _of_order,
    "loop": _of_loop,
}
"""Functions whose gradients have no steps that rounding moves numbers across."""


def gradient(x: Any, name: str) -> Any:
    """The gradient of a function, at the array as float32."""
    return jax.grad(SUMS[name])(x.astype(jnp.float32))
