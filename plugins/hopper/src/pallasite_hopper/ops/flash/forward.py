"""The forward kernel: one warpgroup fetches, up to three compute (J. Shah et al., 2024).

A consumer warpgroup has 64 rows of the queries. It always starts the scores of the next block of
keys before it turns those of this one into weights, and the weights stay in registers as the left
operand of the matmul with the values. The warpgroups alternate in issuing wgmma, so that the
softmax of one falls into the matmuls of the others ("FlashAttention-3: Fast and Accurate Attention
with Asynchrony and Low-precision", arXiv 2407.08608). Keys are gone through from the last block to
the first: masks are needed for the first steps only.
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
from pallasite_hopper.ops.flash import softmax
from pallasite_hopper.ops.flash.config import ROWS, AttentionConfig
from pallasite_hopper.ops.flash.tiles import Problem, Tile, Tiles
from pallasite_std.api import attention_dropout

_REGISTERS = {2: (240, 24), 3: (160, 32)}
"""Registers of a lane of the consumer warpgroups and of the producer warpgroup, by the number of
consumer warpgroups: together what the block starts with. With one of them there are enough."""


_LINE = 32
"""Numbers of int32 that copies into shared memory begin at multiples of."""

_ACCOMPANIED = {2: (224, 24, 40)}
"""The same with a further warpgroup, whose share comes last."""


@dataclasses.dataclass(frozen=True)
class Companion:
    """What one more warpgroup of each block does meanwhile, in kernels of one or two consumers.

    Heads have 128 elements at most: the assembler does not give instructions on more columns the
    registers that they need, since a block with so many warpgroups starts with too few.

    Attributes:
      run: its program: takes the number of the block, how many blocks there are, and references to
        the kernel's last operands, which are its own, and to its results.
      results: types of the results that it writes, which come last.
      name: of the kernel.
    """

    run: Callable[[Any, int, tuple[Any, ...], tuple[Any, ...]], None]
    results: tuple[jax.ShapeDtypeStruct, ...]
    name: str


def build(
    problem: Problem,
    config: AttentionConfig,
    multiprocessors: int,
    companion: Companion | None = None,
) -> Callable[..., Any]:
    """The kernel as a function of q, k, v and the lengths and pairs that the problem has.

    Returns (batch, q_seq, q_heads, value_dim), and log-sum-exp as (batch, q_heads, q_seq rounded up
    to whole tiles), in two parts before the last dimension if the problem says so, or without
    residuals None; then what the companion writes, which needs residuals.
    """
    tiles = Tiles(problem, config, multiprocessors)
    rows, dim, v_dim = config.warpgroups, problem.head_tile, problem.value_tile
    scratch = {
        "q_smem": plgpu.SMEM((rows, ROWS, dim), problem.dtype),
        "k_smem": plgpu.SMEM((config.stages, config.block_kv, dim), problem.dtype),
        "v_smem": plgpu.SMEM((config.stages, config.block_kv, v_dim), problem.out_dtype),
        "q_full": plgpu.Barrier(num_barriers=rows),
        "q_empty": plgpu.Barrier(num_barriers=rows),
        "k_full": _keys_full(problem, config),
        "v_full": plgpu.Barrier(num_barriers=config.stages),
        "k_empty": _released(config),
        "v_empty": _released(config),
    }
    if problem.terms.has("kv_segments"):
        line = -(-config.block_kv // _LINE) * _LINE
        scratch["segments_smem"] = plgpu.SMEM((config.stages, line), jnp.int32)
    if config.separate_out:
        scratch["out_smem"] = plgpu.SMEM((rows, ROWS, v_dim), problem.out_dtype)
    if config.ping_pong and rows > 1:
        scratch["turn"] = plgpu.Barrier(num_barriers=rows)
    if config.split > 1:
        # Sums take the place of the keys when these have been gone through.
        several = (rows,) if rows > 1 else ()
        sums = plgpu.SMEM((*several, ROWS, v_dim), jnp.float32)
        scratch["k_smem"] = plgpu.RefUnion(scratch["k_smem"], sums)
        scratch["statistics"] = plgpu.SMEM((*several, 2, ROWS), jnp.float32)
        scratch["together"] = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=rows)
    result = jax.ShapeDtypeStruct(
        (problem.batch, problem.q_seq, problem.q_heads, problem.value_dim), problem.out_dtype
    )
    numbers = (2,) if problem.two_numbers else ()
    residuals = jax.ShapeDtypeStruct(
        (problem.batch, problem.q_heads, *numbers, tiles.per_head * tiles.rows), jnp.float32
    )
    table = tiles.table()
    more = () if companion is None else companion.results
    kernel: Callable[..., Any] = plgpu.kernel(
        _Forward(problem, config, tiles, table is not None, companion).run,
        out_type=(result, residuals, *more) if problem.save_residuals else (result,),
        grid=(tiles.clusters,),
        grid_names=("clusters",),
        cluster=(config.cluster * config.split,),
        cluster_names=("cluster",),
        num_threads=config.warpgroups + (1 if companion is None else 2),
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="attention_forward" if companion is None else companion.name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            unsafe_no_auto_barriers=True,
        ),
    )

    def call(*operands: Any) -> tuple[Any, ...]:
        results = kernel(*operands) if table is None else kernel(*operands, table)
        return results if problem.save_residuals else (*results, None)

    return call


def _keys_full(problem: Problem, config: AttentionConfig) -> Any:
    """Barriers on which copies of keys, and of their segments, arrive."""
    if problem.terms.has("kv_segments"):
        return plgpu.Barrier(num_arrivals=2, num_barriers=config.stages)
    return plgpu.Barrier(num_barriers=config.stages)


def _released(config: AttentionConfig) -> Any:
    """Barriers on which the readers of stages arrive: those of all blocks that fill them."""
    arrivals = {"num_arrivals": config.warpgroups, "num_barriers": config.stages}
    if config.cluster == 1:
        return plgpu.Barrier(**arrivals)
    return plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals)


def _wait_if(condition: Any, barrier: Any) -> None:
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


class _Forward:
    """The body of the kernel for one problem and configuration."""

    def __init__(
        self,
        problem: Problem,
        config: AttentionConfig,
        tiles: Tiles,
        table: bool,
        companion: Companion | None,
    ):
        self.problem, self.config, self.tiles, self.table = problem, config, tiles, table
        self.companion = companion
        # Scores have their scale already where something else happens to them.
        scaled = problem.soft_cap is not None or problem.terms.biased
        self.factor = softmax.LOG2_E * (1.0 if scaled else problem.scale)
        biased = problem.terms.biased
        self.lowest = softmax.LOWEST if biased else softmax.lowest(self.factor)
        window = problem.ahead is not None or problem.left is not None
        self.masked = window or problem.kv_lengths or problem.kv_seq % config.block_kv != 0
        self.masked = self.masked or problem.terms.segmented or problem.terms.has("visits")
        self.in_parts = config.split > 1 or problem.parts > 1
        self.masked = self.masked or self.in_parts  # Parts need not have keys.
        # The registers of three warpgroups do not suffice for masks and factors of rows: with both,
        # kernels take 1 to 7 % longer. There scores have to be below 2**30 in exponents of 2.
        self.one_factor = config.warpgroups == 3 and self.masked and not biased
        # Whether blocks at the beginning are masked, too.
        self.masked_begin = problem.left is not None or problem.terms.segmented
        self.given: dict[str, Any] = {}

    def run(self, q: Any, k: Any, v: Any, *refs: Any, **scratch: Any) -> None:
        """The kernel's body; ``refs`` are lengths, pairs, the companion's operands and the table,
        if any, then results."""
        companion, made = self.companion, ()
        if companion is not None:
            place = len(refs) - len(companion.results)
            refs, made = refs[:place], refs[place:]
        *given, out, lse = refs if self.problem.save_residuals else (*refs, None)
        given = list(given)
        lengths = (
            given.pop(0) if self.problem.q_lengths else None,
            given.pop(0) if self.problem.kv_lengths else None,
        )
        pairs = given.pop(0) if self.problem.pairs else None
        self.given = {name: given.pop(0) for name in self.problem.terms.names}
        table = given.pop() if self.table else None
        if self.config.split > 1:
            scratch["k_smem"], scratch["sums"] = scratch["k_smem"]
        self.scratch = scratch
        warpgroup = lax.axis_index("warpgroup")
        shares: dict[int, Any] = _REGISTERS if companion is None else _ACCOMPANIED
        registers = shares.get(self.config.warpgroups)

        def fetch_all() -> None:
            if registers is not None:
                plgpu.set_max_registers(registers[1], action="decrease")
            self.tiles.each(
                lambda tile, carry: self._fetch(q, k, v, pairs, tile, carry),
                (jnp.int32(0), jnp.int32(0), jnp.bool_(True)),
                lengths,
                table,
                self.given,
            )

        def compute_all() -> None:
            if registers is not None:
                plgpu.set_max_registers(registers[0], action="increase")
            if "turn" in scratch:
                # The first turn is the first warpgroup's.
                plgpu.barrier_arrive(
                    scratch["turn"].at[0], predicate=warpgroup == self.config.warpgroups - 1
                )
            self.tiles.each(
                lambda tile, stage: self._compute(out, lse, tile, stage, warpgroup),
                jnp.int32(0),
                lengths,
                table,
                self.given,
            )
            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup == self.config.warpgroups)(fetch_all)
        pl.when(warpgroup < self.config.warpgroups)(compute_all)
        if companion is None:
            return

        def accompany() -> None:
            if registers is not None:
                plgpu.set_max_registers(registers[2], action="decrease")
            block = lax.axis_index("clusters") * self.config.cluster + lax.axis_index("cluster")
            blocks = self.tiles.clusters * self.config.cluster
            companion.run(block, blocks, tuple(given), made)

        pl.when(warpgroup == self.config.warpgroups + 1)(accompany)

    def _columns(self, size: int, tile: int) -> tuple[Any, ...]:
        """The window along the elements of a head where it leaves the array: what lies beyond is
        read as zero and not written. Its start is a value of the kernel, since a number would be
        checked."""
        if size == tile:
            return ()
        return (pl.ds(lax.add(jnp.int32(0), jnp.int32(0)), tile),)

    @property
    def _of_keys(self) -> tuple[Any, ...]:
        return self._columns(self.problem.head_dim, self.problem.head_tile)

    @property
    def _of_values(self) -> tuple[Any, ...]:
        return self._columns(self.problem.value_dim, self.problem.value_tile)

    def _next(self, stage: Any) -> Any:
        following = stage + 1
        return lax.select(following == self.config.stages, jnp.int32(0), following)

    # The producer warpgroup ---------------------------------------------------------------------

    def _fetch(self, q: Any, k: Any, v: Any, pairs: Any, tile: Tile, carry: Any) -> Any:
        """Starts all copies of a tile; ``carry``: stage, blocks so far, whether it is the first."""
        s, config = self.scratch, self.config
        stage, filled, first = carry
        of_queries = of_keys = tile.batch
        if self.problem.parts > 1:
            of_queries = of_keys = lax.div(tile.batch, self.problem.parts)
        if pairs is not None:
            of_queries, of_keys = pairs[tile.batch, 0], pairs[tile.batch, 1]

        def load(source: Any, kind: str, block: Any, stage: Any, filled: Any) -> None:
            # The first time round the stages are free.
            _wait_if(filled >= config.stages, s[f"{kind}_empty"].at[stage])
            rows = pl.ds(block * config.block_kv, config.block_kv)
            columns = self._of_keys if kind == "k" else self._of_values
            plgpu.copy_gmem_to_smem(
                source.at[of_keys, rows, tile.kv_head, *columns],
                s[f"{kind}_smem"].at[stage],
                s[f"{kind}_full"].at[stage],
                collective_axes="cluster" if config.cluster > 1 else None,
            )
            if kind == "k" and self.problem.terms.has("kv_segments"):
                plgpu.copy_gmem_to_smem(
                    self.given["kv_segments"].at[tile.batch, rows],
                    s["segments_smem"].at[stage, 0 : config.block_kv],
                    s["k_full"].at[stage],
                )

        # Not a Python number, so that the window may leave the array.
        last = jnp.int32(tile.last)
        load(k, "k", tile.block(last), stage, filled)
        for part in range(config.warpgroups):
            _wait_if(jnp.logical_not(first), s["q_empty"].at[part])
            rows = pl.ds(tile.start + part * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                q.at[of_queries, rows, tile.head, *self._of_keys],
                s["q_smem"].at[part],
                s["q_full"].at[part],
            )

        def step(index: Any, carry: Any) -> Any:
            stage, filled = carry
            following = self._next(stage)
            load(k, "k", tile.block(last - index), following, filled + 1)
            load(v, "v", tile.block(last - index + 1), stage, filled)
            return following, filled + 1

        stage, filled = lax.fori_loop(1, tile.blocks, step, (stage, filled))
        load(v, "v", tile.block(jnp.int32(tile.first)), stage, filled)
        return self._next(stage), filled + 1, jnp.bool_(False)

    # The consumer warpgroups -------------------------------------------------------------------

    def _compute(self, out: Any, lse: Any, tile: Tile, stage: Any, warpgroup: Any) -> Any:
        """One tile; returns the stage of the next one's first block."""
        problem, config = self.problem, self.config
        start = tile.start + warpgroup * ROWS
        last = tile.last
        full = self._full_blocks(tile, start)

        def scope(acc: Any) -> Any:
            plgpu.barrier_wait(self.scratch["q_full"].at[warpgroup])
            scores = self._first_scores(stage, warpgroup)
            maxima = jnp.full((ROWS,), self.lowest, jnp.float32)
            block = tile.block(last)
            scores = self._capped(scores, tile, start, block)
            scores = self._shown(scores, tile, start, block, stage)
            self._release_segments(stage)
            maxima, _, weights = self._weights(scores, maxima)
            kept = self._kept(weights, tile, start, block)
            plgpu.barrier_wait(self.scratch["v_full"].at[stage])
            carry = (
                stage,
                maxima,
                softmax.partial_sums(weights),
                kept.astype(problem.out_dtype),
            )
            acc[...] = jnp.zeros((ROWS, problem.value_tile), jnp.float32)

            def step(masked: bool) -> Callable[[Any, Any], Any]:
                return lambda index, carry: self._step(
                    acc, tile, start, warpgroup, tile.block(last - index), carry, masked
                )

            first = 1
            if self.masked:
                # Blocks with keys that some row does not see.
                partial = lax.max(jnp.int32(1), last + 1 - full)
                if self.masked_begin or self.in_parts:
                    partial = lax.min(partial, tile.blocks)
                carry = lax.fori_loop(1, partial, step(True), carry)
                first = partial
            rest = self._window_blocks(tile, start, first) if self.masked_begin else tile.blocks
            carry = lax.fori_loop(first, rest, step(False), carry)
            if self.masked_begin:
                carry = lax.fori_loop(rest, tile.blocks, step(True), carry)
            if config.separate_out:
                plgpu.barrier_arrive(self.scratch["q_empty"].at[warpgroup])
            end, maxima, sums, weights = carry
            plgpu.wgmma(acc, weights, self.scratch["v_smem"].at[end])
            result = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            plgpu.barrier_arrive(self.scratch["v_empty"].at[end])
            self._finish(result, maxima, sums, out, lse, tile, start, warpgroup)
            return self._next(end)

        return pl.run_scoped(scope, plgpu.ACC((ROWS, problem.value_tile), jnp.float32))

    def _full_blocks(self, tile: Tile, start: Any) -> Any:
        """How many blocks of keys, from the first, all rows from ``start`` on see as a whole."""
        if not self.masked:
            return tile.blocks
        if self.problem.terms.period is not None:
            return jnp.int32(0)
        seen = tile.kv_length
        ahead = self.problem.ahead
        if ahead is not None:
            seen = lax.min(jnp.int32(seen), start + (ahead + 1) + tile.kv_length - tile.q_length)
        full = lax.div(lax.max(jnp.int32(0), jnp.int32(seen)), self.config.block_kv)
        if self.problem.terms.segmented:
            full = lax.min(full, self._of_segment(tile, start)[1])
        return tile.place(full)

    def _of_segment(self, tile: Tile, start: Any) -> tuple[Any, Any]:
        """Blocks of keys [begin, end) that have the segment of the rows alone."""
        if not self.problem.terms.has("spans"):
            return jnp.int32(0), jnp.int32(0)
        part = lax.div(start - tile.number * self.tiles.rows, ROWS)
        entry = self.given["spans"].at[tile.batch, tile.number]
        return entry[2 + 2 * part], entry[3 + 2 * part]

    def _window_blocks(self, tile: Tile, start: Any, first: Any) -> Any:
        """How many blocks, from the last, end before those whose keys lie before some window."""
        size, left = self.config.block_kv, self.problem.left
        if self.problem.terms.period is not None:
            return tile.blocks
        if left is None:
            whole = self._of_segment(tile, start)[0]
        else:
            begin = start + (ROWS - 1) + tile.kv_length - tile.q_length - left
            whole = lax.div(lax.max(jnp.int32(0), jnp.int32(begin)) + (size - 1), size)
            if self.problem.terms.segmented:
                whole = lax.max(whole, self._of_segment(tile, start)[0])
        whole = tile.place(whole)
        return lax.clamp(jnp.int32(first), tile.last + 1 - whole, jnp.int32(tile.blocks))

    def _wait_turn(self, warpgroup: Any) -> None:
        if "turn" in self.scratch:
            plgpu.barrier_wait(self.scratch["turn"].at[warpgroup])

    def _pass_turn(self, warpgroup: Any) -> None:
        if "turn" in self.scratch:
            following = lax.select(
                warpgroup == self.config.warpgroups - 1, jnp.int32(0), warpgroup + 1
            )
            plgpu.barrier_arrive(self.scratch["turn"].at[following])

    def _start_scores(self, scores: Any, stage: Any, warpgroup: Any) -> None:
        keys = plgpu.transpose_ref(self.scratch["k_smem"].at[stage], (1, 0))
        plgpu.wgmma(scores, self.scratch["q_smem"].at[warpgroup], keys, accumulate=False)

    def _first_scores(self, stage: Any, warpgroup: Any) -> Any:
        def scope(scores: Any) -> Any:
            plgpu.barrier_wait(self.scratch["k_full"].at[stage])
            self._wait_turn(warpgroup)
            self._start_scores(scores, stage, warpgroup)
            self._pass_turn(warpgroup)
            return plgpu.wgmma_accumulator_load(scores, wait_n=0)

        result = pl.run_scoped(scope, plgpu.ACC((ROWS, self.config.block_kv), jnp.float32))
        self._release_keys(stage)
        return result

    def _release_keys(self, stage: Any) -> None:
        """Where segments of keys are in shared memory, too, these are read later."""
        if not self.problem.terms.has("kv_segments"):
            plgpu.barrier_arrive(self.scratch["k_empty"].at[stage])

    def _release_segments(self, stage: Any) -> None:
        if self.problem.terms.has("kv_segments"):
            plgpu.barrier_arrive(self.scratch["k_empty"].at[stage])

    def _step(
        self, acc: Any, tile: Tile, start: Any, warpgroup: Any, block: Any, carry: Any, masked: bool
    ) -> Any:
        """The scores of one block of keys, and meanwhile the values of the block before."""
        s, config, problem = self.scratch, self.config, self.problem
        stage, maxima, sums, weights = carry
        following = self._next(stage)

        def scope(scores: Any) -> Any:
            plgpu.barrier_wait(s["k_full"].at[following])
            self._wait_turn(warpgroup)
            self._start_scores(scores, following, warpgroup)
            plgpu.wgmma(acc, weights, s["v_smem"].at[stage])
            self._pass_turn(warpgroup)
            return plgpu.wgmma_accumulator_load(scores, wait_n=1)

        scores = pl.run_scoped(scope, plgpu.ACC((ROWS, config.block_kv), jnp.float32))
        self._release_keys(following)
        scores = self._capped(scores, tile, start, block)
        if masked:
            scores = self._shown(scores, tile, start, block, following)
        self._release_segments(following)
        maxima, shrink, fresh = self._weights(scores, maxima)
        sums = sums * softmax.broadcast_rows(shrink, softmax.COLUMNS) + softmax.partial_sums(fresh)
        # The wait also keeps the assembler from moving the next one above the exponentials: it
        # moves nothing across the loop in it.
        plgpu.barrier_wait(s["v_full"].at[following])
        so_far = plgpu.wgmma_accumulator_load(acc, wait_n=0)
        plgpu.barrier_arrive(s["v_empty"].at[stage])
        acc[...] = so_far * softmax.broadcast_rows(shrink, problem.value_tile)
        kept = self._kept(fresh, tile, start, block)
        return following, maxima, sums, kept.astype(problem.out_dtype)

    def _capped(self, scores: Any, tile: Tile, start: Any, block: Any) -> Any:
        """Scores from products, to be multiplied by ``factor``."""
        problem = self.problem
        if problem.soft_cap is not None:
            scores = softmax.cap(scores, problem.scale, problem.soft_cap)
        elif problem.terms.biased:
            scores = scores * problem.scale
        if problem.terms.has("bias"):
            keys = pl.ds(block * self.config.block_kv, self.config.block_kv)
            place = problem.terms.entry("bias", tile.batch, tile.head)
            bias = self.given["bias"][(*place, pl.ds(start, ROWS), keys)]
            scores = scores + bias.astype(jnp.float32)
        if problem.terms.has("slopes"):
            slope = self.given["slopes"][problem.terms.entry("slopes", tile.batch, tile.head)]
            shape = scores.shape
            own = start + tile.kv_length - tile.q_length - block * self.config.block_kv
            rows, columns = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
            distance = jnp.abs(rows + own - columns).astype(jnp.float32)
            scores = scores - slope * distance
        return scores

    def _weights(self, scores: Any, maxima: Any) -> tuple[Any, Any, Any]:
        """New maxima, the factor of what was summed up under the old ones, and the weights."""
        larger = jnp.maximum(maxima, jnp.max(scores, axis=1))
        factor: Any = self.factor
        if self.one_factor:
            factor = jnp.full((ROWS,), factor, jnp.float32)
        elif not self.problem.terms.biased:
            factor = softmax.factors(larger, factor)
        shrink = jnp.exp2((maxima - larger) * factor)
        weights = softmax.exponentials(scores, factor, larger, self.config.polynomial)
        return larger, shrink, weights

    def _kept(self, weights: Any, tile: Tile, start: Any, block: Any) -> Any:
        """Weights of which dropout leaves some, without the factor of these."""
        problem = self.problem
        if not problem.dropout:
            return weights
        seed = self.given["seed"]
        head = tile.batch * problem.q_heads + tile.head
        key = attention_dropout.key_of_head((seed[0], seed[1]), head)
        first = block * self.config.block_kv
        kept = attention_dropout.kept(key, weights.shape, start, first, 1, problem.dropout)
        # As a number, LLVM would round first and choose halves of registers afterwards.
        zero = lax.optimization_barrier(jnp.float32(0.0))
        return jnp.where(kept, weights, zero)

    def _shown(self, scores: Any, tile: Tile, start: Any, block: Any, stage: Any) -> Any:
        """Minus infinity for keys that a row does not see."""
        if not self.masked:
            return scores
        limit = tile.kv_length - block * self.config.block_kv
        shape = scores.shape
        columns = lax.broadcasted_iota(jnp.int32, shape, 1)
        shown = columns < limit
        problem = self.problem
        if problem.ahead is not None or problem.left is not None:
            rows = lax.broadcasted_iota(jnp.int32, shape, 0)
            own = limit - tile.q_length + start
            if problem.ahead is not None:
                until = rows + (own + (problem.ahead + 1))
                shown = columns < lax.min(until, jnp.broadcast_to(limit, shape))
            if problem.left is not None:
                shown = shown & (columns >= rows + (own - problem.left))
        period = problem.terms.period
        if period is not None:
            queries = start + lax.broadcasted_iota(jnp.int32, (ROWS,), 0)
            begin = lax.div(queries, period) * period - block * self.config.block_kv
            begin = softmax.broadcast_rows(begin, shape[1])
            shown = shown & (columns >= begin) & (columns < begin + period)
        if problem.terms.has("q_segments"):
            of_queries = self.given["q_segments"][tile.batch, pl.ds(start, ROWS)]
            of_keys = self.scratch["segments_smem"][stage, 0 : shape[1]]
            of_keys = jnp.broadcast_to(of_keys[None, :], shape)
            shown = shown & (softmax.broadcast_rows(of_queries, shape[1]) == of_keys)
        return jnp.where(shown, scores, -jnp.inf)

    def _finish(
        self,
        acc: Any,
        maxima: Any,
        sums: Any,
        out: Any,
        lse: Any,
        tile: Tile,
        start: Any,
        warpgroup: Any,
    ) -> None:
        """Divides by the row sums and writes the results."""
        problem, config = self.problem, self.config
        total = jnp.sum(sums, axis=1)
        share = None
        if config.split > 1:
            maxima, total, share = self._over_parts(maxima, total, warpgroup)
        empty = total < softmax.NOTHING
        if problem.q_lengths:
            rows = lax.broadcasted_iota(jnp.int32, (ROWS,), 0)
            empty = empty | (rows >= tile.q_length - start)
        inverse = jnp.where(empty, 0.0, attention_dropout.growth(problem.dropout) / total)
        if share is not None:
            inverse = inverse * share
        values = acc * softmax.broadcast_rows(inverse, problem.value_tile)
        first, count = start, ROWS
        if config.split > 1:
            count = ROWS // config.split
            part = lax.axis_index("cluster") * count
            values, first = self._added(values, part, count, warpgroup), start + part
        values = values.astype(problem.out_dtype)
        if config.separate_out:
            staging = self.scratch["out_smem"].at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        else:
            staging = self.scratch["q_smem"].at[warpgroup]
            if problem.value_tile != problem.head_tile:
                staging = staging.at[:, pl.ds(0, problem.value_tile)]
        if config.split > 1:
            staging = staging.at[pl.ds(0, count)]
        staging[...] = values
        plgpu.commit_smem()
        rows = pl.ds(first, count)
        plgpu.copy_smem_to_gmem(staging, out.at[tile.batch, rows, tile.head, *self._of_values])
        rows = pl.ds(start, ROWS)
        if problem.save_residuals:
            logarithm = jnp.log(total)
            if not problem.two_numbers:
                logarithm = maxima * (self.factor / softmax.LOG2_E) + logarithm
            logarithm = jnp.where(empty, -jnp.inf, logarithm)

            def write() -> None:
                if problem.two_numbers:
                    lse[tile.batch, tile.head, 0, rows] = jnp.where(empty, 0.0, maxima)
                    lse[tile.batch, tile.head, 1, rows] = logarithm
                else:
                    lse[tile.batch, tile.head, rows] = logarithm

            if config.split > 1:
                pl.when(lax.axis_index("cluster") == 0)(write)
            else:
                write()
        if not config.separate_out:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.scratch["q_empty"].at[warpgroup])
        if config.split > 1:
            self._meet()  # Until all have arrived, others read this block's sums.

    # The blocks that share a tile ---------------------------------------------------------------

    def _meet(self) -> None:
        """Waits for the cluster's blocks."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["together"])
        plgpu.barrier_wait(self.scratch["together"])

    def _of_parts(self, name: str, warpgroup: Any) -> list[Any]:
        """A reference to what the same warpgroup of each block of the cluster has."""
        own = self._own(name, warpgroup)
        return [plgpu.cluster_ref(own, {"cluster": part}) for part in range(self.config.split)]

    def _own(self, name: str, warpgroup: Any) -> Any:
        ref = self.scratch[name]
        return ref if self.config.warpgroups == 1 else ref.at[warpgroup]

    def _over_parts(self, maxima: Any, total: Any, warpgroup: Any) -> tuple[Any, Any, Any]:
        """Maxima and sums over all blocks, and the factor of what this one has summed up."""
        own = self._own("statistics", warpgroup)
        own[0] = maxima
        own[1] = total
        self._meet()
        parts = self._of_parts("statistics", warpgroup)
        all_maxima = [ref[0] for ref in parts]
        largest = functools.reduce(jnp.maximum, all_maxima)
        sums = [
            jnp.exp2((one - largest) * self.factor) * ref[1]
            for one, ref in zip(all_maxima, parts, strict=True)
        ]
        share = jnp.exp2((maxima - largest) * self.factor)
        return largest, functools.reduce(jnp.add, sums), share

    def _added(self, values: Any, first: Any, count: int, warpgroup: Any) -> Any:
        """This block's rows of the sum over the blocks."""
        self._own("sums", warpgroup)[...] = values
        self._meet()
        mine = pl.ds(pl.multiple_of(first, count), count)
        parts = self._of_parts("sums", warpgroup)
        return functools.reduce(jnp.add, [ref.at[mine][...] for ref in parts])
