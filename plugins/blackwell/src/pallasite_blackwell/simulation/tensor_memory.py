"""Tensor memory (PTX ISA 9.7.16.1): 128 lanes of 512 columns of 32 bits for each block.

An address has the lane in its upper and the column in its lower 16 bits. Each block of the
simulator has a memory of its own; which columns of it are free also depends on the blocks that
share its multiprocessor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite_blackwell.simulation.multiprocessors import Multiprocessors
from pallasite_simulator.binder import Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.memory import Region, aligned_bytes
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

LANES = 128
COLUMNS = 512
WARP_LANES = 32
"""Lanes that a warp can reach, by its number modulo 4."""

CELL = 4
"""Bytes of a cell."""

SPACE = "tensor"
"""The name of the state space."""

BLOCK_CELLS = LANES * COLUMNS

POISON = np.uint32(0x7FFF7FFF)
"""What columns hold when they have just been allocated: a NaN as float32, or as two of f16 or
bf16."""

TARGETS = frozenset(
    ("sm_100a", "sm_100f", "sm_101a", "sm_101f", "sm_103a", "sm_103f", "sm_110a", "sm_110f")
)
"""Targets that have tensor memory, as ptxas has it."""


def require_target(binder: Binder, targets: frozenset[str], what: str) -> None:
    """Raises :class:`PtxError` unless the module is for one of the targets."""
    target = binder.program.module.target
    if target not in targets:
        raise binder.error(
            f"{what} does not exist on this target",
            got=target,
            expected="one of " + ", ".join(sorted(targets)),
        )


def cta_group(binder: Binder) -> int:
    """1 or 2, as the instruction says."""
    found = [one for one in binder.instruction.modifiers if one.startswith("cta_group::")]
    if found not in (["cta_group::1"], ["cta_group::2"]):
        raise binder.error(
            "the instruction names its group of blocks",
            expected=".cta_group::1 or .cta_group::2",
        )
    return int(found[0][-1])


@dataclasses.dataclass(slots=True)
class Piece:
    """Columns that were allocated together."""

    start: int
    count: int
    group: int
    instruction: Instruction


class TensorMemory:
    """The tensor memory of all blocks of a wave.

    Attributes:
      region: the contents, block by block, lane by lane.
      words: of shape (blocks, lanes, columns).
      cells: the same in one dimension.
      allocated: which columns of each block may be used.
      pieces: allocations of each block.
      relinquished: which blocks may not allocate any more.
      multiprocessors: those of the launch.
    """

    def __init__(self, wave: Wave):
        self.wave = wave
        blocks = wave.block_count
        self.region = Region(SPACE, aligned_bytes(blocks * BLOCK_CELLS * CELL))
        wave.memory.regions[SPACE] = self.region
        wave.memory.describes[SPACE] = self.describe
        wave.at_end.append(self._check_released)
        self.cells: Array = self.region.bytes.view(np.uint32)
        self.words: Array = self.cells.reshape(blocks, LANES, COLUMNS)
        self.allocated: Array = np.zeros((blocks, COLUMNS), np.bool_)
        self.pieces: list[list[Piece]] = [[] for _ in range(blocks)]
        self.relinquished: Array = np.zeros(blocks, np.bool_)
        self._groups: Array = np.zeros(blocks, np.int8)
        self.multiprocessors = Multiprocessors.of(self)

    @classmethod
    def of(cls, wave: Wave) -> TensorMemory:
        """That of a wave."""
        found: Any = wave.resources.get(SPACE)
        if found is None:
            found = wave.resources[SPACE] = cls(wave)
        result: TensorMemory = found
        return result

    # Blocks ---------------------------------------------------------------------------------------

    def peer(self, block: int) -> int:
        """The other block of a pair: its rank in the cluster differs in the last bit."""
        size = self.wave.cluster_size
        return block - block % size + (block % size ^ 1)

    def blocks(self, lane: int, group: int, instruction: Instruction) -> list[int]:
        """The blocks on whose memory an instruction of a thread works, by rank.

        Raises:
          SimulationError: there is no pair of blocks, or the block used the other kind of group.
        """
        block = int(self.wave.lane_block[lane])
        self.use_group(block, group, lane, instruction)
        if group == 1:
            return [block]
        return sorted((block, self.peer(block)))

    def use_group(self, block: int, group: int, lane: int, instruction: Instruction) -> None:
        """Notes that a block uses ``.cta_group::1`` or ``2``; all its instructions must agree.

        Raises:
          SimulationError: they do not, or the cluster has no pairs.
        """
        held = int(self._groups[block])
        if held == group:
            return
        wave = self.wave
        if held:
            raise self.failure(
                lane,
                "uses another group of blocks than before",
                instruction,
                got=f".cta_group::{group}",
                expected=f".cta_group::{held} in all tcgen05 instructions of a kernel",
            )
        if group == 2 and wave.cluster_size % 2:
            raise self.failure(
                lane,
                "needs a pair of blocks",
                instruction,
                got=f"a cluster of {wave.cluster_size}",
                expected="a cluster with an even number of blocks",
            )
        self._groups[block] = group

    # Places ---------------------------------------------------------------------------------------

    def check_columns(
        self, block: int, first: int, last: int, lane: int, what: str, instruction: Instruction
    ) -> None:
        """Raises :class:`SimulationError` unless the columns from ``first`` to ``last`` (inclusive)
        of a block are allocated; ``what`` says what a thread does with them."""
        if first >= 0 and last < COLUMNS and self.allocated[block, first : last + 1].all():
            return
        pieces = self.pieces[block]
        held = ", ".join(f"{one.start} to {one.start + one.count - 1}" for one in pieces)
        raise self.failure(
            lane,
            f"{what} columns of tensor memory that are not allocated",
            instruction,
            got=f"columns {first} to {last} of block {self.wave.block_name(block)}",
            expected=f"allocated ones: {held or 'there are none'}",
        )

    def offsets(self, block: int, lanes: Array, columns: Array) -> Array:
        """Byte offsets in the region, for the observer."""
        found: Array = ((block * LANES + lanes) * COLUMNS + columns) * CELL
        return found

    def count(self, kind: str, cells: int) -> None:
        """Counts cells that are read or written, for statistics."""
        moved = self.wave.memory.bytes_moved
        moved[SPACE, kind] = moved.get((SPACE, kind), 0) + cells * CELL

    def describe(self, offset: int) -> str:
        """Names the cell of a byte offset, for messages."""
        block, cell = divmod(offset // CELL, BLOCK_CELLS)
        lane, column = divmod(cell, COLUMNS)
        return (
            f"lane {lane}, column {column} of tensor memory of block {self.wave.block_name(block)}"
        )

    def _check_released(self) -> None:
        """Tells of columns that are still allocated when all threads have ended."""
        observer = self.wave.observer
        if observer is None:
            return
        for block, pieces in enumerate(self.pieces):
            for one in pieces:
                observer.misuse(
                    np.array([block * self.wave.lanes_per_block]),
                    f"and the other threads of its block end, but {one.count} columns of tensor"
                    f" memory from {one.start} were not released (tcgen05.dealloc)",
                    one.instruction,
                )

    # Errors ---------------------------------------------------------------------------------------

    def failure(
        self,
        lane: int,
        what: str,
        instruction: Instruction,
        got: object = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> SimulationError:
        """An error about what a thread does, to be raised."""
        return SimulationError(
            f"{self.wave.thread_name(lane)} {what}, in: {instruction.text}",
            got=got,
            expected=expected,
            hint=hint,
            location=instruction.location,
        )


def uniform_of_warps(values: Any, lanes: Lanes, what: str, instruction: Instruction) -> Array:
    """One value for each warp of whole warps.

    Raises:
      SimulationError: threads of a warp have different values.
    """
    if not np.ndim(values):
        return np.full(lanes.count // 32, values)
    parts = values.reshape(-1, 32)
    own: Array = np.ascontiguousarray(parts[:, 0])
    different = (parts != own[:, None]).any(axis=1)
    if different.any():
        warp = int(np.flatnonzero(different)[0])
        raise SimulationError(
            f"the threads of a warp have different {what}, in: {instruction.text}",
            got=f"the warp of {lanes.wave.thread_name(int(lanes.numbers[warp * 32]))}",
            location=instruction.location,
        )
    return own
