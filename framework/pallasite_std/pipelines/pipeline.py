"""``emit_pipeline``: a loop over blocks whose copies overlap with its computation.

Inputs come through a circular buffer of stages in shared memory, filled ``max_concurrent_steps``
steps ahead by TMA copies, each stage with a barrier. An output is kept in its stage for as long as
its block index stays the same, and is stored when the index changes and after the last step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import GMEM, as_transformed, checks, memory_space_of
from pallasite_std.barriers.types import Barrier, ClusterBarrier
from pallasite_std.pipelines.block_spec import BlockSpec, shared_axes
from pallasite_std.pipelines.blocks import Grid, differ, int32, make_block
from pallasite_std.pipelines.buffers import Buffer, allocation, copy_all_in
from pallasite_std.primitives.barriers import barrier_arrive, barrier_wait, commit_smem
from pallasite_std.primitives.copies import commit_smem_to_gmem_group, wait_smem_to_gmem


def emit_pipeline(
    body: Callable[..., Any],
    *,
    grid: Sequence[Any],
    in_specs: Sequence[Any] = (),
    out_specs: Sequence[Any] = (),
    max_concurrent_steps: int = 1,
    init_carry: Any = None,
) -> Callable[..., Any]:
    """Makes a function that runs ``body`` over a grid of blocks.

    Args:
      body: called as ``body(indices, *input_refs, *output_refs)`` with the position in the grid and
        references to the blocks in shared memory; with ``init_carry`` it also gets the carry as the
        last argument and returns the next one. An output block keeps its contents over consecutive
        steps with the same block index, so it can be accumulated into; it is not read from global
        memory first.
      grid: sizes; integers or integer scalars. The last dimension moves fastest.
      in_specs, out_specs: one BlockSpec per operand. Dimensions may be None (or ``pl.Squeezed``),
        or ``pl.Element``. With ``memory_space=GMEM`` the body gets the whole array as it is. Blocks
        may leave the array: there inputs are filled with zeros, and outputs are dropped.
      max_concurrent_steps: how many steps are in flight; so many stages each operand gets.
      init_carry: the first value that is carried from step to step.

    A spec's ``delay_release`` keeps its blocks untouched for that many further steps; it must be
    below ``max_concurrent_steps``. Blocks of a cluster that differ only along the
    ``collective_axes`` of an input's spec need the same blocks of it at the same steps, and fetch
    each once for all of them: they go on to the next step together.

    Returns:
      A function of the GMEM references of inputs and outputs that runs the pipeline, and returns
      the last carry if there is one.

    Raises:
      InvalidValueError, InvalidTypeError, UnsupportedError: for specs that cannot be copied.
    """
    grid = tuple(grid)
    in_specs, out_specs = tuple(in_specs), tuple(out_specs)
    for spec in out_specs:
        if isinstance(spec, BlockSpec) and spec.collective_axes:
            raise checks.value_error(
                "an output of a pipeline has collective_axes",
                got=spec.collective_axes,
                expected="collective_axes of inputs only",
            )
    checks.count(max_concurrent_steps, "max_concurrent_steps", minimum=1)
    delays = [getattr(spec, "delay_release", 0) for spec in in_specs]
    if delays and max(delays) >= max_concurrent_steps:
        raise checks.value_error(
            "delay_release is not below max_concurrent_steps",
            got=f"delay_release={max(delays)}, max_concurrent_steps={max_concurrent_steps}",
            hint=f"max_concurrent_steps={max(delays) + 1} or more",
        )
    Grid(grid)  # For its errors.

    def pipeline(*gmem_refs: Any) -> Any:
        if len(gmem_refs) != len(in_specs) + len(out_specs):
            raise checks.type_error(
                f"a pipeline of {len(in_specs)} inputs and {len(out_specs)} outputs got "
                f"{len(gmem_refs)} references"
            )
        steps = Grid(grid)
        depth = max_concurrent_steps
        if steps.static:
            depth = min(depth, steps.num_steps)
        names = [f"input {i}" for i in range(len(in_specs))]
        names += [f"output {i}" for i in range(len(out_specs))]
        blocks, stages = [], []
        for spec, ref, name in zip((*in_specs, *out_specs), gmem_refs, names, strict=True):
            base = as_transformed(ref, name)
            if memory_space_of(_jax.typeof(base.ref)) is not GMEM:
                raise checks.value_error(
                    f"{name} of a pipeline is not in global memory", got=_jax.typeof(base.ref)
                )
            block = make_block(spec, tuple(base.shape), steps, name)
            blocks.append(block)
            stages.append(depth if block.varies else 1)
        num_inputs = len(in_specs)
        inputs = [b for b in blocks[:num_inputs] if b.in_smem]
        # Inputs that are released together arrive together.
        arrivals = len({b.spec.delay_release for b in inputs if b.varies})
        constant = any(not b.varies for b in inputs)
        shared = shared_axes(block.spec for block in inputs)
        ring = () if depth == 1 else depth
        released = {}
        for delay in sorted({b.spec.delay_release for b in inputs if b.varies}):
            members = [b.spec for b in inputs if b.varies and b.spec.delay_release == delay]
            axes = shared_axes(members)
            if axes:
                released[delay] = ClusterBarrier(collective_axes=axes, num_barriers=ring)

        def run(
            smem_refs: Any,
            stream_barrier: Any,
            constant_barrier: Any,
            release_barriers: Any,
            ready: Any,
        ) -> Any:
            if ready is not None:
                # Blocks must have left other uses of the memory before copies of others reach it.
                barrier_arrive(ready)
                barrier_wait(ready)
            parts = zip(blocks, gmem_refs, smem_refs, stages, strict=True)
            buffers = [Buffer(*part) for part in parts]
            loop = _Loop(
                body,
                steps,
                depth,
                buffers[:num_inputs],
                buffers[num_inputs:],
                stream_barrier,
                constant_barrier,
                dict(zip(released, release_barriers, strict=True)),
                init_carry,
            )
            return loop.run()

        return pl.run_scoped(
            run,
            smem_refs=[
                allocation(block, ref, n)
                for block, ref, n in zip(blocks, gmem_refs, stages, strict=True)
            ],
            stream_barrier=Barrier(num_arrivals=arrivals, num_barriers=ring) if arrivals else None,
            constant_barrier=Barrier() if constant else None,
            release_barriers=list(released.values()),
            ready=ClusterBarrier(collective_axes=shared) if shared else None,
        )

    return pipeline


class _Loop:
    """One run of a pipeline, inside the scope of its allocations."""

    def __init__(
        self,
        body: Callable[..., Any],
        steps: Grid,
        depth: int,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        stream_barrier: Any,
        constant_barrier: Any,
        release_barriers: dict[int, Any],
        init_carry: Any,
    ):
        self.body = body
        self.steps = steps
        self.depth = depth
        self.inputs, self.outputs = inputs, outputs
        self.streamed = [b for b in inputs if b.block.in_smem and b.block.varies]
        self.constant = [b for b in inputs if b.block.in_smem and not b.block.varies]
        self.stored = [b for b in outputs if b.block.in_smem and b.block.varies]
        self.stored_once = [b for b in outputs if b.block.in_smem and not b.block.varies]
        # Outputs whose stage moves on only when the block index changes.
        self.held = [b for b in self.stored if not b.block.always_changes]
        self.stream_barrier = stream_barrier
        self.constant_barrier = constant_barrier
        self.release_barriers = release_barriers
        self.init_carry = init_carry
        self.delays = sorted({b.block.spec.delay_release for b in self.streamed})

    def run(self) -> Any:
        steps = self.steps
        first = steps.position(jnp.int32(0), 0, steps.start(0))
        if self.constant:
            copy_all_in(self.constant, 0, first, self.constant_barrier)
        self.prologue()
        if self.constant:
            barrier_wait(self.constant_barrier)
        carry = (
            steps.start(0),
            [steps.start(self.depth - delay) for delay in self.delays],
            [jnp.int32(0) for _ in self.held],
            self.init_carry,
        )
        if steps.static and steps.num_steps == 1:
            carry = self.step(jnp.int32(0), carry)
        else:
            carry = lax.fori_loop(0, steps.num_steps, self.step, carry)
        self.epilogue(first)
        return carry[-1]

    def barrier(self, stage: Any) -> Any:
        return self.stream_barrier if self.depth == 1 else self.stream_barrier.at[stage]

    def fetch(self, delay: int, stage: Any, position: Sequence[Any]) -> None:
        """Starts the copies of the inputs that have a certain delay."""
        buffers = [b for b in self.streamed if b.block.spec.delay_release == delay]
        copy_all_in(buffers, stage, position, self.barrier(stage))

    def prologue(self) -> None:
        """Fills the stages for the first steps."""
        if self.steps.static and self.depth > 1 and not self.steps.start(0):
            # Traced once, but for each step with its own numbers in the code.
            lax.fori_loop(0, self.depth, self.fill, None, unroll=True)
            return
        for step, delay in itertools.product(range(self.depth), self.delays):
            position = self.steps.position(jnp.int32(0), step, self.steps.start(step))
            fetch = functools.partial(self.fetch, delay, step, position)
            if self.steps.static:
                fetch()
            else:
                lax.cond(jnp.int32(step) < self.steps.num_steps, fetch, lambda: None)

    def fill(self, step: Any, _: None) -> None:
        """Starts the copies of a step into the stage of the same number."""
        position = self.steps.position(step, 0, ())
        for delay in self.delays:
            self.fetch(delay, step, position)

    def step(self, step: Any, carry: Any) -> Any:
        step = int32(step)
        carried, fetch_carried, held_stages, user_carry = carry
        steps, depth = self.steps, self.depth
        stage = jnp.int32(0) if depth == 1 else lax.rem(step, np.int32(depth))
        position = steps.position(step, 0, carried)
        if self.streamed:
            barrier_wait(self.barrier(stage))
        every_step = len(self.stored) > len(self.held)
        if every_step:
            wait_smem_to_gmem(depth - 1, wait_read_only=True)
        stages_of_held = dict(zip(map(id, self.held), held_stages, strict=True))
        refs = [
            buffer.stage(stages_of_held.get(id(buffer), stage))
            for buffer in (*self.inputs, *self.outputs)
        ]
        extra = () if self.init_carry is None else (user_carry,)
        user_carry = self.body(position, *refs, *extra)
        if self.init_carry is None:
            user_carry = None
        next_carried = steps.advance(carried)
        if self.stored:
            next_position = steps.position(step, 1, next_carried)
            held_stages = self.store(step, stage, position, next_position, held_stages, every_step)
        self.fetch_ahead(step, fetch_carried)
        return (
            next_carried,
            [steps.advance(c) for c in fetch_carried],
            held_stages,
            user_carry,
        )

    def store(
        self,
        step: Any,
        stage: Any,
        position: Sequence[Any],
        next_position: Sequence[Any],
        held_stages: Sequence[Any],
        every_step: bool,
    ) -> list[Any]:
        """Starts the copies of output blocks that are complete; returns the stages of held ones."""
        is_last = lax.eq(step, lax.sub(int32(self.steps.num_steps), np.int32(1)))
        done = [
            lax.bitwise_or(is_last, differ(buffer.block, position, next_position))
            for buffer in self.held
        ]

        def start() -> None:
            commit_smem()
            held = iter(zip(held_stages, done, strict=True))
            for buffer in self.stored:
                if buffer.block.always_changes:
                    buffer.copy_out(stage, position)
                else:
                    held_stage, is_done = next(held)
                    predicate = is_done if every_step or len(self.held) > 1 else None
                    buffer.copy_out(held_stage, position, predicate)
            commit_smem_to_gmem_group()
            if not every_step:
                wait_smem_to_gmem(self.depth - 1, wait_read_only=True)

        if every_step:
            start()
        else:
            lax.cond(functools.reduce(lax.bitwise_or, done), start, lambda: None)
        if self.depth == 1:
            return list(held_stages)
        one, depth = np.int32(1), np.int32(self.depth)
        return [
            lax.select(is_done, lax.rem(lax.add(held_stage, one), depth), held_stage)
            for held_stage, is_done in zip(held_stages, done, strict=True)
        ]

    def fetch_ahead(self, step: Any, fetch_carried: Sequence[Any]) -> None:
        """Refills stages whose contents this step (or an earlier one, with a delay) used last."""
        steps = self.steps
        for delay, carried in zip(self.delays, fetch_carried, strict=True):
            ahead = self.depth - delay
            target = lax.add(step, np.int32(ahead))
            stage = jnp.int32(0) if self.depth == 1 else lax.rem(target, np.int32(self.depth))
            fetch = functools.partial(
                self.refill, delay, stage, steps.position(step, ahead, carried)
            )
            if steps.static and steps.num_steps <= ahead:
                continue
            needed = lax.lt(target, int32(steps.num_steps))
            if delay:
                needed = lax.bitwise_and(lax.ge(step, np.int32(delay)), needed)
            lax.cond(needed, fetch, lambda: None)

    def refill(self, delay: int, stage: Any, position: Sequence[Any]) -> None:
        """Fetches into a stage that has been used, once all that share its copies have used it."""
        released = self.release_barriers.get(delay)
        if released is not None:
            released = released if self.depth == 1 else released.at[stage]
            barrier_arrive(released)
            barrier_wait(released)
        self.fetch(delay, stage, position)

    def epilogue(self, first: Sequence[Any]) -> None:
        """Stores what no step stores, and waits for all stores."""
        if self.stored_once:
            ran = None if self.steps.static else self.steps.num_steps > 0
            commit_smem()
            for buffer in self.stored_once:
                buffer.copy_out(0, first, ran)
            commit_smem_to_gmem_group()
        if self.stored or self.stored_once:
            wait_smem_to_gmem(0)
