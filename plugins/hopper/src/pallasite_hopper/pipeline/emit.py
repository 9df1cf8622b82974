"""``emit_pipeline_warp_specialized``: a pipeline whose copies have a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallasite.language import checks
from pallasite.language.blocks import Grid
from pallasite_hopper.pipeline.compute_threads import run_compute_thread
from pallasite_hopper.pipeline.memory_thread import run_memory_thread
from pallasite_hopper.pipeline.plan import Configuration, Plan, checked_specs, is_spec
from pallasite_hopper.registers import set_max_registers


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
) -> WarpSpecializedPipeline:
    """Makes a function that runs ``body`` over a grid of blocks."""
    if memory_thread_idx not in (None, num_compute_wgs):
        raise checks.unsupported(
            "the memory thread of a pipeline is not the last thread",
            got=f"memory_thread_idx={memory_thread_idx}",
            expected=f"memory_thread_idx={num_compute_wgs} (num_compute_wgs), or None",
        )
    grid = tuple(grid)
    Grid(grid)  # For its errors.
    checks.count(num_compute_wgs, "num_compute_wgs", minimum=1)
    checks.count(max_concurrent_steps, "max_concurrent_steps", minimum=1)
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
            memory_registers=memory_registers,
            wg_axis=wg_axis,
            num_compute_wgs=num_compute_wgs,
            pipeline_state=pipeline_state,
            manual_produced_barriers=bool(manual_produced_barriers),
            manual_consumed_barriers=bool(manual_consumed_barriers),
            compute_context=compute_context,
        )
    )


class WarpSpecializedPipeline:
    """What :func:`emit_pipeline_warp_specialized` returns."""

    def __init__(self, configuration: Configuration):
        self._configuration = configuration

    def get_allocations(self, *gmem_refs: Any) -> Any:
        """Describes the memory and the barriers that the pipeline needs, for ``pl.run_scoped``."""
        return Plan(self._configuration, gmem_refs).allocations()

    def __call__(self, *gmem_refs: Any, allocations: Any = None) -> None:
        """Runs the pipeline; all threads of the block call it."""
        plan = Plan(self._configuration, gmem_refs)
        if allocations is not None:
            _run(plan, allocations)
            return
        pl.run_scoped(
            lambda memory: _run(plan, memory),
            plan.allocations(),
            collective_axes=self._configuration.wg_axis,
        )


def _run(plan: Plan, memory: Any) -> None:
    configuration = plan.configuration
    registers = configuration.memory_registers

    def compute() -> None:
        if registers is not None:
            set_max_registers(
                _compute_registers(registers, configuration.num_compute_wgs), action="increase"
            )
        run_compute_thread(plan, memory)

    def copy() -> None:
        if registers is not None:
            set_max_registers(registers, action="decrease")
        run_memory_thread(plan, memory)

    thread = lax.axis_index(configuration.wg_axis)
    lax.cond(thread == configuration.num_compute_wgs, copy, compute)


def _compute_registers(memory_registers: int, num_compute_wgs: int) -> int:
    at_launch = 512 // (num_compute_wgs + 1) // 8 * 8
    left = at_launch * (num_compute_wgs + 1) - memory_registers
    return min(256, left // num_compute_wgs // 8 * 8)
