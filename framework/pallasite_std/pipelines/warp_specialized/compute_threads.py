"""Consumer warpgroups: they wait for the blocks of a step, run the body and release the stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasite.plugin.language import checks
from pallasite_std.pipelines.blocks import int32
from pallasite_std.pipelines.warp_specialized.outputs import Writer
from pallasite_std.pipelines.warp_specialized.plan import Plan
from pallasite_std.pipelines.warp_specialized.stages import (
    at,
    earlier_stage,
    least,
    next_stage,
    padding,
    stage_of,
)
from pallasite_std.primitives.barriers import barrier_arrive, barrier_wait


def run_compute_thread(plan: Plan, memory: Any) -> None:
    """The computation of one pipeline, in its context if it has one."""
    context = plan.configuration.compute_context
    loop = _Loop(plan, memory)
    if context is None:
        loop.run(None)
        loop.release_rest()
        return
    calls = 0

    def pipeline(carry: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise checks.value_error(
                "the compute_context of a pipeline calls the pipeline more than once",
                expected="one call, pipeline(initial_carry)",
            )
        return loop.run(carry)

    context(pipeline)
    loop.release_rest()
    if not calls:
        raise checks.value_error(
            "the compute_context of a pipeline does not call the pipeline",
            expected="one call, pipeline(initial_carry)",
        )


class _Loop:
    """The loop over the steps."""

    def __init__(self, plan: Plan, memory: Any):
        self.plan = plan
        self.memory = memory
        self.buffers = plan.input_buffers(memory)
        self.writer = Writer(plan, memory)
        self.groups = list(zip(plan.input_groups, memory["consumed"], strict=True))
        self.has_carry = plan.configuration.compute_context is not None

    def run(self, user_carry: Any) -> Any:
        """All steps; returns the last carry."""
        plan, num_steps = self.plan, self.plan.steps.num_steps
        if plan.constant:
            barrier_wait(self.memory["constant_full"])
        self.writer.begin()
        held = self.writer.start()
        fresh = [jnp.bool_(True) for _ in held]
        start = (jnp.int32(0), plan.steps.start(0), held, fresh, user_carry)
        stage, _, held, _, user_carry = lax.fori_loop(0, num_steps, self.step, start)
        self.writer.end(self.writer.uses(num_steps, stage, held))
        return user_carry

    def release_rest(self) -> None:
        """Releases what no step released: blocks with a delay, constant ones, stages without data.

        Asynchronous operations may use them until the context of the computation ends.
        """
        plan, depth = self.plan, self.plan.depth
        num_steps = plan.steps.num_steps
        for group, ring in self.groups:

            def release(_: Any, stage: Any, ring: Any = ring) -> Any:
                barrier_arrive(at(ring, stage, depth))
                return next_stage(stage, depth)

            count = least(num_steps, group.delay)
            lax.fori_loop(0, count, release, stage_of(num_steps - count, depth))

        def skip(_: Any, stage: Any) -> Any:
            self.wait(stage)
            for _, ring in self.groups:
                barrier_arrive(at(ring, stage, depth))
            return next_stage(stage, depth)

        extra = padding(num_steps, depth, plan.place)
        lax.fori_loop(0, extra, skip, stage_of(num_steps, depth))
        if plan.constant:
            barrier_arrive(self.memory["constant_free"])

    def step(self, step: Any, carry: Any) -> Any:
        """One step of the loop."""
        stage, carried, held, fresh, user_carry = carry
        plan, writer = self.plan, self.writer
        position = plan.steps.position(step, 0, carried)
        following = plan.steps.advance(carried)
        configuration = plan.configuration
        if not configuration.manual_produced_barriers:
            self.wait(stage)
        uses = writer.uses(step, stage, held)
        arguments = [
            *plan.input_tree.unflatten([buffer.stage(stage) for buffer in self.buffers]),
            *plan.output_tree.unflatten(writer.begin_step(uses, fresh)),
            *self.barriers(stage),
        ]
        if self.has_carry:
            arguments.append(user_carry)
        user_carry = configuration.body(position, *arguments)
        if not self.has_carry:
            user_carry = None
        if not configuration.manual_consumed_barriers:
            self.release(step, stage)
        done = writer.complete(step, position, plan.steps.position(step, 1, following))
        writer.end_step(uses, done)
        fresh = [
            complete
            for group, complete in zip(plan.output_groups, done, strict=True)
            if group.kind == "held"
        ]
        return (
            next_stage(stage, plan.depth),
            following,
            writer.advance(held, done),
            fresh,
            user_carry,
        )

    def wait(self, stage: Any) -> None:
        """Waits until the blocks of a stage are there."""
        for barrier in self.memory["produced"]:
            barrier_wait(at(barrier, stage, self.plan.depth))

    def release(self, step: Any, stage: Any) -> None:
        """Says that the blocks of this step, or of an earlier one, have been used."""
        depth = self.plan.depth
        for group, ring in self.groups:
            barrier_arrive(
                at(ring, earlier_stage(stage, group.delay, depth), depth),
                predicate=int32(step) >= jnp.int32(group.delay) if group.delay else None,
            )

    def barriers(self, stage: Any) -> list[Any]:
        """Barriers that the body gets, in the structure of the inputs."""
        plan, depth = self.plan, self.plan.depth
        result: list[Any] = []
        if plan.configuration.manual_produced_barriers:
            rings = zip(plan.streamed, self.memory["produced"], strict=True)
            result += self.of_inputs({number: at(ring, stage, depth) for number, ring in rings})
        if plan.configuration.manual_consumed_barriers:
            result += self.of_inputs(
                {
                    group.members[0]: at(ring, earlier_stage(stage, group.delay, depth), depth)
                    for group, ring in self.groups
                }
            )
        return result

    def of_inputs(self, by_input: dict[int, Any]) -> Any:
        """Barriers in the structure of the inputs; None for those in global memory."""
        flat = [by_input.get(number) for number in range(len(self.buffers))]
        return jax.tree.unflatten(self.plan.input_tree, flat)
