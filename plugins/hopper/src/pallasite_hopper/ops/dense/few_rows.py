"""Products of few rows with a matrix whose rows begin anywhere: no tensor cores, no shared memory.

Such a product takes as long as the matrix takes to arrive. Lanes load it by vectors of 16 bytes
that begin at multiples of those (:mod:`pallasite_hopper.matrix.aligned_rows`), and multiply them
where they are: a lane has only rows of which 8 columns lie in the same places of its vectors. The
warpgroups of a block, and the blocks of a cluster, share the rows of a range of columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallasite import gpu as plgpu
from pallasite.plugin import jax_internals as _jax
from pallasite_hopper.matrix.aligned_rows import VectorWindow, elements_behind, load_row_vectors
from pallasite_hopper.ops.dense.direct import EpilogueVector
from pallasite_std.api import Epilogue, MatmulProblem

ELEMENTS = 1024
"""That a warpgroup loads at once, by vectors of eight."""

VECTOR = 8
"""Elements."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRowsConfig:
    """The configuration of the kernel.

    Attributes:
      columns: of a tile, of which 8 belong to its neighbours where rows are not aligned: 32, 64 or
        128.
      warpgroups: of a block, that share the rows of the matrix.
      split_k: blocks of a cluster that share them, 1 to 8.
      together: loads of a warpgroup that are on their way at a time.
      fold: whether all lanes of a warpgroup first add up the sums of rows that begin equally far
        behind vectors, and then as many as a tile has columns those of different ones.
    """

    columns: int
    warpgroups: int = 4
    split_k: int = 1
    together: int = 4
    fold: bool = False


def build(
    problem: MatmulProblem, config: FewRowsConfig, epilogue: Epilogue
) -> Callable[..., jax.Array]:
    """The kernel as a function of a, b, and the operands of the epilogue: none of them is padded,
    and scalars are vectors of one element."""
    return _FewRows(problem, config, epilogue).kernel()


class _FewRows:
    """The kernel for one problem and configuration."""

    def __init__(self, problem: MatmulProblem, config: FewRowsConfig, epilogue: Epilogue):
        self.problem, self.config, self.epilogue = problem, config, epilogue
        self.rows = ELEMENTS // config.columns
        self.aligned = problem.n % VECTOR == 0
        self.useful = config.columns - VECTOR * (not self.aligned)
        self.tiles = -(-problem.n // self.useful)
        self.units = config.warpgroups * config.split_k
        self.chunk = self.rows * config.together
        shape = (self.rows, config.columns)
        self.window = VectorWindow(problem.k, problem.n, shape, problem.size)

    def kernel(self) -> Callable[..., jax.Array]:
        """The function of the operands."""
        config, problem = self.config, self.problem
        compute, columns = config.warpgroups, config.columns
        # What is read beyond the last sums is not used.
        sums = problem.m * compute * ELEMENTS + columns
        scratch: dict[str, Any] = {
            "sums_smem": plgpu.SMEM((sums,), jnp.float32),
            "added": plgpu.Barrier(num_arrivals=compute),
        }
        if config.split_k > 1:
            parts = (config.split_k - 1, problem.m, columns)
            scratch["parts_smem"] = plgpu.SMEM(parts, jnp.float32)
            scratch["summed"] = plgpu.Barrier(num_arrivals=(config.split_k - 1) * problem.m)
        kernel: Callable[..., jax.Array] = plgpu.kernel(
            self.body,
            out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
            grid=(self.tiles,),
            grid_names=("tile",),
            cluster=(config.split_k,),
            cluster_names=("part",),
            num_threads=compute,
            thread_name="warpgroup",
            scratch_types=scratch,
            kernel_name="few_rows_matmul",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
                unsafe_no_auto_barriers=True,
                approx_math=True,
            ),
        )
        return kernel

    def body(
        self,
        a: Any,
        b: Any,
        *refs: Any,
        sums_smem: Any,
        added: Any,
        parts_smem: Any = None,
        summed: Any = None,
    ) -> None:
        """The kernel's body."""
        *operands, out = refs
        operands = [ref if len(ref.shape) > 1 else EpilogueVector(ref) for ref in operands]
        config, columns, m = self.config, self.config.columns, self.problem.m
        warpgroup = lax.axis_index("warpgroup")
        first = lax.axis_index("tile") * self.useful
        place = warpgroup * (m * ELEMENTS)
        tails = self._tails(a, b, first)
        for row, sums in enumerate(self._sums(warpgroup, a, b, first)):
            own = sums_smem.at[pl.ds(place + row * ELEMENTS, ELEMENTS)]
            own[...] = sums.reshape(ELEMENTS)

        def clear() -> None:
            end = m * config.warpgroups * ELEMENTS
            sums_smem[pl.ds(end, columns)] = jnp.zeros((columns,), jnp.float32)

        pl.when(warpgroup == 0)(clear)
        plgpu.barrier_arrive(added)

        def finish() -> None:
            plgpu.barrier_wait(added)
            if config.fold:
                self._fold(sums_smem)
            totals = [self._total(sums_smem, b, row) for row in range(m)]
            if tails:
                totals = [sum(both) for both in zip(totals, tails, strict=True)]
            if config.split_k == 1:
                self._write(operands, out, totals, first)
                return
            part = lax.axis_index("part")

            def send() -> None:
                for row, total in enumerate(totals):
                    plgpu.async_store_smem(
                        total,
                        parts_smem.at[part - 1, row],
                        summed,
                        cluster_idx=0,
                        cluster_dim="part",
                    )

            def collect() -> None:
                plgpu.barrier_wait(summed)
                every = list(totals)
                for row in range(m):
                    for other in range(config.split_k - 1):
                        every[row] = every[row] + parts_smem[other, row]
                self._write(operands, out, every, first)

            lax.cond(part == 0, collect, send)

        pl.when(warpgroup == 0)(finish)

    def _sums(self, warpgroup: Any, a: Any, b: Any, first: Any) -> list[Any]:
        """A warpgroup's sums for each row: of rows of the matrix that begin equally far behind
        vectors, of the columns of a tile and those before."""
        config, problem = self.config, self.problem
        unit = warpgroup
        if config.split_k > 1:
            unit = unit + lax.axis_index("part") * config.warpgroups
        chunks = -(-problem.k // self.chunk)
        count = lax.div(chunks - 1 - unit + self.units, self.units)
        shape = (self.rows, config.columns)

        def fetch(index: Any) -> list[Any]:
            start = (unit + index * self.units) * self.chunk
            rows = [start + number * self.rows for number in range(config.together)]
            vectors = [load_row_vectors(b, self.window, row, first) for row in rows]
            return [vectors, [self._factors(a, row) for row in rows]]

        def step(index: Any, carry: Any) -> Any:
            sums, (vectors, factors) = carry
            following = fetch(index + 1)
            sums = list(sums)
            for vector, own in zip(vectors, factors, strict=True):
                values = vector.astype(jnp.float32)
                for row, factor in enumerate(own):
                    wide = jnp.broadcast_to(factor.astype(jnp.float32)[:, None], shape)
                    sums[row] = sums[row] + wide * values
            return [sums, following]

        zeros = [jnp.zeros(shape, jnp.float32) for _ in range(problem.m)]
        sums, _ = lax.fori_loop(0, count, step, [zeros, fetch(jnp.int32(0))])
        found: list[Any] = sums
        return found

    def _factors(self, a: Any, start: Any) -> list[Any]:
        """What rows of the matrix are multiplied by."""
        rows = pl.ds(start, self.rows)
        inside = start + lax.broadcasted_iota(jnp.int32, (self.rows,), 0) < self.problem.k
        zero = jnp.zeros((), a.dtype)
        windows = [
            (rows, 0) if self.problem.transpose_a else (row, rows) for row in range(self.problem.m)
        ]
        return [triton.load(a.at[window], mask=inside, other=zero) for window in windows]

    def _fold(self, sums_smem: Any) -> None:
        """Adds up the sums of rows that begin equally far behind vectors, of all warpgroups."""
        m, columns, different = self.problem.m, self.config.columns, self._different
        for row in range(m):
            total = None
            for warpgroup in range(self.config.warpgroups):
                for first in range(0, self.rows, different):
                    place = ((warpgroup * m + row) * self.rows + first) * columns
                    own = sums_smem[pl.ds(place, different * columns)]
                    total = own if total is None else total + own
            # Each lane has read what is there.
            sums_smem.at[pl.ds(row * self.rows * columns, different * columns)][...] = total
        plgpu.commit_smem()

    @property
    def _different(self) -> int:
        """So many rows of the matrix begin differently far behind vectors."""
        return min(self.rows, VECTOR // math.gcd(VECTOR, self.problem.n))

    def _total(self, sums_smem: Any, b: Any, row: int) -> Any:
        """The sums of all warpgroups, those of each row of the matrix from where it begins."""
        problem, columns = self.problem, self.config.columns
        begin = jnp.int32(0) if self._whole else elements_behind(b)
        total = None
        warpgroups, rows = self.config.warpgroups, self.rows
        if self.config.fold:
            warpgroups, rows = 1, self._different
        for warpgroup in range(warpgroups):
            for other in range(rows):
                place = ((warpgroup * problem.m + row) * self.rows + other) * columns
                behind = lax.rem(begin + other * problem.n % VECTOR, jnp.int32(VECTOR))
                own = sums_smem[pl.ds(place + (0 if self.aligned else behind), columns)]
                total = own if total is None else total + own
        return total

    @property
    def _whole(self) -> bool:
        """Whether a matrix ends where a vector does, and so do those before it in a batch."""
        return self.problem.n * self.problem.k % VECTOR == 0

    def _tails(self, a: Any, b: Any, first: Any) -> list[Any]:
        """The products of elements that no vector holds, those behind the last one; they are part
        of the sums of one block."""
        problem, columns = self.problem, self.config.columns
        if self._whole:
            return []
        end = lax.rem(elements_behind(b) + problem.n * problem.k % VECTOR, jnp.int32(VECTOR))
        column = first + lax.broadcasted_iota(jnp.int32, (columns,), 0)
        mask = (column >= problem.n - end) & (column < problem.n)
        if self.config.split_k > 1:
            mask = mask & (lax.axis_index("part") == 0)
        k, zero = problem.k - 1, jnp.zeros((), b.dtype)
        last = triton.load(b.at[k, pl.ds(first, columns)], mask=mask, other=zero)
        found = []
        for row in range(problem.m):
            factor = a[(k, row) if problem.transpose_a else (row, k)]
            found.append(factor.astype(jnp.float32) * last.astype(jnp.float32))
        return found

    def _write(self, operands: Any, out: Any, totals: list[Any], first: Any) -> None:
        problem, columns = self.problem, self.config.columns
        shape = (1, columns)
        column = first + lax.broadcasted_iota(jnp.int32, shape, 1)
        inside = column < jnp.minimum(first + self.useful, problem.n)
        window = pl.ds(first, columns)
        for row, total in enumerate(totals):
            rows, residual = pl.ds(row, 1), None
            if self.epilogue.residual:
                residual = triton.load(operands[-1].at[rows, window], mask=inside)
            values = total.reshape(shape)
            values = self.epilogue.apply(values, operands, rows, window, residual, swapped=False)
            _jax.masked_store(out, (rows, window), values.astype(out.dtype), mask=inside)
