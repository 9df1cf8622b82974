"""The kernel that combines what the ranges of tiles left of the items that they share.

A block belongs to the end of a range: it does something if the range's first item began in a range
before and ends in this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.decode import kernel
from pallasite_hopper.ops.decode.config import DecodeConfig
from pallasite_hopper.ops.decode.schedule import Item, Problem, Schedule, padded_lengths
from pallasite_hopper.ops.flash import softmax


def build(problem: Problem, config: DecodeConfig) -> Callable[..., Any]:
    """The kernel as a function of (lengths?, results, maxima, sums, out); ``out`` is completed.

    With a plan there are no lengths, and the plan comes after ``sums``.
    """
    assert config.blocks is not None
    scratch = {"out_smem": plgpu.SMEM((problem.columns, problem.head_dim), problem.dtype)}
    if problem.lengths and not config.ahead:
        scratch["lengths_smem"] = plgpu.SMEM((padded_lengths(problem),), jnp.int32)
        scratch["lengths_full"] = plgpu.Barrier()
    built: Callable[..., Any] = plgpu.kernel(
        _Combine(problem, config).run,
        out_type=kernel.out_shape(problem),
        grid=(config.blocks - 1, config.heads),
        grid_names=("block", "head"),
        scratch_types=scratch,
        input_output_aliases={4 if config.ahead else 3 + problem.lengths: 0},
        kernel_name="decode_attention_combine",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            unsafe_no_auto_barriers=True,
        ),
    )
    return built


class _Combine:
    """The body of the kernel for one problem and configuration."""

    def __init__(self, problem: Problem, config: DecodeConfig):
        self.problem, self.config = problem, config
        elements = problem.head_dim * problem.columns // 128
        self.at_once = max(1, min(8, 64 // elements))
        """Parts whose loads overlap, so that they fit the registers."""

    def run(self, *refs: Any, **scratch: Any) -> None:
        """The kernel's body."""
        if self.config.ahead:
            self._as_planned(scratch["out_smem"], *refs)
            return
        *given, results, maxima, sums, _, out = refs
        lengths = None
        if given:
            lengths = scratch["lengths_smem"]
            kernel.fetch_lengths(given[0], lengths, scratch["lengths_full"])
            plgpu.barrier_wait(scratch["lengths_full"])
        schedule = Schedule(self.problem, self.config, lengths)
        block = lax.axis_index("block") + 1
        start, end = schedule.start(block), schedule.start(block + 1)

        def look() -> None:
            sequence, unit, before = schedule.find(start)
            ends = start - before + schedule.tiles(sequence) <= end

            def complete() -> None:
                first = schedule.block_of(start - before)
                item = schedule.item(sequence, unit)
                self._complete(
                    (results, maxima, sums), first, block, item, scratch["out_smem"], out
                )
                plgpu.wait_smem_to_gmem(0)

            pl.when((before > 0) & ends)(complete)

        pl.when(start < end)(look)

    def _as_planned(
        self, staging: Any, results: Any, maxima: Any, sums: Any, plan: Any, _: Any, out: Any
    ) -> None:
        block = lax.axis_index("block") + 1
        first, number = plan[block, 0], plan[block, 1]

        def complete() -> None:
            schedule = Schedule(self.problem, self.config, None)
            sequence = lax.div(number, schedule.units)
            item = schedule.item(sequence, number - sequence * schedule.units)
            self._complete((results, maxima, sums), first, block, item, staging, out)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(first >= 0)(complete)

    def _complete(
        self, parts: tuple[Any, ...], first: Any, last: Any, item: Item, staging: Any, out: Any
    ) -> None:
        """Writes the results of an item of which the blocks from first to last have left parts."""
        head = lax.axis_index("head")
        values, total = self._combined(parts, first, last, head)
        kernel.write_results(self.problem, values, total, staging, out, item, item.head + head)

    def _combined(self, parts: tuple[Any, ...], first: Any, last: Any, head: Any) -> Any:
        """The sum of the parts of an item, which the blocks from first to last have left."""
        problem = self.problem
        results, maxima, sums = parts
        lowest = softmax.lowest(1.0)

        def step(turn: Any, carry: Any) -> Any:
            largest, total, values = carry
            loaded = []
            for number in range(self.at_once):
                block = lax.min(first + turn * self.at_once + number, last)
                place = ((block == first).astype(jnp.int32), block, head)
                exists = first + turn * self.at_once + number <= last
                part_maxima = jnp.where(exists, maxima[place], 2 * lowest)
                loaded.append((part_maxima, sums[place], results[place]))
            larger = largest
            for part_maxima, _, _ in loaded:
                larger = jnp.maximum(larger, part_maxima)
            shrink = jnp.exp2(largest - larger)
            total = total * shrink
            values = values * self._spread(shrink)
            for part_maxima, part_sums, part in loaded:
                weight = jnp.exp2(part_maxima - larger)
                total = total + part_sums * weight
                values = values + part * self._spread(weight)
            return larger, total, values

        columns = problem.columns
        start = (
            jnp.full((columns,), lowest, jnp.float32),
            jnp.zeros((columns,), jnp.float32),
            jnp.zeros((problem.head_dim, columns), jnp.float32),
        )
        turns = lax.div(last - first, self.at_once) + 1
        _, total, values = lax.fori_loop(0, turns, step, start)
        return values, total

    def _spread(self, columns: Any) -> Any:
        return lax.broadcast_in_dim(columns, (self.problem.head_dim, columns.shape[0]), (1,))
