"""What the observer is told of the operations of tensor memory.

Operations take effect when they are issued; what is told is when they could have, and what says
that they are over.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite_blackwell.simulation.tensor_memory import CELL, SPACE, TensorMemory
from pallasite_blackwell.simulation.thread_fences import ThreadFences
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.engine.observer import AsyncOperation
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

MOVES = {"read": "tcgen05.ld", "write": "tcgen05.st"}
"""Engines of loads and stores."""

PIPE = "tcgen05"
"""The engine of products and copies: those of a thread are done in order."""

_REMEMBERED = 64
"""Operations of a thread, committed before, of which a commit tells once more."""


def move(kind: str, lanes: Array, instruction: Instruction) -> AsyncOperation:
    """A load (``"read"``) or a store (``"write"``) of warps."""
    name = {"read": "ld", "write": "st"}[kind]
    return AsyncOperation(
        MOVES[kind],
        lanes,
        instruction,
        proxy=SPACE,
        together=WARP,
        serial=True,
        # Instructions that use what was loaded wait for it by themselves.
        required=False,
        title=f"a tcgen05.{name} of the warp",
        hint=f"tcgen05.wait::{name} by the warp, then a barrier (in Pallas: "
        + {"read": "plgpu.wait_load_tmem())", "write": "plgpu.commit_tmem())"}[kind],
    )


def pipe(lane: int, instruction: Instruction) -> AsyncOperation:
    """A product or a copy of a thread."""
    return AsyncOperation(
        PIPE,
        np.array([lane]),
        instruction,
        serial=True,
        in_order=True,
        title="a product or copy of tensor memory",
        hint="tcgen05.commit to an mbarrier by the thread that began it, and a wait for that (in"
        " Pallas: plgpu.tcgen05_commit_arrive or barrier=, and plgpu.barrier_wait)",
    )


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    """An operation, and which lanes of the wave have not waited for it."""

    operation: AsyncOperation
    lanes: Array


class Events:
    """Operations of one wave that are in flight; needed for an observer only."""

    def __init__(self, wave: Wave):
        self._wave = wave
        self._moves: dict[str, list[_Pending]] = {"read": [], "write": []}
        self._issued: dict[int, list[AsyncOperation]] = {}

    @classmethod
    def of(cls, wave: Wave) -> Events:
        """Those of a wave."""
        found: Any = wave.resources.get("tensor memory events")
        if found is None:
            found = wave.resources["tensor memory events"] = cls(wave)
        result: Events = found
        return result

    # Loads and stores -----------------------------------------------------------------------------

    def move(self, operation: AsyncOperation, kind: str) -> None:
        """Warps begin a load (``"read"``) or a store (``"write"``)."""
        lanes = np.zeros(self._wave.lane_count, np.bool_)
        lanes[operation.lanes] = True
        self._moves[kind].append(_Pending(operation, lanes))

    def wait(self, lanes: Lanes, kind: str) -> None:
        """Warps wait for their loads or stores."""
        observer = self._wave.observer
        assert observer is not None
        kept = []
        for one in self._moves[kind]:
            mine = lanes.numbers[one.lanes[lanes.numbers]]
            if len(mine):
                one.lanes[mine] = False
                observer.complete_for([one.operation], mine)
            if one.lanes.any():
                kept.append(one)
        self._moves[kind] = kept

    # Products and copies --------------------------------------------------------------------------

    def issue(self, operation: AsyncOperation) -> None:
        """A thread begins a product or a copy."""
        for lane in operation.lanes.tolist():
            self._issued.setdefault(lane, []).append(operation)

    def commit(self, lane: int) -> list[AsyncOperation]:
        """What a thread has begun, also what it has committed before: another barrier may tell
        other threads. Of operations before the last ones, some barrier has told long ago."""
        issued = self._issued.setdefault(lane, [])
        self._issued[lane] = issued[-_REMEMBERED:]
        return issued


def tell_move(
    lanes: Lanes,
    memory: TensorMemory,
    kind: str,
    cells: Array,
    half: bool,
    instruction: Instruction,
) -> None:
    """Tells of a load or store of whole warps.

    Args:
      cells: numbers of cells, of shape (registers, lanes).
      half: whether each register also has the next cell.
    """
    wave = lanes.wave
    observer = wave.observer
    if observer is None:
        return
    operation = move(kind, lanes.numbers, instruction)
    observer.begin(operation)
    owners = np.broadcast_to(lanes.numbers, cells.shape).reshape(-1)
    offsets = cells.reshape(-1) * CELL
    if half:
        offsets = np.concatenate([offsets, offsets + CELL])
        owners = np.concatenate([owners, owners])
    observer.async_access(operation, kind, SPACE, offsets, CELL, owners)
    Events.of(wave).move(operation, kind)
    fences = ThreadFences.of(wave)
    if fences is not None:
        fences.access(kind, cells, lanes.numbers, instruction)


def tell_pipe(
    memory: TensorMemory,
    operation: AsyncOperation,
    accesses: list[tuple[str, str, Array, int]],
) -> None:
    """Tells of a product or a copy of one thread.

    Args:
      operation: as :func:`pipe` made it.
      accesses: of each piece, its kind (``"update"`` for what is read and written), the state
        space, the byte offsets of the parts, and their size.
    """
    wave = memory.wave
    observer = wave.observer
    assert observer is not None
    observer.begin(operation)
    fences = ThreadFences.of(wave)
    for kind, space, offsets, size in accesses:
        kinds = ("read", "write") if kind == "update" else (kind,)
        places, piece = offsets, size
        if space == SPACE:
            # Pieces of 16 bytes are looked at together.
            piece = 16 if not size % 16 and not (offsets % 16).any() else CELL
            if size > piece:
                places = (offsets[:, None] + np.arange(0, size, piece)).reshape(-1)
        owners = np.full(len(places), int(operation.lanes[0]))
        for one in kinds:
            observer.async_access(operation, one, space, places, piece, owners)
        if fences is not None and space == SPACE:
            columns = np.arange(0, size, CELL) // CELL
            cells = (offsets // CELL)[:, None] + columns
            fences.access(kinds[-1], cells, operation.lanes, operation.instruction)
    Events.of(wave).issue(operation)
