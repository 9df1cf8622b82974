"""The portable kernels of grouped (ragged) GEMM: a block of one warpgroup for a tile.

A tile has rows of one group. How many tiles the groups have is known on the device only: there are
blocks for the most that can be, and those beyond do nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.plugin import jax_internals as _jax
from pallasite_std.ops.dense.config import STEP_BYTES, MatmulConfig
from pallasite_std.ops.rings import PARAMS, first_elements, over_steps


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is multiplied.

    Attributes:
      m: rows of all groups, and those after them.
      n, k: extents of the matrices.
      groups: how many.
      dtype, out_dtype: of operands and result.
      transposed: the matrices of ``ragged_matmul`` are given as (n, k).
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: Any
    out_dtype: Any
    transposed: bool = False


def build(problem: Problem, config: MatmulConfig) -> Callable[..., jax.Array]:
    """The kernel of ``ragged_matmul`` as a function of (a, b, sizes)."""
    tile_m, tile_n, stages = config.tile_m, config.tile_n, config.stages
    tile_k = STEP_BYTES // problem.dtype.itemsize
    steps = -(-problem.k // tile_k)
    n_tiles = -(-problem.n // tile_n)
    # Each group has one tile that is not full, and so have the rows after all groups.
    most = -(-problem.m // tile_m) + problem.groups

    def body(
        a: Any, b: Any, sizes: Any, out: Any, *, a_smem: Any, b_smem: Any, loaded: Any
    ) -> None:
        group, start, end = _find(sizes, lax.axis_index("tile"), tile_m, problem)
        first_column = lax.axis_index("column") * tile_n
        rows, columns = pl.ds(start, tile_m), pl.ds(first_column, tile_n)

        def fetch(step: Any, stage: Any) -> None:
            depth = pl.ds(step * tile_k, tile_k)
            window = (columns, depth) if problem.transposed else (depth, columns)
            plgpu.copy_gmem_to_smem(a.at[rows, depth], a_smem.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(b.at[group, *window], b_smem.at[stage], loaded.at[stage])

        def multiply(step: Any, stage: Any, sums: Any) -> Any:
            right = b_smem[stage]
            return plgpu.mma(sums, a_smem[stage], right.T if problem.transposed else right)

        def compute() -> None:
            # Rows after all groups are zero: no steps.
            count = jnp.where(group < problem.groups, steps, 0)
            zero = jnp.zeros((tile_m, tile_n), jnp.float32)
            sums = over_steps(count, stages, loaded, fetch, multiply, zero)
            shape = (tile_m, tile_n)
            row = start + lax.broadcasted_iota(jnp.int32, shape, 0)
            column = first_column + lax.broadcasted_iota(jnp.int32, shape, 1)
            written = (row < end) & (column < problem.n)
            _jax.masked_store(out, (rows, columns), sums.astype(problem.out_dtype), mask=written)

        pl.when(start < end)(compute)

    b_shape = (tile_n, tile_k) if problem.transposed else (tile_k, tile_n)
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(n_tiles, most),
        grid_names=("column", "tile"),
        scratch_types={
            "a_smem": plgpu.SMEM((stages, tile_m, tile_k), problem.dtype),
            "b_smem": plgpu.SMEM((stages, *b_shape), problem.dtype),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        kernel_name="warp_ragged_matmul",
        compiler_params=PARAMS,
    )
    return kernel


def _find(sizes: Any, number: Any, tile_m: int, problem: Problem) -> tuple[Any, Any, Any]:
    """The group of a tile, its first row, and where the group's rows end.

    The rows after all groups are those of one more. Of a tile that there is not, the first row is
    not before the end.
    """

    def step(group: Any, carry: Any) -> Any:
        tiles, row, found, start, end = carry
        size = jnp.where(
            group < problem.groups, sizes[lax.min(group, problem.groups - 1)], problem.m - row
        )
        size = lax.max(lax.min(size, problem.m - row), 0)
        after = tiles + lax.div(size + (tile_m - 1), tile_m)
        here = (tiles <= number) & (number < after)
        found = jnp.where(here, group, found)
        start = jnp.where(here, row + (number - tiles) * tile_m, start)
        end = jnp.where(here, row + size, end)
        return after, row + size, found, start, end

    zero = jnp.int32(0)
    _, _, *found = lax.fori_loop(0, problem.groups + 1, step, (zero, zero, zero, zero, zero))
    return found[0], found[1], found[2]


def build_transposed(problem: Problem, config: MatmulConfig) -> Callable[..., jax.Array]:
    """The kernel of ``transposed_ragged_matmul`` as a function of (a, b, sizes).

    Tiles are along k and n; steps are along the rows of a group.
    """
    tile_m, tile_n, stages = config.tile_m, config.tile_n, config.stages
    depth = STEP_BYTES // problem.dtype.itemsize
    width = config.epilogue_n(problem.out_dtype.itemsize)

    def body(
        a: Any,
        b: Any,
        sizes: Any,
        out: Any,
        *,
        a_smem: Any,
        b_smem: Any,
        out_smem: Any,
        loaded: Any,
    ) -> None:
        group = lax.axis_index("group")
        first_row, first_column = lax.axis_index("row") * tile_m, lax.axis_index("column") * tile_n

        def size_of(group: Any) -> Any:
            return lax.min(lax.max(sizes[group], jnp.int32(0)), jnp.int32(problem.m))

        start = lax.fori_loop(0, group, lambda one, total: total + size_of(one), jnp.int32(0))
        end = lax.min(start + size_of(group), problem.m)
        rows, columns = pl.ds(first_row, tile_m), pl.ds(first_column, tile_n)

        def fetch(step: Any, stage: Any) -> None:
            window = pl.ds(start + step * depth, depth)
            plgpu.copy_gmem_to_smem(a.at[window, rows], a_smem.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(b.at[window, columns], b_smem.at[stage], loaded.at[stage])

        def multiply(step: Any, stage: Any, sums: Any) -> Any:
            # Rows of the next group are hidden from both operands: they need not be finite.
            left, right = a_smem[stage].T, b_smem[stage]
            rest = end - start - step * depth
            left, right = lax.cond(
                rest >= depth,
                lambda left, right: (left, right),
                lambda left, right: (first_elements(left, rest, 1), first_elements(right, rest, 0)),
                left,
                right,
            )
            return plgpu.mma(sums, left, right)

        steps = lax.div(lax.max(end - start, 0) + (depth - 1), depth)
        zero = jnp.zeros((tile_m, tile_n), jnp.float32)
        sums = over_steps(steps, stages, loaded, fetch, multiply, zero)
        for part in range(0, tile_n, width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = sums[:, part : part + width].astype(problem.out_dtype)
            columns = pl.ds(first_column + part, width)
            plgpu.copy_smem_to_gmem(out_smem, out.at[group, rows, columns])
        plgpu.wait_smem_to_gmem(0)

    kernel: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.groups, problem.k, problem.n), problem.out_dtype),
        grid=(-(-problem.n // tile_n), -(-problem.k // tile_m), problem.groups),
        grid_names=("column", "row", "group"),
        scratch_types={
            "a_smem": plgpu.SMEM((stages, depth, tile_m), problem.dtype),
            "b_smem": plgpu.SMEM((stages, depth, tile_n), problem.dtype),
            "out_smem": plgpu.SMEM((tile_m, width), problem.out_dtype),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        kernel_name="warp_transposed_ragged_matmul",
        compiler_params=PARAMS,
    )
    return kernel
