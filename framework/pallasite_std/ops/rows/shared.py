"""Rows that begin within vectors and that registers do not hold: each passes shared memory.

A row's whole vectors are fetched by one copy, however often the row is read. From shared memory,
lanes take elements one by one; the results are brought together in the same place, and stored by
whole vectors but for the ends.
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

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import INSIDE, Chunk, Exchange, Rows, Work, in_step
from pallasite_std.ops.rows.tiles import places_taken
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, RowTiling, size_of

_WORD = 4
"""Bytes of which rows that come through shared memory are no multiples."""

_MOST_THREADS = 4
"""Warpgroups that share a row."""

_CHUNK = 16 * LANES
"""Columns that a warpgroup works on at a time, at most."""

_FETCHED = 128 * 1024
"""Bytes of the rows of a multiprocessor that suffice, if these are not fewer than three."""

_MOST_RESIDENT = 8
"""Blocks of a multiprocessor."""

_WARPGROUPS = 12
"""Those of a multiprocessor: their lanes have 40 registers each."""

STAGED = True
"""Whether results of which no operand leaves a place in shared memory have one, too, if there is
room; else lanes store them one by one."""

_LEAST = 36 * 1024
"""Bytes of a row from which on that is better."""

_ENOUGH = 2
"""Rows for each multiprocessor at least."""


class _SharedChunk(Chunk):
    """Some columns of a row in shared memory."""

    def load_again(self, ref: Any) -> Any:
        """See the base class; of where the row is."""
        return self._place(ref)[...].astype(jnp.float32)

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; to where the row is, or to global memory."""
        assert isinstance(self.rows, _SharedRow)
        if id(ref) in self.rows.places:
            place = self._place(ref)
        else:
            place = ref.at[pl.ds(self.rows.begin + self.first, self.width)]
        place[...] = value.astype(place.dtype)

    def _place(self, ref: Any) -> Any:
        assert isinstance(self.rows, _SharedRow)
        place, shift = self.rows.places[id(ref)]
        return place.at[pl.ds(shift + self.first, self.width)]


class _SharedRow(Rows):
    """A row in shared memory.

    Attributes:
      places: by the identity of a matrix, where the row is, and at which element it begins.
      begin: the first element of the row in flattened matrices.
    """

    near = True

    def __init__(
        self,
        tiling: RowTiling,
        row: Any,
        thread: Any,
        exchange: Any,
        places: dict[int, Any],
        begin: Any,
    ) -> None:
        super().__init__(tiling, row, thread, exchange)
        self.places = places
        self.begin = begin
        self.resident = self.chunk_at(thread * tiling.chunk, tiling.chunk)

    def chunk_at(self, first: Any, width: int) -> Chunk:
        """See the base class."""
        return _SharedChunk(self, first, width, kept=False)

    def rest(self) -> Chunk | None:
        """See the base class."""
        found = super().rest()
        return None if found is None else self.chunk_at(found.first, found.width)


def _tiling(columns: int, threads: int) -> RowTiling:
    """Chunks of one width, the same number for each warpgroup, and few columns behind them."""
    turns = -(-columns // (threads * _CHUNK))
    chunk = columns // (threads * turns * LANES) * LANES
    return RowTiling(1, threads, chunk, columns)


def _bytes(
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    out_dtypes: Sequence[np.dtype[Any]],
    staged: bool,
) -> int:
    """Bytes of shared memory of a block, about."""
    taken = places_taken(dtypes, out_dtypes)
    apart = [one for one, place in zip(out_dtypes, taken, strict=True) if staged and place is None]
    return sum(columns * size_of(one) + 128 for one in (*dtypes, *apart)) + 1024


def shared_row_kernel(
    body: Callable[..., Work],
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    exchanges: int,
    multiprocessors: int,
    shared_memory: int,
    params: Any = None,
) -> Callable[..., tuple[jax.Array, ...]] | None:
    """A kernel with a block for each row, or None if it does not suit.

    Args:
      body: ``body(rows, *refs)`` works on a row; it yields what it reduces.
      rows, columns: of the matrices.
      dtypes: of the first operands, which are matrices; the others are none.
      out_types: types of the results: matrices, or with an element for each row.
      name: of the kernel, in profiles.
      exchanges: values that the body reduces altogether.
      multiprocessors: of the machine.
      shared_memory: bytes that a block may have.
      params: ``CompilerParams``.
    """
    matrix = [len(one.shape) == 2 for one in out_types]
    of_matrices = [one.dtype for one, whole in zip(out_types, matrix, strict=True) if whole]
    staged_results = STAGED and 2 * _bytes(columns, dtypes, of_matrices, True) <= shared_memory
    needed = _bytes(columns, dtypes, of_matrices, staged_results)
    resident = min(shared_memory // needed, max(3, _FETCHED // needed), _MOST_RESIDENT)
    unaligned = any(columns * size_of(one) % _WORD for one in dtypes)
    if not unaligned or resident < 2 or rows < _ENOUGH * multiprocessors * resident:
        return None
    threads = max(1, min(_MOST_THREADS, _WARPGROUPS // resident))
    if rows * columns >= 2**31 or columns < 2 * threads * LANES:
        return None
    taken, total = places_taken(dtypes, of_matrices), rows * columns

    def vector_of(dtype: Any) -> int:
        return VECTOR_BYTES // size_of(dtype)

    def padded(dtype: Any) -> int:
        """Elements of all whole vectors that a row has elements of."""
        vector = vector_of(dtype)
        return -(-(columns + vector - 1) // vector) * vector

    def on_row(*refs: Any, loaded: Any, **buffers: Any) -> None:
        sources = refs[: len(dtypes)]
        results = [one for one, whole in zip(refs[-len(out_types) :], matrix, strict=True) if whole]
        row, begin = lax.axis_index("rows"), lax.axis_index("rows") * columns
        thread = lax.axis_index("part") if threads > 1 else 0
        exchange = None
        if threads > 1:
            exchange = Exchange(threads, buffers["partials"], buffers["barrier"])
        places = dict[int, Any]()
        for number, source in enumerate(sources):
            shift = lax.rem(begin, vector_of(source.dtype))
            places[id(source)] = buffers[f"staged_{number}"], shift
        for number, (result, operand) in enumerate(zip(results, taken, strict=True)):
            if operand is None and not staged_results:
                continue
            buffer = f"result_{number}" if operand is None else f"staged_{operand}"
            places[id(result)] = buffers[buffer], lax.rem(begin, vector_of(result.dtype))

        def fetch(source: Any) -> None:
            vector, (place, shift) = vector_of(source.dtype), places[id(source)]
            first = pl.multiple_of(begin - shift, vector)

            def copy(count: int) -> None:
                some = source.at[pl.ds(first, count)]
                plgpu.copy_gmem_to_smem(some, place.at[pl.ds(0, count)], loaded, oob_mode=INSIDE)

            # What ends behind the last whole vector of the matrix no copy can fetch.
            whole, of_last = total // vector * vector, (rows - 1) * columns // vector * vector
            count, behind = padded(source.dtype), total - whole
            if whole - of_last >= count:
                copy(count)
                return

            def last() -> None:
                copy(whole - of_last)
                if behind:
                    place[pl.ds(whole - of_last, behind)] = source[pl.ds(whole, behind)]

            pl.when(row < rows - 1)(lambda: copy(count))
            pl.when(row == rows - 1)(last)

        def fetch_all() -> None:
            for source in sources:
                fetch(source)
            plgpu.barrier_arrive(loaded)

        pl.when(thread == 0)(fetch_all)
        plgpu.barrier_wait(loaded)
        block = _SharedRow(_tiling(columns, threads), row, thread, exchange, places, begin)
        in_step([body(block, *refs)], [block])
        together = [one for one in results if id(one) in places]
        if threads > 1 and together:
            plgpu.barrier_arrive(buffers["finished"])
            plgpu.barrier_wait(buffers["finished"])
        for result in together:
            write(result, thread, begin, *places[id(result)])

    def write(result: Any, thread: Any, begin: Any, place: Any, shift: Any) -> None:
        vector = vector_of(result.dtype)
        first = pl.multiple_of(begin - shift, vector)
        width, inside = LANES * vector, (columns - vector) // vector * vector

        def copy(position: Any, count: int) -> None:
            position = pl.multiple_of(position, vector)
            result[pl.ds(first + position, count)] = place[pl.ds(position, count)]

        def step(number: Any, carry: tuple[()]) -> tuple[()]:
            copy(vector + (number * threads + thread) * width, width)
            return carry

        full = inside // width
        mine = lax.div(jnp.int32(full - thread + (threads - 1)), jnp.int32(threads))
        if full:
            lax.fori_loop(0, mine, step, ())

        def ends() -> None:
            if inside % width:
                copy(vector + full * width, inside % width)
            for start in (0, columns - 2 * vector):
                some = pl.ds(shift + start, 2 * vector)
                result[pl.ds(begin + start, 2 * vector)] = place[some]

        pl.when(thread == threads - 1)(ends)

    scratch: dict[str, Any] = {
        f"staged_{number}": plgpu.SMEM((padded(dtype),), dtype)
        for number, dtype in enumerate(dtypes)
    }
    for number, (dtype, operand) in enumerate(zip(of_matrices, taken, strict=True)):
        if operand is None and staged_results:
            scratch[f"result_{number}"] = plgpu.SMEM((padded(dtype),), dtype)
    scratch["loaded"] = plgpu.Barrier(num_arrivals=len(dtypes) + 1)
    arguments: dict[str, Any] = {}
    if threads > 1:
        scratch["finished"] = plgpu.Barrier(num_arrivals=threads)
        scratch["partials"] = plgpu.SMEM((exchanges, threads), jnp.float32)
        scratch["barrier"] = plgpu.Barrier(num_arrivals=threads)
        arguments = dict(num_threads=threads, thread_name="part")
    kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
        on_row,
        out_type=tuple(
            jax.ShapeDtypeStruct((total,), one.dtype) if whole else one
            for one, whole in zip(out_types, matrix, strict=True)
        ),
        grid=(rows,),
        grid_names=("rows",),
        kernel_name=name,
        compiler_params=dataclasses.replace(params or plgpu.CompilerParams(), min_blocks=resident),
        scratch_types=scratch,
        **arguments,
    )

    def call(*operands: Any) -> tuple[jax.Array, ...]:
        flat = [one.reshape(-1) for one in operands[: len(dtypes)]]
        written = kernel(*flat, *operands[len(dtypes) :])
        return tuple(
            one.reshape(rows, columns) if whole else one
            for one, whole in zip(written, matrix, strict=True)
        )

    return call


def suits_shared(columns: int, dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Whether rows that begin within vectors are better in shared memory: long ones of one matrix.

    On an H200, that took 0.71 to 0.99 of the time with 20003 and 37819 columns of 16 bits, 0.99 to
    1.24 of it with 14699 and 9003; of two matrices, 1.00 to 1.16 with any.
    """
    return len(dtypes) == 1 and columns * size_of(dtypes[0]) >= _LEAST
