"""Metadata of sparse matrices: PTX ISA 9.7.16.10.8.

Of each four elements along K two are stored (of tf32 one of two, of fp4 two pairs of four pairs);
four bits of metadata say which these are.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_simulator.types import Array


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    """Where metadata are.

    Attributes:
      lanes, columns, shifts: of the four bits of each group of elements, of shape (rows, groups).
    """

    lanes: Array
    columns: Array
    shifts: Array


def locate(kind: str, address: int, lanes: Array, k: int, selector: int) -> Metadata:
    """Where the metadata of rows are.

    Args:
      kind: of the instruction.
      address: of the metadata.
      lanes: in which the rows are, of shape (rows,).
      k: extent along K, with the elements that are not stored.
      selector: of the instruction descriptor.
    """
    row, first, column = lanes[:, None], address >> 16, address & 0xFFFF
    if kind in ("f16", "tf32"):
        group = np.arange(8)[None, :]
        lane = row // 16 * 16 + row % 8 + 8 * (group // 4)
        place = 4 * (row // 8 % 2) + group % 4
        columns = np.full(place.shape, column + (selector & 1))
    else:
        group = np.arange(16)[None, :]
        lane, place = row + 0 * group, group % 8 + 0 * row
        columns = column + group // 8 + 0 * row
    return Metadata(first + lane, columns, 4 * place)


def indices(kind: str, codes: Array) -> tuple[Array, Array]:
    """Which elements are stored.

    Args:
      codes: the four bits of each group, of shape (rows, groups).

    Returns:
      Numbers of elements along K, of shape (rows, stored elements), and which groups have bits
      that mean nothing.
    """
    low, high = codes & 3, codes >> 2 & 3
    groups = np.arange(codes.shape[1])
    if kind == "tf32":
        wrong = (codes != 0b0100) & (codes != 0b1110)
        return groups * 2 + low // 2, wrong
    wrong = low >= high
    if kind in ("mxf4", "mxf4nvf4"):
        pairs = np.stack([low, high], axis=-1)
        both = 2 * pairs[..., None] + np.arange(2)
        found = groups[:, None, None] * 8 + both
    else:
        found = groups[:, None] * 4 + np.stack([low, high], axis=-1)
    return found.reshape(len(codes), -1), wrong


def expand(stored: Array, places: Array, k: int) -> Array:
    """A matrix with its zeros, from what is stored of it: both of shape (rows, ...)."""
    full = np.zeros((len(stored), k), stored.dtype)
    np.put_along_axis(full, places, stored, axis=1)
    return full
