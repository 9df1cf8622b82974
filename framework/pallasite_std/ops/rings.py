"""A circular buffer of stages in shared memory, which copies fill while MMA reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu


def over_steps(
    steps: Any,
    stages: int,
    loaded: Any,
    fetch: Callable[[Any, Any], None],
    body: Callable[[Any, Any, Any], Any],
    carry: Any,
) -> Any:
    """``carry = body(step, stage, carry)`` for each step, while those to come are fetched.

    A stage is free again when the step after its own begins: products of warps are done when they
    return. The barrier before the copy that overwrites it comes from the compiler.

    Args:
      steps: how many; a number or a value of the kernel.
      stages: the number of stages, of which one less are in flight; with one, nothing overlaps.
      loaded: barriers of the stages, of one phase for each use.
      fetch: ``fetch(step, stage)`` starts the copies into a stage.
      body: what is done with a stage whose copies have arrived.
      carry: what the first step gets.
    """

    def start(step: Any) -> None:
        fetch(step, lax.rem(step, stages))

    ahead = min(stages - 1, steps) if isinstance(steps, int) else lax.min(steps, stages - 1)
    lax.fori_loop(0, ahead, lambda step, _: start(step), None)

    def one(step: Any, carry: Any) -> Any:
        stage = lax.rem(step, stages)
        if stages == 1:
            start(step)
        plgpu.barrier_wait(loaded.at[stage])
        if stages == 1:
            return body(step, stage, carry)
        pl.when(step + stages - 1 < steps)(lambda: start(step + stages - 1))
        return body(step, stage, carry)

    return lax.fori_loop(0, steps, one, carry)


def first_elements(values: Any, count: Any, axis: int) -> Any:
    """The first elements along an axis; zeros beyond them."""
    places = lax.broadcasted_iota(jnp.int32, values.shape, axis)
    return jnp.where(places < count, values, jnp.zeros_like(values))


PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
)
"""Of portable operations: the compiler adds barriers and chooses layouts."""
