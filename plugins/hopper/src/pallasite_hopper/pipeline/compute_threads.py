"""The compute threads: they wait for the blocks of a step, run the body and release the slots."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallasite.language import checks
from pallasite.language.primitives.barriers import barrier_arrive, barrier_wait
from pallasite_hopper.pipeline.plan import Plan
from pallasite_hopper.pipeline.slots import at, earlier_slot, first_slot, next_slot


def run_compute_thread(plan: Plan, memory: dict[str, Any]) -> None:
    """The computation of one pipeline, in its context if it has one."""
    context = plan.configuration.compute_context
    loop = _Loop(plan, memory)
    if context is None:
        loop.run(None)
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
    if not calls:
        raise checks.value_error(
            "the compute_context of a pipeline does not call the pipeline",
            expected="one call, pipeline(initial_carry)",
        )


class _Loop:
    """The loop over the steps."""

    def __init__(self, plan: Plan, memory: dict[str, Any]):
        self.plan = plan
        self.memory = memory
        self.buffers = plan.input_buffers(memory["inputs"])
        self.has_carry = plan.configuration.compute_context is not None

    def run(self, user_carry: Any) -> Any:
        """All steps; returns the last carry."""
        plan = self.plan
        if plan.constant:
            barrier_wait(self.memory["constant_full"])
        carry = (first_slot(), plan.steps.start(0), user_carry)
        _, _, user_carry = lax.fori_loop(0, plan.steps.num_steps, self.step, carry)
        if plan.constant:
            barrier_arrive(self.memory["constant_free"])
        return user_carry

    def step(self, step: Any, carry: Any) -> Any:
        """One step of the loop."""
        slot, carried, user_carry = carry
        plan, configuration = self.plan, self.plan.configuration
        depth = plan.depth
        position = plan.steps.position(step, 0, carried)
        if not configuration.manual_produced_barriers:
            for barrier in self.memory["produced"]:
                barrier_wait(at(barrier, slot, depth))
        inputs = plan.input_tree.unflatten([buffer.slot(slot) for buffer in self.buffers])
        arguments = [*inputs]
        if configuration.manual_produced_barriers:
            by_input = dict(zip(plan.streamed, self.memory["produced"], strict=True))
            arguments += self.barriers_of_inputs(
                {number: at(barrier, slot, depth) for number, barrier in by_input.items()}
            )
        if configuration.manual_consumed_barriers:
            arguments += self.barriers_of_inputs(
                {
                    group.members[0]: at(barrier, earlier_slot(slot, group.delay, depth), depth)
                    for group, barrier in self.releases()
                }
            )
        if self.has_carry:
            arguments.append(user_carry)
        user_carry = configuration.body(position, *arguments)
        if not self.has_carry:
            user_carry = None
        if not configuration.manual_consumed_barriers:
            self.release(step, slot)
        return next_slot(slot, depth), plan.steps.advance(carried), user_carry

    def releases(self) -> list[tuple[Any, Any]]:
        """Groups with their barriers."""
        return list(zip(self.plan.groups, self.memory["consumed"], strict=True))

    def barriers_of_inputs(self, by_input: dict[int, Any]) -> Any:
        """Barriers in the structure of the inputs; None for those that have none."""
        flat = [by_input.get(number) for number in range(len(self.buffers))]
        return jax.tree.unflatten(self.plan.input_tree, flat)

    def release(self, step: Any, slot: Any) -> None:
        """Says that the blocks of this step, or of an earlier one, have been used."""
        for group, barrier in self.releases():
            barrier_arrive(
                at(barrier, earlier_slot(slot, group.delay, self.plan.depth), self.plan.depth),
                predicate=step >= jnp.int32(group.delay) if group.delay else None,
            )
