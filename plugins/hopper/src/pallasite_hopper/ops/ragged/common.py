"""What the kernels share: roles of warpgroups, circular buffers of stages, epilogues."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.ragged.config import RaggedConfig

COMPUTE = 2
"""Compute warpgroups."""

MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232
"""Registers of a lane after reallocation: 168 for each of 384 lanes, reallocated."""

BLOCK = 16
"""Rows of a result that are written at a time."""

PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    unsafe_no_auto_barriers=True,
    approx_math=True,
)
"""Barriers are in the program."""


def roles(memory: Callable[[], None], compute: Callable[[Any], None]) -> None:
    """Runs one function in the producer warpgroup, the other, of its number, in the others."""
    warpgroup = lax.axis_index("warpgroup")

    def fetch() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        memory()

    def multiply() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        compute(warpgroup)
        plgpu.wait_smem_to_gmem(0)

    pl.when(warpgroup == COMPUTE)(fetch)
    pl.when(warpgroup < COMPUTE)(multiply)


def group_rows(size: Any, rows: int) -> Any:
    """The rows of a group: of sizes that are none, as many as there can be, so that every loop over
    them ends."""
    return lax.min(lax.max(size, jnp.int32(0)), jnp.int32(rows))


@dataclasses.dataclass(frozen=True)
class Stages:
    """A circular buffer of stages in shared memory, with their full and empty barriers."""

    stages: int
    full: Any
    empty: Any

    def next(self, stage: Any) -> Any:
        """The stage after another one."""
        following = stage + 1
        return lax.select(following == self.stages, jnp.int32(0), following)

    def wait_empty(self, stage: Any, filled: Any) -> None:
        """Waits until a stage is free; ``filled`` counts those that were filled before."""
        # The first time round the stages are free.
        pl.when(filled >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))


def staging(config: RaggedConfig, dtype: Any) -> Any:
    """Buffers through which :func:`write` writes, those of a warpgroup one after the other."""
    count = COMPUTE * config.epilogue_buffers
    return plgpu.SMEM((count, config.warpgroup_m, config.epilogue_n), dtype)


def columns_of(values: Any, config: RaggedConfig) -> list[Any]:
    """The columns of a warpgroup's part of a tile that are written at a time."""
    width = config.epilogue_n
    return [values[:, start : start + width] for start in range(0, values.shape[1], width)]


def write(
    values: Sequence[Any],
    buffers: Any,
    destination: Callable[[int, int, Any, int], Any],
    config: RaggedConfig,
    rows: Any = None,
) -> None:
    """Writes a warpgroup's part of a finished tile through shared memory.

    Args:
      values: (rows, columns) of the result by ``columns_of``, no more rows than the buffers have.
      buffers: the warpgroup's.
      destination: ``(first column, number of columns, first row, number of rows)`` to the window of
        the result, relative to the warpgroup's part; what lies outside of the array is not written.
      config: how the result is cut.
      rows: how many rows are written; by default all, by one copy. A number is written in blocks
        and single rows: the copy engine's boxes have fixed sizes, and the launcher passes two of
        them for an array.
    """
    width, total, count = config.epilogue_n, values[0].shape[0], config.epilogue_buffers
    for part, columns in enumerate(values):
        buffer = buffers.at[part % count]
        if total < config.warpgroup_m:
            buffer = buffer.at[pl.ds(0, total)]
        # The first buffer may be that of the last part of another tile.
        in_flight = count - 1 if part else 0
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        buffer[...] = columns.astype(buffer.dtype)
        plgpu.commit_smem()
        _copy_rows(buffer, functools.partial(destination, part * width, width), total, rows)
        plgpu.commit_smem_to_gmem_group()


def _copy_rows(
    buffer: Any, window: Callable[[Any, int], Any], total: int, rows: Any | None
) -> None:
    """Starts copies of the first ``rows`` rows of a buffer to a window of as many."""

    def copy(start: Any, count: int) -> None:
        source = buffer.at[pl.ds(start, count)]
        plgpu.copy_smem_to_gmem(source, window(start, count), commit_group=False)

    if rows is None:
        copy(0, total)
        return

    def block(index: Any, carry: Any) -> Any:
        copy(index * BLOCK, BLOCK)
        return carry

    lax.fori_loop(0, lax.div(rows, jnp.int32(BLOCK)), block, jnp.int32(0))

    def single(row: Any, carry: Any) -> Any:
        copy(row, 1)
        return carry

    lax.fori_loop(lax.bitwise_and(rows, -BLOCK), rows, single, jnp.int32(0))
