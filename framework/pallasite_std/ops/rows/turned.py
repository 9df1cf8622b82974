"""Kernels over rows that lie across memory: operands that programs transpose, read as they lie.

A block fetches a tile of such a matrix, in which neighbours in memory belong to different rows, to
shared memory. What lanes load from there is in the order of rows, as are the results. A copy in
that order before would take as long as two of these kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import (
    Chunk,
    Exchange,
    Rows,
    Work,
    await_all,
    barrier_of,
    in_step,
)
from pallasite_std.ops.rows.tiling import VECTOR_BYTES, RowTiling, size_of

_LINE = 128
"""Bytes of a line of the L2 cache."""

_WIDTH, _NARROWEST = 64, 8
"""Columns that a warpgroup works on at a time, and of a matrix at least."""

_SHARES = ((1, 3), (2, 2), (4, 1))
"""Parts of a line that a tile has of each column, and blocks of a multiprocessor that are to have
room for such tiles: with fewer bytes together, memory is slower; with fewer blocks, it waits while
they compute. On an H200, an eighth of a line took 6 times as long as XLA."""

_FEWEST_TILES = 16
"""Tiles of kernels that reduce rows, at least: of 2 to 9, they took 1.2 to 2.4 of XLA's time."""

_MOST_BY_LANES = 1
"""Matrices that lanes move, since their lines begin within vectors, in kernels that reduce rows. Of
two or more, most took 1.0 to 2.9 of XLA's time."""

_MOST_WHOLE = 256
"""Columns up to which whole tiles are written at once if rows of results begin within vectors, by
kernels that reduce nothing, too."""

_GROUPS = (8, 16, 32, 64, 128, 256)
"""Columns of groups that kernels reduce."""

_WARPGROUPS = 8
"""Of a multiprocessor: their lanes have 64 registers each."""

_RESERVED = 2048
"""Bytes of shared memory of a block besides tiles."""


@dataclasses.dataclass(frozen=True)
class Turned:
    """Matrices of one batch or several, and which of them lie across their rows.

    Attributes:
      batch: how many matrices an operand, or a result, has one after the other.
      rows, columns: of each.
      across: of the first operands, which are matrices: whether they are (batch, columns, rows);
        the others are (batch * rows, columns), as the results are.
      group: columns that have a value of their own in what else is (batch * rows, groups), or None
        if there is one for each row, (batch * rows,).
    """

    batch: int
    rows: int
    columns: int
    across: tuple[bool, ...]
    group: int | None = None


class _TurnedRows(Rows):
    """The rows of a tile.

    Attributes:
      tile: the tile.
      places: by the identity of a matrix, where the tile is in shared memory, and whether it lies
        across the rows there.
      buffers: by the identity of a result, where a chunk of it is brought together.
      whole: whether that is the whole tile instead, which is written in the end.
    """

    near, whole = True, False

    def __init__(
        self,
        tiling: RowTiling,
        tile: _Tile,
        thread: Any,
        exchange: Exchange | None,
        places: dict[int, tuple[Any, bool]],
        buffers: dict[int, Any],
    ) -> None:
        super().__init__(tiling, tile.first, thread, exchange)
        self.tile = tile
        self.places = places
        self.buffers = buffers
        column = tile.column + thread * tiling.chunk
        self.resident = _TurnedChunk(self, column, tiling.chunk, kept=tiling.resident)

    def chunk_at(self, first: Any, width: int) -> Chunk:
        """See the base class."""
        return _TurnedChunk(self, first, width, kept=False)

    def rest(self) -> Chunk | None:
        """See the base class."""
        found = super().rest()
        return None if found is None else self.chunk_at(found.first, found.width)

    def values(self, ref: Any) -> Any:
        """See the base class."""
        inside, window = self.tile.rows_inside, self.tile.of_rows(ref)
        return window[...] if inside is None else pltriton.load(window, mask=inside, other=0)

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; of this tile's rows."""
        mine, window = self.tile.own_rows, self.tile.of_rows(ref)

        def write() -> None:
            if mine is None:
                window[...] = value.astype(ref.dtype)
            else:
                pltriton.store(window, value.astype(ref.dtype), mask=mine)

        write() if self.tiling.threads == 1 else pl.when(self.thread == 0)(write)


class _TurnedChunk(Chunk):
    """Some columns of the rows of a tile."""

    rows: _TurnedRows

    def load_again(self, ref: Any) -> Any:
        """See the base class; from shared memory."""
        place, across = self.rows.places[id(ref)]
        if across:
            value = plgpu.load(plgpu.transpose_ref(place.at[self._columns], (1, 0)))
        else:
            value = place[:, self._columns]
        return value.astype(jnp.float32)

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; by way of shared memory."""
        value, tile = value.astype(ref.dtype), self.rows.tile
        if id(ref) in self.rows.places:  # It is loaded again.
            place, across = self.rows.places[id(ref)]
            if across:
                plgpu.transpose_ref(place.at[self._columns], (1, 0))[...] = value
            else:
                place[:, self._columns] = value
        buffer = self.rows.buffers[id(ref)]
        if self.rows.whole:
            buffer.reshape(tile.height, self.rows.tiling.columns)[:, self._columns] = value
            return
        window = tile.window(ref, self.first, self.width)
        if tile.copied:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # Other shapes of copies would be cut into small ones.
        if tile.copied and self.width == self.rows.tiling.chunk:
            buffer[...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, window)
            return
        if self.width < self.rows.tiling.chunk:
            buffer = buffer.at[:, pl.ds(0, self.width)]
        buffer[...] = value
        mask = tile.own(self.first, self.width)
        if mask is None:
            window[...] = buffer[...]
        else:
            pltriton.store(window, buffer[...], mask=mask)

    def move_in(self, window: Any, ref: Any) -> None:
        """Loads these columns of an operand to shared memory, by lanes."""
        place, across = self.rows.places[id(ref)]
        if across:
            place[self._columns] = window[...]
        else:
            place[:, self._columns] = window[...]

    @property
    def _columns(self) -> Any:
        return pl.ds(self.first - self.rows.tile.column, self.width)


def _by_copies(extent: int, dtype: Any) -> bool:
    """Whether the copy engine moves windows of a matrix with lines of so many elements."""
    return extent * size_of(dtype) % VECTOR_BYTES == 0


def _is_matrix(problem: Turned, result: jax.ShapeDtypeStruct) -> bool:
    """Whether a result has an element for each row and column."""
    return bool(result.shape == (problem.batch * problem.rows, problem.columns))


class _Tile:
    """Rows and columns of a matrix that a block works on.

    The copy engine leaves out what is not in the matrix. Where lanes move some of it, the last
    tiles begin early enough to be whole, and write what no other one does.

    Attributes:
      first: the first row, counted over all batches.
      column: the first column.
      copied: whether the copy engine writes results.
      last: whether it is the last one of its rows, and has fewer than others.
      rows_inside: which rows there are; None if there are all.
      own_rows: which this tile writes; None if it writes all.
    """

    def __init__(
        self,
        problem: Turned,
        height: int,
        width: int,
        row_number: Any,
        column_number: Any,
        *,
        clamped: bool,
        copied: bool,
    ) -> None:
        self.height, self.copied = height, copied
        down = -(-problem.rows // height)
        single = problem.batch == 1
        self._batch = 0 if single else lax.div(row_number, down)
        row = (row_number if single else lax.rem(row_number, down)) * height
        column = column_number * width
        self._row, self.column = row, column
        if clamped:
            self._row = lax.min(row, problem.rows - height)
            self.column = lax.min(column, problem.columns - width)
        self.last = row + height > problem.rows
        self._group = None if problem.group is None else lax.div(column, problem.group)
        self.first = self._batch * problem.rows + self._row
        self.rows_inside = self.own_rows = None
        self._own_columns: Any = None
        numbers = self._row + lax.broadcasted_iota(jnp.int32, (height,), 0)
        if problem.rows % height:
            self.own_rows = numbers >= row if clamped else numbers < problem.rows
            self.rows_inside = None if clamped else self.own_rows
        if problem.columns % width and clamped:
            self._own_columns = column

    def window(self, ref: Any, column: Any, width: int, *, across: bool = False) -> Any:
        """Of a matrix: these rows of some columns."""
        rows, columns = pl.ds(self._row, self.height), pl.ds(column, width)
        return ref.at[self._batch, columns, rows] if across else ref.at[self._batch, rows, columns]

    def of_rows(self, ref: Any) -> Any:
        """The elements that these rows have of an array with one for each row, or group of it."""
        rows = pl.ds(self.first, self.height)
        return ref.at[rows] if self._group is None else ref.at[rows, self._group]

    def own(self, column: Any, width: int) -> Any:
        """Which elements of some columns this tile writes; None if it writes all."""
        shape, mask = (self.height, width), None
        if self.own_rows is not None:
            mask = lax.broadcast_in_dim(self.own_rows, shape, (0,))
        if self._own_columns is not None:
            columns = column + lax.broadcasted_iota(jnp.int32, shape, 1)
            later = columns >= self._own_columns
            mask = later if mask is None else mask & later
        return mask


def _moved(problem: Turned, dtypes: Sequence[np.dtype[Any]]) -> list[bool]:
    """Which operands the copy engine moves."""
    return [
        _by_copies(problem.rows if across else problem.columns, dtype)
        for dtype, across in zip(dtypes, problem.across, strict=True)
    ]


class _Matrices:
    """The matrices of a kernel, and their tiles in shared memory.

    Args:
      problem: which matrices lie across.
      dtypes: of the first operands, which are matrices.
      out_types: types of the results: (rows of all, columns), or with an element for each row, or
        group of it.
      height, width: rows and columns of a tile.
      chunk: columns of what results are stored by.
      threads: warpgroups, each of which stores results.
    """

    def __init__(
        self,
        problem: Turned,
        dtypes: Sequence[np.dtype[Any]],
        out_types: Sequence[jax.ShapeDtypeStruct],
        height: int,
        width: int,
        chunk: int,
        threads: int = 1,
    ) -> None:
        self.problem, self.height, self.width = problem, height, width
        self._out_types, self._threads = out_types, threads
        self._results = [n for n, one in enumerate(out_types) if _is_matrix(problem, one)]
        written = [np.dtype(out_types[number].dtype) for number in self._results]
        self._moved = _moved(problem, dtypes)
        lines = all(_by_copies(problem.columns, dtype) for dtype in written)
        begins = [problem.rows * problem.columns * size_of(dtype) for dtype in written]
        # Of tiles of whole rows, all elements follow one another in memory.
        self.whole = not lines and width == problem.columns
        self.whole &= problem.batch == 1 or all(one % VECTOR_BYTES == 0 for one in begins)
        self._clamped = not all(self._moved) or not (lines or self.whole)
        self._copied = lines and not self._clamped
        self.scratch: dict[str, Any] = {}
        for number, (dtype, across) in enumerate(zip(dtypes, problem.across, strict=True)):
            shape = (width, height) if across else (height, width)
            self.scratch[f"staged_{number}"] = plgpu.SMEM(shape, dtype)
        buffer: tuple[int, ...] = (height, chunk) if threads == 1 else (threads, height, chunk)
        buffer = (height * width,) if self.whole else buffer
        for number, dtype in zip(self._results, written, strict=True):
            self.scratch[f"result_{number}"] = plgpu.SMEM(buffer, dtype)
        if any(self._moved):
            self.scratch["loaded"] = plgpu.Barrier(num_arrivals=sum(self._moved))

    def tile(self, row_number: Any, column_number: Any = 0) -> _Tile:
        """One of the tiles."""
        numbers = row_number, column_number
        copied = self._copied
        given = self.problem, self.height, self.width
        return _Tile(*given, *numbers, clamped=self._clamped, copied=copied)

    def fetched(
        self,
        refs: Sequence[Any],
        buffers: dict[str, Any],
        tiling: RowTiling,
        tile: _Tile,
        thread: Any = 0,
        exchange: Exchange | None = None,
        kept: Sequence[tuple[int, int]] = (),
    ) -> _TurnedRows:
        """A tile's rows, which are in shared memory then.

        Args:
          refs: operands and results.
          buffers: the scratch memory.
          tiling: of the rows.
          tile: the tile.
          thread: which of the warpgroups this is.
          exchange: through which they combine values.
          kept: results that are loaded again, and the operands whose places they take.
        """
        across = self.problem.across
        results = refs[len(refs) - len(self._out_types) :]
        operands = refs[: len(across)]
        places = {
            id(ref): (buffers[f"staged_{number}"], turned)
            for number, (ref, turned) in enumerate(zip(operands, across, strict=True))
        }
        for result, operand in kept:
            places[id(results[result])] = places[id(operands[operand])]
        mine = dict[int, Any]()
        for number in self._results:
            buffer = buffers[f"result_{number}"]
            shared = self._threads == 1 or self.whole
            mine[id(results[number])] = buffer if shared else buffer.at[thread]
        block = _TurnedRows(tiling, tile, thread, exchange, places, mine)
        block.whole = self.whole
        moved = list(zip(operands, across, self._moved, strict=True))

        def fetch() -> None:
            for ref, turned, copied in moved:
                if copied:
                    window = tile.window(ref, tile.column, self.width, across=turned)
                    plgpu.copy_gmem_to_smem(window, places[id(ref)][0], buffers["loaded"])

        def move_in(chunk: Any) -> None:
            for ref, turned, copied in moved:
                if not copied:
                    window = tile.window(ref, chunk.first, chunk.width, across=turned)
                    chunk.move_in(window, ref)

        if any(self._moved):
            fetch() if self._threads == 1 else pl.when(thread == 0)(fetch)
        if not all(self._moved):
            block.each(move_in)
        if any(self._moved):
            plgpu.barrier_wait(buffers["loaded"])
        return block

    def finish(self, refs: Sequence[Any], block: _TurnedRows, barrier: Any = None) -> None:
        """Writes what is left of the results, and waits until they are written."""
        results = refs[len(refs) - len(self._out_types) :]

        def write() -> None:
            for number in self._results:
                one = results[number]
                self._write(one, block.buffers[id(one)], block.tile)

        if self.whole:
            plgpu.commit_smem()
            if self._threads > 1:
                await_all(barrier)
            write() if self._threads == 1 else pl.when(block.thread == 0)(write)
        plgpu.wait_smem_to_gmem(0)

    def _write(self, whole: Any, buffer: Any, tile: _Tile) -> None:
        """Writes a tile, whose elements follow one another in a flattened matrix."""
        begin, left = tile.first * self.width, self.problem.rows % self.height * self.width
        size = self.height * self.width

        def copy() -> None:
            first = pl.multiple_of(begin, VECTOR_BYTES // size_of(whole.dtype))
            plgpu.copy_smem_to_gmem(buffer, whole.at[pl.ds(first, size)])

        def store_last() -> None:
            skipped = size - left if self._clamped else 0
            whole[pl.ds(begin + skipped, left)] = buffer[pl.ds(skipped, left)]

        if not left:
            copy()
            return
        pl.when(tile.last)(store_last)
        pl.when(jnp.logical_not(tile.last))(copy)

    def kernel(
        self, body: Callable[..., None], grid: int, name: str, params: Any, **arguments: Any
    ) -> Callable[..., tuple[jax.Array, ...]]:
        """The kernel, whose operands and results are matrices of the rows of all batches."""
        problem = self.problem
        matrix = (problem.batch, problem.rows, problem.columns)
        written = (math.prod(matrix),) if self.whole else matrix
        kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
            body,
            out_type=tuple(
                jax.ShapeDtypeStruct(written, one.dtype) if number in self._results else one
                for number, one in enumerate(self._out_types)
            ),
            grid=(grid,),
            grid_names=("tile",),
            kernel_name=name,
            compiler_params=params,
            **arguments,
        )

        def call(*operands: Any) -> tuple[jax.Array, ...]:
            count = len(problem.across)
            given = [
                one if across else one.reshape(matrix)
                for one, across in zip(operands[:count], problem.across, strict=True)
            ]
            results = kernel(*given, *operands[count:])
            types = zip(results, self._out_types, strict=True)
            return tuple(one.reshape(wanted.shape) for one, wanted in types)

        return call


def _narrowest(problem: Turned, dtypes: Sequence[Any]) -> int:
    """Bytes of the smallest elements of matrices that lie across."""
    pairs = zip(dtypes, problem.across, strict=True)
    return min(size_of(dtype) for dtype, across in pairs if across)


def turned_elementwise_kernel(
    work: Callable[..., None],
    problem: Turned,
    dtypes: Sequence[np.dtype[Any]],
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    multiprocessors: int,
    shared_memory: int,
    params: Any = None,
) -> Callable[..., tuple[jax.Array, ...]] | None:
    """A kernel with a block for each tile, or None where a matrix is smaller than any, or nothing
    copies to shared memory.

    Args:
      work: ``work(rows, chunk, *refs)``, as of :func:`.elementwise_kernel`.
      problem: the matrices, of which one lies across at least.
      dtypes: of the operands that are matrices.
      out_types: types of the results, all of which are matrices.
      name: of the kernel, in profiles.
      multiprocessors, shared_memory, params: as of :func:`turned_row_kernel`.
    """
    narrowest = _narrowest(problem, dtypes)
    height = min(_LINE // narrowest, 1 << (problem.rows.bit_length() - 1))
    width = min(_WIDTH, 1 << (problem.columns.bit_length() - 1))
    if problem.group is not None:
        width = min(width, problem.group & -problem.group)
    if height * narrowest < VECTOR_BYTES or width < _NARROWEST or not shared_memory:
        return None
    pairs = zip(dtypes, _moved(problem, dtypes), strict=True)
    if any(size_of(dtype) == 1 and not moved for dtype, moved in pairs):
        return None  # To move bytes one by one took 0.9 to 1.75 of XLA's time.
    unaligned = any(not _by_copies(problem.columns, one.dtype) for one in out_types)
    if problem.columns <= _MOST_WHOLE and unaligned and problem.group is None:

        def whole(block: Rows, *refs: Any) -> Work:
            block.each(lambda chunk: work(block, chunk, *refs))
            yield from ()

        given = whole, problem, dtypes, out_types, name, 0
        return turned_row_kernel(*given, multiprocessors, shared_memory, params)
    matrices = _Matrices(problem, dtypes, out_types, height, width, width)
    across, down = -(-problem.columns // width), -(-problem.rows // height)
    tiling = RowTiling(height, 1, width, problem.columns, ragged=True)

    def body(*refs: Any, **buffers: Any) -> None:
        number = lax.axis_index("tile")
        tile = matrices.tile(lax.div(number, across), lax.rem(number, across))
        block = matrices.fetched(refs, buffers, tiling, tile)
        work(block, block.resident, *refs)
        matrices.finish(refs, block)

    grid = problem.batch * down * across
    return matrices.kernel(body, grid, name, params, scratch_types=matrices.scratch)


def turned_row_kernel(
    body: Callable[..., Work],
    problem: Turned,
    dtypes: Sequence[np.dtype[Any]],
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    exchanges: int,
    multiprocessors: int,
    shared_memory: int,
    params: Any = None,
    kept: Sequence[tuple[int, int]] = (),
) -> Callable[..., tuple[jax.Array, ...]] | None:
    """A kernel with a block for some rows, or None where shared memory does not hold these.

    Args:
      body: ``body(rows, *refs)`` works on the rows; it yields what it reduces.
      problem: the matrices, of which one lies across at least.
      dtypes: of the first operands, which are matrices; the others are none.
      out_types: types of the results: matrices, or with an element for each row.
      name: of the kernel, in profiles.
      exchanges: values that the body reduces altogether.
      multiprocessors: of the machine.
      shared_memory: bytes that a block may have; 0 if nothing copies to it.
      params: ``CompilerParams``.
      kept: results that the body loads again, and operands, which it then does not, of their dtype.
    """
    columns = problem.columns if problem.group is None else problem.group
    chunk = min(_WIDTH, 1 << (columns.bit_length() - 1))
    if problem.group is not None and columns not in _GROUPS:
        return None
    sizes, narrowest = sum(map(size_of, dtypes)), _narrowest(problem, dtypes)
    results = [np.dtype(one.dtype) for one in out_types if _is_matrix(problem, one)]
    stored = sum(map(size_of, results))
    unaligned = any(not _by_copies(problem.columns, dtype) for dtype in results)
    whole = problem.group is None and problem.batch == 1
    if unaligned and not whole:
        # Tiles of the second matrix, and of others, may not begin at vectors.
        begins = problem.rows * problem.columns
        if problem.group is not None or not all(_by_copies(begins, one) for one in results):
            return None
    by_lanes = sum(not _by_copies(problem.columns, one) for one in results)
    if exchanges and by_lanes + sum(not one for one in _moved(problem, dtypes)) > _MOST_BY_LANES:
        return None
    fitting = []
    for share, resident in _SHARES:
        height = _LINE // share // narrowest
        threads = max(1, min(columns // chunk, _WARPGROUPS // resident))
        if problem.group is not None:
            threads = columns // chunk
        together = columns if unaligned else threads * chunk
        needed = height * (columns * sizes + together * stored + 4 * threads * exchanges)
        fits = resident * (needed + _RESERVED) <= shared_memory and problem.rows >= height
        vectors = not unaligned or all(_by_copies(height * columns, one) for one in results)
        if fits and vectors:
            fitting.append((height, threads, resident))
    if not fitting or chunk < _NARROWEST:
        return None

    across = problem.columns // columns

    def busy(height: int) -> bool:
        return across * problem.batch * (problem.rows // height) >= multiprocessors

    height, threads, resident = next((one for one in fitting if busy(one[0])), fitting[-1])
    if across * problem.batch * (problem.rows // height) < _FEWEST_TILES:
        return None
    tiling = RowTiling(height, threads, chunk, columns)
    matrices = _Matrices(problem, dtypes, out_types, height, columns, chunk, threads)
    scratch, several = matrices.scratch, dict[str, Any]()
    if threads > 1:
        several = dict(num_threads=threads, thread_name="part")
        partials = plgpu.SMEM((max(1, exchanges), threads, height), jnp.float32)
        scratch = scratch | dict(partials=partials, **barrier_of(threads))

    def body_of_tile(*refs: Any, **buffers: Any) -> None:
        number = lax.axis_index("tile")
        numbers = (number,) if across == 1 else (lax.div(number, across), lax.rem(number, across))
        tile = matrices.tile(*numbers)
        thread = lax.axis_index("part") if threads > 1 else 0
        exchange = None
        if threads > 1:
            exchange = Exchange(threads, buffers["partials"], buffers.get("barrier"))
        block = matrices.fetched(refs, buffers, tiling, tile, thread, exchange, kept)
        in_step([body(block, *refs)], [block])
        matrices.finish(refs, block, buffers.get("barrier"))

    params = dataclasses.replace(params or plgpu.CompilerParams(), min_blocks=resident)
    grid = across * problem.batch * -(-problem.rows // height)
    return matrices.kernel(body_of_tile, grid, name, params, scratch_types=scratch, **several)
