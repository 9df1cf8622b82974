"""Blocks that share a multiprocessor, and so its columns of tensor memory (PTX ISA 9.7.16.7.1).

Blocks are given to the multiprocessors in turn, in the order in which they are launched. As many
are on one of them at a time as shared memory, threads and registers allow; a further one begins
when an earlier one ends. ``tcgen05.alloc`` waits for columns that the others hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite_simulator.engine.residency import blocks_per_multiprocessor
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_blackwell.simulation.tensor_memory import TensorMemory


class Multiprocessors:
    """All multiprocessors of a device, during one launch."""

    def __init__(self, wave: Wave):
        geometry = wave.geometry
        cluster = geometry.cluster_size
        count = max(wave.program.multiprocessors // cluster, 1) * cluster
        self._numbers = np.empty(geometry.blocks, np.int64)
        self._numbers[geometry.order] = np.arange(geometry.blocks) % count
        self._places = np.empty(geometry.blocks, np.int64)
        self._places[geometry.order] = np.arange(geometry.blocks)
        self._most = blocks_per_multiprocessor(
            wave.program, geometry, wave.shared_bytes, allocated=False
        )
        self._alone = geometry.blocks <= count
        self._memories: list[TensorMemory] = []

    @classmethod
    def of(cls, memory: TensorMemory) -> Multiprocessors:
        """Those of a launch, with the tensor memory of one more wave."""
        launch = memory.wave.memory.global_memory.resources
        key = ("multiprocessors", memory.wave.geometry.device)
        found: Any = launch.get(key)
        if found is None:
            found = launch[key] = cls(memory.wave)
        result: Multiprocessors = found
        result._memories.append(memory)
        memory.wave.at_end.append(lambda: result._memories.remove(memory))
        return result

    def used(self, memory: TensorMemory, block: int) -> tuple[Array, list[str]] | None:
        """Which columns a block of a wave cannot have, and whose those of others are; None if the
        block has not begun, as those before it fill the multiprocessor."""
        columns: Array = memory.allocated[block].copy()
        holders: list[str] = []
        if self._alone:
            return columns, holders
        own = int(memory.wave.blocks[block])
        earlier = 0
        for other in self._memories:
            numbers = other.wave.blocks
            near = self._numbers[numbers] == self._numbers[own]
            near &= numbers != own
            if not near.any():
                continue
            exited = other.wave.exited.reshape(other.wave.block_count, -1).all(axis=1)
            for one in np.flatnonzero(near & ~exited).tolist():
                earlier += int(self._places[numbers[one]] < self._places[own])
                if other.allocated[one].any():
                    columns |= other.allocated[one]
                    holders.append(other.wave.block_name(one))
        return None if earlier >= self._most else (columns, holders)
