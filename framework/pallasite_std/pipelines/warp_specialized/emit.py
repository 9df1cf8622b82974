"""``emit_pipeline_warp_specialized``: a pipeline whose copies have a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks
from pallasite_std.pipelines.blocks import Grid
from pallasite_std.pipelines.warp_specialized.compute_threads import run_compute_thread
from pallasite_std.pipelines.warp_specialized.memory_thread import run_memory_thread
from pallasite_std.pipelines.warp_specialized.plan import (
    Configuration,
    Plan,
    checked_specs,
    is_spec,
)
from pallasite_std.pipelines.warp_specialized.register_split import (
    checked_registers,
    split_registers,
)
from pallasite_std.pipelines.warp_specialized.states import place_of


def emit_pipeline_warp_specialized(
    body: Callable[..., Any],
    *,
    grid: Sequence[Any],
    memory_registers: int | None,
    in_specs: Any = (),
    out_specs: Any = (),
    max_concurrent_steps: int = 2,
    wg_axis: Any,
    num_compute_wgs: int,
    pipeline_state: Any = None,
    manual_produced_barriers: bool = False,
    manual_consumed_barriers: bool = False,
    compute_context: Callable[..., None] | None = None,
    memory_thread_idx: int | None = None,
    manual_ready_barriers: bool = False,
) -> WarpSpecializedPipeline:
    """Makes a function that runs ``body`` over a grid of blocks, with a thread for the copies.

    The last thread of the block, the producer warpgroup, only copies; the others run the body, each
    for every step, on the same blocks. Blocks wait in circular buffers of stages in shared memory.

    Args:
      body: called as ``body(indices, *input_refs, *output_refs)`` with the position in the grid and
        references to the blocks. An output block keeps its contents over consecutive steps with
        the same block index; it is stored once all consumer warpgroups are done with it, and is not
        read from global memory first.
      grid: sizes; integers or integer scalars. The last dimension moves fastest.
      memory_registers: registers of each lane of the producer warpgroup (a multiple of 8 from 24
        on, 40 is enough for most pipelines); the consumer warpgroups share the rest. What all
        threads run afterwards has to do with as few, so it is better in ``compute_context``. None
        leaves all threads their equal share. It does nothing on targets that cannot move registers.
      in_specs, out_specs: a sequence of trees of BlockSpecs, one for each operand; the body gets
        trees of references of the same structure. With ``memory_space=GMEM`` it gets the whole
        array as it is. Blocks may leave the array: there inputs are filled with zeros (or as
        ``oob_fill_mode`` says), and outputs are dropped. An input whose block does not depend on
        the grid is fetched once. ``delay_release`` keeps the blocks of an input untouched for that
        many further steps, and the last ones until ``compute_context`` returns. ``collective_axes``
        of an input names cluster axes along which all blocks of the cluster need the same data,
        which is then fetched once for all of them.
      max_concurrent_steps: how many steps are in flight; so many stages each operand gets.
      wg_axis: the kernel's ``thread_name``; it has ``num_compute_wgs + 1`` threads.
      num_compute_wgs: how many threads compute.
      pipeline_state: for several pipelines in a row that share their allocations, a
        :class:`PipelinePipeline` (or a scalar with its value): the producer warpgroup then fetches
        for the next one while the consumer warpgroups are still busy. They may differ in the body,
        in the index maps, in the grid and in the operands. Each costs least if the number of its
        steps is a multiple of ``max_concurrent_steps``. Between them, nothing may write to the
        operands.
      manual_produced_barriers: the body also gets, after the outputs, a barrier for each input, in
        the structure of the inputs, on which it must wait itself. With manual barriers, every input
        is fetched for each step; those in global memory have None for a barrier.
      manual_consumed_barriers: the body also gets, after these, a barrier for each input on which
        every consumer warpgroup must arrive once per step, when it has used the block; with
        ``delay_release=d``, that of the block d steps before, and not in the first d steps.
      compute_context: called in the consumer warpgroups only, as ``compute_context(pipeline)``. It
        calls ``pipeline(initial_carry)`` once, which runs the steps and returns the last carry; the
        body then gets the carry as its last argument and returns the next one.
      memory_thread_idx: ``num_compute_wgs`` or None.
      manual_ready_barriers: the same as ``manual_produced_barriers``, under the name that it has in
        JAX 0.11.0.

    Returns:
      A function of the GMEM references of inputs and outputs, which all threads call. It allocates
      what it needs, or takes it as ``allocations=``: what ``pl.run_scoped`` makes of the result of
      its method ``get_allocations(*references)``.

    Raises:
      InvalidValueError, InvalidTypeError, UnsupportedError: for arguments that do not fit together
      and specs that cannot be copied.
    """
    checks.count(num_compute_wgs, "num_compute_wgs", minimum=1)
    checks.count(max_concurrent_steps, "max_concurrent_steps", minimum=1)
    if memory_thread_idx not in (None, num_compute_wgs):
        raise checks.unsupported(
            "the producer warpgroup of a pipeline is not the last thread",
            got=f"memory_thread_idx={memory_thread_idx}",
            expected=f"memory_thread_idx={num_compute_wgs} (num_compute_wgs), or None",
        )
    grid = tuple(grid)
    Grid(grid)  # For its errors.
    place_of(pipeline_state)
    in_specs = checked_specs(in_specs, "input")
    delays = [getattr(s, "delay_release", 0) for s in jax.tree.leaves(in_specs, is_leaf=is_spec)]
    if delays and max(delays) >= max_concurrent_steps:
        raise checks.value_error(
            "delay_release is not below max_concurrent_steps",
            got=f"delay_release={max(delays)}, max_concurrent_steps={max_concurrent_steps}",
            hint=f"max_concurrent_steps={max(delays) + 1} or more",
        )
    return WarpSpecializedPipeline(
        Configuration(
            body=body,
            grid=grid,
            in_specs=in_specs,
            out_specs=checked_specs(out_specs, "output"),
            max_concurrent_steps=max_concurrent_steps,
            memory_registers=checked_registers(memory_registers),
            wg_axis=wg_axis,
            num_compute_wgs=num_compute_wgs,
            pipeline_state=pipeline_state,
            manual_produced_barriers=bool(manual_produced_barriers or manual_ready_barriers),
            manual_consumed_barriers=bool(manual_consumed_barriers),
            compute_context=compute_context,
        )
    )


class WarpSpecializedPipeline:
    """What :func:`emit_pipeline_warp_specialized` returns."""

    def __init__(self, configuration: Configuration):
        self._configuration = configuration

    def get_allocations(self, *gmem_refs: Any) -> Any:
        """Describes the memory and the barriers that the pipeline needs.

        Args:
          gmem_refs: references of the shapes and dtypes of the operands.

        Returns:
          A tree for ``pl.run_scoped(function, tree, collective_axes=wg_axis)``.
        """
        return Plan(self._configuration, gmem_refs).allocations(scoped=False)

    def __call__(self, *gmem_refs: Any, allocations: Any = None) -> None:
        """Runs the pipeline on GMEM references; all threads of the block call it.

        Args:
          gmem_refs: trees of references, for the inputs and then the outputs.
          allocations: what ``pl.run_scoped`` made of the result of :meth:`get_allocations`. Without
            them, the pipeline allocates what it needs, for this run only.

        Raises:
          InvalidValueError, InvalidTypeError: references or allocations that do not fit.
        """
        configuration = self._configuration
        axis, threads = configuration.wg_axis, configuration.num_compute_wgs + 1
        if not _jax.axis_exists(axis):
            raise checks.value_error(
                f"there is no axis named {axis!r}",
                expected="wg_axis= the kernel's thread_name",
            )
        if _jax.axis_size(axis) != threads:
            raise checks.value_error(
                f"a pipeline with num_compute_wgs={threads - 1} needs {threads} threads",
                got=f"num_threads={_jax.axis_size(axis)}",
                expected=f"num_threads={threads}: one more, for the copies",
            )
        plan = Plan(configuration, gmem_refs)
        if allocations is not None:
            plan.check_allocations(allocations)
            _run(plan, allocations)
            return
        if plan.place.in_sequence:
            raise checks.value_error(
                "a pipeline with a pipeline_state has no allocations",
                expected="the allocations= that all pipelines of the sequence share",
                hint="pl.run_scoped(..., pipeline.get_allocations(...), collective_axes=wg_axis)",
            )
        scoped = plan.allocations(scoped=True)
        pl.run_scoped(lambda memory: _run(plan, memory), scoped, collective_axes=axis)


def _run(plan: Plan, memory: Any) -> None:
    configuration = plan.configuration
    registers = configuration.memory_registers

    def compute() -> None:
        if registers is not None:
            split_registers(registers, in_memory_thread=False)
        run_compute_thread(plan, memory)

    def copy() -> None:
        if registers is not None:
            split_registers(registers, in_memory_thread=True)
        run_memory_thread(plan, memory)

    thread = lax.axis_index(configuration.wg_axis)
    lax.cond(thread == configuration.num_compute_wgs, copy, compute)
