"""What one consumer warpgroup of the backward does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.flash.backward_config import LOG2_E, ROWS, BackwardConfig
from pallasite_hopper.ops.flash.softmax import cap, normalized
from pallasite_std.api import attention_dropout

if TYPE_CHECKING:
    from pallasite_hopper.ops.flash.backward_tiles import Block, Tiles

when: Callable[[Any], Callable[[Callable[[], None]], None]] = pl.when


@dataclasses.dataclass(frozen=True)
class _Step:
    """One tile of queries.

    Attributes:
      i: number within the head.
      number: number of all steps before.
      group: the query's head among those that share the keys.
      mask: whether some queries do not see some keys.
    """

    i: Any
    number: Any
    group: Any
    mask: bool


class Worker:
    """A consumer warpgroup."""

    def __init__(
        self,
        tiles: Tiles,
        block: Block,
        scratch: dict[str, Any],
        thread: Any,
        dq_g: Any,
        scores_g: Any = None,
    ):
        self.tiles = tiles
        self.problem = tiles.problem
        self.config = tiles.config
        self.block = block
        self.s = scratch
        self.thread = thread
        self.dq_g, self.scores_g = dq_g, scores_g
        self.rows = pl.ds(pl.multiple_of(thread * ROWS, ROWS), ROWS)
        self.first_key: Any = thread * ROWS
        self.first_query: Any = 0
        self.queries = self.config.block_q
        self.key_columns, self.value_columns = self.problem.head_dim, self.problem.value_depth
        self.key_dims, self.value_dims = pl.ds(0, self.key_columns), pl.ds(0, self.value_columns)

    def run(self, dk_g: Any, dv_g: Any, dk: Any, dv: Any, scores: Any = None) -> None:
        """Everything that the warpgroup does; scores that run ahead have their own place."""
        s, block = self.s, self.block
        steps = block.end - block.begin
        masked = block.full - block.begin

        if self.tiles.always_starts:
            plgpu.barrier_wait(s["k_full"])
            self.start_scores(jnp.int32(0), scores)
            # The loop's other accumulators are cleared now, which ptxas does not do meanwhile.
            plgpu.wgmma_wait(0)

        @when(steps > 0)
        def _() -> None:
            if not self.tiles.always_starts:
                plgpu.barrier_wait(s["k_full"])
            plgpu.barrier_wait(s["v_full"])

        def heads(group: Any, _: Any) -> None:
            def step(i: Any, mask: bool) -> None:
                self.step(_Step(i, group * steps + i, group, mask), dk, dv, scores)

            if self.problem.windowed or self.tiles.masks_keys or self.problem.terms.segmented:
                lax.fori_loop(0, masked, lambda i, _: step(i, True), None)
                # ptxas gives up on matmuls that are in flight from one loop to another.
                plgpu.wgmma_wait(0)
            stop = block.stop - block.begin if self.problem.masked_end else steps
            lax.fori_loop(masked, stop, lambda i, _: step(i, False), None)
            plgpu.wgmma_wait(0)
            if self.problem.masked_end:
                lax.fori_loop(stop, steps, lambda i, _: step(i, True), None)
                plgpu.wgmma_wait(0)

        if self.problem.group == 1:
            heads(jnp.int32(0), None)
        else:
            lax.fori_loop(0, self.problem.group, heads, None)
        self.finish(dk_g, dv_g, dk, dv)

    def scores_type(self) -> Any:
        """An accumulator for scores."""
        return plgpu.ACC((ROWS, self.queries), jnp.float32)

    def q_stage(self, number: Any) -> Any:
        """Where the queries of a step are."""
        return lax.rem(number, jnp.int32(self.config.q_stages))

    def d_out_stage(self, number: Any) -> Any:
        """Where the gradient of the output for a step is."""
        return lax.rem(number, jnp.int32(self.config.d_out_stages))

    def start_scores(self, number: Any, scores: Any) -> None:
        """Starts the matmul of keys and queries."""
        stage = self.q_stage(number)
        plgpu.barrier_wait(self.s["q_full"].at[stage])
        queries = self.s["q_s"].at[stage, pl.ds(self.first_query, self.queries)]
        keys = self.s["k_s"].at[self.rows]
        plgpu.wgmma(scores, keys, plgpu.transpose_ref(queries, (1, 0)), accumulate=False)

    def step(self, step: _Step, dk: Any, dv: Any, scores: Any) -> None:
        """One tile of queries."""
        if scores is None:
            ds = pl.run_scoped(
                lambda scores, dp: self.score_gradients(step, dv, scores, dp),
                self.scores_type(),
                self.scores_type(),
            )
        else:
            ds = pl.run_scoped(
                lambda dp: self.score_gradients(step, dv, scores, dp), self.scores_type()
            )
        pl.run_scoped(
            lambda dq: self.gradients(step, dk, ds, dq, scores),
            plgpu.ACC((ROWS, self.tiles.dq.columns), jnp.float32),
        )

    def score_gradients(self, step: _Step, dv: Any, scores: Any, dp: Any) -> Any:
        """The gradients of the scores; starts the matmul for the values."""
        c, p, s = self.config, self.problem, self.s
        do_stage = self.d_out_stage(step.number)
        do_s = s["do_s"].at[do_stage]
        if not self.tiles.always_starts:
            self.start_scores(step.number, scores)
        plgpu.barrier_wait(s["do_full"].at[do_stage])
        self.start_products(dp, do_s)
        waits = None if self.tiles.always_starts else 1
        probabilities, slope = self.probabilities(step, scores, waits)
        rounded = self.used(probabilities).astype(p.dtype)
        if c.values_first:
            plgpu.wgmma(dv, rounded, do_s.at[:, self.value_dims])
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=1)
            if not p.dropout:
                # The rounded probabilities stay in registers anyway.
                probabilities = rounded.astype(jnp.float32)
        else:
            dp = plgpu.wgmma_accumulator_load(dp, wait_n=0)
        ds = self.scaled(step, dp, probabilities, slope)
        if not c.values_first:
            plgpu.wgmma(dv, rounded, do_s.at[:, self.value_dims])
        return ds

    def start_products(self, dp: Any, d_out: Any) -> None:
        """Starts the matmul of values and the gradient of the output, rows of queries."""
        depth = pl.ds(0, self.problem.value_depth)
        d_out = plgpu.transpose_ref(d_out.at[:, depth], (1, 0))
        plgpu.wgmma(dp, self.s["v_s"].at[self.rows, depth], d_out, accumulate=False)

    def of_queries(self, ref: Any, stage: Any) -> Any:
        """One number for each query that the warpgroup has scores of, as a matrix."""
        window = pl.ds(self.first_query, self.queries)
        return jnp.broadcast_to(ref[stage, window][None, :], (ROWS, self.queries))

    def probabilities(self, step: _Step, scores: Any, waits: int | None) -> tuple[Any, Any]:
        """Probabilities, and by which factor the soft cap changes their gradients, if there is one.
        Those that dropout dropped are negative, which takes no registers.

        ``waits`` is the number of matmuls that may stay in flight when the scores are read.
        """
        c, p, s = self.config, self.problem, self.s
        x = plgpu.wgmma_accumulator_load(scores, wait_n=waits)
        stage = self.q_stage(step.number)
        logs = self.of_queries(s["log_s"], stage)
        if c.ahead == "dk":
            # The last matmul of the step before is over too.
            before = self.q_stage(step.number + (c.q_stages - 1))
            plgpu.barrier_arrive(s["q_empty"].at[before], predicate=step.number > 0)
        slope = None
        if p.terms.biased:
            # Scores as the forward has them, to the last bit: a large bias rounds them.
            x = x * p.scale if p.soft_cap is None else cap(x, p.scale, p.soft_cap)
            if p.soft_cap is not None:
                bend = x * (1 / p.soft_cap)
                slope = 1.0 - bend * bend
            maxima = self.of_queries(s["max_s"], stage)
            probabilities = normalized(self.biased(step, x), LOG2_E, maxima, logs)
        elif p.soft_cap is None:
            probabilities = jnp.exp2(x * (p.scale * LOG2_E) - logs)
        else:
            bend = jnp.tanh(x * (p.scale / p.soft_cap))
            probabilities = jnp.exp2(bend * (p.soft_cap * LOG2_E) - logs)
            slope = 1.0 - bend * bend
        if step.mask:
            probabilities = jnp.where(self.visible(step), probabilities, 0.0)
        if p.dropout:
            probabilities = jnp.where(self.kept(step), probabilities, -probabilities)
        return probabilities, slope

    def kept(self, step: _Step) -> Any:
        """Which weights dropout keeps."""
        block, problem = self.block, self.problem
        seed = self.tiles.given["seed"]
        head = block.kv_head * problem.group + step.group
        number = attention_dropout.key_of_head(
            (seed[0], seed[1]), block.batch * problem.q_heads + head
        )
        query = self.tiles.q_tile(block, step.i) * self.config.block_q + self.first_query
        key = block.first_key + self.first_key
        shape = (ROWS, self.queries)
        return attention_dropout.kept(number, shape, query, key, 0, problem.dropout)

    def used(self, probabilities: Any) -> Any:
        """What values were multiplied by, without the factor of what dropout keeps."""
        return jnp.maximum(probabilities, 0.0) if self.problem.dropout else probabilities

    def scaled(self, step: _Step, dp: Any, probabilities: Any, slope: Any) -> Any:
        """The gradients of the scores from those of the probabilities."""
        delta = self.of_queries(self.s["delta_s"], self.d_out_stage(step.number))
        if self.problem.dropout:
            growth = attention_dropout.growth(self.problem.dropout)
            difference = jnp.where(probabilities > 0, dp * growth - delta, -delta)
            ds = difference * jnp.abs(probabilities)
        else:
            ds = (dp - delta) * probabilities
        return (ds if slope is None else ds * slope).astype(self.problem.dtype)

    def biased(self, step: _Step, scores: Any) -> Any:
        """Scores with what is added to them."""
        terms, block = self.problem.terms, self.block
        head = block.kv_head * self.problem.group + step.group
        key = block.first_key + self.first_key
        query = self.tiles.q_tile(block, step.i) * self.config.block_q + self.first_query
        if terms.has("bias"):
            bias = self.tiles.given["bias"].at[terms.entry("bias", block.batch, head)]
            window = (pl.ds(key, ROWS), pl.ds(query, self.queries))
            added = plgpu.transpose_ref(bias, (1, 0))[window]
            scores = scores + added.astype(jnp.float32)
        if terms.has("slopes"):
            slope = self.tiles.given["slopes"][terms.entry("slopes", block.batch, head)]
            keys, queries = (lax.broadcasted_iota(jnp.int32, scores.shape, n) for n in (0, 1))
            distance = jnp.abs(queries + (query + block.offset - key) - keys)
            scores = scores - slope * distance.astype(jnp.float32)
        return scores

    def visible(self, step: _Step) -> Any:
        """Which keys each query of the tile sees."""
        c, block, i = self.config, self.block, step.i
        shape = (ROWS, self.queries)
        key = lax.broadcasted_iota(jnp.int32, shape, 0)
        key = key + (block.first_key + self.first_key)
        seen = None
        if self.tiles.masks_keys:
            seen = key < block.keys
        ahead, left = self.problem.ahead, self.problem.left
        if self.problem.windowed:
            query = lax.broadcasted_iota(jnp.int32, shape, 1)
            first_query = self.tiles.q_tile(block, i) * c.block_q + self.first_query
            own = first_query + block.offset
            before = None if ahead is None else key <= query + (own + ahead if ahead else own)
            after = None if left is None else key >= query + (own - left)
            for one in (before, after):
                if one is not None:
                    seen = one if seen is None else seen & one
        if self.problem.terms.segmented:
            same = self.same_segment(step, key, shape)
            seen = same if seen is None else seen & same
        return seen

    def same_segment(self, step: _Step, key: Any, shape: tuple[int, int]) -> Any:
        """Which keys are of the segments of the queries."""
        block, period = self.block, self.problem.terms.period
        first_key = block.first_key + self.first_key
        if period is not None:
            first = self.tiles.q_tile(block, step.i) * self.config.block_q + self.first_query
            number = lax.div(first_key + lax.broadcasted_iota(jnp.int32, (ROWS,), 0), period)
            begin = lax.broadcast_in_dim(number * period - first, shape, (0,))
            query = lax.broadcasted_iota(jnp.int32, shape, 1)
            return (query >= begin) & (query < begin + period)
        of_keys = self.tiles.given["kv_segments"][block.batch, pl.ds(first_key, ROWS)]
        of_queries = self.of_queries(self.s["segments_s"], self.q_stage(step.number))
        return lax.broadcast_in_dim(of_keys, shape, (0,)) == of_queries

    def gradients(self, step: _Step, dk: Any, ds: Any, dq: Any, scores: Any) -> None:
        """The matmuls with the gradients of the scores."""
        c, s = self.config, self.s
        q_stage, do_stage = self.q_stage(step.number), self.d_out_stage(step.number)
        ds_s = s["ds_s"].at[lax.rem(step.number, jnp.int32(c.ds_stages))]
        if c.ds_stages == 1:

            @when(step.number > 0)
            def _() -> None:
                plgpu.barrier_wait(s["ds_empty"])

        ds_s[self.rows] = ds
        plgpu.commit_smem()
        self.write_scores(step, ds_s)
        plgpu.barrier_arrive(s["ds_full"])
        plgpu.barrier_wait(s["ds_full"])
        plgpu.wgmma(dq, *self.dq_operands(ds_s), accumulate=False)
        plgpu.wgmma(dk, ds, s["q_s"].at[q_stage, :, self.key_dims])
        # The sums of the step before have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = plgpu.wgmma_accumulator_load(dq, wait_n=1)
        plgpu.barrier_arrive(s["do_empty"].at[do_stage])
        if c.ds_stages == 1:
            plgpu.barrier_arrive(s["ds_empty"])
        self.add_dq(step, sums)
        if self.tiles.always_starts:
            self.start_scores(step.number + 1, scores)
        if c.ahead != "dk":
            # Scores that were started have to be waited for in the same pass through the loop:
            # ptxas does not follow what is read in the next one.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s["q_empty"].at[q_stage])

    def write_scores(self, step: _Step, ds_s: Any) -> None:
        """Writes the gradients of this warpgroup's scores, if they are wanted."""
        if self.scores_g is None:
            return
        block, size = self.block, self.config.block_q
        head = block.kv_head * self.problem.group + step.group
        keys = pl.ds(block.first_key + self.first_key, ROWS)
        queries = pl.ds(self.tiles.q_tile(block, step.i) * size, size)
        target = self.scores_g.at[block.batch, head, keys, queries]
        plgpu.copy_smem_to_gmem(ds_s.at[self.rows], target)

    def add_dq(self, step: _Step, sums: Any) -> None:
        """Adds this warpgroup's part of the gradient of the queries to the sums."""
        part = self.s["dq_s"].at[self.thread]
        head = self.block.kv_head * self.problem.group + step.group
        tile = self.tiles.q_tile(self.block, step.i)
        target = self.dq_g.at[self.block.batch, head, tile, self.thread]
        rounds = self.config.dq_rounds
        piece = dataclasses.replace(self.tiles.dq, columns=self.tiles.dq.columns // rounds)
        for number in range(rounds):
            if number:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            mine = sums[:, number * piece.columns : (number + 1) * piece.columns]
            piece.view(part)[...] = piece.split(mine)
            plgpu.commit_smem()
            lines = pl.ds(number * piece.lines, piece.lines)
            plgpu.copy_smem_to_gmem(part, target.at[lines], reduction_op="add")

    def dq_operands(self, ds_s: Any) -> tuple[Any, Any]:
        """The operands of this warpgroup's part of the gradient of the queries."""
        parts, k_s = self.tiles.dq, self.s["k_s"]
        rows = self.rows
        columns = pl.ds(pl.multiple_of(self.thread * parts.columns, parts.columns), parts.columns)
        if parts.transposed:
            left, right = plgpu.transpose_ref(k_s, (1, 0)), ds_s
        else:
            left, right = plgpu.transpose_ref(ds_s, (1, 0)), k_s
        if parts.by_rows:
            return left.at[rows], right
        return left, right.at[:, columns]

    def finish(self, dk_g: Any, dv_g: Any, dk: Any, dv: Any) -> None:
        """Writes the gradients of keys and values, over keys and values in shared memory."""
        p, s = self.problem, self.s
        # Other warpgroups read the keys for the last time before they arrive here.
        plgpu.barrier_arrive(s["ds_full"])
        plgpu.barrier_wait(s["ds_full"])
        growth = attention_dropout.growth(p.dropout) if p.dropout else None
        keys = pl.ds(self.block.first_key + self.first_key, ROWS)
        place = (self.block.result, keys, self.block.kv_head)
        for target, memory, sums, scale, dims, window in (
            (dv_g, s["v_s"], dv, growth, self.value_dims, p.value_window),
            (dk_g, s["k_s"], dk, p.scale, self.key_dims, p.head_window),
        ):
            values = plgpu.wgmma_accumulator_load(sums, wait_n=0)
            if scale is not None:
                values = values * scale
            memory[self.rows, dims] = values.astype(p.dtype)
            plgpu.commit_smem()
            mine, window = self.finish_windows(dims, window)
            plgpu.copy_smem_to_gmem(memory.at[mine], target.at[*place, *window])
        plgpu.wait_smem_to_gmem(0)

    def finish_windows(self, dims: Any, window: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Where this warpgroup's gradients are in shared memory, and which elements of the head
        they are: ``window`` if all."""
        del dims
        return (self.rows, slice(None)), window


def worker_class(config: BackwardConfig) -> type[Worker]:
    """The kind of worker for a configuration."""
    return SharedKeysWorker if config.shared_keys else Worker


class SharedKeysWorker(Worker):
    """A consumer warpgroup for large heads: all of them share 64 keys.

    Each computes the scores of its part of the queries. Probabilities and gradients of the scores
    go to shared memory, from where each warpgroup computes its part of the head's dimensions of
    all three gradients.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.rows = pl.ds(0, ROWS)
        self.first_key = 0
        self.queries = self.config.block_q // self.config.warpgroups
        self.first_query = pl.multiple_of(self.thread * self.queries, self.queries)
        sizes = (self.problem.head_dim, self.problem.value_tile)
        self.key_columns, self.value_columns = (size // self.config.warpgroups for size in sizes)
        self.key_dims, self.value_dims = (
            pl.ds(pl.multiple_of(self.thread * columns, columns), columns)
            for columns in (self.key_columns, self.value_columns)
        )

    def step(self, step: _Step, dk: Any, dv: Any, scores: Any) -> None:
        """One tile of queries."""
        pl.run_scoped(
            lambda scores, dp: self.share_scores(step, scores, dp),
            self.scores_type(),
            self.scores_type(),
        )
        pl.run_scoped(
            lambda dq: self.products(step, dk, dv, dq),
            plgpu.ACC((ROWS, self.tiles.dq.columns), jnp.float32),
        )

    def share_scores(self, step: _Step, scores: Any, dp: Any) -> None:
        """Probabilities and gradients of the scores, of this warpgroup's queries."""
        p, s = self.problem, self.s
        do_stage = self.d_out_stage(step.number)
        self.start_scores(step.number, scores)
        plgpu.barrier_wait(s["do_full"].at[do_stage])
        self.start_products(dp, s["do_s"].at[do_stage, pl.ds(self.first_query, self.queries)])
        probabilities, slope = self.probabilities(step, scores, 1)
        ds = self.scaled(step, plgpu.wgmma_accumulator_load(dp, wait_n=0), probabilities, slope)

        @when(step.number > 0)
        def _() -> None:
            plgpu.barrier_wait(s["ds_empty"])

        columns = pl.ds(self.first_query, self.queries)
        s["p_s"][:, columns] = self.used(probabilities).astype(p.dtype)
        s["ds_s"][0, :, columns] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(s["ds_full"])
        plgpu.barrier_wait(s["ds_full"])

    def products(self, step: _Step, dk: Any, dv: Any, dq: Any) -> None:
        """This warpgroup's dimensions of the gradients."""
        s = self.s
        q_stage, do_stage = self.q_stage(step.number), self.d_out_stage(step.number)
        ds_s = s["ds_s"].at[0]
        left = plgpu.transpose_ref(ds_s, (1, 0))
        plgpu.wgmma(dq, left, s["k_s"].at[:, self.key_dims], accumulate=False)
        plgpu.wgmma(dv, s["p_s"], s["do_s"].at[do_stage, :, self.value_dims])
        plgpu.wgmma(dk, ds_s, s["q_s"].at[q_stage, :, self.key_dims])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.add_dq(step, plgpu.wgmma_accumulator_load(dq, wait_n=2))
        plgpu.wgmma_wait(1)
        plgpu.barrier_arrive(s["do_empty"].at[do_stage])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s["ds_empty"])
        plgpu.barrier_arrive(s["q_empty"].at[q_stage])

    def finish_windows(self, dims: Any, window: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """See :meth:`Worker.finish_windows`."""
        del window
        return (slice(None), dims), (dims,)
