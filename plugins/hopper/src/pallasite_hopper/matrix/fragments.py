"""Which registers an instruction names, and in what order (PTX ISA, "Register Fragments")."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pallasite.plugin.layouts import RegisterLayout
from pallasite_hopper.matrix.layouts import SPECIFICATIONS

type Place = tuple[int, int]
"""(register number, element in its vector)."""


@functools.lru_cache(maxsize=256)
def accumulator_layout(shape: tuple[int, ...], dtype: np.dtype[Any]) -> RegisterLayout:
    """How an accumulator is held: one element in each 32-bit register, or two of 16 bits."""
    name = "WGMMA" if dtype.itemsize == 2 else "_WGMMA_ACC_32BIT"
    return SPECIFICATIONS[name].layout(shape)


@functools.lru_cache(maxsize=256)
def result_layout(shape: tuple[int, ...]) -> RegisterLayout:
    """The layout of what is read from an accumulator."""
    return SPECIFICATIONS["WGMMA"].layout(shape)


def left_layout_name(bits: int) -> str:
    """The register layout of a left operand with elements of so many bits."""
    return {8: "WGMMA_8BIT", 16: "WGMMA", 32: "WGMMA_TF32"}[bits]


@functools.lru_cache(maxsize=256)
def left_layout(shape: tuple[int, ...], bits: int) -> RegisterLayout:
    """The layout of a left operand in registers."""
    return SPECIFICATIONS[left_layout_name(bits)].layout(shape)


@functools.lru_cache(maxsize=256)
def _places(layout: RegisterLayout) -> dict[tuple[int, ...], Place]:
    """Where the first lane holds its elements."""
    return {
        layout.element_at(0, 0, register, element): (register, element)
        for register in range(layout.registers)
        for element in range(layout.vector_length)
    }


@functools.lru_cache(maxsize=256)
def accumulator_registers(
    layout: RegisterLayout, row: int, column: int, columns: int
) -> tuple[int, ...]:
    """The registers of the accumulator of one instruction, in its order.

    Args:
      layout: of the whole accumulator.
      row: the first of 64 rows.
      column, columns: first and number of columns.
    """
    places = _places(layout)
    per_register = layout.vector_length
    return tuple(
        places[row + 8 * half, column + 8 * block + element][0]
        for block in range(columns // 8)
        for half in range(2)
        for element in range(0, 2, per_register)
    )


@functools.lru_cache(maxsize=256)
def left_registers(layout: RegisterLayout, row: int, k: int, bits: int) -> tuple[int, ...]:
    """The four 32-bit registers of a left operand for one instruction, in its order."""
    places = _places(layout)
    half_depth = 128 // bits
    return tuple(
        places[row + 8 * half, k + part * half_depth][0] for part in range(2) for half in range(2)
    )
