"""The compute threads: they wait for the blocks of a step, run the body and release the slots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasite.language import checks
from pallasite.language.blocks import int32
from pallasite.language.primitives.barriers import barrier_arrive, barrier_wait
from pallasite_hopper.pipeline.outputs import Writer
from pallasite_hopper.pipeline.plan import Plan
from pallasite_hopper.pipeline.slots import at, earlier_slot, next_slot, padding


def run_compute_thread(plan: Plan, memory: Any) -> None:
    """The computation of one pipeline, in its context if it has one."""
    context = plan.configuration.compute_context
    if context is None:
        _Loop(plan, memory).run(None)
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
        return _Loop(plan, memory).run(carry)

    context(pipeline)
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
        plan, depth = self.plan, self.plan.depth
        num_steps = plan.steps.num_steps
        if plan.constant:
            barrier_wait(self.memory["constant_full"])
        self.writer.begin()
        held = self.writer.start()
        fresh = [jnp.bool_(True) for _ in held]
        start = (jnp.int32(0), plan.steps.start(0), held, fresh, user_carry)
        slot, _, held, _, user_carry = lax.fori_loop(0, num_steps, self.step, start)
        if plan.constant:
            barrier_arrive(self.memory["constant_free"])
        self.writer.end(self.writer.uses(num_steps, slot, held))

        def skip(extra: Any, slot: Any) -> Any:
            self.wait(slot)
            self.release(int32(num_steps) + int32(extra), slot)
            return next_slot(slot, depth)

        lax.fori_loop(0, padding(num_steps, depth, plan.place), skip, slot)
        return user_carry

    def step(self, step: Any, carry: Any) -> Any:
        """One step of the loop."""
        slot, carried, held, fresh, user_carry = carry
        plan, writer = self.plan, self.writer
        position = plan.steps.position(step, 0, carried)
        following = plan.steps.advance(carried)
        configuration = plan.configuration
        if not configuration.manual_produced_barriers:
            self.wait(slot)
        uses = writer.uses(step, slot, held)
        arguments = [
            *plan.input_tree.unflatten([buffer.slot(slot) for buffer in self.buffers]),
            *plan.output_tree.unflatten(writer.begin_step(uses, fresh)),
            *self.barriers(slot),
        ]
        if self.has_carry:
            arguments.append(user_carry)
        user_carry = configuration.body(position, *arguments)
        if not self.has_carry:
            user_carry = None
        if not configuration.manual_consumed_barriers:
            self.release(step, slot)
        done = writer.complete(step, position, plan.steps.position(step, 1, following))
        writer.end_step(uses, done)
        fresh = [
            complete
            for group, complete in zip(plan.output_groups, done, strict=True)
            if group.kind == "held"
        ]
        return (
            next_slot(slot, plan.depth),
            following,
            writer.advance(held, done),
            fresh,
            user_carry,
        )

    def wait(self, slot: Any) -> None:
        """Waits until the blocks of a slot are there."""
        for barrier in self.memory["produced"]:
            barrier_wait(at(barrier, slot, self.plan.depth))

    def release(self, step: Any, slot: Any) -> None:
        """Says that the blocks of this step, or of an earlier one, have been used.

        With a delay, the first steps release blocks of the pipeline before, if there is one.
        """
        plan = self.plan
        for group, barrier in self.groups:
            condition = None
            if group.delay and plan.place.first is not False:
                condition = int32(step) >= jnp.int32(group.delay)
                if plan.place.first is not True:
                    condition = lax.bitwise_or(condition, lax.bitwise_not(plan.place.first))
            which = earlier_slot(slot, group.delay, plan.depth)
            barrier_arrive(at(barrier, which, plan.depth), predicate=condition)

    def barriers(self, slot: Any) -> list[Any]:
        """Barriers that the body gets, in the structure of the inputs."""
        plan, depth = self.plan, self.plan.depth
        result: list[Any] = []
        if plan.configuration.manual_produced_barriers:
            rings = zip(plan.streamed, self.memory["produced"], strict=True)
            result += self.of_inputs({number: at(ring, slot, depth) for number, ring in rings})
        if plan.configuration.manual_consumed_barriers:
            result += self.of_inputs(
                {
                    group.members[0]: at(ring, earlier_slot(slot, group.delay, depth), depth)
                    for group, ring in self.groups
                }
            )
        return result

    def of_inputs(self, by_input: dict[int, Any]) -> Any:
        """Barriers in the structure of the inputs; None for those in global memory."""
        flat = [by_input.get(number) for number in range(len(self.buffers))]
        return jax.tree.unflatten(self.plan.input_tree, flat)
