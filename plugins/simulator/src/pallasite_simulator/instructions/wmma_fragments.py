"""Where the elements of ``wmma`` fragments are.

PTX leaves that open (9.7.14.4.1); these are the places that an H200 uses. They are those of ``mma``
for parts of 16 or 8 rows, one after the other; a matrix of 8x32 is kept as the transposed one of
32x8 is.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pallasite_simulator.types import Array

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}
BITS |= {"f64": 64, "f32": 32, "s32": 32}

SHAPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), ("m16n16k16", "m32n8k16", "m8n32k16")),
    "tf32": ("m16n16k8",),
    "f64": ("m8n8k4",),
    **dict.fromkeys(("s4", "u4"), ("m8n8k32",)),
    "b1": ("m8n8k128",),
}
"""Shapes by the type of A and B."""

ACCUMULATORS: dict[str, tuple[str, ...]] = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "f64": ("f64",),
    **dict.fromkeys(("s8", "u8", "s4", "u4", "b1"), ("s32",)),
}
"""Types of C and D by the type of A and B."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """The part of a matrix that each lane has.

    Attributes:
      rows, columns: for each lane and element, its place in the matrix.
      shape: of the matrix.
      bits: of an element.
    """

    rows: Array
    columns: Array
    shape: tuple[int, int]
    bits: int

    @property
    def registers(self) -> int:
        """Registers of a lane, of 32 bits (64 for ``.f64``)."""
        return int(self.rows.shape[1]) * self.bits // max(32, self.bits)

    @property
    def index(self) -> Array:
        """For each element of the matrix, its number among the elements of all lanes."""
        found = np.zeros(self.shape, np.int64)
        numbers = np.arange(self.rows.size).reshape(self.rows.shape)
        found[self.rows, self.columns] = numbers
        return found


def extents(shape: str) -> tuple[int, int, int]:
    """M, N and K of a shape such as ``"m16n16k8"``."""
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


@functools.cache
def multiplicand(which: str, shape: str, kind: str) -> Fragment:
    """The fragment of A (``which`` is ``"a"``) or B."""
    m, n, k = extents(shape)
    extent = m if which == "a" else n
    # Of the 16 elements that a lane has of .f16, there may be fewer, more than once.
    copies = 16 * 32 // (extent * k) if kind == "f16" else 1
    tall = extent == 32 or (extent == 16 and which == "a")
    across, along = _places(extent, k, BITS[kind], tall, copies)
    if which == "a":
        return Fragment(across, along, (m, k), BITS[kind])
    return Fragment(along, across, (k, n), BITS[kind])


def _places(extent: int, depth: int, bits: int, tall: bool, copies: int) -> tuple[Array, Array]:
    """Places across (M or N) and along K; ``tall`` is how A of ``mma`` lies, else as B does."""
    g, t = np.divmod(np.arange(32)[:, None], 4)
    each = max(1, 32 // bits)
    height = 16 if tall else 8
    order = [
        (block * height + 8 * half, step * 4 * each + e)
        for _ in range(copies)
        for block in range(extent // height)
        for step in range(depth // (4 * each))
        for half in range(height // 8)
        for e in range(each)
    ]
    across, along = np.array(order).T
    return g + across, t * each + along


@functools.cache
def accumulator(shape: str, kind: str) -> Fragment:
    """The fragment of C or D."""
    m, n, _ = extents(shape)
    g, t = np.divmod(np.arange(32)[:, None], 4)
    if n == 32:
        order = [(e, 8 * block) for block in range(4) for e in range(2)]
        rows, columns = np.array(order).T
        return Fragment(2 * t + rows, g + columns, (m, n), BITS[kind])
    order = [
        (8 * block, 8 * side + e)
        for side in range(n // 8)
        for block in range(m // 8)
        for e in range(2)
    ]
    rows, columns = np.array(order).T
    return Fragment(g + rows, 2 * t + columns, (m, n), BITS[kind])
