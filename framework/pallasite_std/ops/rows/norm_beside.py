"""Gradients of norms of small matrices: blocks with rows beside blocks with columns, in one kernel.

What is summed for weight and bias depends on no reduction of a row but those that the forward has
saved. So some blocks go over the rows of a few columns and write whole sums, while others compute
the gradient by x of a row each: no block waits for what another has summed. Operands are read
twice, the second time from the L2 cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import Chunk, Exchange, Rows, await_all, barrier_of, in_step
from pallasite_std.ops.rows.norm_body import Norm
from pallasite_std.ops.rows.norm_kernels import gradient_body
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, RowTiling, size_of

MOST_BYTES = 4 * 1024 * 1024
"""Of a matrix: what larger ones take to be read twice is more than a second kernel."""

_MOST_ROWS = 512
"""Blocks that sum go over all rows one after the other: 1500 took 1.14 times as long as with a
second kernel."""

_AT_ONCE = 2
"""Groups of rows that begin within vectors that a warpgroup loads at a time."""

_THREADS = 4
"""Warpgroups that share a row, or the rows of some columns."""

_FEWEST = 64
"""Blocks that sum at least: of fewer, a second kernel took 0.91 of the time."""

_MOST_ELEMENTS = 16
"""Of a row for each lane."""

_WIDTH, _HEIGHT = 32, 32
"""Columns of a block that sums, and rows that a warpgroup of it adds at a time."""

_RESIDENT = {False: 2, True: 3}
"""Blocks of a multiprocessor, by whether rows are whole vectors: then lanes have few registers on
their way."""


def suits_beside(norm: Norm, rows: int, columns: int, dtype: np.dtype[Any]) -> bool:
    """Whether a matrix is small enough, and has rows and columns enough."""
    fits = _FEWEST * _WIDTH <= columns <= _MOST_ELEMENTS * LANES * _THREADS
    small = rows * columns * size_of(dtype) <= MOST_BYTES
    return fits and small and _HEIGHT <= rows <= _MOST_ROWS and (norm.weight or norm.bias)


@functools.lru_cache(maxsize=512)
def gradients_beside(
    norm: Norm, rows: int, columns: int, dtype: np.dtype[Any], dtypes: tuple[np.dtype[Any], ...]
) -> Callable[..., Any]:
    """The kernel, a function of the operands of :func:`.norm_kernels.backward`.

    Args:
      dtypes: of the gradients by weight and bias, as far as there are such operands.

    Returns:
      the gradient by x, and (columns,) of each of these dtypes.
    """
    threads, sums = _THREADS, len(dtypes)
    aligned = columns * size_of(dtype) % VECTOR_BYTES == 0
    unit = VECTOR_BYTES // size_of(dtype) if aligned else LANES // 4
    chunk = -(-columns // (threads * unit)) * unit
    strips, rest = -(-columns // _WIDTH), columns % _WIDTH
    groups = -(-rows // _HEIGHT)
    body, moments = gradient_body(norm, columns), norm.moments
    first_moment = 3 if norm.residual else 2

    def on_blocks(*refs: Any, totals: Any, partials: Any, barrier: Any = None) -> None:
        number, thread = lax.axis_index("block"), lax.axis_index("part")
        x, d_out = refs[:2]
        scale, *mean = refs[first_moment : first_moment + moments]
        operands, folded = refs[: len(refs) - sums], refs[len(refs) - sums :]

        def of_row(row: Any) -> None:
            def share(width: int) -> None:
                exchange = Exchange(threads, partials, barrier)
                part = RowTiling(1, threads, width, width * threads)
                one = Rows(part, row, thread, exchange)
                one.resident = Chunk(one, thread * chunk, width, kept=True)
                in_step([body(one, *operands)], [one])

            last = columns - (threads - 1) * chunk
            if last == chunk:
                share(chunk)
                return
            pl.when(thread < threads - 1)(lambda: share(chunk))
            pl.when(thread == threads - 1)(lambda: share(last))

        def of_columns(first: Any, width: int) -> None:
            window, shape = pl.ds(first, width), (_HEIGHT, width)

            def begin_of(group: Any) -> Any:
                # The last rows may be of two groups.
                return lax.min(group * _HEIGHT, rows - _HEIGHT)

            def load(group: Any) -> tuple[Any, ...]:
                these = pl.ds(begin_of(group), _HEIGHT)
                of_rows = (one[these] for one in (scale, *mean))
                return (x[these, window], d_out[these, window], *of_rows)

            def add(number: Any, loaded: tuple[Any, ...], so_far: Any) -> Any:
                value, cotangent, *of_rows = loaded
                group = thread + number * threads
                value, cotangent = value.astype(jnp.float32), cotangent.astype(jnp.float32)
                factor, *shift = (lax.broadcast_in_dim(one, shape, (0,)) for one in of_rows)
                if rows % _HEIGHT or (groups % threads and not aligned):
                    row = lax.broadcasted_iota(jnp.int32, shape, 0) + begin_of(group)
                    cotangent = jnp.where(row >= group * _HEIGHT, cotangent, 0.0)
                if shift:
                    value = value - shift[0]
                added = [cotangent * (value * factor)] if norm.weight else []
                added += [cotangent] if norm.bias else []
                return [one + more for one, more in zip(so_far, added, strict=True)]

            found: Any = [jnp.zeros(shape, jnp.float32)] * sums
            turns = -(-groups // threads)
            if aligned:

                def step(turn: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                    # The next group's, early.
                    following = load(thread + (turn + 1) * threads)
                    return (*following, add(turn, carry[:-1], carry[-1]))

                mine = lax.div(groups - thread + (threads - 1), threads)
                *_, found = lax.fori_loop(0, mine, step, (*load(thread), found))
            for turn in range(0, 0 if aligned else turns, _AT_ONCE):
                those = range(turn, min(turn + _AT_ONCE, turns))
                loaded = [load(thread + number * threads) for number in those]
                for number, one in zip(those, loaded, strict=True):
                    found = add(number, one, found)
            for place, one in enumerate(found):
                totals[thread, place, pl.ds(0, width)] = jnp.sum(one, axis=0)
            await_all(barrier)
            for place, result in enumerate(folded):

                def store(place: int = place, result: Any = result) -> None:
                    total = totals[0, place, pl.ds(0, width)]
                    for other in range(1, threads):
                        total = total + totals[other, place, pl.ds(0, width)]
                    result[window] = total.astype(result.dtype)

                pl.when(thread == place)(store)

        def of_strip(strip: Any) -> None:
            first = pl.multiple_of(strip * _WIDTH, _WIDTH)
            if not rest:
                of_columns(first, _WIDTH)
                return
            pl.when(strip < strips - 1)(lambda: of_columns(first, _WIDTH))
            pl.when(strip == strips - 1)(lambda: of_columns((strips - 1) * _WIDTH, rest))

        # Going over the rows takes longer than a row: these blocks begin first.
        pl.when(number < strips)(lambda: of_strip(number))
        pl.when(number >= strips)(lambda: of_row(number - strips))

    kernel: Callable[..., Any] = plgpu.kernel(
        on_blocks,
        out_type=(
            jax.ShapeDtypeStruct((rows, columns), dtype),
            *(jax.ShapeDtypeStruct((columns,), one) for one in dtypes),
        ),
        grid=(strips + rows,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="part",
        kernel_name=f"{norm.name}_gradient",
        compiler_params=plgpu.CompilerParams(
            approx_math=size_of(dtype) < 4, min_blocks=_RESIDENT[aligned]
        ),
        scratch_types=dict(
            totals=plgpu.SMEM((threads, sums, _WIDTH), jnp.float32),
            partials=plgpu.SMEM((moments, threads), jnp.float32),
            **barrier_of(threads),
        ),
    )
    return kernel
