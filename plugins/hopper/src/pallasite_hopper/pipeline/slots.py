"""Rings of slots: counting through them, and the barriers of one slot."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def first_slot() -> Any:
    """The slot of step 0."""
    return jnp.int32(0)


def next_slot(slot: Any, depth: int) -> Any:
    """The slot after ``slot`` in a ring of ``depth`` slots."""
    if depth == 1:
        return slot
    following = slot + jnp.int32(1)
    return lax.select(following == jnp.int32(depth), jnp.int32(0), following)


def earlier_slot(slot: Any, steps: int, depth: int) -> Any:
    """The slot ``steps`` steps before, with ``steps`` below ``depth``."""
    if steps == 0:
        return slot
    before = slot - jnp.int32(steps)
    return lax.select(before < jnp.int32(0), before + jnp.int32(depth), before)


def at(barrier: Any, slot: Any, depth: int) -> Any:
    """The barrier of one slot; a ring of one slot has a single barrier."""
    return barrier if depth == 1 else barrier.at[slot]
