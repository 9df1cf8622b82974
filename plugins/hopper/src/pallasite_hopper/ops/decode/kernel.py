"""The kernel that reads the cache: one warpgroup fetches, one for each head computes.

The rows of the cache are the left operands of the tensor cores, so that few queries waste nothing:
scores are computed as keys (tile, head_dim) times queries (head_dim, columns), results as
transposed values (head_dim, tile) times weights (tile, columns), which pass through shared memory.
A range of tiles that has not all of an item leaves (result, maxima, sums) for the block whose range
ends the item, which combines them when it is done with all else; see ``combine.py``.

Source: T. Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.decode.combine import Role, Shares, combined
from pallasite_hopper.ops.decode.config import DecodeConfig
from pallasite_hopper.ops.decode.schedule import (
    Item,
    Problem,
    Schedule,
    loads_lengths,
    padded_lengths,
)
from pallasite_hopper.ops.flash import softmax

_ROWS = 64
"""Rows of one instruction's left operand."""

_QUERY_SLOTS = 2

_LINE, _WINDOW = 32, 256
"""Entries of the page table in a line of the cache, and in the largest window of a copy."""


def partial_shapes(problem: Problem, config: DecodeConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Partial results, maxima and sums.

    The first index is 0 for the part of an item that began before the block's range, 1 for one that
    begins in it; then come block and head.
    """
    assert config.blocks is not None
    outer = (2, config.blocks, config.heads)
    vectors = jax.ShapeDtypeStruct((*outer, problem.columns), jnp.float32)
    results = jax.ShapeDtypeStruct((*outer, problem.head_tile, problem.columns), jnp.float32)
    return results, vectors, vectors


def out_shape(problem: Problem) -> jax.ShapeDtypeStruct:
    """Results: queries that share a head of the cache are one matrix."""
    matrices = problem.batch * problem.tokens * problem.kv_heads
    return jax.ShapeDtypeStruct((matrices, problem.group, problem.head_dim), problem.dtype)


def build(problem: Problem, config: DecodeConfig) -> Callable[..., Any]:
    """The kernel as a function of (q, k, v, k_scales?, v_scales?, lengths?, page_indices?).

    q has the shape of the results; k and v are arrays of rows, see ``_Decode._window``.
    Returns (results, *partial results); of the latter, only what was written is defined.
    """
    assert config.stages is not None
    assert config.blocks is not None
    columns, dim, heads, stages = problem.columns, problem.head_tile, config.heads, config.stages
    scratch = {
        "ring": plgpu.SMEM((stages, heads, config.tile, dim), problem.cache_dtype),
        "q_smem": plgpu.SMEM((_QUERY_SLOTS, heads, columns, dim), problem.dtype),
        "p_smem": plgpu.SMEM((heads, config.tile, columns), problem.weights_dtype),
        "out_smem": plgpu.SMEM((heads, columns, dim), problem.dtype),
        "full": plgpu.Barrier(num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=heads, num_barriers=stages),
        "q_full": plgpu.Barrier(num_barriers=_QUERY_SLOTS),
        "q_empty": plgpu.Barrier(num_arrivals=heads, num_barriers=_QUERY_SLOTS),
    }
    if problem.lengths and not loads_lengths(problem, config):
        scratch["lengths_smem"] = plgpu.SMEM((padded_lengths(problem),), jnp.int32)
        scratch["lengths_full"] = plgpu.Barrier()
    built: Callable[..., Any] = plgpu.kernel(
        _Decode(problem, config).run,
        out_type=(out_shape(problem), *partial_shapes(problem, config)),
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=heads + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="decode_attention",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            unsafe_no_auto_barriers=True,
            min_blocks=config.blocks_per_multiprocessor,
            # Lengths decide which heads are done by one block, and which in parts.
            plugin_options={"standard": {"partial_outputs": True}},
        ),
    )
    return built


def shares_items(problem: Problem, config: DecodeConfig) -> bool:
    """Whether ranges may begin or end within items."""
    assert config.blocks is not None
    lines = problem.batch * problem.kv_heads // config.heads * problem.parts
    whole = not problem.lengths and lines % config.blocks == 0
    return config.blocks > 1 and not whole


def fetch_lengths(lengths: Any, lengths_smem: Any, barrier: Any) -> None:
    """Starts the copy of the lengths; zeros follow them."""
    start = lax.axis_index("block") * 0  # Not a Python number: the window leaves the array.
    plgpu.copy_gmem_to_smem(lengths.at[pl.ds(start, lengths_smem.shape[0])], lengths_smem, barrier)


def write_results(
    problem: Problem, values: Any, sums: Any, staging: Any, out: Any, item: Item, head: Any
) -> None:
    """Divides transposed results (head_tile, columns) by their sums and writes them."""
    inverse = jnp.where(sums == 0, 0.0, 1 / sums)
    scaled = values * lax.broadcast_in_dim(inverse, values.shape, (1,))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.transpose_ref(staging, (1, 0))[...] = scaled.astype(problem.dtype)
    plgpu.commit_smem()
    rows = problem.lane_heads
    for token in range(problem.lane_tokens):
        plgpu.copy_smem_to_gmem(
            staging.at[pl.ds(token * rows, rows)],
            out.at[
                matrix_of(problem, item, head, token),
                pl.ds(item.group_start, rows),
                *columns_of(problem),
            ],
        )


def columns_of(problem: Problem) -> tuple[Any, ...]:
    """The window along the elements of a head, where it leaves the array: what lies beyond is read
    as zero and not written. Its start is a value of the kernel, since a number would be checked."""
    if problem.head_tile == problem.head_dim:
        return ()
    return (pl.ds(lax.axis_index("block") * 0, problem.head_tile),)


def matrix_of(problem: Problem, item: Item, head: Any, token: int) -> Any:
    """Which matrix of queries a token of an item belongs to."""
    tokens = item.sequence * problem.tokens + item.token + token
    return tokens * problem.kv_heads + head


class _Decode:
    """The body of the kernel for one problem and configuration."""

    def __init__(self, problem: Problem, config: DecodeConfig):
        self.problem, self.config = problem, config
        capped = problem.soft_cap is not None
        self.factor = softmax.LOG2_E * (1.0 if capped else problem.scale)
        self.lowest = softmax.lowest(self.factor)
        self.page_rows = min(problem.page_size or config.tile, config.tile)
        """Rows that one copy fetches."""

    def run(self, q: Any, k: Any, v: Any, *refs: Any, **scratch: Any) -> None:
        """The kernel's body; ``refs`` are scales, lengths and pages, if any, then the results."""
        given = list(refs)
        out, results, maxima, sums = given[-4:]
        del given[-4:]
        self.scales = (given.pop(0), given.pop(0)) if self.problem.scales else None
        self.scratch, self.partial = scratch, (results, maxima, sums)
        self.left = None
        if shares_items(self.problem, self.config):
            assert self.config.blocks is not None
            count = self.config.blocks * self.config.heads
            self.left = pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
        lengths = given.pop(0) if self.problem.lengths else None
        pages = given[0] if given else None
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        if pages is not None and self.config.ahead:
            pl.when(warpgroup == self.config.heads)(lambda: self._prefetch(pages, block))
        if "lengths_smem" in scratch:

            def fetch() -> None:
                fetch_lengths(lengths, scratch["lengths_smem"], scratch["lengths_full"])

            pl.when(warpgroup == self.config.heads)(fetch)

            plgpu.barrier_wait(scratch["lengths_full"])
            lengths = scratch["lengths_smem"]
        schedule = Schedule(self.problem, self.config, lengths)

        def memory() -> None:
            zero = jnp.int32(0)
            schedule.each(
                block,
                lambda item, first, count, tiles, carry: self._fetch(
                    q, k, v, pages, item, first, count, carry
                ),
                (zero, zero, zero),
            )

        pl.when(warpgroup == self.config.heads)(memory)

        def compute() -> None:
            begin = schedule.begin(block)
            schedule.each(
                block,
                lambda item, first, count, tiles, carry: self._compute(
                    schedule, out, item, first, count, tiles, carry, warpgroup, block
                ),
                (jnp.int32(0), jnp.int32(0)),
                begin,
            )
            if self.left is not None:
                role = Role.of(schedule, block, begin)
                pl.when(role.combines)(
                    lambda: self._combine(out, role, schedule.item(*begin[:2]), warpgroup, block)
                )
            plgpu.wait_smem_to_gmem(0, wait_read_only=self.config.ahead)

        pl.when(warpgroup < self.config.heads)(compute)

    def _prefetch(self, pages: Any, block: Any) -> None:
        """Brings a block's share of the page table into the L2 cache: whichever entries a block
        needs, another one has asked for them."""
        blocks = self.config.blocks
        assert blocks is not None
        share = -(-pages.shape[0] // blocks)
        share = min(-(-share // _LINE) * _LINE, _WINDOW)
        start = block * share
        plgpu.async_prefetch(pages.at[pl.ds(start, share)], predicate=start < pages.shape[0])

    def _next(self, stage: Any) -> Any:
        following = stage + 1
        return lax.select(following == self.config.stages, jnp.int32(0), following)

    # The producer warpgroup -----------------------------------------------------------------------

    def _fetch(
        self,
        q: Any,
        k: Any,
        v: Any,
        pages: Any,
        item: Item,
        first: Any,
        count: Any,
        carry: Any,
    ) -> Any:
        """Starts the copies of an item; ``carry``: stage, stages filled and items so far."""
        stage, filled, items = carry
        self._fetch_queries(q, item, items)

        def step(index: Any, carry: Any) -> Any:
            stage, filled = carry
            tile = item.hidden + first + index
            starts = self._rows(pages, item, tile)
            self._load(k, item, starts, stage, filled)
            following = self._next(stage)
            self._load(v, item, starts, following, filled + 1)
            return self._next(following), filled + 2

        stage, filled = lax.fori_loop(0, count, step, (stage, filled))
        return stage, filled, items + 1

    def _fetch_queries(self, q: Any, item: Item, items: Any) -> None:
        s, problem = self.scratch, self.problem
        stage = lax.rem(items, _QUERY_SLOTS)

        pl.when(items >= _QUERY_SLOTS)(lambda: plgpu.barrier_wait(s["q_empty"].at[stage]))

        rows = problem.lane_heads
        plgpu.barrier_expect(s["q_full"].at[stage], s["q_smem"].at[stage])
        for head in range(self.config.heads):
            for token in range(problem.lane_tokens):
                matrix = matrix_of(problem, item, item.head + head, token)
                plgpu.copy_gmem_to_smem(
                    q.at[matrix, pl.ds(item.group_start, rows), *columns_of(problem)],
                    s["q_smem"].at[stage, head, pl.ds(token * rows, rows)],
                    s["q_full"].at[stage],
                    arrive=False,
                )

    def _rows(self, pages: Any, item: Item, tile: Any) -> list[Any]:
        """Where the rows of a tile begin, copy by copy; beyond the cache if there are none."""
        problem, config = self.problem, self.config
        start = tile * config.tile
        if pages is None:
            return [start]
        beyond = problem.pages * problem.page_size
        if problem.heads_first:
            beyond *= problem.kv_heads
        found = []
        for part in range(config.tile // self.page_rows):
            row = start + part * self.page_rows
            entry = lax.div(row, problem.page_size)
            entry_of_page = lax.min(entry, problem.pages_per_sequence - 1)
            page = pages[item.sequence * problem.pages_per_sequence + entry_of_page]
            place = page * problem.page_size + (row - entry * problem.page_size)
            found.append(jnp.where(row < item.length, place, beyond))
        return found

    def _load(self, source: Any, item: Item, starts: list[Any], stage: Any, filled: Any) -> None:
        s, config = self.scratch, self.config
        full, destination = s["full"].at[stage], s["ring"].at[stage]

        # The first time round the stages are free.
        pl.when(filled >= config.stages)(lambda: plgpu.barrier_wait(s["empty"].at[stage]))

        plgpu.barrier_expect(full, destination)
        for part, start in enumerate(starts):
            for head in range(config.heads):
                plgpu.copy_gmem_to_smem(
                    self._window(source, item, start, item.head + head),
                    destination.at[head, pl.ds(part * self.page_rows, self.page_rows)],
                    full,
                    arrive=False,
                    evict_first=config.evict_first,
                )

    def _window(self, source: Any, item: Item, start: Any, head: Any) -> Any:
        """Rows of one head: the cache is (batch, rows, heads, head_dim) without pages.

        With pages it is (rows, heads, head_dim), or (rows, head_dim) with the heads first.
        """
        problem, columns = self.problem, columns_of(self.problem)
        if not problem.page_size:
            return source.at[item.sequence, pl.ds(start, self.page_rows), head, *columns]
        if not problem.heads_first:
            return source.at[pl.ds(start, self.page_rows), head, *columns]
        start = start + head * (problem.pages * problem.page_size)
        return source.at[pl.ds(start, self.page_rows), *columns]

    # The consumer warpgroups ---------------------------------------------------------------------

    def _compute(
        self,
        schedule: Schedule,
        out: Any,
        item: Item,
        first: Any,
        count: Any,
        tiles: Any,
        carry: Any,
        warpgroup: Any,
        block: Any,
    ) -> Any:
        """One item, or a part of it; ``carry``: stage and items so far."""
        problem, s = self.problem, self.scratch
        stage, items = carry
        queries = lax.rem(items, _QUERY_SLOTS)
        plgpu.barrier_wait(s["q_full"].at[queries])

        def scope(acc: Any) -> Any:
            acc[...] = jnp.zeros((problem.head_tile, problem.columns), jnp.float32)
            head = item.head + warpgroup
            k_scale, v_scale = self._scales_of(head)
            maxima = jnp.full((problem.columns,), self.lowest, jnp.float32)
            sums = jnp.zeros((_ROWS, problem.columns), jnp.float32)
            stage_after, maxima, sums = lax.fori_loop(
                0,
                count,
                lambda index, carry: self._step(
                    acc, item, item.hidden + first + index, queries, warpgroup, k_scale, carry
                ),
                (stage, maxima, sums),
            )
            plgpu.barrier_arrive(s["q_empty"].at[queries])
            values = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            if v_scale is not None:
                values = values * v_scale
            total = jnp.sum(sums, axis=0)
            whole = count == tiles

            def write() -> None:
                staging = s["out_smem"].at[warpgroup]
                write_results(problem, values, total, staging, out, item, head)

            pl.when(whole)(write)

            def leave() -> None:
                place = (first == 0).astype(jnp.int32), block, warpgroup
                self._leave(place, (values, maxima * self.factor, total))
                shares = Shares.of(schedule, block, first, tiles - (first + count))
                # What a block combines itself it does when it is done with all else.
                pl.when(shares.reader != block)(lambda: self._signal(shares.reader, warpgroup))

            if self.left is not None:
                pl.when(jnp.logical_not(whole))(leave)

            return stage_after

        stage = pl.run_scoped(scope, plgpu.ACC((problem.head_tile, problem.columns), jnp.float32))
        return stage, items + 1

    def _leave(self, place: tuple[Any, ...], part: tuple[Any, Any, Any]) -> None:
        """Writes a transposed result, its maxima and sums."""
        for ref, values in zip(self.partial, part, strict=True):
            ref[place] = values
        plgpu.commit_smem()  # All lanes have written.

    def _parts_for(self, block: Any, warpgroup: Any) -> Any:
        """Counts the parts that others have left for a block to combine."""
        assert self.left is not None
        return self.left.at[block * self.config.heads + warpgroup]

    def _signal(self, block: Any, warpgroup: Any) -> None:
        pl.semaphore_signal(self._parts_for(block, warpgroup))

    def _combine(self, out: Any, role: Role, item: Item, warpgroup: Any, block: Any) -> None:
        """Combines parts of an item.

        Blocks begin in their order, so those that are waited for are running, and end at about the
        same time.
        """
        pl.semaphore_wait(self._parts_for(block, warpgroup), role.parts(block) - 1)
        values, maxima, total = combined(self.problem, self.partial, role, block, warpgroup)

        def complete() -> None:
            staging = self.scratch["out_smem"].at[warpgroup]
            write_results(self.problem, values, total, staging, out, item, item.head + warpgroup)

        def pass_on() -> None:
            self._leave((1, block, warpgroup), (values, maxima, total))
            self._signal(role.last, warpgroup)

        lax.cond(role.leads, pass_on, complete)

    def _scales_of(self, head: Any) -> tuple[Any, Any]:
        if self.scales is None:
            return None, None
        return self.scales[0][head], self.scales[1][head]

    def _step(
        self,
        acc: Any,
        item: Item,
        tile: Any,
        queries: Any,
        warpgroup: Any,
        k_scale: Any,
        carry: Any,
    ) -> Any:
        """One tile: scores, their weights, and the values by the weights."""
        s, problem, config = self.scratch, self.problem, self.config
        keys, maxima, sums = carry
        values = self._next(keys)

        def scope(scores: Any) -> Any:
            plgpu.barrier_wait(s["full"].at[keys])
            right = plgpu.transpose_ref(s["q_smem"].at[queries, warpgroup], (1, 0))
            left = self._left(s["ring"].at[keys, warpgroup], problem.dtype)
            plgpu.wgmma(scores, left, right, accumulate=False)
            return plgpu.wgmma_accumulator_load(scores, wait_n=0)

        shape = (config.tile, problem.columns)
        scores = pl.run_scoped(scope, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(s["empty"].at[keys])
        if k_scale is not None:
            scores = scores * k_scale
        if problem.soft_cap is not None:
            scores = softmax.cap(scores, problem.scale, problem.soft_cap)
        limit = item.length - tile * config.tile
        scores = self._shown(scores, limit, item)
        larger = jnp.maximum(maxima, jnp.max(scores, axis=0))
        factors = softmax.factors(larger, self.factor)
        # The difference first: with a product in a multiply-add, equal extremes do not cancel.
        shrink = jnp.exp2((maxima - larger) * factors)
        factors, scaled = (_spread(one, config.tile) for one in (factors, larger * factors))
        weights = jnp.exp2(scores * factors - scaled)
        s["p_smem"].at[warpgroup][...] = weights.astype(problem.weights_dtype)
        plgpu.commit_smem()
        partial = [weights[start : start + _ROWS] for start in range(0, config.tile, _ROWS)]
        sums = sums * _spread(shrink, _ROWS) + sum(partial[1:], partial[0])
        so_far = plgpu.wgmma_accumulator_load(acc, wait_n=None)
        acc[...] = so_far * _spread(shrink, problem.head_tile)
        plgpu.barrier_wait(s["full"].at[values])
        matrix = s["ring"].at[values, warpgroup]
        if problem.lengths:
            pl.when(limit < config.tile)(lambda: self._clear(matrix, limit))
        left = self._left(plgpu.transpose_ref(matrix, (1, 0)), problem.weights_dtype)
        plgpu.wgmma(acc, left, s["p_smem"].at[warpgroup])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s["empty"].at[values])
        return self._next(values), larger, sums

    def _left(self, operand: Any, dtype: Any) -> Any:
        """Keys or values as a left operand: where they lie, or converted in registers."""
        if not self.problem.narrow:
            return operand
        return operand[...].astype(dtype)

    def _clear(self, matrix: Any, limit: Any) -> None:
        """Zeros in place of values that do not exist: what is there may not be finite."""
        values = matrix[...]
        rows = lax.broadcasted_iota(jnp.int32, values.shape, 0)
        matrix[...] = jnp.where(rows < limit, values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()

    def _shown(self, scores: Any, limit: Any, item: Item) -> Any:
        """Minus infinity for keys that do not exist, come after a token, or before its window."""
        problem, shape = self.problem, scores.shape
        rows = lax.broadcasted_iota(jnp.int32, shape, 0)
        ends = jnp.broadcast_to(limit, shape)
        if problem.tokens > 1:
            columns = lax.broadcasted_iota(jnp.int32, shape, 1)
            behind = problem.tokens - 1 - item.token
            tokens = lax.div(columns, jnp.full(shape, problem.lane_heads, jnp.int32))
            ends = tokens + (limit - behind)
        shown = rows < ends
        if problem.left is not None:
            shown = shown & (rows >= ends - (problem.left + 1))
        return jnp.where(shown, scores, -jnp.inf)


def _spread(columns: Any, rows: int) -> Any:
    """A value for each column as a matrix."""
    return lax.broadcast_in_dim(columns, (rows, columns.shape[0]), (1,))
