"""When gradients of normalisations are computed by pipelined rows, and how they are shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite_std.ops.rows.pipelined import PERIOD, Pipeline
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, size_of

_LEAST = 6 * 1024
"""Bytes of a row, of all matrices: shorter ones are as fast when a warpgroup has whole rows."""

_LONG, _WIDE = 64 * 1024, 14 * 1024
"""Bytes, and columns, of what a block has of a row at most: for more, stages and registers do not
suffice. Clusters of four blocks take longer than the other kernels."""

_WIDEST = 16 * 1024
"""The same columns if there is one sum over rows, and shared memory has room for the weight."""

_STEPS = 8
"""Rows of each block from which the beginning and the end of a pipeline do not count."""

_RESERVED = 4096
"""Bytes of shared memory for barriers and what warpgroups send one another, about."""


def shared_memory_of(
    pipeline: Pipeline, stages: int, held: bool, sizes: Sequence[int], vectors: int
) -> int:
    """Bytes of shared memory that a block takes, with as many stages.

    Args:
      held: whether vectors with an element for each column are in registers.
      sizes: bytes of the elements of matrices.
      vectors: bytes of the elements that vectors have for each column.
    """
    one = pipeline.chunk * pipeline.threads
    slots = 2 if pipeline.blocks == 1 else 2 * PERIOD + 1
    buffers = [slots * pipeline.parts * 16, 0 if held else one * vectors]
    buffers += [stages * pipeline.together * one * size for size in sizes]
    # Each begins at a multiple of 1024, then there are barriers and what reductions need.
    return sum(-(-size // 1024) * 1024 for size in buffers) + 512


def gradient_pipeline(
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    vectors: int,
    sums: int,
    multiprocessors: int,
    shared_memory: int,
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
    """
    sizes = [size_of(dtype) for dtype in dtypes]
    vector = VECTOR_BYTES // min(sizes)
    row_bytes = columns * sum(sizes)
    if row_bytes < _LEAST or columns % vector:
        return None
    fitting = (n for n in (1, 2) if row_bytes <= n * _LONG and columns <= n * _WIDE)
    blocks = next(fitting, None)
    widest = blocks is None and row_bytes <= 2 * _LONG and columns <= 2 * _WIDEST and sums < 2
    if widest:
        blocks = 2
    if blocks is None:
        return None
    width, width_bytes = -(-columns // blocks), row_bytes // blocks
    held, threads, together, resident = False, 4, 1, 1
    if blocks == 1 and width_bytes <= 14 * 1024:
        held, threads, together, resident = True, 2, 2, 3
        if width_bytes > 8 * 1024:
            # Lanes that all have whole vectors have room for the weight.
            full = columns % (LANES * vector) == 0
            held, threads, resident = full, 3 if full else 2, 2
    elif blocks == 1 and columns == 4 * LANES * vector:
        # Lanes of two blocks have a vector each.
        held, resident = True, 2
    elif blocks == 1 and width_bytes <= 28 * 1024:
        held, threads, together = True, -(-width // 1024), 2
    elif width <= 12 * 1024:
        threads = max(threads, -(-width // 2048))
        held = 7 * 1024 < width <= 8 * 1024
    chunk = -(-columns // (threads * blocks * vector)) * vector
    of_stage = chunk * threads * together * sum(sizes)
    free = shared_memory // resident - _RESERVED
    if not widest:  # At most so many bytes; stages and registers are chosen for them.
        vectors = 4 if vectors else 0
    if not held and free - vectors * chunk * threads < 3 * of_stage:
        held = True
    if not held:
        free -= vectors * chunk * threads
    stages = min(free // of_stage, 3 if together > 1 else 4)
    pipeline = Pipeline(threads, blocks, columns, stages, resident, chunk, together, held)
    most = shared_memory // resident
    while stages > 2 and shared_memory_of(pipeline, stages, held, sizes, vectors) > most:
        stages -= 1
    if stages < 3 and not held and not widest:
        held, stages = True, 3
    pipeline = dataclasses.replace(pipeline, stages=stages, held=held)
    room = shared_memory_of(pipeline, stages, held, sizes, vectors) <= most
    if stages < 3 or pipeline.last <= 0 or (widest and held) or not room:
        return None
    enough = rows >= _STEPS * together * pipeline.groups(multiprocessors)
    return pipeline if enough else None
