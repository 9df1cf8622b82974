"""Bank conflicts of shared memory accesses."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

BANKS = 32
BANK_BYTES = 4


@dataclasses.dataclass
class SharedAccesses:
    """Accesses to shared memory by one instruction.

    Attributes:
      warps: how many times a warp executed it.
      wavefronts: how many passes over the banks that took.
      ideal: how many passes the same bytes need at least.
    """

    warps: int = 0
    wavefronts: int = 0
    ideal: int = 0


class BankConflicts:
    """Counts, for each instruction, the passes over the banks of shared memory.

    There are 32 banks of 4 bytes. Accesses of 8 and 16 bytes are served in halves and quarters of a
    warp; lanes that access the same word share it.
    """

    def __init__(self) -> None:
        self.accesses: dict[Instruction, SharedAccesses] = {}

    def access(self, lanes: Lanes, offsets: Array, size: int, instruction: Instruction) -> None:
        """Counts one execution: ``size`` bytes at a byte offset for each lane."""
        parts = max(1, min(size, 16) // BANK_BYTES)
        warps, places = np.unique(lanes.numbers // WARP, return_inverse=True)
        group = places * parts + lanes.numbers % WARP // (WARP // parts)
        words = (offsets // BANK_BYTES)[:, None] + np.arange(max(1, size // BANK_BYTES))
        keys = np.unique(np.stack([np.repeat(group, words.shape[1]), words.reshape(-1)]), axis=1)
        passes = np.zeros((len(warps) * parts, BANKS), np.int64)
        np.add.at(passes, (keys[0], keys[1] % BANKS), 1)
        found = self.accesses.setdefault(instruction, SharedAccesses())
        found.warps += len(warps)
        found.wavefronts += int(passes.max(axis=1).sum())
        needed = -(-np.bincount(keys[0], minlength=len(passes)) // BANKS)
        found.ideal += int(needed.sum())
