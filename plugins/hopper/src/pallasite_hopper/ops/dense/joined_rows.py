"""GEMM whose right operand has rows that the copy engine cannot read, without a copy of it.

Two, four or eight rows of the matrix together are a multiple of 16 bytes
(:mod:`pallasite_hopper.matrix.joined_rows`): the GEMM is the sum of as many, each with every
second, fourth or eighth row of it and such columns of the left operand, which are brought together
before. In each of these all rows begin equally far behind multiples of 16 bytes, from which the
copy engine reads them: so far are the sums shifted that it leaves. They are parts of the sums over
k, which a second kernel adds up, together with the products of the last rows, if some are left.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.matrix.joined_rows import joined_rows, rows_together
from pallasite_hopper.ops.dense.candidates import candidates, with_most_stages
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import H200, H200_CHOICE, Rates, Sizes, nanoseconds
from pallasite_hopper.ops.dense.kernel import Item, MatmulLoop
from pallasite_hopper.ops.dense.kernel import build as build_kernel
from pallasite_hopper.ops.dense.split_columns import split_columns
from pallasite_std.api import Epilogue, MatmulProblem

SWIZZLED = 64
"""Elements of 16 bits of the rows of a swizzle."""

VECTOR = 8
"""Elements of 16 bits at whose multiples the copy engine begins to read."""

_LEAST_COLUMNS = 256
"""Of the matrix; joined rows are longer than any tile."""

_MOST_PARTS, _MOST_ROUNDS = 64, 4
"""Parts of the sums, and rounds of tiles if there are more than there must be."""

_SPLIT_BYTES = 1500.0
"""Of the left operand that are read and written in a nanosecond where its columns are brought
together, which are far from each other."""


@dataclasses.dataclass(frozen=True)
class JoinedRowsConfig:
    """The configuration of the kernel.

    Attributes:
      matmul: of the GEMM; its ``parts`` are a multiple of the rows that are joined.
    """

    matmul: MatmulConfig


def joined_rows_config(sizes: Sizes) -> tuple[JoinedRowsConfig, float] | None:
    """The best configuration, and nanoseconds that all kernels take; None if there is none."""
    return _best(sizes)


@functools.lru_cache(maxsize=1024)
def _best(sizes: Sizes) -> tuple[JoinedRowsConfig, float] | None:
    found = joined_rows_configs(sizes)
    if not found:
        return None
    return found[0], joined_rows_nanoseconds(found[0], sizes)


def joined_rows_configs(sizes: Sizes) -> list[JoinedRowsConfig]:
    """Configurations, the best by the estimate first; none where rows of the matrix are aligned, or
    lie along k, or are few or short."""
    together = rows_together(sizes.n, sizes.size)
    if sizes.size != 2 or sizes.transpose_b or together == 1 or sizes.n < _LEAST_COLUMNS:
        return []
    if not sizes.m or sizes.k < 2 * VECTOR * together:
        return []
    found: dict[MatmulConfig, float] = {}
    for one in candidates(_plain(sizes)):
        divided = max(one.parts, one.split_k, one.cluster_blocks, one.last_parts)
        if divided > 1 or one.alternate:
            continue
        steps = -(-(sizes.k // together) // one.tile_k)
        tiles = -(-sizes.n // one.tile_m) if one.swap else -(-sizes.n // one.tile_n)
        tiles *= -(-sizes.m // (one.tile_n if one.swap else one.tile_m)) * together
        for split in range(1, min(steps, _MOST_PARTS // together) + 1):
            if split > 1 and tiles * split > _MOST_ROUNDS * H200.multiprocessors:
                break
            config = dataclasses.replace(one, parts=together * split, epilogue_in_stages=False)
            config = with_most_stages(config, sizes.size, 4)
            if config.stages >= 2:
                found[config] = _nanoseconds(config, sizes, H200_CHOICE)
    return [JoinedRowsConfig(one) for one in sorted(found, key=found.__getitem__)]


def joined_rows_nanoseconds(config: JoinedRowsConfig, sizes: Sizes) -> float:
    """The time of all kernels, good enough to compare configurations."""
    return _nanoseconds(config.matmul, sizes, H200)


def _nanoseconds(config: MatmulConfig, sizes: Sizes, rates: Rates) -> float:
    split = H200.copy + 2 * sizes.m * sizes.k * sizes.size / _SPLIT_BYTES
    return nanoseconds(config, _plain(sizes), rates) + split


def _plain(sizes: Sizes) -> Sizes:
    """Of the sums, all parts together."""
    pitch = rows_together(sizes.n, sizes.size) * sizes.n
    return dataclasses.replace(sizes, out_size=4, transpose_a=False, pitch_n=pitch)


def build(
    problem: MatmulProblem, config: JoinedRowsConfig, epilogue: Epilogue, multiprocessors: int
) -> Callable[..., jax.Array]:
    """The GEMM as a function of a, b, and the operands of the epilogue: none of them is padded, and
    scalars are vectors of one element."""
    together = rows_together(problem.n, problem.size)
    rows = problem.k // together
    # As far behind multiples of 16 bytes as rows begin, but for as little as no tensor map has.
    columns = -(-(problem.n + VECTOR - 1) // VECTOR) * VECTOR
    sums = dataclasses.replace(
        problem, n=columns, k=rows, out_dtype=problem.accumulator, transpose_a=False
    )
    matmul = config.matmul
    # A block that runs fewer steps than there are stages has no use for the others.
    most = _steps(sums, matmul, matmul.parts // together)
    matmul = dataclasses.replace(matmul, stages=max(2, min(matmul.stages, most)))
    swapped = sums.swapped() if matmul.swap else sums
    loop = _JoinedRowsLoop(swapped, matmul, Epilogue(), problem.n, together)
    kernel = build_kernel(
        swapped, matmul, Epilogue(), multiprocessors, loop, name="joined_rows_matmul"
    )

    def function(a: jax.Array, b: jax.Array, *extras: jax.Array) -> jax.Array:
        parts = (_transposed_split if problem.transpose_a else split_columns)(a, together)
        given = kernel(b, parts) if matmul.swap else kernel(parts, b)
        total = _added(given, problem.n, together)
        for row in range(rows * together, problem.k):
            column = a[row] if problem.transpose_a else a[:, row]
            total += column[:, None].astype(total.dtype) * b[row].astype(total.dtype)
        residual = extras[-1] if epilogue.residual else None
        whole = slice(None)
        total = epilogue.apply(total, extras, whole, whole, residual, swapped=False)
        result: jax.Array = total.astype(problem.out_dtype)
        return result

    return function


def _steps(problem: MatmulProblem, config: MatmulConfig, parts: int) -> int:
    """Steps along k of all tiles of a block, of that which has most; ``parts`` of them are of the
    same rows."""
    m, n = (problem.n, problem.m) if config.swap else (problem.m, problem.n)
    units = -(-m // config.tile_m) * -(-n // config.tile_n) * config.parts
    return -(-units // H200.multiprocessors) * -(-problem.k // (config.tile_k * parts))


def _transposed_split(a: jax.Array, together: int) -> jax.Array:
    """``split_columns`` of the transpose of a matrix."""
    columns = a.shape[0] // together
    parts = a[: columns * together].reshape(columns, together, a.shape[1]).transpose(1, 2, 0)
    return jnp.pad(parts, ((0, 0), (0, 0), (0, -columns % VECTOR)))


def _added(parts: jax.Array, columns: int, together: int) -> jax.Array:
    """The sum of parts, each of which begins some columns before what is wanted of it."""
    shifted = []
    for number in range(parts.shape[0]):
        behind = number % together * columns % VECTOR
        shifted.append(parts[number, :, behind : behind + columns])
    return functools.reduce(jnp.add, shifted)


class _JoinedRowsLoop(MatmulLoop):
    """The GEMM's loop, in which some parts of k have every so-manieth row."""

    def __init__(
        self,
        problem: MatmulProblem,
        config: MatmulConfig,
        epilogue: Epilogue,
        columns: int,
        together: int,
    ):
        super().__init__(problem, config, epilogue)
        self.columns, self.together = columns, together

    def arrange(self, scratch: dict[str, Any]) -> None:
        # Columns that the swizzle has room for below each other: so one instruction copies all
        # rows of them, whatever the number of rows in the matrix is.
        name = "a_smem" if self.config.swap else "b_smem"
        tiles = (plgpu.TilingTransform((self.config.tile_k, SWIZZLED)), plgpu.SwizzleTransform(128))
        memory = scratch[name]
        scratch[name] = plgpu.SMEM(memory.shape, memory.dtype, transforms=tiles)

    def _steps(self, part: Any) -> tuple[Any, Any]:
        parts = self.config.parts // self.together
        if parts == 1:
            return 0, self.k_steps
        assert parts <= self.k_steps  # None is without a step.
        part = lax.div(part, jnp.int32(self.together))
        least, more = divmod(self.k_steps, parts)
        first = part * least + lax.min(part, jnp.int32(more))
        return first, least + (part < more).astype(jnp.int32)

    def fetch_left(self, a: Any, item: Item, window: Any, smem: Any, full: Any, share: Any) -> None:
        del share
        depth = window[0] if self.config.swap else window[1]
        first = self.config.evict_first and self.n_tiles == 1
        source = self._source(a, item, depth, item.m, self.config.tile_m, self.config.swap)
        plgpu.copy_gmem_to_smem(source, smem, full, evict_first=first)

    def fetch_right(self, b: Any, item: Item, depth: Any, smem: Any, full: Any, share: Any) -> None:
        del share
        first = self.config.evict_first and self.m_tiles == 1
        source = self._source(b, item, depth, item.n, self.config.tile_n, not self.config.swap)
        plgpu.copy_gmem_to_smem(source, smem, full, evict_first=first)

    def _source(
        self, operand: Any, item: Item, depth: Any, begin: Any, extent: int, matrix: bool
    ) -> Any:
        """What is copied of the matrix, or of the parts of the other operand."""
        which = lax.rem(item.part, jnp.int32(self.together))
        if not matrix:
            return operand.at[which, pl.ds(begin, extent), depth]
        before = lax.div(which * self.columns, jnp.int32(VECTOR)) * VECTOR
        column = pl.multiple_of(before + begin, VECTOR)
        return joined_rows(operand, self.together).at[depth, pl.ds(column, extent)]
