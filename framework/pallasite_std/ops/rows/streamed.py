"""Long rows: shared memory has those to come, registers the present one.

The blocks that are resident go over many rows each. Whole vectors of the flattened matrix are
fetched by copies, before their turn; each warpgroup has columns of its own, which lanes take one by
one, once, whatever the number of passes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rings import over_steps
from pallasite_std.ops.rows.kernel import INSIDE, Chunk, Exchange, Rows, Work, in_step
from pallasite_std.ops.rows.pipelined import Pipeline
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, RowTiling, size_of

_LEAST = 16 * 1024
"""Bytes of a row at least, of all matrices."""

_REGISTERS = 512
"""Of a multiprocessor, by lanes of a warpgroup."""

_BESIDES = 34
"""Registers of a lane besides the elements that it holds."""

_SHARES = ((2, 4), (4, 2), (8, 1), (6, 1), (5, 1), (4, 1))
"""Warpgroups that share a row, and blocks of a multiprocessor, the best first."""

_FEW = 4
"""Warpgroups of a multiprocessor that are too few where weights have no room in shared memory."""

_LEAST_WHOLE = 40 * 1024
"""Bytes from which on rows are streamed that begin at whole vectors."""

_PLAIN = range(34 * 1024, 48 * 1024 + 1)
"""Bytes of rows of norms that are streamed although other kernels may hold them: of 17864 to 24568
columns in bfloat16, that took 0.70 to 1.01 of the time on an H200."""

_RESERVED = 6144
"""Bytes of shared memory for barriers and what warpgroups send one another, about."""

_ENOUGH = 4
"""Rows of each block at least."""

_MOST_STAGES = 4


@dataclasses.dataclass(frozen=True)
class Stream:
    """How rows are shared, and what shared memory has.

    Attributes:
      pipeline: of one block; rows of a stage follow those of all blocks.
      kept: so many of the operands with an element for each column are in shared memory.
    """

    pipeline: Pipeline
    kept: int


def row_stream(
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    vectors: Sequence[int],
    multiprocessors: int,
    shared_memory: int,
) -> Stream | None:
    """How rows are streamed; None if that does not suit.

    Args:
      rows, columns: of the matrices.
      dtypes: of those that are read.
      vectors: bytes of the elements of operands with an element for each column.
      multiprocessors: of the machine.
      shared_memory: bytes that a block may have.
    """
    sizes = [size_of(dtype) for dtype in dtypes]
    vector = VECTOR_BYTES // min(sizes)
    if min(sizes) != max(sizes):
        return None
    if rows * columns >= 2**31 or columns * sum(sizes) < _LEAST:
        return None
    found = list[Stream]()
    for threads, resident in _SHARES:
        chunk = -(-columns // (threads * LANES)) * LANES
        registers = _REGISTERS // (threads * resident) // 8 * 8
        if vectors and threads * resident <= _FEW:
            continue
        if chunk // LANES + _BESIDES > registers or columns <= (threads - 1) * chunk + 2 * vector:
            continue
        if rows < _ENOUGH * multiprocessors * resident:
            continue
        pipeline = Pipeline(threads, 1, columns, 2, resident, chunk, vector=vector, by_columns=True)
        room = shared_memory // resident - _RESERVED
        stage = threads * pipeline.whole_vectors(chunk) * sum(sizes)
        kept = len(vectors)
        while kept and room - sum(vectors[:kept]) * columns < 2 * stage:
            kept -= 1
        stages = min((room - sum(vectors[:kept]) * columns) // stage, _MOST_STAGES)
        if stages >= 2:
            found.append(Stream(dataclasses.replace(pipeline, stages=stages), kept))
    return max(found, key=lambda one: one.kept, default=None)


def suits_stream(
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    quantized: bool,
    held: object,
    plain: bool = False,
) -> bool:
    """Whether streaming rows of a matrix is faster than other kernels.

    On an H200, quantised norms of rows that begin within vectors took 0.57 to 0.87 of the time with
    9777 to 33333 columns of 16 bits, others 0.92 to 1.19: results leave element by element. Norms
    and quotients of rows that begin at whole vectors, and that no other kernel holds in registers,
    took 0.71 to 0.98 of the time with 22984 and 32776 columns.

    Args:
      columns: of the matrices.
      dtypes: of those that are read.
      quantized: whether the result of a norm is quantised.
      held: whether registers hold the rows in other kernels.
      plain: whether it is a norm whose result is not quantised.
    """
    size = size_of(dtypes[0])
    if len(dtypes) > 1 or size > 2:
        return False
    if columns * size % VECTOR_BYTES:
        return quantized
    if plain and columns * size in _PLAIN:
        return True
    return not held and columns * size >= _LEAST_WHOLE


class _StreamedChunk(Chunk):
    """Columns of a row of a flattened matrix, which registers keep."""

    def __init__(self, rows: Rows, first: Any, width: int, position: Any) -> None:
        super().__init__(rows, first, width, kept=True)
        self._position = position

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; to a flattened matrix."""
        ref[pl.ds(self._position, self.width)] = value.astype(ref.dtype)


def streamed_row_kernel(
    body: Callable[..., Work],
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    exchanges: int,
    stream: Stream,
    multiprocessors: int,
    vectors: Sequence[int] = (),
    params: Any = None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel whose blocks go over many rows each.

    Args:
      body: ``body(rows, *refs)`` works on a row; it yields what it reduces.
      rows, columns: of the matrices.
      dtypes: of the first operands, which are matrices.
      out_types: types of the results: matrices, or with an element for each row.
      name: of the kernel, in profiles.
      exchanges: values that the body reduces altogether.
      stream: how the rows are shared.
      multiprocessors: of the machine.
      vectors: numbers of the operands with an element for each column.
      params: ``CompilerParams``.
    """
    pipeline = stream.pipeline
    threads, stages, vector = pipeline.threads, pipeline.stages, pipeline.vector
    blocks, total = multiprocessors * pipeline.resident, rows * columns
    behind = total % vector
    whole, place = total - behind, pipeline.whole_vectors(pipeline.chunk)
    matrix = [len(one.shape) == 2 for one in out_types]

    def on_rows(*refs: Any, **scratch: Any) -> None:
        own, last = lax.axis_index("part"), threads - 1
        width = columns - last * pipeline.chunk
        pl.when(own < last)(lambda: on_columns(pipeline.chunk, own, *refs, **scratch))
        pl.when(own == last)(lambda: on_columns(width, last, *refs, **scratch))

    def on_columns(
        width: int, own: Any, *refs: Any, partials: Any, combined: Any, loaded: Any, **buffers: Any
    ) -> None:
        block, first = lax.axis_index("block"), own * pipeline.chunk
        sources = refs[: len(dtypes)]
        kept = dict[int, Any]()
        for one in vectors[: stream.kept]:
            place = buffers[f"vector_{one}"].at[pl.ds(first, width)]
            place[...] = refs[one][pl.ds(first, width)]
            kept[id(refs[one])] = place
        barriers = loaded.at[pl.ds(own * stages, stages)]
        # The last warpgroup's part of the last row may end behind the last whole vector.
        wanted, fetched = (pipeline.whole_vectors(width),) * 2
        short = False
        if isinstance(own, int):
            begin = ((rows - 1) * columns + first) // vector * vector
            short, fetched = whole - begin < wanted, min(whole - begin, wanted)

        def start_of(row: Any) -> Any:
            return lax.rem(row * columns + first, vector)

        def places(stage: Any) -> list[Any]:
            return [buffers[f"staged_{n}"].at[stage, own] for n in range(len(dtypes))]

        def fetch(step: Any, stage: Any) -> None:
            row = block + step * blocks
            position = pl.multiple_of(row * columns + first - start_of(row), vector)

            def copy(count: int) -> None:
                for source, place in zip(sources, places(stage), strict=True):
                    plgpu.copy_gmem_to_smem(
                        source.at[pl.ds(position, count)], place.at[pl.ds(0, count)],
                        barriers.at[stage], oob_mode=INSIDE,
                    )  # fmt: skip

            if short:
                pl.when(row < rows - 1)(functools.partial(copy, wanted))
                pl.when(row == rows - 1)(functools.partial(copy, fetched))
            else:
                copy(wanted)

        def work(step: Any, stage: Any, carry: tuple[()]) -> tuple[()]:
            row, there = block + step * blocks, dict(kept)
            if short and behind:

                def add() -> None:
                    for source, place in zip(sources, places(stage), strict=True):
                        place[pl.ds(fetched, behind)] = source[pl.ds(whole, behind)]

                pl.when(row == rows - 1)(add)
            for source, place in zip(sources, places(stage), strict=True):
                there[id(source)] = place.at[pl.ds(start_of(row), width)]
            # The slots of one step are free two steps later.
            exchange = Exchange(threads, partials, combined, lax.rem(step, 2) * exchanges)
            tiling = RowTiling(1, threads, width, width * threads)
            one = Rows(tiling, row, own, exchange, there)
            one.resident = _StreamedChunk(one, first, width, row * columns + first)
            in_step([body(one, *refs)], [one])
            return carry

        steps = lax.div(rows - block + (blocks - 1), blocks)
        over_steps(steps, stages, barriers, fetch, work, ())

    @functools.lru_cache(maxsize=8)
    def kernel_of(*vector_types: np.dtype[Any]) -> Callable[..., tuple[jax.Array, ...]]:
        scratch: dict[str, Any] = {
            f"staged_{number}": plgpu.SMEM((stages, threads, place), dtype)
            for number, dtype in enumerate(dtypes)
        }
        for one, dtype in zip(vectors[: stream.kept], vector_types, strict=False):
            scratch[f"vector_{one}"] = plgpu.SMEM((columns,), dtype)
        kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
            on_rows,
            out_type=tuple(
                jax.ShapeDtypeStruct((total,), one.dtype) if whole else one
                for one, whole in zip(out_types, matrix, strict=True)
            ),
            grid=(blocks,),
            grid_names=("block",),
            num_threads=threads,
            thread_name="part",
            kernel_name=name,
            compiler_params=dataclasses.replace(
                params or plgpu.CompilerParams(), min_blocks=pipeline.resident
            ),
            scratch_types=scratch
            | dict(
                partials=plgpu.SMEM((2 * exchanges, threads), jnp.float32),
                combined=plgpu.Barrier(num_arrivals=threads),
                loaded=plgpu.Barrier(num_arrivals=len(dtypes), num_barriers=stages * threads),
            ),
        )
        return kernel

    def call(*operands: Any) -> tuple[jax.Array, ...]:
        kernel = kernel_of(*(np.dtype(operands[one].dtype) for one in vectors))
        flat = [one.reshape(-1) for one in operands[: len(dtypes)]]
        written = kernel(*flat, *operands[len(dtypes) :])
        return tuple(
            one.reshape(rows, columns) if whole else one
            for one, whole in zip(written, matrix, strict=True)
        )

    return call
