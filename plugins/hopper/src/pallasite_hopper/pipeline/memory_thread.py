"""The memory thread: its warps issue the copies, each one kind of them.

A warp that waits for a slot then starts the copies itself, so nothing is exchanged between warps,
and each barrier is awaited by one warp only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite.language.blocks import int32
from pallasite.language.buffers import copy_all_in
from pallasite.language.helpers import warp_map
from pallasite.language.primitives.barriers import barrier_wait
from pallasite_hopper.pipeline.plan import Plan
from pallasite_hopper.pipeline.slots import at, first_slot, next_slot


def run_memory_thread(plan: Plan, memory: dict[str, Any]) -> None:
    """All copies of one pipeline."""
    jobs: list[Callable[[Plan, dict[str, Any]], None]] = []
    if plan.streamed:
        jobs.append(_fetch_streamed)
    if plan.constant:
        jobs.append(_fetch_constant)

    def run(warp: Any) -> None:
        for number, job in enumerate(jobs):
            pl.when(warp == number)(lambda job=job: job(plan, memory))

    if jobs:
        warp_map(run)


def _fetch_streamed(plan: Plan, memory: dict[str, Any]) -> None:
    steps, depth = plan.steps, plan.depth
    buffers = plan.input_buffers(memory["inputs"])
    produced = memory["produced"]

    def fetch(step: Any, carry: Any) -> Any:
        slot, carried = carry
        position = steps.position(step, 0, carried)
        for group, consumed in zip(plan.groups, memory["consumed"], strict=True):
            if not (steps.static and steps.num_steps == depth):
                pl.when(step >= jnp.int32(depth))(
                    lambda consumed=consumed: barrier_wait(at(consumed, slot, depth))
                )
            if plan.configuration.manual_produced_barriers:
                for number in group.members:
                    barrier = at(produced[plan.streamed.index(number)], slot, depth)
                    copy_all_in([buffers[number]], slot, position, barrier)
            else:
                members = [buffers[number] for number in group.members]
                copy_all_in(members, slot, position, at(produced[0], slot, depth))
        return next_slot(slot, depth), steps.advance(carried)

    end, _ = lax.fori_loop(0, steps.num_steps, fetch, (first_slot(), steps.start(0)))
    _drain(plan, memory, end)


def _drain(plan: Plan, memory: dict[str, Any], end: Any) -> None:
    """Waits until the last slots are released, so that no barrier is left behind.

    ``end`` is the slot after that of the last step, which is the oldest if all were filled.
    """
    steps, depth = plan.steps, plan.depth
    num_steps = int32(steps.num_steps)
    filled = jnp.minimum(num_steps, jnp.int32(depth))
    start = lax.select(num_steps < jnp.int32(depth), jnp.int32(0), end)
    for group, consumed in zip(plan.groups, memory["consumed"], strict=True):

        def wait(_: Any, slot: Any, consumed: Any = consumed) -> Any:
            barrier_wait(at(consumed, slot, depth))
            return next_slot(slot, depth)

        lax.fori_loop(0, filled - jnp.int32(group.delay), wait, start)


def _fetch_constant(plan: Plan, memory: dict[str, Any]) -> None:
    buffers = plan.input_buffers(memory["inputs"])
    position = plan.steps.position(jnp.int32(0), 0, plan.steps.start(0))
    members = [buffers[number] for number in plan.constant]
    copy_all_in(members, 0, position, memory["constant_full"])
    barrier_wait(memory["constant_free"])
