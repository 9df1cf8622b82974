"""Tiles of rows that begin within vectors: whole tiles begin at vectors, and pass shared memory.

So many rows that they are whole vectors together are fetched by one copy. From shared memory, lanes
take elements one by one, which costs little there; the results are brought together in the same
place, and stored by whole vectors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import INSIDE, Chunk, Rows, Work, in_step
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, RowTiling, size_of

WORD = VECTOR_BYTES
"""Bytes of which rows are no multiples that are moved so. Of 16-bit elements in whole words, norms
took 0.55 to 1.05 of the time on an H200 (layer norm 1.11 with 1002 columns), quantised ones 1.00 to
1.14."""

_FEWEST, _MOST = 8, 2304
"""Columns of such rows at least, and at most: with 2901, few blocks have room, and norms reached 60
to 73 % of the bandwidth of a copy, 0.85 to 0.88 of what XLA did. With 11 to 61 columns, norms and
quantisation took 0.27 to 0.83 of the time on an H200 that rows from global memory did."""

_PART = 48 * LANES
"""Elements of the rows that are worked on at a time, about: registers keep them."""

_MOST_PART = 64 * LANES
"""The same at most, if four rows, one for each warp, have more than that."""

_RESIDENT = 3
"""Blocks of a multiprocessor at least: while one computes, others fetch."""

_ENOUGH = 4
"""Tiles for each multiprocessor at least."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a block fetches at a time.

    Attributes:
      height: rows, which are whole vectors together.
      part: rows that are worked on at a time.
    """

    height: int
    part: int


class PlacedChunk(Chunk):
    """All columns of the rows of a part of a tile, or of one row of flattened matrices."""

    def __init__(self, rows: Rows, places: dict[int, Any]) -> None:
        super().__init__(rows, 0, rows.tiling.columns, kept=True)
        self._places = places

    def load_again(self, ref: Any) -> Any:
        """See the base class; of where the matrix is."""
        return self._places[id(ref)][...].astype(jnp.float32)

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; to where the matrix is."""
        place = self._places[id(ref)]
        place[...] = value.astype(place.dtype)


def row_tile(
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    out_dtypes: Sequence[np.dtype[Any]],
    multiprocessors: int,
    shared_memory: int,
) -> Tile | None:
    """The tiles of matrices; None if rows begin at whole words, or tiles do not suit.

    Args:
      rows, columns: of the matrices.
      dtypes: of the matrices that are read.
      out_dtypes: of those that are written.
      multiprocessors: of the machine.
      shared_memory: bytes that a block may have.
    """
    sizes = [columns * size_of(dtype) for dtype in dtypes]
    word = WORD if min(map(size_of, dtypes)) < 4 else VECTOR_BYTES
    if all(size % word == 0 for size in sizes) or rows * columns >= 2**31:
        return None
    if not _FEWEST <= columns <= _MOST:
        return None
    part = 4
    while 2 * part * columns <= _PART:
        part *= 2
    while part > 1 and part * columns > _MOST_PART:
        part //= 2
    if part * columns > _MOST_PART:
        return None
    period = max(VECTOR_BYTES // math.gcd(size, VECTOR_BYTES) for size in sizes)
    tile = Tile(max(period, part), part)
    taken = places_taken(dtypes, out_dtypes)
    apart = [one for one, place in zip(out_dtypes, taken, strict=True) if place is None]
    staged = sum(sizes) + sum(columns * size_of(one) for one in apart)
    if _RESIDENT * (tile.height * staged + 8 * columns + 2048) > shared_memory:
        return None
    return tile if rows >= _ENOUGH * multiprocessors * tile.height else None


def places_taken(
    dtypes: Sequence[np.dtype[Any]], out_dtypes: Sequence[np.dtype[Any]]
) -> list[int | None]:
    """For each result, the operand of its dtype whose place it takes, if there is one left."""
    free = dict(enumerate(dtypes))
    found = list[int | None]()
    for one in out_dtypes:
        place = next((number for number, dtype in free.items() if dtype == one), None)
        if place is not None:
            del free[place]
        found.append(place)
    return found


def tiled_row_kernel(
    body: Callable[..., Work],
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    multiprocessors: int,
    shared_memory: int,
    vectors: Sequence[int] = (),
    params: Any = None,
) -> Callable[..., tuple[jax.Array, ...]] | None:
    """A kernel with a block for each tile, or None where there are none (:func:`row_tile`).

    Args:
      body: ``body(rows, *refs)`` works on some rows; it yields what it reduces.
      rows, columns: of the matrices.
      dtypes: of the first operands, which are matrices; the others are none.
      out_types: types of the results: matrices, or with an element for each row.
      name: of the kernel, in profiles.
      multiprocessors, shared_memory: of :func:`row_tile`.
      vectors: numbers of the operands with an element for each column.
      params: ``CompilerParams``.
    """
    whole = [len(one.shape) == 2 for one in out_types]
    of_matrices = [one.dtype for one, matrix in zip(out_types, whole, strict=True) if matrix]
    tile = row_tile(rows, columns, dtypes, of_matrices, multiprocessors, shared_memory)
    if tile is None:
        return None
    height, part, size = tile.height, tile.part, tile.height * columns
    full, left = divmod(rows, height)
    taken = places_taken(dtypes, of_matrices)

    def on_tiles(*refs: Any, loaded: Any, **buffers: Any) -> None:
        sources = refs[: len(dtypes)]
        results = refs[len(refs) - len(out_types) :]
        results = tuple(one for one, matrix in zip(results, whole, strict=True) if matrix)
        number = lax.axis_index("tile")

        def of_tile(number: Any) -> None:
            first = pl.multiple_of(number * height, height)
            window = pl.ds(pl.multiple_of(number * size, size), size)
            places = dict[int, Any]()
            for index, source in enumerate(sources):
                place = buffers[f"staged_{index}"]
                plgpu.copy_gmem_to_smem(source.at[window], place, loaded, oob_mode=INSIDE)
                places[id(source)] = place
            for index, (result, operand) in enumerate(zip(results, taken, strict=True)):
                name = f"result_{index}" if operand is None else f"staged_{operand}"
                places[id(result)] = buffers[name]
            kept = dict[int, Any]()
            for one in vectors:
                kept[id(refs[one])] = buffers[f"vector_{one}"]
                buffers[f"vector_{one}"][...] = refs[one][...]
            plgpu.barrier_wait(loaded)

            def of_part(number: Any, carry: tuple[()]) -> tuple[()]:
                row = pl.multiple_of(number * part, part)
                these = row if part == 1 else pl.ds(row, part)
                there = {key: one.reshape(height, columns).at[these] for key, one in places.items()}
                staged = kept | {id(one): there[id(one)] for one in sources}
                block = Rows(RowTiling(part, 1, columns, columns), first + row, 0, None, staged)
                block.resident = PlacedChunk(block, there)
                in_step([body(block, *refs)], [block])
                return carry

            lax.fori_loop(0, height // part, of_part, ())
            for result in results:
                result[window] = places[id(result)][...]

        def of_row(row: Any) -> None:
            window = pl.ds(row * columns, columns)
            block = Rows(RowTiling(1, 1, columns, columns), row, 0)
            there = {id(one): one.at[window] for one in (*sources, *results)}
            block.resident = PlacedChunk(block, there)
            in_step([body(block, *refs)], [block])

        if not left:
            of_tile(number)
            return
        # One after the other, the last rows would take longer than many tiles.
        pl.when(number < left)(lambda: of_row(full * height + number))
        pl.when(number >= left)(lambda: of_tile(number - left))

    buffers: dict[str, Any] = {
        f"staged_{number}": plgpu.SMEM((size,), dtype) for number, dtype in enumerate(dtypes)
    }
    for number, (dtype, operand) in enumerate(zip(of_matrices, taken, strict=True)):
        if operand is None:
            buffers[f"result_{number}"] = plgpu.SMEM((size,), dtype)
    buffers["loaded"] = plgpu.Barrier(num_arrivals=len(dtypes))

    @functools.lru_cache(maxsize=8)
    def kernel_of(*vector_types: np.dtype[Any]) -> Callable[..., tuple[jax.Array, ...]]:
        of_vectors = {
            f"vector_{number}": plgpu.SMEM((columns,), dtype)
            for number, dtype in zip(vectors, vector_types, strict=True)
        }
        kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
            on_tiles,
            out_type=tuple(
                jax.ShapeDtypeStruct((rows * columns,), one.dtype) if matrix else one
                for one, matrix in zip(out_types, whole, strict=True)
            ),
            grid=(full + left,),
            grid_names=("tile",),
            kernel_name=name,
            compiler_params=params,
            scratch_types=buffers | of_vectors,
        )
        return kernel

    def call(*operands: Any) -> tuple[jax.Array, ...]:
        kernel = kernel_of(*(np.dtype(operands[one].dtype) for one in vectors))
        flat = [one.reshape(-1) for one in operands[: len(dtypes)]]
        written = kernel(*flat, *operands[len(dtypes) :])
        return tuple(
            one.reshape(rows, columns) if matrix else one
            for one, matrix in zip(written, whole, strict=True)
        )

    return call
