"""When gradients of normalisations are computed by pipelined rows, and how they are shared."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import Work, no_sums
from pallasite_std.ops.rows.pipelined import FITTING_CLUSTERS, Pipeline, pipelined_row_kernel
from pallasite_std.ops.rows.tiling import (
    LANES,
    MOST_WARPGROUPS,
    VECTOR_BYTES,
    RowTiling,
    size_of,
)

_LEAST = 6 * 1024
"""Bytes of a row, of all matrices: shorter ones are as fast when a warpgroup has whole rows."""

_LEAST_UNALIGNED = 3 * 1024
"""The same of rows that begin within vectors."""

_LONG, _WIDE = 64 * 1024, 14 * 1024
"""Bytes, and columns, of what a block has of a row at most: for more, stages and registers do not
suffice, if there are sums."""

CLUSTERS = (1, 2, 4, 8)
"""Blocks that share a row."""

_WIDEST = 16 * 1024
"""The same columns if there is one sum over rows, and shared memory has room for the weight."""

_MOST_OF_SUMS = 4
"""Blocks that share a row at most if there are several sums: by eight, gradients of a layer norm
of 77704 columns took 1.12 times as long as by two kernels."""

BY_COLUMNS = True
"""Whether warpgroups share the columns of rows that begin within vectors, not the vectors, if there
are sums over rows."""

FORWARD_BY_COLUMNS = False
"""The same where there are none."""

MORE_BY_COLUMNS = True
"""Whether twice as many blocks share the columns of rows where fewer have no room for that."""

PASS_ELEMENTS: int | None = None
"""Elements of a lane up to which few warpgroups and blocks share rows if there are no sums."""

_MOST_HELD = 20
"""Registers of a lane that such rows leave for vectors."""

_FEW_COLUMNS = 12 * 1024
"""Of fewer, that took longer: 7001 columns 1.48 times as long, 14231 columns 0.77 to 0.90."""

_STEPS = 4
"""Rows of each block from which the beginning and the end of a pipeline do not count."""

FEW_ROWS = True
"""Whether blocks may have fewer rows, where rows would be read twice else, and clusters are for
long rows alone."""

_LEAST_PART = 4 * LANES
"""Columns of a warpgroup at least if few rows are shared by more blocks than their length needs."""

_LONGEST_PASS = 48 * 1024
"""Bytes of a row up to which it is pipelined if there are no sums over rows."""

_SCRATCH = 2048
"""Bytes that a warpgroup takes for each reduction but one that it makes at once."""

_RESERVED = 4096
"""Bytes of shared memory for barriers and what warpgroups send one another, about."""


def shared_memory_of(
    pipeline: Pipeline,
    stages: int,
    held: bool,
    sizes: Sequence[int],
    vectors: int,
    depth: int = 1,
) -> int:
    """Bytes of shared memory that a block takes, with as many stages.

    Args:
      held: whether vectors with an element for each column are in registers.
      sizes: bytes of the elements of matrices.
      vectors: bytes of the elements that vectors have for each column.
      depth: reductions of a row that follow one another.
    """
    one = pipeline.fetched * pipeline.threads
    slots = 2 if pipeline.blocks == 1 else 2 * pipeline.interval + depth
    buffers = [slots * pipeline.parts * 16, 0 if held else one * vectors]
    buffers += [stages * pipeline.together * one * size for size in sizes]
    # Each begins at a multiple of 1024, then there are barriers and what reductions need.
    reduced_at_once = _SCRATCH * pipeline.threads * (depth - 1)
    return sum(-(-size // 1024) * 1024 for size in buffers) + reduced_at_once + 512


def gradient_pipeline(
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    vectors: int,
    sums: int,
    multiprocessors: int,
    shared_memory: int,
    depth: int = 1,
    wide: bool = False,
    few: bool = False,
    forward_by_columns: bool = False,
) -> Pipeline | None:
    """How rows are shared, or None if the other kernels are faster or have to do.

    The bounds are from samples of 30 widths between 1024 and 32000 on an H200.

    Args:
      rows, columns: of the matrices.
      dtypes: of the matrices that are read.
      vectors: bytes of the elements that operands have for each column.
      sums: over rows, for each column.
      multiprocessors: of the machine.
      shared_memory: bytes that a block may have.
      depth: reductions of a row that follow one another.
      wide: whether operands with an element for each column have wider ones than matrices.
      few: whether blocks may have few rows each: other kernels read rows twice.
      forward_by_columns: whether warpgroups share columns if there are no sums.
    """
    given = rows, columns, dtypes, vectors, sums, multiprocessors, shared_memory, depth, wide
    wanted = BY_COLUMNS if sums else forward_by_columns or FORWARD_BY_COLUMNS
    by_columns = wanted and not wide

    def many(one: Pipeline) -> bool:
        return rows >= _STEPS * one.together * one.groups(multiprocessors)

    found = [one for n in CLUSTERS if (one := _of_blocks(n, *given, by_columns)) is not None]
    if not FEW_ROWS:
        found = [one for one in found if many(one)]
    if not found:
        return None
    first = found[0]
    if first.masked and sums and MORE_BY_COLUMNS:
        suits = (first.blocks == 1 and columns > _FEW_COLUMNS) or (first.blocks == 2 and sums > 1)
        twice = [one for one in found if one.by_columns and one.blocks == 2 * first.blocks]
        if suits and twice and (many(twice[0]) or not many(first)):
            first = twice[0]
    if many(first):
        return first
    if not few or rows < first.period:
        return None
    for more in found:
        room = more.blocks * rows <= FITTING_CLUSTERS * multiprocessors
        if room and more.blocks > first.blocks and more.chunk >= _LEAST_PART:
            first = more if rows >= more.period else first
    return first


def _of_blocks(
    blocks: int,
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    vectors: int,
    sums: int,
    multiprocessors: int,
    shared_memory: int,
    depth: int,
    wide: bool,
    by_columns: bool,
) -> Pipeline | None:
    """How so many blocks share rows, if that suits."""
    sizes = [size_of(dtype) for dtype in dtypes]
    vector = VECTOR_BYTES // min(sizes)
    # With several sums over wide parts of rows, there is no room for what lanes exchange.
    enough = sums < 2 or columns <= 12 * 1024 * blocks
    by_columns = by_columns and enough
    shape = Pipeline(1, 1, columns, 1, 1, 1, vector=vector, by_columns=by_columns)
    by_columns = by_columns and shape.unaligned
    columns = shape.padded
    row_bytes = columns * sum(sizes)
    least = _LEAST_UNALIGNED if shape.unaligned else _LEAST
    if row_bytes < least or (shape.unaligned and rows * shape.columns >= 2**31):
        return None
    of_pass = (2 * PASS_ELEMENTS if PASS_ELEMENTS else 16) * MOST_WARPGROUPS * LANES
    widest = columns > blocks * (_WIDE if sums else of_pass)
    longest = shared_memory // 3 if PASS_ELEMENTS and not sums else _LONG
    if row_bytes > blocks * longest or (widest and not 0 < sums < 2):
        return None
    if widest and (blocks == 1 or columns > blocks * _WIDEST):
        return None
    if sums > 1 and blocks > _MOST_OF_SUMS:
        return None
    width, width_bytes = -(-columns // blocks), row_bytes // blocks
    held, threads, together, resident, least_stages = False, 4, 1, 1, depth + 2
    if blocks == 1 and width_bytes <= 14 * 1024:
        held, threads, together, resident = True, 2, 2, 3
        if width_bytes > 8 * 1024:
            # Lanes that all have whole vectors have room for the weight.
            full = columns % (LANES * vector) == 0
            held, threads, resident = full, 3 if full else 2, 2
    elif blocks == 1 and columns == 4 * LANES * vector:
        # Lanes of two blocks have a vector each.
        held, resident = True, 2
    elif blocks == 1 and sums and width_bytes <= 28 * 1024:
        held, threads, together = True, min(-(-width // 1024), MOST_WARPGROUPS), 2
    elif width <= 12 * 1024 or not sums:
        most = 16 if sums else PASS_ELEMENTS or 32
        threads = min(max(threads, -(-width // (most * LANES))), MOST_WARPGROUPS)
        held = 7 * 1024 < width <= 8 * 1024
    unit = LANES if by_columns else vector
    chunk = -(-columns // (threads * blocks * unit)) * unit
    of_stage = (chunk + by_columns * vector) * threads * together * sum(sizes)
    most = shared_memory // resident
    padded = shape.unaligned or chunk % LANES > 0
    if padded and (max(sizes) > 2 or (wide and shape.unaligned)):
        # With padding, lanes that load elements of 32 bits need not be those that use them.
        most -= 8 * chunk * threads
    free = most - _RESERVED
    if sums and not widest:  # At most so many bytes; stages and registers are chosen for them.
        vectors = 4 if vectors else 0
    if not held and free - vectors * chunk * threads < least_stages * of_stage:
        held = True
    if not held:
        free -= vectors * chunk * threads
    stages = min(free // of_stage, (2 if together > 1 else 3) + depth)
    pipeline = Pipeline(
        threads, blocks, shape.columns, stages, resident, chunk, together, held, vector, by_columns
    )
    needs = functools.partial(shared_memory_of, pipeline, sizes=sizes, vectors=vectors, depth=depth)
    while stages >= least_stages and needs(stages, held) > most:
        stages -= 1
    if stages < least_stages and not held and not widest:
        held, stages = True, least_stages
    registers = held * vectors * chunk / (4 * LANES)
    if PASS_ELEMENTS and not sums and threads > 4 and registers > _MOST_HELD:
        return None
    pipeline = dataclasses.replace(pipeline, stages=stages, held=held)
    # What lanes exchange: sums beside weights in registers, or weights, counted above in part.
    exchanged = (12 if held else 2 * (sums > 1)) * chunk * threads
    if by_columns and needs(stages, held) + exchanged > most:
        return _of_blocks(
            blocks, rows, shape.columns, dtypes, vectors, sums, multiprocessors, shared_memory,
            depth, wide, by_columns=False,
        )  # fmt: skip
    room = needs(stages, held) <= most
    # What ends behind a row, and may not be there, is the last warpgroup's.
    least = 2 * vector if shape.unaligned else 0
    if stages < least_stages or pipeline.last <= least or (widest and held) or not room:
        return None
    return pipeline


def suits_pipeline(tiling: RowTiling, dtypes: Sequence[np.dtype[Any]]) -> bool:
    """Whether rows that are reduced and written are better pipelined.

    Those are that registers do not hold, which would be read several times, up to a length. On an
    H200, that took 0.60 to 0.75 of the time with 14701 columns of 16 bits, and 1.10 to 1.62 of it
    with 37821 and more.
    """
    return not tiling.resident and tiling.columns * min(map(size_of, dtypes)) <= _LONGEST_PASS


def row_pipeline(
    body: Callable[..., Work],
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    reductions: Sequence[Sequence[str]],
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    multiprocessors: int,
    shared_memory: int,
    vectors: Sequence[int] = (),
    vector_bytes: int = 0,
    wide: bool = False,
    params: Any = None,
    samples: bool = False,
    by_columns: bool = False,
) -> Callable[..., tuple[jax.Array, ...]] | None:
    """A kernel without sums over rows, or None if it cannot be.

    Args:
      body, rows, reductions, out_types, name, vectors, samples: of :func:`.pipelined_row_kernel`.
      columns: of the matrices.
      dtypes: of the matrices that are read, the first operands.
      multiprocessors, shared_memory, vector_bytes, wide: of :func:`gradient_pipeline`.
      params: ``CompilerParams``.
      by_columns: whether warpgroups share columns of rows that begin within vectors.
    """
    pipeline = gradient_pipeline(
        rows, columns, dtypes, vector_bytes, 0, multiprocessors, shared_memory, len(reductions),
        wide, forward_by_columns=by_columns,
    )  # fmt: skip
    if pipeline is None:
        return None
    params = dataclasses.replace(params or plgpu.CompilerParams(), min_blocks=pipeline.resident)
    groups = pipeline.groups(multiprocessors, rows)
    return pipelined_row_kernel(
        body, no_sums, rows, pipeline, groups, dtypes, reductions, 0, out_types, name, vectors,
        params=params, samples=samples,
    )  # fmt: skip
