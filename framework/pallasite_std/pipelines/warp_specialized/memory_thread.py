"""The producer warpgroup: its warps issue the copies, each warp one kind of them.

The warp that waits until a stage is free then starts the copies itself. So nothing is exchanged
between warps, and each barrier is awaited by one warp only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite_std.pipelines.blocks import int32
from pallasite_std.pipelines.buffers import Buffer, copy_all_in
from pallasite_std.pipelines.helpers import warp_map
from pallasite_std.pipelines.warp_specialized.outputs import store_outputs
from pallasite_std.pipelines.warp_specialized.plan import InputGroup, Plan
from pallasite_std.pipelines.warp_specialized.stages import (
    at,
    drain,
    next_stage,
    padding,
    used_before,
    when,
)
from pallasite_std.primitives.barriers import barrier_arrive, barrier_wait
from pallasite_std.primitives.copies import barrier_expect


def run_memory_thread(plan: Plan, memory: Any) -> None:
    """All copies of one pipeline."""
    jobs: list[Callable[[Plan, Any], None]] = []
    if plan.streamed:
        jobs.append(_fetch_streamed)
    if plan.constant:
        jobs.append(_fetch_constant)
    if plan.output_groups:
        jobs.append(store_outputs)
    if memory["ready"] is not None:
        # Blocks must have left other uses of the memory before their peers' copies reach it.
        barrier_arrive(memory["ready"])
        barrier_wait(memory["ready"])

    def run(warp: Any) -> None:
        for number, job in enumerate(jobs):
            pl.when(warp == number)(lambda job=job: job(plan, memory))

    if jobs:
        warp_map(run)


def _fetch_streamed(plan: Plan, memory: Any) -> None:
    """Fetches the blocks of each step as soon as their stages are free."""
    steps, depth, place = plan.steps, plan.depth, plan.place
    num_steps = steps.num_steps
    buffers = plan.input_buffers(memory)
    produced = memory["produced"]
    groups = list(zip(plan.input_groups, memory["consumed"], strict=True))
    fits = steps.static and num_steps <= depth and place.first is True

    def arrivals(group: InputGroup) -> list[tuple[Any, list[Buffer]]]:
        """The barriers on which a group arrives, and with which inputs."""
        if plan.configuration.manual_produced_barriers:
            return [(produced[plan.streamed.index(i)], [buffers[i]]) for i in group.members]
        return [(produced[0], [buffers[i] for i in group.members])]

    def wait_for_stage(consumed: Any, step: Any, stage: Any) -> None:
        in_use = False if fits else used_before(step, depth, place)
        when(in_use, lambda: barrier_wait(at(consumed, stage, depth)))

    def fetch(step: Any, carry: Any) -> Any:
        stage, carried = carry
        position = steps.position(step, 0, carried)
        for group, consumed in groups:
            wait_for_stage(consumed, step, stage)
            for barrier, members in arrivals(group):
                copy_all_in(members, stage, position, at(barrier, stage, depth))
        return next_stage(stage, depth), steps.advance(carried)

    stage, _ = lax.fori_loop(0, num_steps, fetch, (jnp.int32(0), steps.start(0)))

    def skip(extra: Any, stage: Any) -> Any:
        """Passes a stage on without data."""
        for group, consumed in groups:
            wait_for_stage(consumed, int32(num_steps) + int32(extra), stage)
            for barrier, _ in arrivals(group):
                barrier_expect(at(barrier, stage, depth))
        return next_stage(stage, depth)

    stage = lax.fori_loop(0, padding(num_steps, depth, place), skip, stage)
    for _, consumed in groups:
        drain(consumed, num_steps, stage, depth, place)


def _fetch_constant(plan: Plan, memory: Any) -> None:
    """Fetches the blocks that stay the same, once the pipeline before has used its own."""
    position = plan.steps.position(jnp.int32(0), 0, plan.steps.start(0))
    buffers = plan.input_buffers(memory)
    free = memory["constant_free"]
    when(used_before(0, 1, plan.place), lambda: barrier_wait(free))
    members = [buffers[number] for number in plan.constant]
    copy_all_in(members, 0, position, memory["constant_full"])
    when(plan.place.last, lambda: barrier_wait(free))
