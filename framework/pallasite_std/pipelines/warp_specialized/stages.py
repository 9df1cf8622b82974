"""Rings of stages: counting through them, waiting for them, and bringing them back to the start."""

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


def next_stage(stage: Any, depth: int) -> Any:
    """The stage after ``stage`` in a ring of ``depth`` stages."""
    if depth == 1:
        return stage
    following = stage + jnp.int32(1)
    return lax.select(following == jnp.int32(depth), jnp.int32(0), following)


def stage_of(step: Any, depth: int) -> Any:
    """The stage of a step."""
    if checks.is_integer(step):
        return jnp.int32(step % depth)
    return lax.rem(int32(step), jnp.int32(depth))


def least(count: Any, limit: int) -> Any:
    """The smaller of two numbers, of which one may be computed by the kernel."""
    if checks.is_integer(count):
        return min(count, limit)
    return jnp.minimum(int32(count), jnp.int32(limit)) if limit else 0


def earlier_stage(stage: Any, steps: int, depth: int) -> Any:
    """The stage ``steps`` steps before, with ``steps`` below ``depth``."""
    if steps == 0:
        return stage
    before = stage - jnp.int32(steps)
    return lax.select(before < jnp.int32(0), before + jnp.int32(depth), before)


def at(barrier: Any, stage: Any, depth: int) -> Any:
    """The barrier of one stage; a ring of one stage has a single barrier."""
    return barrier if depth == 1 else barrier.at[stage]


def when(condition: Any, action: Callable[[], None]) -> None:
    """``pl.when`` that needs no branch where the condition is known while tracing."""
    if isinstance(condition, bool):
        if condition:
            action()
        return
    pl.when(condition)(action)


def used_before(use: Any, depth: int, place: Place) -> Any:
    """Whether a stage is in use when a ring comes to its ``use``-th use (a number or a scalar).

    In the first round of the first pipeline of a sequence, stages are free from the beginning.
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
    """How many more uses bring a ring back to its first stage.

    A ring of a sequence is used at least once around, so that at the end of the sequence it is
    known which stages have been in use.
    """
    if not place.in_sequence or depth == 1:
        return 0
    if checks.is_integer(uses):
        return -uses % depth if uses else depth
    rest = lax.rem(uses, jnp.int32(depth))
    more = lax.select(rest == jnp.int32(0), jnp.int32(0), jnp.int32(depth) - rest)
    return lax.select(uses == jnp.int32(0), jnp.int32(depth), more)


def drain(barriers: Any, uses: Any, end: Any, depth: int, place: Place) -> None:
    """Waits until all stages are released; otherwise barriers were left behind.

    Args:
      barriers: of the releases.
      uses: how often stages were used.
      end: the stage after the last one that was used: if all are in use, the oldest.
      depth: how many stages there are.
      place: where the pipeline stands.
    """

    def wait(_: Any, stage: Any) -> Any:
        barrier_wait(at(barriers, stage, depth))
        return next_stage(stage, depth)

    def run() -> None:
        count, start = least(uses, depth), end
        if place.in_sequence:
            # The ring has been used all around and is back at its first stage.
            count, start = depth, jnp.int32(0)
        elif checks.is_integer(uses):
            start = stage_of(uses - count, depth)
        else:
            start = lax.select(uses < jnp.int32(depth), jnp.int32(0), end)
        lax.fori_loop(0, count, wait, start)

    when(place.last, run)
