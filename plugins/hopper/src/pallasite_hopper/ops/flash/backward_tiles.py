"""The matmuls of the backward: gradients of keys, values and (as sums) queries.

A block owns a tile of keys and goes through the tiles of queries that see them. One warpgroup
fetches; each of the others owns 64 keys and keeps their two gradients in registers. It computes the
scores with keys as rows, so that probabilities and their gradients are, in registers, what the
matmuls with the gradient of the output and with the queries have on the left. The gradients of the
scores also go to shared memory, where all consumer warpgroups read them for the gradient of the
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
from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.flash.backward_config import ROWS, BackwardConfig, BackwardProblem
from pallasite_hopper.ops.flash.backward_worker import when, worker_class
from pallasite_hopper.ops.flash.terms import Visits

MEMORY_REGISTERS = 24

_LINE = 32
"""Numbers of float32 that copies into shared memory begin at multiples of."""

_CACHED_BYTES = 24 << 20
"""Of the L2 cache that the heads in progress may fill."""


@dataclasses.dataclass(frozen=True)
class DqParts:
    """How a tile of the gradient of the queries is cut into parts of 64 rows, one for each
    consumer warpgroup.

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
) -> tuple[Callable[..., tuple[jax.Array, ...]], tuple[int, ...]]:
    """The kernel as a function of q, k, v, d_out, statistics, [lengths,] arrays of terms, [scores,]
    sums.

    The results are the sums for the gradient of q, which begin as zeros of float32 of the shape
    that is returned as well, and the gradients of k and v, of each part of the queries: a batch of
    arrays like k and v for each. With a bias, the gradients of the scores follow, of
    ``problem.scores_shape``; where blocks do not go through all of these, ``scores`` are zeros.
    """
    tiles = Tiles(problem, config)
    p, c, dq = problem, config, tiles.dq
    keys = (c.parts * p.batch, p.kv_seq, p.kv_heads)
    line = -(-c.block_q // _LINE) * _LINE
    segments, biased = p.terms.has("q_segments"), p.terms.biased
    scratch = {
        "k_s": plgpu.SMEM((c.block_kv, p.head_dim), p.dtype),
        "v_s": plgpu.SMEM((c.block_kv, p.head_dim), p.dtype),
        "q_s": plgpu.SMEM((c.q_stages, c.block_q, p.head_dim), p.dtype),
        "do_s": plgpu.SMEM((c.d_out_stages, c.block_q, p.head_dim), p.dtype),
        "ds_s": plgpu.SMEM((c.ds_stages, c.block_kv, c.block_q), p.dtype),
        "p_s": plgpu.SMEM((ROWS, c.block_q), p.dtype),
        "dq_s": plgpu.SMEM((dq.parts, dq.lines // c.dq_rounds, 256), jnp.float32),
        "log_s": plgpu.SMEM((c.q_stages, line), jnp.float32),
        "delta_s": plgpu.SMEM((c.d_out_stages, line), jnp.float32),
        "k_full": plgpu.Barrier(),
        "v_full": plgpu.Barrier(),
        "q_full": plgpu.Barrier(num_arrivals=2 + segments + biased, num_barriers=c.q_stages),
        "q_empty": plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.q_stages),
        "do_full": plgpu.Barrier(num_arrivals=2, num_barriers=c.d_out_stages),
        "do_empty": plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.d_out_stages),
        "ds_full": plgpu.Barrier(num_arrivals=c.warpgroups),
        "ds_empty": plgpu.Barrier(num_arrivals=c.warpgroups),
    }
    if not c.shared_keys:
        del scratch["p_s"]
    if segments:
        scratch["segments_s"] = plgpu.SMEM((c.q_stages, line), jnp.int32)
    if biased:
        scratch["max_s"] = plgpu.SMEM((c.q_stages, line), jnp.float32)
    fills = p.with_bias and not p.sees_all
    operands = (7 if p.has_lengths else 6) + len(p.terms.names) + fills
    scores = [jax.ShapeDtypeStruct(p.scores_shape, p.dtype)] if p.with_bias else []
    aliases = {operands - 1: 0} | ({operands - 2: 3} if fills else {})

    def body(*refs: Any, **scratch_refs: Any) -> None:
        tiles.run(refs, scratch_refs)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(tiles.sums_shape, jnp.float32),
            jax.ShapeDtypeStruct((*keys, p.stored_dim), p.dtype),
            jax.ShapeDtypeStruct((*keys, p.value_dim), p.dtype),
            *scores,
        ),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            unsafe_no_auto_barriers=True,
        ),
        grid=(tiles.kv_tiles * p.batch * p.kv_heads * c.parts,),
        grid_names=("block",),
        num_threads=c.warpgroups + 1,
        thread_name="warpgroup",
        input_output_aliases=aliases,
        kernel_name="attention_backward",
    )
    return kernel, tiles.sums_shape


@dataclasses.dataclass(frozen=True)
class Block:
    """What one block does.

    Attributes:
      batch, kv_head: which keys.
      first_key: of its tile.
      begin, full, stop, end: tiles of queries [begin, end); of these [full, stop) without a mask.
        Places in a list of tiles, if there is one.
      offset: query i sees keys up to i + offset, with a causal mask.
      keys: number of keys that exist.
      visits: the list of tiles.
      result: of its part of the queries and its batch, among the gradients of keys and values.
    """

    batch: Any
    kv_head: Any
    first_key: Any
    begin: Any
    full: Any
    stop: Any
    end: Any
    offset: Any
    keys: Any
    visits: Visits | None = None
    result: Any = None


class Tiles:
    """The kernel's parts that depend on the problem and the configuration."""

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
        self.given: dict[str, Any] = {}
        self.masks_keys = problem.has_lengths or problem.kv_seq % config.block_kv != 0

    def run(self, refs: tuple[Any, ...], scratch: dict[str, Any]) -> None:
        """The kernel."""
        p, c = self.problem, self.config
        q_g, k_g, v_g, do_g, stats_g, *rest = refs
        lengths_g = rest.pop(0) if p.has_lengths else None
        self.given = {name: rest.pop(0) for name in p.terms.names}
        *_, dq_g, dk_g, dv_g = rest[:-1] if p.with_bias else rest
        scores_g = rest[-1] if p.with_bias else None
        block = self.block(lengths_g)
        thread = lax.axis_index("warpgroup")

        @when(thread == c.warpgroups)
        def _fetch() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            self.fetch(block, (q_g, k_g, v_g, do_g, stats_g), scratch)

        @when(thread < c.warpgroups)
        def _compute() -> None:
            plgpu.set_max_registers(c.registers, action="increase")
            worker = worker_class(self.config)(self, block, scratch, thread, dq_g, scores_g)
            sums = [
                plgpu.ACC((ROWS, columns), jnp.float32)
                for columns in (worker.key_columns, worker.value_columns)
            ]
            carried = [worker.scores_type()] if self.always_starts else []
            pl.run_scoped(functools.partial(worker.run, dk_g, dv_g), *sums, *carried)

    def block(self, lengths_g: Any) -> Block:
        """Which tile of keys this block has, longest first within a section of heads."""
        p, c = self.problem, self.config
        number, part = lax.axis_index("block"), jnp.int32(0)
        if c.parts > 1:
            number, part = _divide(number, c.parts)
        section, inside = _divide(number, self.kv_tiles * self.section)
        tile, head = _divide(inside, self.section)
        batch, kv_head = _divide(section * self.section + head, p.kv_heads)
        first_key = tile * c.block_kv
        queries: Any = jnp.int32(p.q_seq)
        keys: Any = jnp.int32(p.kv_seq)
        if lengths_g is not None:
            queries = lax.min(lengths_g[batch, 0], queries)
            keys = lax.min(lengths_g[batch, 1], keys)
        offset = keys - queries
        end = lax.div(queries + (c.block_q - 1), jnp.int32(c.block_q))
        begin = full = jnp.int32(0)
        if p.ahead is not None:
            since = first_key - offset
            if p.ahead:
                since = since - p.ahead
            begin = lax.div(jnp.maximum(since, 0), jnp.int32(c.block_q))
            seen = jnp.maximum(since + (c.block_kv - 1), 0)
            full = lax.div(seen + (c.block_q - 1), jnp.int32(c.block_q))
        until = first_key + 1 - offset
        if p.left is not None:
            last = jnp.maximum(until + (p.left + c.block_kv - 1), 0)
            end = jnp.minimum(end, lax.div(last + (c.block_q - 1), jnp.int32(c.block_q)))
        if self.masks_keys:
            full = jnp.where(first_key + c.block_kv > keys, end, full)
            end = jnp.where(first_key >= keys, 0, end)
        whole = None
        if p.terms.segmented:
            first, last, whole = self.segments(batch, tile)
            begin, end = jnp.maximum(begin, first), jnp.minimum(end, last)
            full = jnp.maximum(full, whole[0])
        begin = jnp.minimum(begin, end)
        full = jnp.clip(full, begin, end)
        stop = end
        if p.left is not None:
            stop = lax.div(jnp.maximum(until + p.left, 0), jnp.int32(c.block_q))
            stop = jnp.clip(stop, full, end)
        if whole is not None:
            stop = jnp.clip(jnp.minimum(stop, whole[1]), full, end)
        visits = None
        if p.terms.has("visits"):
            entry = (*p.terms.entry("visits", batch, kv_head * p.group), tile)
            visits = Visits(self.given["visits"].at[entry])
            begin, full, stop, end = map(visits.place, (begin, full, stop, end))
        result = batch
        if c.parts > 1:
            first, steps = begin, end - begin
            begin = first + lax.div(steps * part, jnp.int32(c.parts))
            end = first + lax.div(steps * (part + 1), jnp.int32(c.parts))
            full = jnp.clip(full, begin, end)
            stop = jnp.clip(stop, full, end)
            result = part * p.batch + batch
        return Block(
            batch, kv_head, first_key, begin, full, stop, end, offset, keys, visits, result
        )

    def segments(self, batch: Any, tile: Any) -> tuple[Any, Any, tuple[Any, Any]]:
        """Tiles of queries [begin, end) that may see a tile of keys, and of those that see all."""
        period, size, columns = self.problem.terms.period, self.config.block_kv, self.config.block_q
        if period is None and "spans" not in self.given:
            every = jnp.int32(self.q_tiles)
            return jnp.int32(0), every, (every, every)
        if period is None:
            entry = self.given["spans"].at[batch, tile]
            return entry[0], entry[1], (entry[2], entry[3])
        begin = lax.div(tile * size, period) * period
        end = (lax.div(tile * size + (size - 1), period) + 1) * period
        last = lax.div(end + (columns - 1), columns)
        return lax.div(begin, columns), last, (last, last)

    def q_tile(self, block: Block, step: Any) -> Any:
        """The tile of queries of a step."""
        if block.visits is not None:
            return block.visits.tile(block.begin + step)
        staggered = self.config.stagger and self.config.parts == 1
        if not staggered or self.problem.windowed or self.problem.terms:
            return block.begin + step
        start = lax.rem(
            lax.div(block.first_key, jnp.int32(self.config.block_q)), jnp.maximum(block.end, 1)
        )
        tile = start + step
        return jnp.where(tile >= block.end, tile - block.end, tile)

    def fetch(self, block: Block, refs: tuple[Any, ...], s: dict[str, Any]) -> None:
        """The producer warpgroup."""
        p, c = self.problem, self.config
        q_g, k_g, v_g, do_g, stats_g = refs
        steps = block.end - block.begin
        kv_head = block.kv_head if p.sharing == 1 else lax.div(block.kv_head, p.sharing)
        keys = (block.batch, pl.ds(block.first_key, c.block_kv), kv_head)

        def load(kind: int, number: Any, head: Any, tile: Any) -> None:
            """Queries and what normalizes their weights (0), or the other gradient's tile (1)."""
            name, source, stages, line = (
                ("q", q_g, c.q_stages, s["log_s"]),
                ("do", do_g, c.d_out_stages, s["delta_s"]),
            )[kind]
            stage = lax.rem(number, jnp.int32(stages))
            full = s[f"{name}_full"].at[stage]
            queries = pl.ds(tile * c.block_q, c.block_q)

            @when(number >= stages)
            def _() -> None:
                plgpu.barrier_wait(s[f"{name}_empty"].at[stage])

            columns = (p.head_window, p.value_window)[kind]
            rows = source.at[block.batch, queries, head, *columns]
            plgpu.copy_gmem_to_smem(rows, s[f"{name}_s"].at[stage], full)
            if kind == 0 and "segments_s" in s:
                of_queries = self.given["q_segments"].at[block.batch, queries]
                plgpu.copy_gmem_to_smem(of_queries, s["segments_s"].at[stage, 0 : c.block_q], full)
            if kind == 0 and "max_s" in s:
                numbers = stats_g.at[block.batch, head, 2, queries]
                plgpu.copy_gmem_to_smem(numbers, s["max_s"].at[stage, 0 : c.block_q], full)
            numbers = stats_g.at[block.batch, head, kind, queries]
            plgpu.copy_gmem_to_smem(numbers, line.at[stage, 0 : c.block_q], full)

        def fetch_all(warp: Any) -> None:
            @when((warp == 0) & (self.always_starts | (steps > 0)))
            def _() -> None:
                plgpu.copy_gmem_to_smem(k_g.at[*keys, *p.head_window], s["k_s"], s["k_full"])

                def step(i: Any, group: Any) -> None:
                    head = block.kv_head * p.group + group
                    number = group * steps + i
                    tile = self.q_tile(block, i)
                    load(0, number, head, tile)

                    @when(number == 0)
                    def _() -> None:
                        plgpu.copy_gmem_to_smem(
                            v_g.at[*keys, *p.value_window], s["v_s"], s["v_full"]
                        )

                    load(1, number, head, tile)

                self.loop(0, steps, step)
                if self.always_starts:
                    # The last step starts scores as well; they are unused.
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
