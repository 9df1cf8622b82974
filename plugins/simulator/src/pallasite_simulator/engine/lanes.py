"""The lanes that execute an instruction together, and their registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite_simulator.distinct import distinct
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave

WARP = 32

ALL = slice(None)

_PARTS = 64
"""How many parts of lanes are remembered."""


class Lanes:
    """Some lanes of a wave, which execute one instruction together.

    A lane is numbered by its place in the wave: block by block, each block padded to whole warps,
    so lane ``n`` is lane ``n % 32`` of warp ``n // 32``. Values of lanes are arrays whose first
    dimension is :attr:`count` (for all lanes of the wave in order, or the lanes of ``index``).

    Attributes:
      wave: the blocks that run together.
      index: ``slice(None)`` for all lanes of the wave, else a sorted array of lane numbers.
      count: how many there are.
      registers: the wave's registers: arrays over all lanes of the wave, None while never written.
    """

    __slots__ = (
        "_numbers",
        "_parts",
        "_warp_count",
        "_whole",
        "count",
        "index",
        "registers",
        "wave",
    )

    def __init__(self, wave: Wave, index: Any):
        self.wave = wave
        self.index = index
        self.registers = wave.registers
        self._numbers: Array | None = None
        self._whole: bool | None = None
        self._warp_count: int | None = None
        self._parts: dict[bytes, Lanes] | None = None
        if index is ALL:
            self.count = wave.lane_count
            self._whole = True
        else:
            self.count = len(index)
            self._numbers = index

    @property
    def full(self) -> bool:
        """Whether these are all lanes of the wave."""
        return self.index is ALL

    @property
    def numbers(self) -> Array:
        """Their numbers in the wave, ascending (int64)."""
        if self._numbers is None:
            self._numbers = self.wave.all_numbers
        return self._numbers

    @property
    def whole_warps(self) -> bool:
        """Whether all 32 lanes are there of each warp of which one is."""
        if self._whole is None:
            numbers = self.numbers
            self._whole = (
                self.count % WARP == 0
                and bool((numbers[::WARP] % WARP == 0).all())
                and bool((numbers[WARP - 1 :: WARP] - numbers[::WARP] == WARP - 1).all())
            )
        return self._whole

    @property
    def warps(self) -> Array:
        """Numbers of the warps in the wave that have a lane here, ascending."""
        if self.whole_warps:
            return self.numbers[::WARP] // WARP
        return distinct(self.numbers // WARP)

    @property
    def warp_count(self) -> int:
        """How many warps have a lane here."""
        if self._warp_count is None:
            self._warp_count = self.count // WARP if self.whole_warps else len(self.warps)
        return self._warp_count

    def where(self, mask: Array) -> Lanes | None:
        """Those for which ``mask`` (one bool for each) is true; None if there are none."""
        if mask.ndim == 0:
            return self if mask else None
        hits = np.count_nonzero(mask)
        if hits == self.count:
            return self
        if not hits:
            return None
        if self._parts is None:
            self._parts = {}
        key = mask.tobytes()
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) > _PARTS:
                self._parts.clear()
            found = self._parts[key] = self.wave.lanes(self.numbers[mask])
        return found

    def of(self, values: Array) -> Array:
        """From one value for each lane of the wave, the values of these lanes; a view or a copy."""
        return values if self.index is ALL else values[self.index]

    def put(self, register: int, values: Values) -> None:
        """Sets a register, given as its number.

        Args:
          register: its number in the program.
          values: bits in the register's storage dtype, one for each lane or a scalar. Ownership
            goes to the register: not an array, or a view of one, that a register already holds.
        """
        registers = self.registers
        if self.index is ALL:
            if values.ndim == 0:
                scalar, values = values, np.empty(self.count, values.dtype)
                values.fill(scalar)
            registers[register] = values
            if register in self.wave.undefined:
                del self.wave.undefined[register]
            return
        held, wave = registers[register], self.wave
        if held is None:
            held = registers[register] = wave.new_register(register)
            wave.undefined[register] = wave.new_undefined(register)
            wave.undefined[register][self.index] = 0
            held[self.index] = values
            wave.defined[register] = {self}
            return
        held[self.index] = values
        undefined = wave.undefined.get(register)
        if undefined is not None:
            if self in wave.defined.get(register, ()):
                return
            undefined[self.index] = 0
            if undefined.any():
                wave.note_defined(register, self)
            else:
                del wave.undefined[register]
