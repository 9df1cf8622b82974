"""The kernels of RMSNorm and layer norm, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows import norm_body
from pallasite_std.ops.rows.folding_tiles import folded_tile, folding_tile_kernel
from pallasite_std.ops.rows.kept import Kept, kept_plan, kept_row_kernel
from pallasite_std.ops.rows.kernel import (
    Chunk,
    Rows,
    Staging,
    Work,
    alone,
    folding_row_kernel,
    no_sums,
    parameters,
    resident_parameters,
    row_kernel,
)
from pallasite_std.ops.rows.norm_body import Norm, affine, at_once, forward_body, forward_types
from pallasite_std.ops.rows.norm_stages import (
    LANE_REGISTERS,
    MOST_STAGES,
    UNIT,
    available_registers,
    needed_registers,
    staged_rows,
)
from pallasite_std.ops.rows.pipelined import Pipeline, fewest, pipelined_row_kernel
from pallasite_std.ops.rows.pipelines import gradient_pipeline, row_pipeline, suits_pipeline
from pallasite_std.ops.rows.shared import shared_row_kernel, suits_shared
from pallasite_std.ops.rows.streamed import row_stream, streamed_row_kernel, suits_stream
from pallasite_std.ops.rows.tiles import tiled_row_kernel
from pallasite_std.ops.rows.tiling import (
    BUSY_ROWS,
    LANES,
    MOST_WARPGROUPS,
    VECTOR_BYTES,
    Registers,
    RowTiling,
    few_rows_tiling,
    row_tiling,
    size_of,
)

FORWARD = Registers()
QUANTIZED = Registers(four=48 * 1024)
"""What else is computed takes registers: fewer blocks of four warpgroups are resident."""
GRADIENT = Registers(alone=8, shared=10, crowded=16, area=1024)
"""Sums for the gradients by weight and bias stay in registers: of 64, with which a multiprocessor
has 32 warps, they are not to take more than half."""
UNSUMMED = Registers(alone=32, shared=32, crowded=16, area=2048)
"""Without sums, two matrices take the registers. Smaller tiles, as with sums, took up to 1.5 times
as long on an H200."""
HELD = 8
"""Elements that a lane may have of a row if the weight stays in registers, too."""


@functools.lru_cache(maxsize=512)
def forward(
    norm: Norm,
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    saves: bool = False,
    multiprocessors: int = 1,
    shared_memory: int = 0,
) -> Callable[..., Any]:
    """The kernel, a function of x, residual?, weight?, bias?; ``shared_memory`` may hold rows that
    are fetched before their turn.

    Returns:
      the result, the scales of its rows if it is quantised, and the sum of x and residual if there
      is a residual; with ``saves`` then the factor that normalises each row, and its mean if that
      is subtracted, float32 (rows,), for :func:`backward`.
    """
    registers = FORWARD if norm.quantized is None else QUANTIZED
    params = parameters(dtype)
    apart = norm.centered and norm.quantized is None and not ALL_CONTRACTED
    if apart and columns * size_of(dtype) % VECTOR_BYTES:
        # With products and sums in one instruction, that took 1.00 to 1.07 of the time.
        params = plgpu.CompilerParams()
    tiling = row_tiling(rows, columns, size_of(dtype), registers)
    tiling = few_rows_tiling(rows, tiling, size_of(dtype))
    # If all blocks are resident at once, nothing else hides what fetching the weight takes.
    one_wave = -(-rows // tiling.height) * tiling.threads <= EARLY * multiprocessors
    early_vectors = tiling.resident and one_wave and tiling.chunk <= _EARLY_ELEMENTS * LANES

    body = forward_body(norm, columns, dtype, early_vectors)
    out_types = forward_types(norm, rows, columns, dtype, saves)
    exchanges = (2 if norm.centered else 1) + (norm.quantized is not None)
    blocks = max(1, multiprocessors)
    least = STREAMED_COLUMNS if exchanges > 1 else 3 * STREAMED_COLUMNS
    vectors = range(1 + norm.residual, 1 + norm.residual + norm.weight + norm.bias)
    matrices, reductions = [dtype] * (1 + norm.residual), _reductions(norm, dtype)
    kernel = tiled_row_kernel(
        body, rows, columns, matrices, out_types, norm.name, blocks, shared_memory, vectors,
        params,
    )  # fmt: skip
    if kernel is not None:
        return kernel
    sizes = [norm.weight_size] * len(vectors)
    if _keeps_forward(norm, columns, tiling, matrices) and rows >= _ENOUGH_KEPT * blocks:
        given = rows, columns, matrices, sizes, 0, blocks, shared_memory
        plan = kept_plan(*given) or kept_plan(*given, held=False)
        if plan is not None:
            return kept_row_kernel(
                body, no_sums, rows, columns, plan, fewest(rows, blocks * plan.resident),
                matrices, 0, out_types, norm.name, exchanges, vectors, (), params,
            )  # fmt: skip
    streamed = None
    if not norm.residual and columns > least:
        streamed = streamed_rows(rows, columns, dtype, blocks, shared_memory)
    stream = None
    held = tiling.resident or streamed
    if suits_stream(columns, matrices, norm.quantized is not None, held, norm.quantized is None):
        stream = row_stream(rows, columns, matrices, sizes, blocks, shared_memory)
    if stream is not None:
        return streamed_row_kernel(
            body, rows, columns, matrices, out_types, norm.name, exchanges, stream, blocks,
            vectors, params,
        )  # fmt: skip
    if suits_shared(columns, matrices):
        kernel = shared_row_kernel(
            body, rows, columns, matrices, out_types, norm.name, exchanges, blocks, shared_memory,
            params,
        )  # fmt: skip
        if kernel is not None:
            return kernel
    by_columns = _by_columns(norm, columns, matrices)
    if by_columns or _pipelined(norm, tiling, matrices):
        kernel = row_pipeline(
            body, rows, columns, matrices, reductions, out_types, norm.name, blocks,
            shared_memory, vectors, norm.weight_size * len(vectors),
            norm.weight_size > size_of(dtype), params, at_once(norm, dtype), by_columns,
        )  # fmt: skip
        if kernel is not None:
            return kernel
    if streamed is None:
        one_pass = norm_body.ONE_PASS and norm.centered and not tiling.resident
        # As many as without the sums, which take registers.
        least = 8 // tiling.threads if one_pass else 1
        params = resident_parameters(tiling, dtype, params, least)
        return row_kernel(alone(body), rows, tiling, out_types, norm.name, exchanges, params)
    parts, staging = streamed
    most_held = HELD_SHARE * LANE_REGISTERS / parts.threads
    return folding_row_kernel(
        body, no_sums, rows, parts, blocks, 0, out_types, norm.name, exchanges, staging,
        params, vectors, most_held=most_held,
    )  # fmt: skip


_EARLY_ELEMENTS = 16
"""Elements of a lane up to which registers have room for them: with 60, that took 1.1 to 1.8 times
as long."""

EARLY = 8
"""Warpgroups of a multiprocessor up to which weight and bias are fetched before a reduction."""

ALL_CONTRACTED = True
"""Whether layer norms of rows that begin within vectors have products and sums in one instruction,
too."""

CONTRACTED = True
"""Whether gradients whose sums stay in registers have products and sums in one instruction."""


def _pipelined(norm: Norm, tiling: RowTiling, matrices: list[np.dtype[Any]]) -> bool:
    """Whether the forward is pipelined: rows that registers do not hold, up to a length.

    RMSNorms of 16 bits whose rows begin within vectors are, too: of 2683 to 3745 and 8111 columns
    they took 0.92 to 0.95 of the time on an H200, with a residual 0.95 to 1.00, and of 28001 to
    41003 columns 0.79 to 0.92; of 5519 and 6373 columns 1.01 to 1.05.
    """
    if suits_pipeline(tiling, matrices):
        return True
    if norm.quantized is not None or max(map(size_of, matrices)) > 2:
        return False
    if tiling.columns * size_of(matrices[0]) % VECTOR_BYTES == 0:
        return not (tiling.resident or norm.residual) and tiling.columns in _LONG_PIPELINED
    simple = not norm.centered and tiling.columns not in _MIDDLE
    return PIPELINED and simple and (tiling.resident or norm.residual)


def _by_columns(norm: Norm, columns: int, matrices: list[np.dtype[Any]]) -> bool:
    """Whether warpgroups share columns, not vectors, of the rows of a layer norm.

    That took 0.82 and 0.93 of the time of rows in registers with 5519 and 6373 columns of 16 bits
    on an H200, 0.96 to 1.10 with 2683 to 3745 and 8111.
    """
    narrow = len(matrices) == 1 and size_of(matrices[0]) == 2 and norm.weight_size <= 2
    within = columns * size_of(matrices[0]) % VECTOR_BYTES > 0
    plain = norm.centered and norm.quantized is None
    return PIPELINED and plain and narrow and within and columns in _MIDDLE


def _keeps_forward(
    norm: Norm, columns: int, tiling: RowTiling, matrices: list[np.dtype[Any]]
) -> bool:
    """Whether registers keep rows that begin within vectors, and come through shared memory: of
    layer norms that are not pipelined, and of quantised ones that could be.

    On an H200 that took 0.93 to 0.95 of the time of layer norms with 2519 to 3501 columns, and 0.84
    with 27817; to fp8, 0.90 and 0.96 with 13501 and 9777, 1.01 with 3817 and 7013. RMSNorms that
    are not quantised took 1.06 to 1.13.
    """
    within = columns * size_of(matrices[0]) % VECTOR_BYTES > 0
    if not KEPT or not within or max(map(size_of, matrices)) != 2:
        return False
    if columns < LEAST_KEPT_FORWARD:
        return False
    if norm.quantized is not None:
        return suits_pipeline(tiling, matrices) and len(matrices) == 1
    pipelined = suits_pipeline(tiling, matrices) and (columns < _LEAST_WIDE or norm.residual)
    return norm.centered and not (pipelined or _by_columns(norm, columns, matrices))


LEAST_KEPT_FORWARD = 8 * LANES
"""Columns from which on a row has a warpgroup of its own: with one element for each lane, that took
up to 5 times as long as a copy on an H200."""

_LEAST_WIDE = 18 * 1024
"""Columns from which on a layer norm is kept where it could be pipelined, too."""

_ENOUGH_KEPT = 8
"""Rows for each multiprocessor that are many."""

_LONG_PIPELINED = range(44 * 1024, 64 * 1024 + 1)
"""Columns of 16 bits of rows that begin at whole vectors and are pipelined although they are long:
of 47112 and 65536 that took 0.88 to 0.98 of the time on an H200, of 40968 0.99 and 1.08."""

_MIDDLE = range(4608, 7168)
"""Columns of rows of which registers, or the pipelines of two blocks, hold few."""

PIPELINED = True
"""Whether norms are pipelined although registers would hold rows that begin within vectors."""


def _reductions(norm: Norm, dtype: np.dtype[Any]) -> list[tuple[str, ...]]:
    """The kinds of what the forward kernel reduces at a time."""
    if at_once(norm, dtype):
        return [("sum", "sum")]
    early = norm.quantized is not None and not norm.bias
    found: list[tuple[str, ...]] = [("sum",)] if norm.centered else []
    found.append(("sum", "max") if early else ("sum",))
    return [*found, ("max",)] if norm.quantized is not None and not early else found


HELD_SHARE = 0.32
"""Of a lane's registers, for weight and bias while rows are streamed."""
STREAMED_COLUMNS = 8192
"""Longer rows that are reduced twice are fetched before their turn: a multiprocessor has registers
for few. Those that are reduced once, from three times as many columns on."""
STREAMED_WARPGROUPS = range(4, MOST_WARPGROUPS + 1)


def streamed_rows(
    rows: int, columns: int, dtype: np.dtype[Any], blocks: int, shared_memory: int
) -> tuple[RowTiling, Staging] | None:
    """How a block on each multiprocessor goes over long rows; None where it is not to.

    Args:
      rows, columns, dtype: of the matrix.
      blocks: that share the rows.
      shared_memory: bytes that a block may use for them.
    """
    size = size_of(dtype)
    vector, stages = VECTOR_BYTES // size, (shared_memory - 4096) // (columns * size)
    if stages < 2 or rows < 4 * blocks:
        return None
    for threads in STREAMED_WARPGROUPS:
        if columns % (threads * vector) == 0 and columns // threads <= FORWARD.limit(threads):
            tiling = RowTiling(1, threads, columns // threads, columns)
            return tiling, Staging(min(MOST_STAGES, stages), (dtype,))
    return None


# Backward -----------------------------------------------------------------------------------------


def keeps_rows(
    norm: Norm,
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
) -> bool:
    """Whether :func:`backward` serves: registers hold a row, or there are no sums over rows."""
    if _gradient_tiling(norm, rows, columns, dtype).resident or not (norm.weight or norm.bias):
        return True
    given = norm, rows, columns, dtype, multiprocessors, shared_memory
    return _kept(*given) is not None or _pipeline(*given) is not None


def _kept(
    norm: Norm,
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
) -> Kept | None:
    """How warpgroups keep whole rows, if they are better kept.

    Many rows of whole vectors are, but for RMSNorms that fill all lanes, and those that pipelines
    of two rows at a time, or pairs of warpgroups, share.
    """
    if not KEPT or not shared_memory or columns < _LEAST_KEPT:
        return None
    size = size_of(dtype)
    aligned = columns * size % VECTOR_BYTES == 0 and rows >= _ENOUGH_KEPT * multiprocessors
    if aligned:
        full = columns * size % (LANES * VECTOR_BYTES) == 0
        if columns in _IN_PAIRS if norm.centered else full or columns < _LEAST_OF_VECTORS:
            return None
    sums, vectors = norm.weight + norm.bias, [norm.weight_size] * norm.weight
    given = rows, columns, _matrices(norm, dtype), vectors, sums, multiprocessors, shared_memory
    plan = kept_plan(*given) or kept_plan(*given, held=False)
    return None if plan is not None and aligned and plan.threads == 2 else plan


KEPT = True
"""Whether registers keep rows of gradients that are in shared memory."""

_LEAST_KEPT = 512
"""Columns from which on they do: of fewer, reductions take most of the time."""

_IN_PAIRS = range(2304, 4608)
"""Columns of layer norms that two or three warpgroups of a pipeline share, two rows at a time."""

_LEAST_OF_VECTORS = 1024
"""Columns of RMSNorms that begin at whole vectors, at least."""


def _pipeline(
    norm: Norm,
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
) -> Pipeline | None:
    """With one reduction, registers that hold a row are as fast if it begins at whole vectors, but
    for the longest rows."""
    matrices = _matrices(norm, dtype)
    long = columns * sum(map(size_of, matrices)) > _LONG
    aligned = columns * min(map(size_of, matrices)) % VECTOR_BYTES == 0
    held = _gradient_tiling(norm, rows, columns, dtype).resident
    if held and aligned and not (norm.centered or long):
        return None
    vectors, sums = norm.weight * norm.weight_size, norm.weight + norm.bias
    wide = norm.weight_size > min(map(size_of, matrices))
    return gradient_pipeline(
        rows,
        columns,
        matrices,
        vectors,
        sums,
        multiprocessors,
        shared_memory,
        wide=wide,
        few=not held,
    )


def _matrices(norm: Norm, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """Types of what :func:`backward` reads: x, the cotangents of the result and of the sum."""
    return (dtype, norm.out_dtype, *((dtype,) if norm.residual else ()))


def _gradient_tiling(norm: Norm, rows: int, columns: int, dtype: np.dtype[Any]) -> RowTiling:
    sums = norm.weight + norm.bias
    registers = GRADIENT if sums else UNSUMMED
    height = 1
    while TALLER and rows > BUSY_ROWS // 4 * height and 2 * height * columns <= _TALLEST:
        height *= 2
    if sums and height > 1 and rows < 4 * BUSY_ROWS:
        # What blocks of few rows write as sums, and what adds them, takes as long as the rows.
        return RowTiling(height, 1, columns, columns)
    if sums > 1 and columns & (columns - 1) and columns * size_of(dtype) % VECTOR_BYTES == 0:
        # Lanes are not all used, and sums of as many rows would not stay in registers.
        registers = dataclasses.replace(GRADIENT, area=GRADIENT.area // 2)
    tiling = row_tiling(rows, columns, size_of(dtype), registers)
    if tiling.chunk == columns or not sums:
        return tiling

    def padded(one: RowTiling) -> int:
        """Columns of all warpgroups with those that fill vectors of sums in float32."""
        return one.threads * -(-one.chunk // (4 * LANES)) * 4 * LANES

    def suits(one: RowTiling) -> bool:
        whole = one.resident and one.chunk * size_of(dtype) % UNIT == 0
        long = padded(one) >= one.threads * _LEAST_CHUNK and one.chunk <= _MOST_CHUNK
        if not (whole and long):
            return False
        return 0.93 * needed_registers(one, sums) <= available_registers(one, 1)

    counts = range(MOST_WARPGROUPS, 2, -1)
    others = [RowTiling(1, threads, columns // threads, columns) for threads in counts]
    best = min(filter(suits, others), key=padded, default=tiling)
    better = padded(best) < padded(tiling) or not (suits(tiling) or tiling.threads < 3)
    return best if not tiling.resident or better else tiling


TALLER = False
"""Whether few short rows are shared by no more blocks than multiprocessors, about."""

_TALLEST = 4096
"""Elements of their blocks at most."""

_LONG = 64 * 1024
"""Bytes of a row, of all matrices, that one block has no room for with others on their way."""

_LEAST_CHUNK, _MOST_CHUNK = 1024, 4096
"""Columns of a warpgroup: with fewer, what it waits for others takes longer than its work."""


def gradient_body(norm: Norm, columns: int) -> Callable[..., Work]:
    """The gradient by x of a row, a body of x, d_out, d_sum?, the moments, weight? and the result;
    it adds to the sums for weight and bias."""

    def body(block: Rows, x: Any, d_out: Any, *refs: Any) -> Work:
        operands = list(refs)
        d_sum = operands.pop(0) if norm.residual else None
        scale, *mean = (block.values(operands.pop(0)) for _ in range(norm.moments))
        weight = operands.pop(0) if norm.weight else None
        d_x = operands.pop(0)

        # Normalised values are x * scale + below.
        below = -mean[0] * scale if mean else None
        added: list[Any] = []

        def products(chunk: Chunk) -> tuple[Any, ...]:
            cotangent = chunk.load(d_out)
            value = chunk.load(x) * block.spread(scale, chunk)
            if below is not None:
                value = value + block.spread(below, chunk)
            if chunk is block.resident:
                # With sums, registers hold the row: it is a single chunk.
                added.extend([cotangent * value] if norm.weight else [])
                added.extend([cotangent] if norm.bias else [])
            gradient = affine(norm, chunk, cotangent, weight, None)
            return (gradient * value, gradient) if mean else (gradient * value,)

        along, *shift = yield products, ("sum",) * norm.moments, added
        # The result is (gradient - shift / columns - value * along / columns) * scale.
        factor = -along * scale / columns
        offset = None
        if below is not None:
            offset = factor * below - shift[0] * scale / columns
        factor = factor * scale

        def store(chunk: Chunk) -> None:
            result = chunk.load(x) * block.spread(factor, chunk)
            if offset is not None:
                result = result + block.spread(offset, chunk)
            gradient = affine(norm, chunk, chunk.load(d_out), weight, None)
            result = gradient * block.spread(scale, chunk) + result
            if d_sum is not None:
                result = result + chunk.load_again(d_sum)
            chunk.store(d_x, result)

        block.each(store)

    return body


@functools.lru_cache(maxsize=512)
def backward(
    norm: Norm,
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
) -> Callable[..., Any]:
    """The kernel, a function of x (or the sum with the residual), d_out, d_sum?, the moments that
    :func:`forward` saves, weight?.

    Returns:
      the gradient by x; then, if there are such operands, sums over the rows of each block from
      which gradients by weight and bias are made, float32 (blocks, columns) each: registers have to
      hold a row (:func:`keeps_rows`).
    """
    tiling = _gradient_tiling(norm, rows, columns, dtype)
    count = norm.weight + norm.bias

    body = gradient_body(norm, columns)

    def finish(first: Any, block: Any, sums: tuple[Any, ...], *refs: Any) -> None:
        for ref, value in zip(refs[len(refs) - len(sums) :], sums, strict=True):
            ref[block, pl.ds(first, value.shape[0])] = value

    name, exchanges = f"{norm.name}_gradient", norm.moments
    dtypes = _matrices(norm, dtype)
    of_rows = range(len(dtypes), len(dtypes) + norm.moments)
    out_types = [jax.ShapeDtypeStruct((rows, columns), dtype)]
    if not count:
        return row_kernel(alone(body), rows, tiling, out_types, name, exchanges)
    tile = folded_tile(rows, columns, dtypes, norm.moments, count, multiprocessors, shared_memory)
    if tile is not None:
        blocks = multiprocessors * tile.resident
        out_types += [jax.ShapeDtypeStruct((blocks, columns), jnp.float32)] * count

        return folding_tile_kernel(
            body, finish, rows, columns, tile, blocks, dtypes, count, out_types, name,
            [of_rows.stop] if norm.weight else [], of_rows, parameters(dtype),
        )  # fmt: skip
    plan = _kept(norm, rows, columns, dtype, multiprocessors, shared_memory)
    if plan is not None:
        blocks = fewest(rows, multiprocessors * plan.resident)
        out_types += [jax.ShapeDtypeStruct((blocks, columns), jnp.float32)] * count

        return kept_row_kernel(
            body, finish, rows, columns, plan, blocks, dtypes, count, out_types, name,
            exchanges, [of_rows.stop] if norm.weight else [], of_rows, parameters(dtype),
        )  # fmt: skip
    pipeline = _pipeline(norm, rows, columns, dtype, multiprocessors, shared_memory)
    if pipeline is not None:
        groups = pipeline.groups(multiprocessors, rows)
        out_types += [jax.ShapeDtypeStruct((groups, columns), jnp.float32)] * count

        return pipelined_row_kernel(
            body, finish, rows, pipeline, groups, dtypes,
            [("sum",) * norm.moments], count, out_types, name,
            [of_rows.stop] if norm.weight else [], of_rows,
            plgpu.CompilerParams(approx_math=size_of(dtype) < 4, min_blocks=pipeline.resident),
        )  # fmt: skip
    resident, staging = staged_rows(tiling, rows, count, dtypes, shared_memory)
    group = tiling.height * (1 if staging is None else staging.together)
    blocks = max(1, min(rows // group, multiprocessors * resident))
    if FEWEST_BLOCKS:
        blocks = fewest(max(1, rows // group), blocks)
    blocks = min(blocks, max(multiprocessors, rows // (group * LEAST_STEPS)))
    out_types += [jax.ShapeDtypeStruct((blocks, columns), jnp.float32)] * count
    params = parameters(dtype) if CONTRACTED else plgpu.CompilerParams()
    if staging is not None:
        params = dataclasses.replace(params, min_blocks=resident)
    held = norm.weight and tiling.height * tiling.chunk <= HELD * LANES
    vectors = [of_rows.stop] if held else []
    return folding_row_kernel(
        body,
        finish,
        rows,
        tiling,
        blocks,
        count,
        out_types,
        name,
        exchanges,
        staging,
        params,
        vectors,
        of_rows,
    )


FEWEST_BLOCKS = True
"""Whether as few blocks share rows as take no longer: each has sums, which are summed."""

LEAST_STEPS = 1
"""Rows, or groups of them, of each block at least, if all multiprocessors have blocks."""
