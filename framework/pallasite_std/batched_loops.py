"""Loops whose condition is an array, as ``jax.vmap`` makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def while_each(
    condition: Callable[..., Any], body: Callable[..., Sequence[Any]], initial: Sequence[Any]
) -> list[Any]:
    """A loop with conditions of their own for parts of what it carries: it goes on while one holds,
    and changes only those parts whose conditions hold.

    Args:
      condition: a function of what is carried, whose result has its leading dimensions.
      body: the same; returns what is carried next.
      initial: what is carried first.
    """

    def step(state: Any) -> Any:
        proceeds, carried = state
        kept = []
        for new, old in zip(body(*carried), carried, strict=True):
            mask = lax.broadcast_in_dim(proceeds, old.shape, tuple(range(proceeds.ndim)))
            kept.append(lax.select(mask, new, old))
        return condition(*kept), kept

    start = condition(*initial), list(initial)
    return list(lax.while_loop(lambda state: jnp.any(state[0]), step, start)[1])
