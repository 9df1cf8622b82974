"""Kernels over rows that lie across memory: operands that programs transpose, read as they lie.

A block fetches a tile of such a matrix, in which neighbours in memory belong to different rows, to
shared memory. What lanes load from there is in the order of rows, as are the results. A copy in
that order before would take as long as two of these kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import Chunk, Exchange, Rows, Work, barrier_of, in_step
from pallasite_std.ops.rows.tiling import VECTOR_BYTES, RowTiling, size_of

_LINE = 128
"""Bytes of a line of the L2 cache."""

_WIDTH, _NARROWEST = 64, 8
"""Columns that a warpgroup works on at a time, and of a matrix at least."""

_SHARES = ((1, 3), (2, 2), (4, 1), (8, 1))
"""Parts of a line that a tile has of each column, and blocks of a multiprocessor that are to have
room for such tiles: with fewer bytes together, memory is slower; with fewer blocks, it waits while
they compute. The last ones are for few rows."""

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
    """

    batch: int
    rows: int
    columns: int
    across: tuple[bool, ...]


class _TurnedRows(Rows):
    """The rows of a tile.

    Attributes:
      tile: the tile.
      places: by the identity of a matrix, where the tile is in shared memory, and whether it lies
        across the rows there.
      buffers: by the identity of a result, where a chunk of it is brought together.
    """

    near = True

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
        inside = self.tile.rows_inside
        if inside is None:
            return super().values(ref)
        return pltriton.load(ref.at[self.place], mask=inside, other=0)

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; of this tile's rows."""
        mine = self.tile.own_rows
        if mine is None:
            super().store(ref, value)
            return

        def write() -> None:
            pltriton.store(ref.at[self.place], value.astype(ref.dtype), mask=mine)

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
        buffer, window = self.rows.buffers[id(ref)], tile.window(ref, self.first, self.width)
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


class _Tile:
    """Rows and columns of a matrix that a block works on.

    The copy engine leaves out what is not in the matrix. Else the last tiles begin early enough to
    be whole, and write what no other one does.

    Attributes:
      first: the first row, counted over all batches.
      column: the first column.
      copied: whether the copy engine moves all matrices.
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
        copied: bool,
    ) -> None:
        self.height, self.copied = height, copied
        down = -(-problem.rows // height)
        single = problem.batch == 1
        self._batch = 0 if single else lax.div(row_number, down)
        row = (row_number if single else lax.rem(row_number, down)) * height
        column = column_number * width
        self._row, self.column = row, column
        if not copied:
            self._row = lax.min(row, problem.rows - height)
            self.column = lax.min(column, problem.columns - width)
        self.first = self._batch * problem.rows + self._row
        self.rows_inside = self.own_rows = None
        self._own_columns: Any = None
        numbers = self._row + lax.broadcasted_iota(jnp.int32, (height,), 0)
        if problem.rows % height:
            self.own_rows = numbers < problem.rows if copied else numbers >= row
            self.rows_inside = self.own_rows if copied else None
        if problem.columns % width:
            self._own_columns = column

    def window(self, ref: Any, column: Any, width: int, *, across: bool = False) -> Any:
        """Of a matrix: these rows of some columns."""
        rows, columns = pl.ds(self._row, self.height), pl.ds(column, width)
        return ref.at[self._batch, columns, rows] if across else ref.at[self._batch, rows, columns]

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


class _Matrices:
    """The matrices of a kernel, and their tiles in shared memory.

    Args:
      problem: which matrices lie across.
      dtypes: of the first operands, which are matrices.
      out_types: types of the results: (rows of all, columns), or with an element for each row.
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
        self._results = [number for number, one in enumerate(out_types) if len(one.shape) == 2]
        written = [np.dtype(out_types[number].dtype) for number in self._results]
        lines = [
            (problem.rows if across else problem.columns, dtype)
            for dtype, across in zip(dtypes, problem.across, strict=True)
        ]
        lines += [(problem.columns, dtype) for dtype in written]
        self.copied = all(_by_copies(*line) for line in lines)
        self.scratch: dict[str, Any] = {}
        for number, (dtype, across) in enumerate(zip(dtypes, problem.across, strict=True)):
            shape = (width, height) if across else (height, width)
            self.scratch[f"staged_{number}"] = plgpu.SMEM(shape, dtype)
        buffer = (height, chunk) if threads == 1 else (threads, height, chunk)
        for number, dtype in zip(self._results, written, strict=True):
            self.scratch[f"result_{number}"] = plgpu.SMEM(buffer, dtype)
        if self.copied:
            self.scratch["loaded"] = plgpu.Barrier(num_arrivals=len(dtypes))

    def tile(self, row_number: Any, column_number: Any = 0) -> _Tile:
        """One of the tiles."""
        numbers = row_number, column_number
        return _Tile(self.problem, self.height, self.width, *numbers, copied=self.copied)

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
            mine[id(results[number])] = buffer if self._threads == 1 else buffer.at[thread]
        block = _TurnedRows(tiling, tile, thread, exchange, places, mine)

        def fetch() -> None:
            for ref, turned in zip(operands, across, strict=True):
                window = tile.window(ref, tile.column, self.width, across=turned)
                plgpu.copy_gmem_to_smem(window, places[id(ref)][0], buffers["loaded"])

        def move_in(chunk: Any) -> None:
            for ref, turned in zip(operands, across, strict=True):
                chunk.move_in(tile.window(ref, chunk.first, chunk.width, across=turned), ref)

        if not self.copied:
            block.each(move_in)
            return block
        fetch() if self._threads == 1 else pl.when(thread == 0)(fetch)
        plgpu.barrier_wait(buffers["loaded"])
        return block

    def kernel(
        self, body: Callable[..., None], grid: int, name: str, params: Any, **arguments: Any
    ) -> Callable[..., tuple[jax.Array, ...]]:
        """The kernel, whose operands and results are matrices of the rows of all batches."""
        problem = self.problem
        matrix = (problem.batch, problem.rows, problem.columns)
        kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
            body,
            out_type=tuple(
                jax.ShapeDtypeStruct(matrix, one.dtype) if number in self._results else one
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
    params: Any = None,
) -> Callable[..., tuple[jax.Array, ...]] | None:
    """A kernel with a block for each tile, or None where a matrix is smaller than any.

    Args:
      work: ``work(rows, chunk, *refs)``, as of :func:`.elementwise_kernel`.
      problem: the matrices, of which one lies across at least.
      dtypes: of the operands that are matrices.
      out_types: types of the results, all of which are matrices.
      name: of the kernel, in profiles.
      params: ``CompilerParams``.
    """
    narrowest = _narrowest(problem, dtypes)
    height = min(_LINE // narrowest, 1 << (problem.rows.bit_length() - 1))
    width = min(_WIDTH, 1 << (problem.columns.bit_length() - 1))
    if height * narrowest < VECTOR_BYTES or width < _NARROWEST:
        return None
    matrices = _Matrices(problem, dtypes, out_types, height, width, width)
    across, down = -(-problem.columns // width), -(-problem.rows // height)
    tiling = RowTiling(height, 1, width, problem.columns, ragged=True)

    def body(*refs: Any, **buffers: Any) -> None:
        number = lax.axis_index("tile")
        tile = matrices.tile(lax.div(number, across), lax.rem(number, across))
        block = matrices.fetched(refs, buffers, tiling, tile)
        work(block, block.resident, *refs)
        plgpu.wait_smem_to_gmem(0)

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
      shared_memory: bytes that a block may have.
      params: ``CompilerParams``.
      kept: results that the body loads again, and operands, which it then does not, of their dtype.
    """
    columns = problem.columns
    chunk = min(_WIDTH, 1 << (columns.bit_length() - 1))
    sizes, narrowest = sum(map(size_of, dtypes)), _narrowest(problem, dtypes)
    stored = sum(size_of(one.dtype) for one in out_types if len(one.shape) == 2)
    fitting = []
    for share, resident in _SHARES:
        height = _LINE // share // narrowest
        threads = max(1, min(columns // chunk, _WARPGROUPS // resident))
        needed = height * (columns * sizes + threads * (chunk * stored + 4 * exchanges))
        if resident * (needed + _RESERVED) <= shared_memory and problem.rows >= height:
            fitting.append((height, threads, resident))
    if not fitting or chunk < _NARROWEST:
        return None

    def busy(height: int) -> bool:
        return problem.batch * (problem.rows // height) >= multiprocessors

    height, threads, resident = next((one for one in fitting if busy(one[0])), fitting[-1])
    tiling = RowTiling(height, threads, chunk, columns)
    matrices = _Matrices(problem, dtypes, out_types, height, columns, chunk, threads)
    scratch, several = matrices.scratch, dict[str, Any]()
    if threads > 1:
        several = dict(num_threads=threads, thread_name="part")
        partials = plgpu.SMEM((exchanges, threads, height), jnp.float32)
        scratch = scratch | dict(partials=partials, **barrier_of(threads))

    def body_of_tile(*refs: Any, **buffers: Any) -> None:
        tile = matrices.tile(lax.axis_index("tile"))
        thread = lax.axis_index("part") if threads > 1 else 0
        exchange = None
        if threads > 1:
            exchange = Exchange(threads, buffers["partials"], buffers.get("barrier"))
        block = matrices.fetched(refs, buffers, tiling, tile, thread, exchange, kept)
        in_step([body(block, *refs)], [block])
        plgpu.wait_smem_to_gmem(0)

    params = dataclasses.replace(params or plgpu.CompilerParams(), min_blocks=resident)
    grid = problem.batch * -(-problem.rows // height)
    return matrices.kernel(body_of_tile, grid, name, params, scratch_types=scratch, **several)
