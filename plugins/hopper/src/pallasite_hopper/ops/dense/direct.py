"""GEMM of operands whose rows begin anywhere, and of small ones: a kernel without copies.

The copy engine takes rows that are multiples of 16 bytes. Here warpgroups move their operands
themselves, and multiply them from shared memory while those of the next steps are on their way.
Rows that begin at words are copied by ``cp.async`` (:mod:`pallasite_hopper.matrix.row_copies`);
others are loaded word by word, shifted in registers (:mod:`pallasite_hopper.matrix.odd_rows`) and
stored. The warpgroups of a block, and the blocks of a cluster, share the steps along k of one tile
of the result.
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
from jax.experimental.pallas import triton

from pallasite import gpu as plgpu
from pallasite.plugin import jax_internals as _jax
from pallasite_hopper.matrix.odd_rows import RowWindow, load_row_words, rows_of_words
from pallasite_hopper.matrix.row_copies import copy_row_words
from pallasite_std.api import Epilogue, MatmulProblem

ROWS = 64
"""Of a tile of the left operand."""

DEPTH_BYTES = 128
"""Of a step along k."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectConfig:
    """The configuration of the kernel.

    Attributes:
      columns: of a tile, a multiple of 8; a power of two if the right operand's rows are not along
        k.
      warpgroups: of a block, that share the steps of a tile.
      split_k: blocks of a cluster that share them, 1 to 8.
      ahead: steps whose words are on their way to registers of a warpgroup.
      stages: steps of an operand whose rows begin at words that shared memory has room for.
      swap: whether the right operand is b.T @ a.T's left one, of which a tile has 64 rows.
      at_once: whether lanes write the sums that they have, not by way of shared memory; only if
        nobody shares the steps of a tile.
    """

    columns: int
    warpgroups: int = 4
    split_k: int = 1
    swap: bool = False
    ahead: int = 1
    stages: int = 4
    at_once: bool = False


def build(
    problem: MatmulProblem, config: DirectConfig, epilogue: Epilogue
) -> Callable[..., jax.Array]:
    """The kernel as a function of a, b, and the operands of the epilogue: none of them is padded,
    and scalars are vectors of one element."""
    return _Direct(problem, config, epilogue).kernel()


class EpilogueVector:
    """An operand of the epilogue: what is beyond its end is zero."""

    def __init__(self, ref: Any):
        self.ref = ref

    def __getitem__(self, window: Any) -> Any:
        if isinstance(window, int):
            return self.ref[window]
        places = window.start + lax.broadcasted_iota(jnp.int32, (window.size,), 0)
        mask = places < self.ref.shape[0]
        return triton.load(self.ref.at[window], mask=mask, other=jnp.zeros((), self.ref.dtype))


class _Direct:
    """The kernel for one problem and configuration."""

    def __init__(self, problem: MatmulProblem, config: DirectConfig, epilogue: Epilogue):
        self.config, self.epilogue, self.result = config, epilogue, problem
        self.problem = problem.swapped() if config.swap else problem
        self.depth = DEPTH_BYTES // problem.size
        self.steps = -(-problem.k // self.depth)
        self.units = config.warpgroups * config.split_k
        tile = (ROWS, config.columns)
        self.tile_m, self.tile_n = tile[::-1] if config.swap else tile
        self.m_tiles = -(-problem.m // self.tile_m)
        self.n_tiles = -(-problem.n // self.tile_n)
        left, right = self.problem.transpose_a, not self.problem.transpose_b
        self.left = self._window(self.problem.m, ROWS, turned=left)
        self.right = self._window(self.problem.n, config.columns, turned=right)

    def _window(self, extent: int, tile: int, *, turned: bool) -> RowWindow:
        """Of an operand that is (extent, k), or (k, extent) if ``turned``."""
        k, size = self.problem.k, self.problem.size
        if turned:
            return RowWindow(k, extent, (self.depth, tile), size, exact=False)
        return RowWindow(extent, k, (tile, self.depth), size, exact=True)

    def _buffers(self, window: RowWindow) -> tuple[int, ...]:
        stages = self._rounds(window)
        return (self.config.warpgroups, stages, *window.shape)

    def _rounds(self, window: RowWindow) -> int:
        """Steps that shared memory has room for."""
        return 2 if window.shifted else self.config.stages

    def kernel(self) -> Callable[..., jax.Array]:
        """The function of the operands."""
        config, problem = self.config, self.problem
        compute = config.warpgroups
        tile = (self.tile_m, self.tile_n)
        operands = [
            plgpu.SMEM(self._buffers(self.left), problem.dtype_a),
            plgpu.SMEM(self._buffers(self.right), problem.dtype_b),
        ]
        sums = plgpu.SMEM((compute, *tile), problem.accumulator)
        scratch: dict[str, Any] = {
            "memory": plgpu.RefUnion(operands, sums),
        }
        if not config.at_once:
            scratch["multiplied"] = plgpu.Barrier(num_arrivals=compute)
        if compute > 1:
            scratch["added"] = plgpu.Barrier(num_arrivals=compute)
        if config.split_k > 1:
            parts = (config.split_k - 1, *tile)
            scratch["parts_smem"] = plgpu.SMEM(parts, problem.accumulator)
            scratch["summed"] = plgpu.Barrier(num_arrivals=config.split_k - 1)
        shape = (self.result.m, self.result.n)
        kernel: Callable[..., jax.Array] = plgpu.kernel(
            self.body,
            out_type=jax.ShapeDtypeStruct(shape, problem.out_dtype),
            grid=(self.m_tiles * self.n_tiles,),
            grid_names=("tile",),
            cluster=(config.split_k,),
            cluster_names=("part",),
            num_threads=compute,
            thread_name="warpgroup",
            scratch_types=scratch,
            kernel_name="direct_matmul",
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
        memory: Any,
        multiplied: Any = None,
        added: Any = None,
        parts_smem: Any = None,
        summed: Any = None,
    ) -> None:
        """The kernel's body."""
        *operands, out = refs
        operands = [ref if len(ref.shape) > 1 else EpilogueVector(ref) for ref in operands]
        config = self.config
        left, right = (b, a) if config.swap else (a, b)
        warpgroup, tile = lax.axis_index("warpgroup"), lax.axis_index("tile")
        # Neighbours have the same rows of the left operand.
        if config.swap:
            m, n = lax.rem(tile, self.m_tiles), lax.div(tile, self.m_tiles)
        else:
            m, n = lax.div(tile, self.n_tiles), lax.rem(tile, self.n_tiles)
        m, n = m * self.tile_m, n * self.tile_n
        buffers, sums_smem = memory
        buffers = [one.at[warpgroup] for one in buffers]
        sums = self._sums(warpgroup, left, right, buffers, m, n)
        if config.at_once:
            self._write(operands, out, sums.T if config.swap else sums, m, n)
            return
        # Sums are where the operands were.
        plgpu.barrier_arrive(multiplied)
        plgpu.barrier_wait(multiplied)
        own = sums_smem.at[warpgroup]
        view = plgpu.transpose_ref(own, (1, 0)) if config.swap else own
        view[...] = sums
        if config.warpgroups == 1:
            plgpu.commit_smem()
        else:
            plgpu.barrier_arrive(added)

        def finish() -> None:
            if config.warpgroups > 1:
                plgpu.barrier_wait(added)
            total = sums_smem[0]
            for other in range(1, config.warpgroups):
                total = total + sums_smem[other]
            if config.split_k == 1:
                self._write(operands, out, total, m, n)
                return
            part = lax.axis_index("part")

            def send() -> None:
                target = parts_smem.at[part - 1]
                plgpu.async_store_smem(total, target, summed, cluster_idx=0, cluster_dim="part")

            def collect() -> None:
                plgpu.barrier_wait(summed)
                every = total
                for other in range(config.split_k - 1):
                    every = every + parts_smem[other]
                self._write(operands, out, every, m, n)

            lax.cond(part == 0, collect, send)

        pl.when(warpgroup == 0)(finish)

    def _sums(
        self,
        warpgroup: Any,
        left: Any,
        right: Any,
        buffers: Any,
        m: Any,
        n: Any,
    ) -> Any:
        """A warpgroup's sums of a tile."""
        problem, depth = self.problem, self.depth
        row, column = (n, m) if self.config.swap else (m, n)
        unit = warpgroup
        if self.config.split_k > 1:
            unit = unit + lax.axis_index("part") * self.config.warpgroups
        # One beyond the end has zeros.
        count = lax.max(lax.div(self.steps - 1 - unit + self.units, self.units), jnp.int32(1))
        places = functools.partial(self._places, row, column)

        windows = (self.left, self.right)
        refs = (left, right)
        turned = (problem.transpose_a, problem.transpose_b)
        stages, ahead = self.config.stages, self.config.ahead
        copied = [not window.shifted for window in windows]

        def at_step(index: Any) -> Any:
            return places((unit + index * self.units) * depth)

        def fetch(index: Any) -> list[Any]:
            """Loads of the words of operands that go through registers."""
            at = at_step(index)
            return [
                [] if copied[i] else load_row_words(refs[i], windows[i], *at[i]) for i in range(2)
            ]

        def copy(index: Any) -> None:
            """Starts the copies of the others to the buffers of a step."""
            stage, at = lax.rem(index, jnp.int32(stages)), at_step(index)
            for i in range(2):
                if copied[i]:
                    row, column = at[i]
                    copy_row_words(refs[i], windows[i], row, column, buffers[i].at[stage])

        def buffer(which: int, index: Any) -> Any:
            count = self._rounds(windows[which])
            return buffers[which].at[lax.rem(index, jnp.int32(count))]

        def multiplied(which: int, index: Any) -> Any:
            view = buffer(which, index)
            return plgpu.transpose_ref(view, (1, 0)) if turned[which] else view

        def scope(acc: Any) -> Any:
            def step(index: Any, on_their_way: Any) -> Any:
                words, *waiting = on_their_way
                plgpu.wgmma_wait(0)
                if any(copied):
                    plgpu.wait_gmem_to_smem((stages - 2) * sum(copied))
                at = at_step(index)
                for i in range(2):
                    if not copied[i]:
                        rows = rows_of_words(words[i], refs[i], windows[i], *at[i])
                        buffer(i, index)[...] = rows
                plgpu.commit_smem()
                following = fetch(index + ahead)
                plgpu.wgmma(acc, multiplied(0, index), multiplied(1, index), accumulate=index > 0)
                copy(index + (stages - 1))
                return [*waiting, following]

            for index in range(stages - 1):
                copy(jnp.int32(index))
            lax.fori_loop(0, count, step, [fetch(place) for place in range(ahead)])
            sums = acc[...]
            if any(copied):
                plgpu.wait_gmem_to_smem(0)
            return sums

        shape = (ROWS, self.config.columns)
        return pl.run_scoped(scope, plgpu.ACC(shape, problem.accumulator))

    def _places(self, row: Any, column: Any, k: Any) -> tuple[Any, Any]:
        """Where the parts of both operands begin."""
        left = (k, row) if self.problem.transpose_a else (row, k)
        right = (column, k) if self.problem.transpose_b else (k, column)
        return left, right

    def _write(self, operands: Any, out: Any, values: Any, m: Any, n: Any) -> None:
        shape = (self.tile_m, self.tile_n)
        rows, columns = pl.ds(m, self.tile_m), pl.ds(n, self.tile_n)
        row = m + lax.broadcasted_iota(jnp.int32, shape, 0)
        column = n + lax.broadcasted_iota(jnp.int32, shape, 1)
        inside = (row < self.result.m) & (column < self.result.n)
        residual = None
        if self.epilogue.residual:
            residual = triton.load(operands[-1].at[rows, columns], mask=inside)
        values = self.epilogue.apply(values, operands, rows, columns, residual, swapped=False)
        _jax.masked_store(out, (rows, columns), values.astype(out.dtype), mask=inside)
