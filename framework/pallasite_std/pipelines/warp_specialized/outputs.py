"""Outputs: consumer warpgroups write them to stages, a warp of the producer warpgroup stores them.

A stage goes to the storing warp when all consumer warpgroups have written it (barrier ``written``)
and comes back when the copy has read it (barrier ``stored``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite_std.pipelines.blocks import differ, int32
from pallasite_std.pipelines.warp_specialized.plan import OutputGroup, Plan
from pallasite_std.pipelines.warp_specialized.stages import (
    at,
    drain,
    next_stage,
    padding,
    used_before,
    when,
)
from pallasite_std.primitives.barriers import barrier_arrive, barrier_wait, commit_smem
from pallasite_std.primitives.copies import commit_smem_to_gmem_group, wait_smem_to_gmem

type Use = tuple[Any, Any]
"""A stage of a ring, and how often stages of the ring were used up before."""


class _Side:
    """What the consumer warpgroups and the storing warp have in common.

    The rings of outputs that are held have a state of their own, in this order; those of the
    outputs of every step advance with the steps.
    """

    def __init__(self, plan: Plan, memory: Any):
        self.plan = plan
        self.groups: list[tuple[OutputGroup, Any, Any]] = list(
            zip(plan.output_groups, memory["written"], memory["stored"], strict=True)
        )
        self.buffers = plan.output_buffers(memory)

    def start(self) -> list[Use]:
        """The state at the beginning."""
        held = [group for group, _, _ in self.groups if group.kind == "held"]
        return [(jnp.int32(0), jnp.int32(0)) for _ in held]

    def uses(self, step: Any, stage: Any, state: Sequence[Use]) -> list[Use]:
        """For each group, the stage of a step and how many were used up before."""
        held = iter(state)
        result: list[Use] = []
        for group, _, _ in self.groups:
            if group.kind == "held":
                result.append(next(held))
            else:
                result.append((stage, step) if group.kind == "every" else (0, 0))
        return result

    def complete(self, step: Any, position: Any, next_position: Any) -> list[Any]:
        """For each group, whether its block is complete after a step."""
        is_last = int32(step) == int32(self.plan.steps.num_steps) - jnp.int32(1)
        done: list[Any] = []
        for group, _, _ in self.groups:
            if group.kind == "held":
                block = self.plan.outputs[group.members[0]]
                done.append(lax.bitwise_or(is_last, differ(block, position, next_position)))
            else:
                done.append(group.kind == "every")
        return done

    def advance(self, state: Sequence[Use], done: Sequence[Any]) -> list[Use]:
        """The state after a step."""
        result: list[Use] = []
        held = iter(state)
        for (group, _, _), complete in zip(self.groups, done, strict=True):
            if group.kind == "held":
                stage, uses = next(held)
                if group.stages > 1:
                    stage = lax.select(complete, next_stage(stage, group.stages), stage)
                result.append((stage, uses + lax.convert_element_type(complete, jnp.int32)))
        return result


def _any(conditions: Sequence[Any]) -> Any:
    if any(condition is True for condition in conditions):
        return True
    traced = [condition for condition in conditions if condition is not False]
    return functools.reduce(lax.bitwise_or, traced) if traced else False


def _arrive(barrier: Any, condition: Any) -> None:
    if condition is not False:
        barrier_arrive(barrier, predicate=None if condition is True else condition)


class Writer(_Side):
    """The side of a consumer warpgroup."""

    def begin(self) -> None:
        """Waits for the stages that all steps write to."""
        for group, _, stored in self.groups:
            if group.kind == "once":
                in_use = used_before(0, 1, self.plan.place)
                when(in_use, functools.partial(barrier_wait, stored))

    def begin_step(self, uses: Sequence[Use], fresh: Sequence[Any]) -> list[Any]:
        """Waits until the stages of a step are free; returns the references to the blocks.

        ``fresh`` says for each held output whether the step is the first one with its block.
        """
        stages: dict[int, Any] = {}
        of_held = iter(fresh)
        for (group, _, stored), (stage, count) in zip(self.groups, uses, strict=True):
            stages |= dict.fromkeys(group.members, stage)
            if group.kind == "once":
                continue
            in_use = used_before(count, group.stages, self.plan.place)
            if group.kind == "held":
                is_fresh = next(of_held)
                in_use = is_fresh if in_use is True else lax.bitwise_and(is_fresh, in_use)
            when(in_use, functools.partial(barrier_wait, at(stored, stage, group.stages)))
        return [buffer.stage(stages.get(i, 0)) for i, buffer in enumerate(self.buffers)]

    def end_step(self, uses: Sequence[Use], done: Sequence[Any]) -> None:
        """Releases the stages that are complete."""
        when(_any(done), commit_smem)
        for (group, written, _), (stage, _), complete in zip(self.groups, uses, done, strict=True):
            _arrive(at(written, stage, group.stages), complete)

    def end(self, uses: Sequence[Use]) -> None:
        """Releases what is complete only now, and waits for all stores if nothing follows."""
        place = self.plan.place
        once = [ring for group, *ring in self.groups if group.kind == "once"]
        if once:
            commit_smem()
        for written, _ in once:
            barrier_arrive(written)
        for (group, written, stored), (stage, count) in zip(self.groups, uses, strict=True):
            if group.kind != "once":
                skip = functools.partial(self.skip, group, written, stored, count)
                stage = lax.fori_loop(0, padding(count, group.stages, place), skip, stage)
                drain(stored, count, stage, group.stages, place)
        for _, stored in once:
            when(place.last, functools.partial(barrier_wait, stored))

    def skip(
        self, group: OutputGroup, written: Any, stored: Any, count: Any, extra: Any, stage: Any
    ) -> Any:
        """Passes a stage on without data."""
        in_use = used_before(int32(count) + int32(extra), group.stages, self.plan.place)
        when(in_use, functools.partial(barrier_wait, at(stored, stage, group.stages)))
        barrier_arrive(at(written, stage, group.stages))
        return next_stage(stage, group.stages)


class Store(_Side):
    """The side of the storing warp."""

    def run(self) -> None:
        """Stores each block when it is complete."""
        steps, place = self.plan.steps, self.plan.place
        # With several stages, a stage is given back only when the next copies have been started.
        self.lag = 1 if self.plan.depth > 1 else 0
        start = (jnp.int32(0), steps.start(0), self.start(), self.nothing())
        stage, _, state, before = lax.fori_loop(0, steps.num_steps, self.step, start)
        uses = self.uses(steps.num_steps, stage, state)
        first = steps.position(jnp.int32(0), 0, steps.start(0))
        ran = None if steps.static else steps.num_steps > jnp.int32(0)
        for group, written, _ in self.groups:
            if group.kind == "once":
                self.copy_out(group, written, 0, first, ran)
        commit_smem_to_gmem_group()
        # The consumer warpgroups take the release of all stages for the end of all stores.
        when(place.last, lambda: wait_smem_to_gmem(0))
        if place.last is not True:
            wait_smem_to_gmem(0, wait_read_only=True)
        self.give_back(
            [
                (0, True) if group.kind == "once" else pending
                for (group, _, _), pending in zip(self.groups, before, strict=True)
            ]
        )
        for (group, written, stored), (stage, count) in zip(self.groups, uses, strict=True):
            if group.kind != "once":
                skip = functools.partial(self.skip, group, written, stored)
                lax.fori_loop(0, padding(count, group.stages, place), skip, stage)

    def nothing(self) -> list[Any]:
        """For each group, the stage that is still to be given back, and whether there is one."""
        if not self.lag:
            return [(0, False) for _ in self.groups]
        return [(jnp.int32(0), jnp.bool_(False)) for _ in self.groups]

    def step(self, number: Any, carry: Any) -> Any:
        """One step: stores what is complete after it."""
        stage, carried, state, before = carry
        steps = self.plan.steps
        position = steps.position(number, 0, carried)
        following = steps.advance(carried)
        done = self.complete(number, position, steps.position(number, 1, following))
        uses = self.uses(number, stage, state)
        some = _any(done)
        store = functools.partial(self.store, position, uses, done, before)
        if some is True:
            before = store()
        elif some is not False:
            before = lax.cond(some, store, lambda: before)
        return next_stage(stage, self.plan.depth), following, self.advance(state, done), before

    def store(
        self, position: Any, uses: Sequence[Use], done: Sequence[Any], before: Sequence[Any]
    ) -> list[Any]:
        """Starts copies, and gives stages back; returns those that are still to be given back."""
        for (group, written, _), (stage, _), complete in zip(self.groups, uses, done, strict=True):
            copy_out = functools.partial(self.copy_out, group, written, stage, position)
            when(complete, copy_out)
        commit_smem_to_gmem_group()
        wait_smem_to_gmem(self.lag, wait_read_only=True)
        started = [(stage, complete) for (stage, _), complete in zip(uses, done, strict=True)]
        if not self.lag:
            self.give_back(started)
            return list(before)
        self.give_back(before)
        return [(int32(stage), jnp.bool_(complete)) for stage, complete in started]

    def copy_out(
        self, group: OutputGroup, written: Any, stage: Any, position: Any, condition: Any = None
    ) -> None:
        """Starts the copies of a group."""
        barrier_wait(at(written, stage, group.stages))
        for number in group.members:
            self.buffers[number].copy_out(stage, position, condition)

    def give_back(self, stages: Sequence[Any]) -> None:
        """Tells the consumer warpgroups that stages have been read."""
        for (group, _, stored), (stage, condition) in zip(self.groups, stages, strict=True):
            _arrive(at(stored, stage, group.stages), condition)

    def skip(self, group: OutputGroup, written: Any, stored: Any, _: Any, stage: Any) -> Any:
        """Passes a stage on without data."""
        barrier_wait(at(written, stage, group.stages))
        barrier_arrive(at(stored, stage, group.stages))
        return next_stage(stage, group.stages)


def store_outputs(plan: Plan, memory: Any) -> None:
    """Stores each block when it is complete; run by one warp."""
    Store(plan, memory).run()
