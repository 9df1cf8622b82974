"""The accumulators of ``wgmma.mma_async``, and how MMAs get there.

The registers of an accumulator are up to 128 arrays. They are kept side by side in one block of
memory, of which the registers are the rows, so that an MMA can add to all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite_hopper.simulation.warpgroups import THREADS, WARPS
from pallasite_simulator.binder import Source
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.instructions.products import add_products
from pallasite_simulator.instructions.tensor_core import add_saturating, add_to_f16
from pallasite_simulator.types import Array

_DTYPES: dict[str, Any] = {"f32": np.float32, "s32": np.int32}

_PADDING = 16
"""Between rows, so that their addresses do not differ by a power of two: the parts of one
warpgroup's registers would displace each other from the processor's cache."""


class Accumulators:
    """Registers of one accumulator in one wave.

    Attributes:
      numbers: of the registers.
      block: their contents, of shape (registers, lanes).
    """

    def __init__(self, wave: Wave, numbers: Sequence[int]):
        self.numbers = tuple(numbers)
        width = wave.lane_count
        self.block = np.zeros((len(self.numbers), width + _PADDING), np.uint32)[:, :width]
        self._rows = list(self.block)
        self._defined = np.zeros(wave.lane_count // WARP, np.bool_)

    @classmethod
    def of(cls, wave: Wave, numbers: tuple[int, ...]) -> Accumulators:
        """Those of the registers with these numbers."""
        key = ("wgmma accumulators", numbers)
        found: Any = wave.resources.get(key)
        if found is None:
            found = wave.resources[key] = cls(wave, numbers)
        result: Accumulators = found
        return result

    def hold(self, lanes: Lanes, reads: Sequence[Source], keep: Array) -> None:
        """Makes the registers rows of the block, and defined for the lanes.

        Args:
          lanes: who is going to add to them.
          reads: reads the registers, which tells the observer of undefined ones.
          keep: which of the warpgroups read what is there.
        """
        registers = lanes.registers
        warps = lanes.warps
        if not self._defined[warps].all():
            self._define(lanes, reads, keep)
            self._defined[warps] = True
        for place, (number, row) in enumerate(zip(self.numbers, self._rows, strict=True)):
            held = registers[number]
            if held is not row:
                assert held is not None
                self.block[place] = held
                registers[number] = row

    def _define(self, lanes: Lanes, reads: Sequence[Source], keep: Array) -> None:
        wave, registers = lanes.wave, lanes.registers
        readers = lanes.where(np.repeat(keep != 0, THREADS))
        for number, read in zip(self.numbers, reads, strict=True):
            undefined = wave.undefined.get(number)
            held = registers[number]
            if held is None or (undefined is not None and lanes.of(undefined).any()):
                if readers is not None:
                    read(readers)
                    held = registers[number]
                lanes.put(number, np.uint32(0) if held is None else lanes.of(held).copy())

    def add(
        self,
        lanes: Lanes,
        a: Array,
        b: Array,
        keep: Array,
        kind: str,
        *,
        by_rows: bool,
        saturate: bool,
    ) -> None:
        """Adds the results of MMAs to the registers, or replaces them.

        Args:
          lanes: whole warpgroups.
          a, b, by_rows: matrices, as :func:`add_products` takes them.
          keep: to which of the warpgroups' accumulators to add (uint8).
          kind: type of the accumulators.
          saturate: whether integers that overflow are limited to the range; else they wrap.
        """
        if kind == "f32" or (kind == "s32" and not saturate):
            registers = self.block.view(_DTYPES[kind])
            starts = np.ascontiguousarray(lanes.numbers[::THREADS])
            add_products(a, b, registers, starts, keep, warps=WARPS, by_rows=by_rows)
            return
        groups = len(keep)
        pairs, dtype = kind == "f16", np.float32 if kind == "f16" else np.int32
        sums = np.empty((len(self.numbers), lanes.count * (1 + pairs)), dtype)
        starts, nothing = np.arange(groups) * THREADS, np.zeros(groups, np.uint8)
        add_products(a, b, sums, starts, nothing, warps=WARPS, by_rows=by_rows, pairs=pairs)
        # Indexing may put the lanes first in memory.
        held = np.ascontiguousarray(self.block[:, lanes.numbers])
        held.reshape(-1, groups, THREADS)[:, keep == 0] = 0
        result = (
            add_to_f16(held.view(np.float16), sums)
            if pairs
            else add_saturating(held.view(np.int32), sums)
        )
        self.block[:, lanes.numbers] = result.view(np.uint32)
