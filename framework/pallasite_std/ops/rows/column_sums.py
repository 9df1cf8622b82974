"""Sums of matrices by columns, of all of them in one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import await_all, barrier_of
from pallasite_std.ops.rows.tiling import LANES, MOST_WARPGROUPS

WIDTHS = (128, 32, 16, 8)
"""Columns of a block: whole sectors of a cache."""

_BLOCKS = (1024, 96, 48)
"""Blocks that are enough for each of these widths but the last."""

_ELEMENTS = 16
"""Of a lane at a time, all on their way at once."""


_RESIDENT = 8
"""Warpgroups of a multiprocessor, about: their lanes have 64 registers each, or 56."""


def column_sums(
    arrays: Sequence[jax.Array], dtypes: Sequence[Any], multiprocessors: int
) -> list[jax.Array]:
    """Sums over rows, in float32.

    Args:
      arrays: float32 (rows, columns), all of one shape.
      dtypes: of the results.
      multiprocessors: of the machine.

    Returns:
      (columns,) of each.
    """
    if not arrays:
        return []
    types = tuple(np.dtype(one) for one in dtypes)
    return list(_kernel(*arrays[0].shape, types, multiprocessors)(*arrays))


@functools.lru_cache(maxsize=512)
def _kernel(
    rows: int, columns: int, dtypes: tuple[np.dtype[Any], ...], multiprocessors: int
) -> Callable[..., Any]:
    count = len(dtypes)
    enough = (
        one for one, least in zip(WIDTHS, _BLOCKS, strict=False) if count * columns >= least * one
    )
    width = min(next(enough, WIDTHS[-1]), columns)
    height = max(1, LANES * _ELEMENTS // width)
    full, rest = divmod(rows, height)
    blocks = count * -(-columns // width)
    # All blocks at once: what a second round of them waits for takes longer than their work.
    resident = -(-blocks // multiprocessors)
    parts = min(MOST_WARPGROUPS, full + (rest > 0), max(1, _RESIDENT // resident))
    most = _RESIDENT // parts + (parts == 1)

    def body(*refs: Any, partials: Any = None, barrier: Any = None) -> None:
        number, block = lax.axis_index("array"), lax.axis_index("columns")
        part = lax.axis_index("part") if parts > 1 else jnp.int32(0)

        def over_rows(source: Any, result: Any, first: Any, width: int) -> None:
            window = pl.ds(first, width)

            def step(turn: Any, total: Any) -> Any:
                row = pl.multiple_of((part + turn * parts) * height, height)
                return total + source[pl.ds(row, height), window]

            def of_full() -> Any:
                turns = lax.div(full - part + (parts - 1), parts)
                start = jnp.zeros((height, width), jnp.float32)
                return jnp.sum(lax.fori_loop(0, turns, step, start), axis=0)

            def of_rest() -> Any:
                return jnp.sum(source[pl.ds(full * height, rest), window], axis=0)

            if not full:
                total = of_rest()
            elif not rest:
                total = of_full()
            else:
                none = jnp.zeros((width,), jnp.float32)
                last = lax.cond(part == full % parts, of_rest, lambda: none)
                total = of_full() + last
            if parts == 1:
                result[window] = total.astype(result.dtype)
                return
            partials[part, pl.ds(0, width)] = total
            await_all(barrier)

            def store() -> None:
                found = partials[0, pl.ds(0, width)]
                for other in range(1, parts):
                    found = found + partials[other, pl.ds(0, width)]
                result[window] = found.astype(result.dtype)

            pl.when(part == 0)(store)

        def of_array(source: Any, result: Any) -> None:
            blocks, left = divmod(columns, width)
            first = pl.multiple_of(block * width, width)
            if not left:
                over_rows(source, result, first, width)
                return
            pl.when(block < blocks)(lambda: over_rows(source, result, first, width))
            pl.when(block == blocks)(lambda: over_rows(source, result, blocks * width, left))

        for one in range(count):
            pl.when(number == one)(functools.partial(of_array, refs[one], refs[count + one]))

    several: dict[str, Any] = {}
    if parts > 1:
        several = dict(num_threads=parts, thread_name="part")
        several["scratch_types"] = dict(
            partials=plgpu.SMEM((parts, width), jnp.float32), **barrier_of(parts)
        )
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((columns,), dtype) for dtype in dtypes),
        grid=(count, -(-columns // width)),
        grid_names=("array", "columns"),
        kernel_name="column_sums",
        compiler_params=plgpu.CompilerParams(min_blocks=max(1, min(resident, most))),
        **several,
    )
    return kernel
