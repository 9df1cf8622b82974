"""Rings of slots: counting through them, waiting for them, and bringing them back to the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite.plugin.language import checks
from pallasite_std.pipelines.blocks import int32
from pallasite_std.pipelines.warp_specialized.states import Place
from pallasite_std.primitives.barriers import barrier_wait


def next_slot(slot: Any, depth: int) -> Any:
    """The slot after ``slot`` in a ring of ``depth`` slots."""
    if depth == 1:
        return slot
    following = slot + jnp.int32(1)
    return lax.select(following == jnp.int32(depth), jnp.int32(0), following)


def slot_of(step: Any, depth: int) -> Any:
    """The slot of a step."""
    if checks.is_integer(step):
        return jnp.int32(step % depth)
    return lax.rem(int32(step), jnp.int32(depth))


def least(count: Any, limit: int) -> Any:
    """The smaller of two numbers, of which one may be computed by the kernel."""
    if checks.is_integer(count):
        return min(count, limit)
    return jnp.minimum(int32(count), jnp.int32(limit)) if limit else 0


def earlier_slot(slot: Any, steps: int, depth: int) -> Any:
    """The slot ``steps`` steps before, with ``steps`` below ``depth``."""
    if steps == 0:
        return slot
    before = slot - jnp.int32(steps)
    return lax.select(before < jnp.int32(0), before + jnp.int32(depth), before)


def at(barrier: Any, slot: Any, depth: int) -> Any:
    """The barrier of one slot; a ring of one slot has a single barrier."""
    return barrier if depth == 1 else barrier.at[slot]


def when(condition: Any, action: Callable[[], None]) -> None:
    """``pl.when`` that needs no branch where the condition is known while tracing."""
    if isinstance(condition, bool):
        if condition:
            action()
        return
    pl.when(condition)(action)


def used_before(use: Any, depth: int, place: Place) -> Any:
    """Whether a slot is in use when a ring comes to its ``use``-th use (a number or a scalar).

    In the first round of the first pipeline of a sequence, slots are free from the beginning.
    """
    if place.first is False:
        return True
    if checks.is_integer(use) and isinstance(place.first, bool):
        return bool(use >= depth)
    again = int32(use) >= jnp.int32(depth)
    if place.first is True:
        return again
    return lax.bitwise_or(again, lax.bitwise_not(place.first))


def padding(uses: Any, depth: int, place: Place) -> Any:
    """How many more uses bring a ring back to its first slot.

    A ring of a sequence is used at least once around, so that at the end of the sequence it is
    known which slots have been in use.
    """
    if not place.in_sequence or depth == 1:
        return 0
    if checks.is_integer(uses):
        return -uses % depth if uses else depth
    rest = lax.rem(uses, jnp.int32(depth))
    more = lax.select(rest == jnp.int32(0), jnp.int32(0), jnp.int32(depth) - rest)
    return lax.select(uses == jnp.int32(0), jnp.int32(depth), more)


def drain(barriers: Any, uses: Any, end: Any, depth: int, place: Place) -> None:
    """Waits until all slots are released; otherwise barriers were left behind.

    Args:
      barriers: of the releases.
      uses: how often slots were used.
      end: the slot after the last one that was used: if all are in use, the oldest.
      depth: how many slots there are.
      place: where the pipeline stands.
    """

    def wait(_: Any, slot: Any) -> Any:
        barrier_wait(at(barriers, slot, depth))
        return next_slot(slot, depth)

    def run() -> None:
        count, start = least(uses, depth), end
        if place.in_sequence:
            # The ring has been used all around and is back at its first slot.
            count, start = depth, jnp.int32(0)
        elif checks.is_integer(uses):
            start = slot_of(uses - count, depth)
        else:
            start = lax.select(uses < jnp.int32(depth), jnp.int32(0), end)
        lax.fori_loop(0, count, wait, start)

    when(place.last, run)
