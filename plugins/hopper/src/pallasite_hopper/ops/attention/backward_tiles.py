"""The products of the backward: gradients of keys, values and (as sums) queries.

A block owns a tile of keys and goes through the tiles of queries that see them. One warpgroup
fetches; each of the others owns 64 keys and keeps their two gradients in registers. It computes the
scores with keys as rows, so that probabilities and their gradients are, in registers, what the
products with the gradient of the output and with the queries have on the left. The gradients of the
scores also go to shared memory, where all compute warpgroups read them for the gradient of the
queries: each computes one part of it, which the copy engine adds to sums in global memory.

J. Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision",
2024, appendix B.
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
from pallasite.errors import InvalidValueError
from pallasite_hopper.ops.attention.backward_config import (
    LOG2_E,
    ROWS,
    BackwardConfig,
    BackwardProblem,
)

MEMORY_REGISTERS = 32

_LINE = 32
"""Numbers of float32 that copies into shared memory begin at multiples of."""

_CACHED_BYTES = 24 << 20
"""Of the L2 cache that the heads in progress may fill."""


@dataclasses.dataclass(frozen=True)
class DqParts:
    """How a tile of the gradient of the queries is cut into parts of 64 rows, one for each
    compute warpgroup.

    A part is stored as registers hold it: 8 columns after each other, of these each lane's two
    rows of two columns, so that a lane writes 16 bytes at once.

    Attributes:
      transposed: the rows are dimensions of the head, the columns queries.
      by_rows: warpgroups differ in the rows, else in the columns.
      parts: number of parts.
      columns: of a part.
    """

    transposed: bool
    by_rows: bool
    parts: int
    columns: int

    @classmethod
    def of(cls, problem: BackwardProblem, config: BackwardConfig) -> DqParts:
        """The parts of a tile of ``block_q`` queries."""
        count = config.warpgroups
        rows, columns = config.block_q, problem.head_dim
        if config.transposed_dq:
            rows, columns = columns, rows
        by_rows = rows == ROWS * count
        part = columns if by_rows else columns // count
        if not by_rows and (rows != ROWS or columns % (16 * count)):
            raise InvalidValueError(
                "the gradient of a tile of queries cannot be shared by the warpgroups",
                got=f"{config}, head_dim {problem.head_dim}",
                expected=f"{rows} x {columns} as {count} parts of 64 rows or of all rows",
            )
        return cls(config.transposed_dq, by_rows, count, part)

    @property
    def lines(self) -> int:
        """Rows of 256 numbers that a part is stored in."""
        return self.columns // 4

    @property
    def layout(self) -> Any:
        """The registers of a part in the shape of ``view``."""
        tile = plgpu.Tiling(((4, 2, 8, 1, 4, 2),))
        return plgpu.Layout.TILED(tile, (-6,), (-4, -2), -1)

    def view(self, ref: Any) -> Any:
        """A stored part with the shape that ``split`` gives it."""
        blocks = ref.reshape(self.columns // 8, 4, 8, 4, 2, 2)
        return plgpu.transpose_ref(blocks, (1, 4, 2, 0, 3, 5))

    def split(self, part: Any) -> Any:
        """A part in registers, with a dimension for each place that ``view`` tells apart."""
        return part.reshape(4, 2, 8, self.columns // 8, 4, 2)

    def join(self, part: Any) -> Any:
        """The inverse of ``split``."""
        return part.reshape(ROWS, self.columns)


def _matrix(rows: int, columns: int, dtype: Any, stages: int | None = None) -> Any:
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    shape = (rows, columns) if stages is None else (stages, rows, columns)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def section_heads(problem: BackwardProblem, config: BackwardConfig) -> int:
    """Heads of keys whose blocks run at about the same time; divides all heads."""
    heads = problem.batch * problem.kv_heads
    wanted = config.heads_per_section
    if wanted is None:
        bytes_per_row = problem.head_dim * (2 * problem.item_bytes + 4)
        wanted = _CACHED_BYTES // max(1, problem.group * problem.q_seq * bytes_per_row)
    return next(n for n in range(min(heads, max(1, wanted)), 0, -1) if heads % n == 0)


def build(
    problem: BackwardProblem, config: BackwardConfig
) -> tuple[Callable[..., tuple[jax.Array, jax.Array, jax.Array]], tuple[int, ...]]:
    """The kernel as a function of q, k, v, d_out, statistics, [lengths,] sums.

    The results are the sums for the gradient of q, which begin as zeros of float32 of the shape
    that is returned as well, and the gradients of k and v.
    """
    tiles = _Tiles(problem, config)
    p, c, dq = problem, config, tiles.dq
    kv_shape = (p.batch, p.kv_seq, p.kv_heads, p.head_dim)
    line = -(-c.block_q // _LINE) * _LINE
    scratch = {
        "k_s": _matrix(c.block_kv, p.head_dim, p.dtype),
        "v_s": _matrix(c.block_kv, p.head_dim, p.dtype),
        "q_s": _matrix(c.block_q, p.head_dim, p.dtype, c.q_stages),
        "do_s": _matrix(c.block_q, p.head_dim, p.dtype, c.d_out_stages),
        "ds_s": _matrix(c.block_kv, c.block_q, p.dtype, c.ds_stages),
        "dq_s": plgpu.SMEM((dq.parts, dq.lines, 256), jnp.float32),
        "log_s": plgpu.SMEM((c.q_stages, line), jnp.float32),
        "delta_s": plgpu.SMEM((c.d_out_stages, line), jnp.float32),
        "k_full": plgpu.Barrier(),
        "v_full": plgpu.Barrier(),
        "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=c.q_stages),
        "q_empty": plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.q_stages),
        "do_full": plgpu.Barrier(num_arrivals=2, num_barriers=c.d_out_stages),
        "do_empty": plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.d_out_stages),
        "ds_full": plgpu.Barrier(num_arrivals=c.warpgroups),
        "ds_empty": plgpu.Barrier(num_arrivals=c.warpgroups),
    }
    operands = 7 if p.has_lengths else 6

    def body(*refs: Any, **scratch_refs: Any) -> None:
        tiles.run(refs, scratch_refs)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(tiles.sums_shape, jnp.float32),
            jax.ShapeDtypeStruct(kv_shape, p.dtype),
            jax.ShapeDtypeStruct(kv_shape, p.dtype),
        ),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        grid=(tiles.kv_tiles * p.batch * p.kv_heads,),
        grid_names=("block",),
        num_threads=c.warpgroups + 1,
        thread_name="warpgroup",
        input_output_aliases={operands - 1: 0},
        kernel_name="attention_backward",
    )
    return kernel, tiles.sums_shape


@dataclasses.dataclass(frozen=True)
class _Block:
    """What one block does.

    Attributes:
      batch, kv_head: which keys.
      first_key: of its tile.
      begin, full, end: tiles of queries [begin, end); from ``full`` on without a mask.
      offset: query i sees keys up to i + offset, with a causal mask.
      keys: number of keys that exist.
    """

    batch: Any
    kv_head: Any
    first_key: Any
    begin: Any
    full: Any
    end: Any
    offset: Any
    keys: Any


class _Tiles:
    def __init__(self, problem: BackwardProblem, config: BackwardConfig):
        self.problem = problem
        self.config = config
        self.dq = DqParts.of(problem, config)
        self.q_tiles = -(-problem.q_seq // config.block_q)
        self.kv_tiles = -(-problem.kv_seq // config.block_kv)
        self.section = section_heads(problem, config)
        self.sums_shape = (
            *(problem.batch, problem.q_heads, self.q_tiles),
            *(self.dq.parts, self.dq.lines, 256),
        )
        self.always_starts = config.ahead == "scores"
        self.masks_keys = problem.has_lengths or problem.kv_seq % config.block_kv != 0

    def run(self, refs: tuple[Any, ...], scratch: dict[str, Any]) -> None:
        """The kernel."""
        p, c = self.problem, self.config
        q_g, k_g, v_g, do_g, stats_g, *rest = refs
        lengths_g = rest.pop(0) if p.has_lengths else None
        _, dq_g, dk_g, dv_g = rest
        block = self.block(lengths_g)
        thread = lax.axis_index("warpgroup")

        @pl.when(thread == c.warpgroups)
        def _fetch() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            self.fetch(block, (q_g, k_g, v_g, do_g, stats_g), scratch)

        @pl.when(thread < c.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(c.registers, action="increase")
            worker = _Worker(self, block, scratch, thread, dq_g)
            sums = plgpu.ACC((ROWS, p.head_dim), jnp.float32)
            carried = [worker.scores_type()] if self.always_starts else []
            pl.run_scoped(functools.partial(worker.run, dk_g, dv_g), sums, sums, *carried)

    def block(self, lengths_g: Any) -> _Block:
        """Which tile of keys this block has, longest first within a section of heads."""
        p, c = self.problem, self.config
        number = lax.axis_index("block")
        section, inside = _divide(number, self.kv_tiles * self.section)
        tile, head = _divide(inside, self.section)
        batch, kv_head = _divide(section * self.section + head, p.kv_heads)
        first_key = tile * c.block_kv
        queries: Any = jnp.int32(p.q_seq)
        keys: Any = jnp.int32(p.kv_seq)
        if lengths_g is not None:
            queries, keys = lengths_g[batch, 0], lengths_g[batch, 1]
        offset = keys - queries
        end = lax.div(queries + (c.block_q - 1), jnp.int32(c.block_q))
        begin = full = jnp.int32(0)
        if p.causal:
            begin = lax.div(jnp.maximum(first_key - offset, 0), jnp.int32(c.block_q))
            seen = jnp.maximum(first_key + (c.block_kv - 1) - offset, 0)
            full = lax.div(seen + (c.block_q - 1), jnp.int32(c.block_q))
        if self.masks_keys:
            full = jnp.where(first_key + c.block_kv > keys, end, full)
            end = jnp.where(first_key >= keys, 0, end)
        begin = jnp.minimum(begin, end)
        full = jnp.clip(full, begin, end)
        return _Block(batch, kv_head, first_key, begin, full, end, offset, keys)

    def q_tile(self, block: _Block, step: Any) -> Any:
        """The tile of queries of a step."""
        if not self.config.stagger or self.problem.causal:
            return block.begin + step
        start = lax.rem(
            lax.div(block.first_key, jnp.int32(self.config.block_q)), jnp.maximum(block.end, 1)
        )
        tile = start + step
        return jnp.where(tile >= block.end, tile - block.end, tile)

    def fetch(self, block: _Block, refs: tuple[Any, ...], s: dict[str, Any]) -> None:
        """The work of the warpgroup that copies."""
        p, c = self.problem, self.config
        q_g, k_g, v_g, do_g, stats_g = refs
        steps = block.end - block.begin
        keys = (block.batch, pl.ds(block.first_key, c.block_kv), block.kv_head)

        def load(kind: int, number: Any, head: Any, tile: Any) -> None:
            """Queries and the logarithms of their sums (0), or the other gradient's tile (1)."""
            name, source, stages, line = (
                ("q", q_g, c.q_stages, s["log_s"]),
                ("do", do_g, c.d_out_stages, s["delta_s"]),
            )[kind]
            slot = lax.rem(number, jnp.int32(stages))
            full = s[f"{name}_full"].at[slot]
            queries = pl.ds(tile * c.block_q, c.block_q)

            @pl.when(number >= stages)
            def _() -> None:
                plgpu.barrier_wait(s[f"{name}_empty"].at[slot])

            window = (block.batch, queries, head)
            plgpu.copy_gmem_to_smem(source.at[window], s[f"{name}_s"].at[slot], full)
            window = (block.batch, head, kind, queries)
            plgpu.copy_gmem_to_smem(stats_g.at[window], line.at[slot, 0 : c.block_q], full)

        def fetch_all(warp: Any) -> None:
            @pl.when((warp == 0) & (self.always_starts | (steps > 0)))
            def _() -> None:
                plgpu.copy_gmem_to_smem(k_g.at[keys], s["k_s"], s["k_full"])

                def step(i: Any, group: Any) -> None:
                    head = block.kv_head * p.group + group
                    number = group * steps + i
                    tile = self.q_tile(block, i)
                    load(0, number, head, tile)

                    @pl.when(number == 0)
                    def _() -> None:
                        plgpu.copy_gmem_to_smem(v_g.at[keys], s["v_s"], s["v_full"])

                    load(1, number, head, tile)

                self.loop(0, steps, step)
                if self.always_starts:
                    # The last step starts scores as well; nobody looks at them.
                    load(0, steps * p.group, block.kv_head * p.group, 0)

        plgpu.warp_map(fetch_all)

    def loop(self, begin: Any, end: Any, step: Callable[[Any, Any], None]) -> None:
        """Calls ``step(number, query head within the group)`` for all heads of the group."""

        def heads(group: Any, _: Any) -> None:
            lax.fori_loop(begin, end, lambda i, _: step(i, group), None)

        if self.problem.group == 1:
            heads(jnp.int32(0), None)
        else:
            lax.fori_loop(0, self.problem.group, heads, None)


def _divide(number: Any, by: int) -> tuple[Any, Any]:
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


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


class _Worker:
    """A compute warpgroup."""

    def __init__(
        self, tiles: _Tiles, block: _Block, scratch: dict[str, Any], thread: Any, dq_g: Any
    ):
        self.tiles = tiles
        self.problem = tiles.problem
        self.config = tiles.config
        self.block = block
        self.s = scratch
        self.thread = thread
        self.dq_g = dq_g
        self.rows = pl.ds(pl.multiple_of(thread * ROWS, ROWS), ROWS)

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

        @pl.when(steps > 0)
        def _() -> None:
            if not self.tiles.always_starts:
                plgpu.barrier_wait(s["k_full"])
            plgpu.barrier_wait(s["v_full"])

        def heads(group: Any, _: Any) -> None:
            def step(i: Any, mask: bool) -> None:
                self.step(_Step(i, group * steps + i, group, mask), dk, dv, scores)

            if self.problem.causal or self.tiles.masks_keys:
                lax.fori_loop(0, masked, lambda i, _: step(i, True), None)
                # ptxas gives up on products that are in flight from one loop to another.
                plgpu.wgmma_wait(0)
            lax.fori_loop(masked, steps, lambda i, _: step(i, False), None)

        if self.problem.group == 1:
            heads(jnp.int32(0), None)
        else:
            lax.fori_loop(0, self.problem.group, heads, None)
        plgpu.wgmma_wait(0)
        self.finish(dk_g, dv_g, dk, dv)

    def scores_type(self) -> Any:
        """An accumulator for scores."""
        return plgpu.ACC((ROWS, self.config.block_q), jnp.float32)

    def q_slot(self, number: Any) -> Any:
        """Where the queries of a step are."""
        return lax.rem(number, jnp.int32(self.config.q_stages))

    def d_out_slot(self, number: Any) -> Any:
        """Where the gradient of the output for a step is."""
        return lax.rem(number, jnp.int32(self.config.d_out_stages))

    def start_scores(self, number: Any, scores: Any) -> None:
        """Starts the product of keys and queries."""
        slot = self.q_slot(number)
        plgpu.barrier_wait(self.s["q_full"].at[slot])
        queries = plgpu.transpose_ref(self.s["q_s"].at[slot], (1, 0))
        plgpu.wgmma(scores, self.s["k_s"].at[self.rows], queries, accumulate=False)

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
        """The gradients of the scores; starts the product for the values."""
        c, p, s = self.config, self.problem, self.s
        q_slot, do_slot = self.q_slot(step.number), self.d_out_slot(step.number)
        per_query = plgpu.Layout.WGMMA.reduce(0)
        do_s = s["do_s"].at[do_slot]
        if not self.tiles.always_starts:
            self.start_scores(step.number, scores)
        plgpu.barrier_wait(s["do_full"].at[do_slot])
        d_out = plgpu.transpose_ref(do_s, (1, 0))
        plgpu.wgmma(dp, s["v_s"].at[self.rows], d_out, accumulate=False)
        x = plgpu.wgmma_accumulator_load(scores, wait_n=None if self.tiles.always_starts else 1)
        logs = plgpu.load(s["log_s"].at[q_slot, 0 : c.block_q], layout=per_query)
        if c.ahead == "dk":
            # The last product of the step before is over too.
            before = self.q_slot(step.number + (c.q_stages - 1))
            plgpu.barrier_arrive(s["q_empty"].at[before], predicate=step.number > 0)
        slope = None
        if p.soft_cap is None:
            x = x * (p.scale * LOG2_E) - _spread(logs, c.block_q)
        else:
            bend = jnp.tanh(x * (p.scale / p.soft_cap))
            x = bend * (p.soft_cap * LOG2_E) - _spread(logs, c.block_q)
            slope = 1.0 - bend * bend
        probabilities = jnp.exp2(x)
        if step.mask:
            probabilities = jnp.where(self.visible(step.i), probabilities, 0.0)
        rounded = probabilities.astype(p.dtype)
        if c.values_first:
            plgpu.wgmma(dv, rounded, do_s)
            ds = plgpu.wgmma_accumulator_load(dp, wait_n=1)
            # The rounded probabilities stay in registers anyway.
            probabilities = rounded.astype(jnp.float32)
        else:
            ds = plgpu.wgmma_accumulator_load(dp, wait_n=0)
        delta = plgpu.load(s["delta_s"].at[do_slot, 0 : c.block_q], layout=per_query)
        ds = (ds - _spread(delta, c.block_q)) * probabilities
        if not c.values_first:
            plgpu.wgmma(dv, rounded, do_s)
        return (ds if slope is None else ds * slope).astype(p.dtype)

    def visible(self, i: Any) -> Any:
        """Which keys each query of the tile sees."""
        c, block = self.config, self.block
        shape = (ROWS, c.block_q)
        layout = plgpu.Layout.WGMMA
        key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        key = key + (block.first_key + self.thread * ROWS)
        seen = None
        if self.tiles.masks_keys:
            seen = key < block.keys
        if self.problem.causal:
            query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
            first_query = self.tiles.q_tile(block, i) * c.block_q
            before = key <= query + (first_query + block.offset)
            seen = before if seen is None else seen & before
        return seen

    def gradients(self, step: _Step, dk: Any, ds: Any, dq: Any, scores: Any) -> None:
        """The products with the gradients of the scores."""
        c, p, s = self.config, self.problem, self.s
        q_slot, do_slot = self.q_slot(step.number), self.d_out_slot(step.number)
        ds_s = s["ds_s"].at[lax.rem(step.number, jnp.int32(c.ds_stages))]
        if c.ds_stages == 1:

            @pl.when(step.number > 0)
            def _() -> None:
                plgpu.barrier_wait(s["ds_empty"])

        ds_s[self.rows] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(s["ds_full"])
        plgpu.barrier_wait(s["ds_full"])
        plgpu.wgmma(dq, *self.dq_operands(ds_s), accumulate=False)
        plgpu.wgmma(dk, ds, s["q_s"].at[q_slot])
        started = 1
        if self.tiles.always_starts:
            self.start_scores(step.number + 1, scores)
            started = 2
        # The sums of the step before have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = plgpu.wgmma_accumulator_load(dq, wait_n=started)
        plgpu.barrier_arrive(s["do_empty"].at[do_slot])
        if c.ds_stages == 1:
            plgpu.barrier_arrive(s["ds_empty"])
        part = s["dq_s"].at[self.thread]
        parts = self.tiles.dq
        parts.view(part)[...] = parts.split(sums)
        plgpu.commit_smem()
        head = self.block.kv_head * p.group + step.group
        tile = self.tiles.q_tile(self.block, step.i)
        target = self.dq_g.at[self.block.batch, head, tile, self.thread]
        plgpu.copy_smem_to_gmem(part, target, reduction_op="add")
        if c.ahead != "dk":
            # Scores that were started have to be waited for in the same pass through the loop:
            # ptxas does not follow what is read in the next one.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s["q_empty"].at[q_slot])

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
        p, s, block = self.problem, self.s, self.block
        # Other warpgroups read the keys for the last time before they arrive here.
        plgpu.barrier_arrive(s["ds_full"])
        plgpu.barrier_wait(s["ds_full"])
        start = block.first_key + self.thread * ROWS
        window = (block.batch, pl.ds(start, ROWS), block.kv_head)
        for target, memory, sums, scale in (
            (dv_g, s["v_s"], dv, None),
            (dk_g, s["k_s"], dk, p.scale),
        ):
            values = plgpu.wgmma_accumulator_load(sums, wait_n=0)
            if scale is not None:
                values = values * scale
            memory[self.rows] = values.astype(p.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.at[self.rows], target.at[window])
        plgpu.wait_smem_to_gmem(0)


def _spread(per_query: Any, columns: int) -> Any:
    """One number for each column, as a matrix."""
    spread = jnp.broadcast_to(per_query[None, :], (ROWS, columns))
    return plgpu.layout_cast(spread, plgpu.Layout.WGMMA)
