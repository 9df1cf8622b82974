"""Sums over short rows that begin within vectors: tiles of them pass shared memory.

So many rows that they are whole vectors together are fetched by one copy, while a block works on
others. As in :mod:`.tiles`, lanes take elements one by one from there, and results leave by whole
vectors; what is added for each column stays in registers.
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

from pallasite import gpu as plgpu
from pallasite_std.ops.rings import over_steps
from pallasite_std.ops.rows.kernel import INSIDE, Rows, Work, in_step
from pallasite_std.ops.rows.tiles import PlacedChunk, places_taken
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, RowTiling, size_of

TILED = True
"""Whether gradients of norms of such rows are computed so."""

FEWEST_SUMS = 1
"""Those over rows of whole words from which on: with one, gradients of RMSNorm in bfloat16 took
0.79 to 1.01 of the time with 66 to 1368 columns on an H200, in float32 0.81 and 0.93 with 66 and
100."""

_MOST_WIDE = 256
"""Columns of 32 bits up to which one sum suffices: with 500 and 1002 that took 1.13 and 1.07."""

_FEWEST = 64
"""Columns of such rows at least."""

_PART = 16
"""Elements of a lane up to which more than four rows are worked on at a time."""

_RESERVED = 3072
"""Bytes of shared memory for barriers, and what warps exchange, about."""

_BESIDES = 30
"""Registers of a lane besides arrays."""

_FEW, _COMFORT = 4, 18
"""Blocks of a multiprocessor that are few, and more registers with which fewer are faster: of 521
columns, four blocks took 133 us on an H200, where three with tiles of 691 took 110."""

_WARPGROUPS = 512
"""Registers of a multiprocessor by lanes of a warpgroup."""

_ENOUGH = 4
"""Tiles of each block at least."""

_STAGES = 3
_RESIDENT, _LEAST_RESIDENT = 8, 3
"""Blocks of a multiprocessor, at most and at least."""

_MOST_HEIGHT = 64


@dataclasses.dataclass(frozen=True)
class FoldedTile:
    """What a block fetches at a time.

    Attributes:
      height: rows, which are whole vectors together.
      part: rows that are worked on at a time.
      stages: tiles in shared memory.
      resident: blocks of a multiprocessor.
    """

    height: int
    part: int
    stages: int
    resident: int


def folded_tile(
    rows: int,
    columns: int,
    dtypes: Sequence[np.dtype[Any]],
    values: int,
    sums: int,
    multiprocessors: int,
    shared_memory: int,
) -> FoldedTile | None:
    """The tiles of matrices; None if rows begin at whole words, or tiles do not suit.

    Args:
      rows, columns: of the matrices.
      dtypes: of the matrices that are read.
      values: how many operands have an element for each row, of 32 bits.
      sums: over rows.
      multiprocessors: of the machine.
      shared_memory: bytes that a block may have.
    """
    sizes = [columns * size_of(dtype) for dtype in dtypes]
    words = all(size % 4 == 0 for size in sizes)
    wide = min(map(size_of, dtypes)) == 4 and columns > _MOST_WIDE
    if not TILED or (words and sums < (2 if wide else FEWEST_SUMS)) or rows * columns >= 2**31:
        return None
    if columns < _FEWEST or not shared_memory:
        return None
    vector = min(VECTOR_BYTES // size_of(one) for one in dtypes) if words else 1
    vector = math.gcd(columns, vector)

    def lane_elements(part: int) -> int:
        """Of the rows that are worked on at a time, each by lanes of its own."""
        unit = vector * max(1, LANES // part)
        return -(-columns // unit) * vector * max(1, part // LANES)

    part = 4  # A warp has a row: lanes exchange what they have summed among themselves.
    while lane_elements(2 * part) <= _PART:
        part *= 2
    # Besides sums, registers hold what is read, and the weight.
    registers = _BESIDES + (len(dtypes) + sums + 1) * lane_elements(part)
    if registers > _WARPGROUPS // _LEAST_RESIDENT:
        return None
    # Elements of rows are fetched, too: four of 32 bits are a vector.
    period = max(VECTOR_BYTES // math.gcd(size, VECTOR_BYTES) for size in sizes)
    height = max(period, part, 4)
    row = sum(sizes) + 4 * values
    most = min(_RESIDENT, _WARPGROUPS // (-(-registers // 8) * 8))
    if most <= _FEW:
        comfortable = -(-(registers + _COMFORT) // 8) * 8
        most = max(_LEAST_RESIDENT, min(most, _WARPGROUPS // comfortable))
    room = shared_memory // most - _RESERVED
    while 2 * height * row * _STAGES <= room and 2 * height <= _MOST_HEIGHT:
        height *= 2
    for stages in range(_STAGES, 1, -1):
        needed = stages * height * row + _RESERVED
        resident = min(most, shared_memory // needed)
        if resident == most or stages == 2:
            break
    if resident < _LEAST_RESIDENT or rows < _ENOUGH * height * multiprocessors * resident:
        return None
    return FoldedTile(height, part, stages, resident)


class _FoldedChunk(PlacedChunk):
    """The same where registers have vectors, repeated for each row."""

    def vector(self, ref: Any) -> Any:
        """See the base class."""
        return self.rows.held[id(ref)]


def folding_tile_kernel(
    body: Callable[..., Work],
    finish: Callable[..., None],
    rows: int,
    columns: int,
    tile: FoldedTile,
    blocks: int,
    dtypes: Sequence[np.dtype[Any]],
    sums: int,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    vectors: Sequence[int],
    of_rows: Sequence[int],
    params: Any,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel whose blocks go over many tiles each, and keep sums over rows in registers.

    Args:
      body, finish, sums, name, vectors, of_rows, params: of :func:`.kernel.folding_row_kernel`.
      rows, columns: of the matrices.
      tile: how they are fetched.
      blocks: how many share the tiles.
      dtypes: of the first operands, which are matrices.
      out_types: types of the results: a matrix of the first operand's dtype, then sums.
    """
    height, part, size = tile.height, tile.part, tile.height * columns
    full, left = divmod(rows, height)
    (taken,) = places_taken(dtypes, [out_types[0].dtype])
    assert taken is not None

    def on_tiles(*refs: Any, loaded: Any, **buffers: Any) -> None:
        block, sources = lax.axis_index("block"), refs[: len(dtypes)]
        result = refs[len(refs) - len(out_types)]
        shape = (columns,) if part == 1 else (part, columns)

        def spread(vector: Any) -> Any:
            return vector if part == 1 else lax.broadcast_in_dim(vector, shape, (1,))

        vectors_here = {
            id(refs[one]): spread(refs[one][...].astype(jnp.float32)) for one in vectors
        }

        def places(stage: Any) -> dict[int, Any]:
            found = {
                id(source): buffers[f"staged_{number}"].at[stage]
                for number, source in enumerate(sources)
            }
            return found | {id(refs[one]): buffers[f"values_{one}"].at[stage] for one in of_rows}

        def fetch(step: Any, stage: Any) -> None:
            number, there = block + step * blocks, places(stage)
            for refs_of, count in ((sources, size), ([refs[one] for one in of_rows], height)):
                for one in refs_of:
                    window = pl.ds(pl.multiple_of(number * count, count), count)
                    plgpu.copy_gmem_to_smem(
                        one.at[window], there[id(one)], loaded.at[stage], oob_mode=INSIDE
                    )

        def work(step: Any, stage: Any, carry: Any) -> Any:
            first, there = (block + step * blocks) * height, places(stage)
            there[id(result)] = there[id(sources[taken])]

            def of_part(number: Any, carry: Any) -> Any:
                row = pl.multiple_of(number * part, part)
                these = row if part == 1 else pl.ds(row, part)
                some = {
                    id(one): there[id(one)].reshape(height, columns).at[these]
                    for one in (*sources, result)
                }
                held = {id(refs[one]): there[id(refs[one])][these] for one in of_rows}
                rows_here = Rows(
                    RowTiling(part, 1, columns, columns), first + row, 0, None, None,
                    vectors_here | held,
                )  # fmt: skip
                rows_here.resident = _FoldedChunk(rows_here, some)
                so_far = list(carry)

                def add(added: list[Any]) -> None:
                    so_far[:] = [one + more for one, more in zip(so_far, added, strict=True)]

                in_step([body(rows_here, *refs)], [rows_here], add)
                return tuple(so_far)

            carry = lax.fori_loop(0, height // part, of_part, carry)
            window = pl.ds(pl.multiple_of((block + step * blocks) * size, size), size)
            result[window] = there[id(result)][...]
            return carry

        def of_row(row: Any, carry: Any) -> Any:
            window = pl.ds(row * columns, columns)
            alone = Rows(RowTiling(1, 1, columns, columns), row, 0)
            there = {id(one): one.at[window] for one in (*sources, result)}
            alone.resident = PlacedChunk(alone, there)
            added: list[Any] = []
            in_step([body(alone, *refs)], [alone], added.extend)
            if part == 1:
                return tuple(one + more for one, more in zip(carry, added, strict=True))
            shape = (part, columns)
            top = lax.broadcasted_iota(jnp.int32, shape, 0) == 0
            return tuple(
                one + jnp.where(top, lax.broadcast_in_dim(more, shape, (1,)), 0.0)
                for one, more in zip(carry, added, strict=True)
            )

        carry: Any = (jnp.zeros(shape, jnp.float32),) * sums
        steps = lax.div(full - block + (blocks - 1), blocks)
        carry = over_steps(steps, tile.stages, loaded, fetch, work, carry)
        if left:
            # Of the last rows, the blocks that would be next take one each.
            number = lax.rem(block + (blocks - full % blocks), blocks)
            first = full * height + number

            def of_rest(step: Any, carry: Any) -> Any:
                return of_row(first + step * blocks, carry)

            count = lax.div(left - number + (blocks - 1), blocks)
            carry = lax.fori_loop(0, count, of_rest, carry)
        if part > 1:
            carry = tuple(jnp.sum(one, axis=0) for one in carry)
        finish(0, block, carry, *refs)

    scratch: dict[str, Any] = {
        f"staged_{number}": plgpu.SMEM((tile.stages, size), dtype)
        for number, dtype in enumerate(dtypes)
    }
    for one in of_rows:
        scratch[f"values_{one}"] = plgpu.SMEM((tile.stages, height), jnp.float32)
    scratch["loaded"] = plgpu.Barrier(
        num_arrivals=len(dtypes) + len(of_rows), num_barriers=tile.stages
    )
    matrix = jax.ShapeDtypeStruct((rows * columns,), out_types[0].dtype)
    kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
        on_tiles,
        out_type=(matrix, *out_types[1:]),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=dataclasses.replace(params, min_blocks=tile.resident),
        scratch_types=scratch,
    )

    def call(*operands: Any) -> tuple[jax.Array, ...]:
        flat = [one.reshape(-1) for one in operands[: len(dtypes)]]
        matrix, *rest = kernel(*flat, *operands[len(dtypes) :])
        return (matrix.reshape(rows, columns), *rest)

    return call
