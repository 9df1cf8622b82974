"""The accumulators of ``wgmma.mma_async``, and how products get there.

The registers of an accumulator are up to 128 arrays. They are kept side by side in one block of
memory, of which the registers are the rows, so that NumPy adds to all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite_hopper.simulation.warpgroups import Placement
from pallasite_simulator.binder import Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.instructions.tensor_core import accumulate
from pallasite_simulator.types import Array, Values

DTYPES: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "s32": np.int32}


class Accumulators:
    """Registers of one accumulator in one wave.

    Attributes:
      numbers: of the registers.
      block: their contents, of shape (registers, lanes).
    """

    def __init__(self, wave: Wave, numbers: Sequence[int]):
        self.numbers = tuple(numbers)
        self.block = np.zeros((len(self.numbers), wave.lane_count), np.uint32)
        self._rows = list(self.block)
        self._defined = np.zeros(wave.lane_count // 32, np.bool_)

    @classmethod
    def of(cls, wave: Wave, numbers: tuple[int, ...]) -> Accumulators:
        """Those of the registers with these numbers."""
        key = ("wgmma accumulators", numbers)
        found: Any = wave.resources.get(key)
        if found is None:
            found = wave.resources[key] = cls(wave, numbers)
        result: Accumulators = found
        return result

    def hold(self, lanes: Lanes, reads: Sequence[Source], keep: Values) -> None:
        """Makes the registers rows of the block, and defined for the lanes.

        Args:
          lanes: who is going to add to them.
          reads: reads the registers, which tells the observer of undefined ones.
          keep: which of the lanes read what is there, or whether all do.
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

    def _define(self, lanes: Lanes, reads: Sequence[Source], keep: Values) -> None:
        wave, registers = lanes.wave, lanes.registers
        readers = lanes.where(np.asarray(keep))
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
        placement: Placement,
        products: Array,
        kind: str,
        keep: Values,
        saturate: bool,
    ) -> None:
        """Adds products to the registers, or replaces them.

        Args:
          lanes: who.
          placement: where they are.
          products: as :func:`by_register` returns them.
          kind: type of the accumulators.
          keep: to which of the lanes' accumulators to add, or whether to all.
          saturate: as for :func:`accumulate`.
        """
        dtype = DTYPES[kind]
        if not placement.regular:
            held = self.block[:, lanes.index]
            _add(held, products, dtype, keep, saturate)
            self.block[:, lanes.index] = held
            return
        _add(placement.of(self.block), products, dtype, keep, saturate)


def _add(held: Array, products: Array, dtype: Any, keep: Values, saturate: bool) -> None:
    keep = np.asarray(keep)
    if keep.ndim and not keep.all():
        if keep.any():
            held[:, ~keep.reshape(held.shape[1:])] = 0
        else:
            keep = np.bool_(False)
    values = held.view(dtype)
    products = products.reshape(values.shape)
    if not keep.ndim and not keep:
        with np.errstate(over="ignore", invalid="ignore"):
            values[...] = products
    elif dtype is np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(values, products, out=values)
    else:
        values[...] = accumulate(values, products, saturate)


def by_register(products: Array, kind: str) -> Array:
    """Brings products into the order of the registers (PTX ISA 9.7.15.5.1.1).

    In warp ``w``, lane ``4 * g + t`` holds the rows ``16 * w + g`` (register ``4 * j + e``, with
    ``e`` 0 or 1) and ``16 * w + 8 + g`` (register ``4 * j + 2 + e``), in the columns
    ``8 * j + 2 * t + e``; two elements of ``.f16`` share a register.

    Args:
      products: of shape (warpgroups, 64, N), in single precision. Unless ``kind`` is ``"f16"``, of
        each eight columns the even ones come first.
      kind: type of the accumulators.

    Returns:
      An array of shape (registers, lanes), or (registers, lanes * 2) for ``"f16"``.
    """
    groups, _, columns = products.shape
    # A complex number stands for four values: the lanes t, or two of t with both e.
    quads = products.view(np.complex128).reshape(groups, 4, 2, 8, columns // 8, 2)
    order = (4, 2, 0, 1, 3, 5) if kind == "f16" else (4, 2, 5, 0, 1, 3)
    found = np.ascontiguousarray(quads.transpose(order)).view(np.float32)
    return found.reshape(columns // 4 if kind == "f16" else columns // 2, -1)
