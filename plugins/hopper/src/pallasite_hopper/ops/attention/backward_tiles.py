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
from pallasite_hopper.ops.attention.backward_config import (
    LOG2_E,
    ROWS,
    BackwardConfig,
    BackwardProblem,
)

MEMORY_REGISTERS = 32

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
        return cls(config.transposed_dq, by_rows, count, columns if by_rows else columns // count)

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
    scratch = {
        "k_s": _matrix(c.block_kv, p.head_dim, p.dtype),
        "v_s": _matrix(c.block_kv, p.head_dim, p.dtype),
        "q_s": _matrix(c.block_q, p.head_dim, p.dtype, c.q_stages),
        "do_s": _matrix(c.block_q, p.head_dim, p.dtype, c.d_out_stages),
        "ds_s": _matrix(c.block_kv, c.block_q, p.dtype, c.ds_stages),
        "dq_s": plgpu.SMEM((dq.parts, dq.lines, 256), jnp.float32),
        "log_s": plgpu.SMEM((c.q_stages, c.block_q), jnp.float32),
        "delta_s": plgpu.SMEM((c.d_out_stages, c.block_q), jnp.float32),
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
            pl.run_scoped(
                functools.partial(worker.run, dk_g, dv_g),
                plgpu.ACC((ROWS, p.head_dim), jnp.float32),
                plgpu.ACC((ROWS, p.head_dim), jnp.float32),
            )

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
        start = lax.rem(lax.div(block.first_key, jnp.int32(self.config.block_q)), block.end)
        tile = start + step
        return jnp.where(tile >= block.end, tile - block.end, tile)

    def fetch(self, block: _Block, refs: tuple[Any, ...], s: dict[str, Any]) -> None:
        """The work of the warpgroup that copies."""
        p, c = self.problem, self.config
        q_g, k_g, v_g, do_g, stats_g = refs
        steps = block.end - block.begin

        def load(warp: Any) -> None:
            @pl.when((warp == 0) & (steps > 0))
            def _() -> None:
                keys = pl.ds(block.first_key, c.block_kv)
                window = (block.batch, keys, block.kv_head)
                plgpu.copy_gmem_to_smem(k_g.at[window], s["k_s"], s["k_full"])

                def step(i: Any, group: Any) -> None:
                    head = block.kv_head * p.group + group
                    number = group * steps + i
                    queries = pl.ds(self.q_tile(block, i) * c.block_q, c.block_q)
                    window = (block.batch, queries, head)
                    for name, kind, source, stages in (
                        ("q", 0, q_g, c.q_stages),
                        ("do", 1, do_g, c.d_out_stages),
                    ):
                        slot = lax.rem(number, jnp.int32(stages))
                        full = s[f"{name}_full"].at[slot]

                        @pl.when(number >= stages)
                        def _(name: str = name, slot: Any = slot) -> None:
                            plgpu.barrier_wait(s[f"{name}_empty"].at[slot])

                        plgpu.copy_gmem_to_smem(source.at[window], s[f"{name}_s"].at[slot], full)
                        target = s["log_s" if kind == 0 else "delta_s"].at[slot]
                        plgpu.copy_gmem_to_smem(
                            stats_g.at[block.batch, head, kind, queries], target, full
                        )
                        if kind == 0:

                            @pl.when(number == 0)
                            def _() -> None:
                                window = (block.batch, keys, block.kv_head)
                                plgpu.copy_gmem_to_smem(v_g.at[window], s["v_s"], s["v_full"])

                self.loop(0, steps, step)

        plgpu.warp_map(load)

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

    def run(self, dk_g: Any, dv_g: Any, dk: Any, dv: Any) -> None:
        """Everything that the warpgroup does."""
        s, block = self.s, self.block
        steps = block.end - block.begin
        masked = block.full - block.begin

        @pl.when(steps > 0)
        def _() -> None:
            plgpu.barrier_wait(s["k_full"])
            plgpu.barrier_wait(s["v_full"])

        def heads(group: Any, _: Any) -> None:
            def step(i: Any, mask: bool) -> None:
                self.step(i, group * steps + i, group, dk, dv, mask)

            if self.problem.causal or self.tiles.masks_keys:
                lax.fori_loop(0, masked, lambda i, _: step(i, True), None)
            lax.fori_loop(masked, steps, lambda i, _: step(i, False), None)

        if self.problem.group == 1:
            heads(jnp.int32(0), None)
        else:
            lax.fori_loop(0, self.problem.group, heads, None)
        self.finish(dk_g, dv_g, dk, dv)

    def step(self, i: Any, number: Any, group: Any, dk: Any, dv: Any, mask: bool) -> None:
        """One tile of queries."""
        c, p = self.config, self.problem
        scores = plgpu.ACC((ROWS, c.block_q), jnp.float32)
        dq_shape = (ROWS, self.tiles.dq.columns)

        def inner(st: Any, dpt: Any) -> Any:
            return self.scores(i, number, dk, dv, mask, st, dpt)

        ds = pl.run_scoped(inner, scores, scores)
        pl.run_scoped(
            functools.partial(self.gradients, i, number, group, dk, ds),
            plgpu.ACC(dq_shape, jnp.float32),
        )
        del p

    def scores(self, i: Any, number: Any, dk: Any, dv: Any, mask: bool, st: Any, dpt: Any) -> Any:
        """The gradients of the scores; starts the product for the values."""
        c, p, s = self.config, self.problem, self.s
        q_slot = lax.rem(number, jnp.int32(c.q_stages))
        do_slot = lax.rem(number, jnp.int32(c.d_out_stages))
        per_query = plgpu.Layout.WGMMA.reduce(0)
        k_rows, v_rows = s["k_s"].at[self.rows], s["v_s"].at[self.rows]
        q_s, do_s = s["q_s"].at[q_slot], s["do_s"].at[do_slot]
        plgpu.barrier_wait(s["q_full"].at[q_slot])
        plgpu.wgmma(st, k_rows, plgpu.transpose_ref(q_s, (1, 0)), accumulate=False)
        plgpu.barrier_wait(s["do_full"].at[do_slot])
        plgpu.wgmma(dpt, v_rows, plgpu.transpose_ref(do_s, (1, 0)), accumulate=False)
        logs = _spread(plgpu.load(s["log_s"].at[q_slot], layout=per_query), c.block_q)
        x = plgpu.wgmma_accumulator_load(st, wait_n=1)
        slope = None
        if p.soft_cap is None:
            x = x * (p.scale * LOG2_E) - logs
        else:
            bend = jnp.tanh(x * (p.scale / p.soft_cap))
            x = bend * (p.soft_cap * LOG2_E) - logs
            slope = 1.0 - bend * bend
        probabilities = jnp.exp2(x)
        if mask:
            probabilities = jnp.where(self.visible(i), probabilities, 0.0)
        delta = _spread(plgpu.load(s["delta_s"].at[do_slot], layout=per_query), c.block_q)
        ds = (plgpu.wgmma_accumulator_load(dpt, wait_n=0) - delta) * probabilities
        if slope is not None:
            ds = ds * slope
        plgpu.wgmma(dv, probabilities.astype(p.dtype), do_s)
        return ds.astype(p.dtype)

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

    def gradients(self, i: Any, number: Any, group: Any, dk: Any, ds: Any, dq: Any) -> None:
        """The products with the gradients of the scores."""
        c, p, s = self.config, self.problem, self.s
        q_slot = lax.rem(number, jnp.int32(c.q_stages))
        do_slot = lax.rem(number, jnp.int32(c.d_out_stages))
        ds_slot = lax.rem(number, jnp.int32(c.ds_stages))
        q_s = s["q_s"].at[q_slot]
        ds_s = s["ds_s"].at[ds_slot]
        if c.ds_stages == 1:

            @pl.when(number > 0)
            def _() -> None:
                plgpu.barrier_wait(s["ds_empty"])

        ds_s[self.rows] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(s["ds_full"])
        plgpu.barrier_wait(s["ds_full"])
        plgpu.wgmma(dq, *self.dq_operands(ds_s), accumulate=False)
        plgpu.wgmma(dk, ds, q_s)
        # The sums of the step before have left shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = plgpu.wgmma_accumulator_load(dq, wait_n=1)
        plgpu.barrier_arrive(s["do_empty"].at[do_slot])
        if c.ds_stages == 1:
            plgpu.barrier_arrive(s["ds_empty"])
        part = s["dq_s"].at[self.thread]
        parts = self.tiles.dq
        parts.view(part)[...] = parts.split(sums)
        plgpu.commit_smem()
        head = self.block.kv_head * p.group + group
        tile = self.tiles.q_tile(self.block, i)
        plgpu.copy_smem_to_gmem(
            part, self.dq_g.at[self.block.batch, head, tile, self.thread], reduction_op="add"
        )
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
        plgpu.wgmma_wait(0)
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
