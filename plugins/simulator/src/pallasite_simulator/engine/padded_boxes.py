"""Boxes of tensors whose elements have 4 or 6 bits (``.b4x16``, ``.b4x16_p64``, ``.b6x16_p32``).

In global memory 16 elements lie side by side in 8 or 12 bytes. In shared memory they have as many,
or, for the types with padding, 16 bytes, whose last ones are zeros here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pallasite_simulator.engine.boxes import Box, Part
from pallasite_simulator.engine.memory import Region
from pallasite_simulator.engine.tensor_map import GROUP, TensorMap
from pallasite_simulator.types import Array

_WORD = 2
"""The element type of 32 bits."""

_WORD_BYTES = 4


def _in_words(tensor: TensorMap, words: int) -> TensorMap:
    """The tensor map whose elements are words, of which 16 elements have some."""
    return dataclasses.replace(
        tensor,
        element_type=_WORD,
        sizes=(tensor.sizes[0] // GROUP * words, *tensor.sizes[1:]),
        box=(tensor.box[0] // GROUP * words, *tensor.box[1:]),
    )


class PaddedBox(Box):
    """How such boxes are moved. Coordinates are in elements; parts are in words of global memory.

    They are moved one by one.
    """

    def __init__(self, tensor: TensorMap):
        element = tensor.element
        self._words = element.group_bytes // _WORD_BYTES
        super().__init__(_in_words(tensor, element.padded_bytes // _WORD_BYTES))
        self._inner = Box(_in_words(tensor, self._words))
        self.together = False

    def stored_places(self, offset: int, part: Part) -> tuple[Array, int]:
        return self.whole_places(offset)  # Parts are in other words.

    def clip(self, coordinates: Sequence[int], *, whole_pieces: bool = False) -> Part | None:
        first = coordinates[0] // GROUP * self._words
        return self._inner.clip([first, *coordinates[1:]], whole_pieces=whole_pieces)

    def rows(self, part: Part) -> Array:
        return self._inner.rows(part)

    def load(self, memory: Region, part: Part | None) -> Array:
        packed = self._inner.load(memory, part)
        groups = np.ascontiguousarray(packed).view(np.uint32).reshape(-1, self._words)
        width = self._row_bytes * self._rows // _WORD_BYTES // len(groups)
        words = np.zeros((len(groups), width), np.uint32)
        words[:, : self._words] = groups
        return words.reshape(-1).view(np.complex128).reshape(self._pieces)

    def store(self, memory: Region, part: Part, pieces: Array) -> None:
        self._inner.store(memory, part, pieces)
