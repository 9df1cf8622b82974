"""What a block of the kernel of all gradients of attention does."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.flash.single_config import TILE, Kind, SingleConfig
from pallasite_std.api import (
    LOG2_E,
    AttentionProblem,
    AttentionView,
    broadcast_rows,
    exponents,
    normalized,
    over_keys,
    over_queries,
)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """References to the kernel's arrays.

    Attributes:
      q, k, v, d_out, out: (batch, sequence, heads, elements of a head).
      lse: (batch, q_heads, rows), or (batch, q_heads, 2, rows) with a bias.
      operands: of the problem.
      results: the gradients, by name.
    """

    q: Any
    k: Any
    v: Any
    d_out: Any
    out: Any
    lse: Any
    operands: tuple[Any, ...]
    results: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The tile that the block owns, and what it goes through; values of the kernel.

    Attributes:
      view: of the batch, and a head of the queries.
      head: of the tile; of the keys or of the queries, as the tile is.
      kv_head: of the keys.
      start: the first row.
      steps: tiles that see it, or that it sees.
      before, count: of these, how many come before the block's part, and how many it has.
      own, other: arrays of the tile, and of those that the block goes through, with how many
        elements heads have.
    """

    view: AttentionView
    head: Any
    kv_head: Any
    start: Any
    steps: Any
    before: Any
    count: Any
    own: tuple[tuple[Any, int], ...]
    other: tuple[tuple[Any, int], ...]


class Block:
    """A block of a kind. Rows of scores are those of its tile."""

    def __init__(
        self,
        problem: AttentionProblem,
        config: SingleConfig,
        kind: Kind,
        size: int,
        arrays: Arrays,
        scratch: dict[str, Any],
        part: Any,
    ):
        """``size``: elements of a head in shared memory; ``part``: the block's, in its cluster."""
        self.problem, self.config, self.kind, self.size = problem, config, kind, size
        self.arrays, self.scratch, self.part = arrays, scratch, part
        self.split = config.split if kind.by_keys else 1

    def run(self, number: Any) -> None:
        """All of it, for the tile with a number."""
        sums = [plgpu.ACC((TILE, self.size), jnp.float32)] * (2 if self.kind is Kind.BOTH else 1)
        pl.run_scoped(lambda *accumulators: self._work(self._tile(number), accumulators), *sums)

    def _tile(self, number: Any) -> _Tile:
        p, kind, arrays = self.problem, self.kind, self.arrays
        heads = p.kv_heads if kind.by_keys else p.q_heads
        place, rest = _divide(number, p.batch * heads)
        batch, head = _divide(rest, heads)
        kv_head = head if kind.by_keys else lax.div(head, jnp.int32(p.group))
        of_keys = ((arrays.k, p.head_dim), (arrays.v, p.v_dim))
        of_queries = ((arrays.q, p.head_dim), (arrays.d_out, p.v_dim), (arrays.out, p.v_dim))
        columns = self.config.columns
        # With a causal mask, the first keys and the last queries have most to do: they come first.
        if kind.by_keys:
            start = place * TILE
            view = AttentionView.of(p, arrays.operands, batch, head * p.group)
            steps = over_queries(view, kv_head, start, TILE, columns)
            own: tuple[Any, ...] = of_keys if kind.of_scores else of_keys[:1]
            other: tuple[Any, ...] = of_queries if kind.of_scores else of_queries[:2]
        else:
            start = (-(-p.q_seq // TILE) - 1 - place) * TILE
            view = AttentionView.of(p, arrays.operands, batch, head)
            steps = over_keys(view, start, TILE, columns)
            own, other = of_queries, of_keys
        before, count = jnp.int32(0), steps.count
        if self.split > 1:
            before = lax.div(count * self.part, jnp.int32(self.split))
            count = lax.div(count * (self.part + 1), jnp.int32(self.split)) - before
        return _Tile(view, head, kv_head, start, steps, before, count, own, other)

    # Copies ---------------------------------------------------------------------------------------

    def _columns(self, dim: int) -> tuple[Any, ...]:
        """What a window has after its rows and its head: columns of a whole head in shared memory,
        where those that do not exist are read as zero and not written."""
        if dim == self.size:
            return ()
        # A value of the kernel, since a number would be checked.
        return (pl.ds(lax.add(jnp.int32(0), jnp.int32(0)), self.size),)

    def _fetch_own(self, tile: _Tile, n: int) -> None:
        ref, dim = tile.own[n]
        rows = pl.ds(tile.start, TILE)
        window = ref.at[tile.view.batch, rows, tile.head, *self._columns(dim)]
        own, full = self.scratch["own"].at[n], self.scratch["own_full"].at[n]
        plgpu.copy_gmem_to_smem(window, own, full)

    def _at(self, tile: _Tile, step: Any) -> tuple[Any, Any]:
        """The head and the first row of what a step has."""
        part, first = tile.steps.place(tile.before + step)
        if self.kind.by_keys:
            return tile.kv_head * self.problem.group + part, first
        return tile.kv_head, first

    def _slot(self, n: int, stage: Any) -> Any:
        return n * self.config.stages + stage

    def _fetch(self, tile: _Tile, step: Any, which: range) -> None:
        head, first = self._at(tile, step)
        stage = lax.rem(jnp.int32(step), jnp.int32(self.config.stages))
        for n in which:
            ref, dim = tile.other[n]
            rows = pl.ds(first, self.config.columns)
            window = ref.at[tile.view.batch, rows, head, *self._columns(dim)]
            slot = self._slot(n, stage)
            other, full = self.scratch["other"].at[slot], self.scratch["other_full"].at[slot]
            plgpu.copy_gmem_to_smem(window, other, full)

    # Steps ----------------------------------------------------------------------------------------

    def _work(self, tile: _Tile, sums: tuple[Any, ...]) -> None:
        s, stages, by_keys = self.scratch, self.config.stages, self.kind.by_keys
        every = range(len(tile.other))
        # In the order in which they are needed.
        self._fetch_own(tile, 0)
        pl.when(tile.count > 0)(lambda: self._fetch(tile, 0, every[:1]))
        for n in range(1, len(tile.own)):
            self._fetch_own(tile, n)
        pl.when(tile.count > 0)(lambda: self._fetch(tile, 0, every[1:]))
        for ahead in range(1, stages - 1):
            pl.when(tile.count > ahead)(functools.partial(self._fetch, tile, ahead, every))
        of_rows: tuple[Any, Any] | None = None
        if not by_keys:
            logarithms = self._logarithms(tile.view.batch, tile.head, tile.start, TILE)
        for n in range(len(tile.own)):
            plgpu.barrier_wait(s["own_full"].at[n])
        if not by_keys:
            of_rows = logarithms, _products(s["own"].at[1], s["own"].at[2])

        def step(number: Any, _: Any) -> None:
            following = number + (stages - 1)
            needed = (following < tile.count) if stages > 1 else (number > 0)
            pl.when(needed)(functools.partial(self._fetch, tile, following, every))
            scores = [plgpu.ACC((TILE, self.config.columns), jnp.float32)]
            scores *= 1 + self.kind.of_scores
            pl.run_scoped(
                lambda *accumulators: self._step(tile, number, of_rows, sums, accumulators),
                *scores,
            )

        lax.fori_loop(0, tile.count, step, None)
        self._finish(tile, sums)

    def _logarithms(self, batch: Any, head: Any, start: Any, count: int) -> list[Any]:
        """To base 2, of the sums of queries; infinite for those that see nothing. With a bias, the
        largest scores that they are relative to come first."""
        rows, lse = pl.ds(pl.multiple_of(start, count), count), self.arrays.lse.at[batch, head]
        if not self.problem.biased:
            return [exponents(lse[rows])]
        logs = lse[1, rows] * LOG2_E
        return [lse[0, rows], jnp.where(logs == -jnp.inf, jnp.inf, logs)]

    def _step(
        self,
        tile: _Tile,
        number: Any,
        of_rows: tuple[Any, Any] | None,
        sums: tuple[Any, ...],
        accumulators: tuple[Any, ...],
    ) -> None:
        """One tile of what the block goes through.

        ``of_rows``: logarithms and sums of products of the block's rows, if these are queries.
        """
        p, s, kind = self.problem, self.scratch, self.kind
        shape, axis = (TILE, self.config.columns), 0 if kind.by_keys else 1
        head, first = self._at(tile, number)
        view = tile.view.with_head(head if kind.by_keys else tile.head)
        place = (first, tile.start) if kind.by_keys else (tile.start, first)
        if of_rows is None:
            logs = self._logarithms(view.batch, head, first, self.config.columns)
            logs = [lax.broadcast_in_dim(one, shape, (1,)) for one in logs]
        else:
            logs = [broadcast_rows(one, shape[1]) for one in of_rows[0]]
        stage = lax.rem(number, jnp.int32(self.config.stages))
        slots = [self._slot(n, stage) for n in range(len(tile.other))]
        other, own = [s["other"].at[slot] for slot in slots], s["own"]
        plgpu.barrier_wait(s["other_full"].at[slots[0]])
        plgpu.wgmma(accumulators[0], own.at[0], _transposed(other[0]), accumulate=False)
        for slot in slots[1:]:
            plgpu.barrier_wait(s["other_full"].at[slot])
        if kind.of_scores:
            plgpu.wgmma(accumulators[1], own.at[1], _transposed(other[1]), accumulate=False)
            if of_rows is None:
                # Through shared memory, from one number for each row to one for each column.
                s["delta"][...] = _products(other[1], other[2])
                delta = lax.broadcast_in_dim(s["delta"][...], shape, (1,))
            else:
                delta = broadcast_rows(of_rows[1], shape[1])
        products = plgpu.wgmma_accumulator_load(accumulators[0], wait_n=int(kind.of_scores))
        scores, capped = view.scores(products, *place, keys_axis=axis)
        if p.biased:
            shown = view.masked(scores, *place, keys_axis=axis)
            weights = normalized(shown, p.factor, *logs)
        else:
            shown = view.masked(scores * p.factor, *place, keys_axis=axis)
            weights = jnp.exp2(shown - logs[0])
        if kind.of_values:
            used = view.dropped(weights, *place, keys_axis=axis)
            plgpu.wgmma(sums[-1], used.astype(p.dtype), other[1])
        if kind.of_scores:
            waits = 1 if kind.of_values else 0
            d_weights = plgpu.wgmma_accumulator_load(accumulators[1], wait_n=waits)
            d_weights = view.dropped(d_weights, *place, keys_axis=axis)
            d_scores = weights * (d_weights - delta)
            if p.soft_cap is not None:
                d_scores = d_scores * p.slope(capped)
            plgpu.wgmma(sums[0], d_scores.astype(p.dtype), other[0])
        plgpu.wgmma_wait(0)

    # Results --------------------------------------------------------------------------------------

    def _finish(self, tile: _Tile, sums: tuple[Any, ...]) -> None:
        """Writes the block's gradients, by way of its own tiles."""
        p, kind = self.problem, self.kind
        rows = TILE // self.split
        first = tile.start if self.split == 1 else tile.start + self.part * rows
        named = ["k" if kind.by_keys else "q"] if kind.of_scores else []
        named += ["v"] if kind.of_values else []
        for n, (name, total) in enumerate(zip(named, sums, strict=True)):
            values = plgpu.wgmma_accumulator_load(total, wait_n=0)
            if self.split > 1:
                values = self._added(values, rows)
            if name != "v" and p.soft_cap is None:
                values = values * p.scale
            staging = self.scratch["own"].at[n, pl.ds(0, rows)]
            staging[...] = values.astype(p.dtype)
            plgpu.commit_smem()
            columns = self._columns(p.v_dim if name == "v" else p.head_dim)
            window = (tile.view.batch, pl.ds(first, rows), tile.head, *columns)
            plgpu.copy_smem_to_gmem(staging, self.arrays.results[name].at[window])
        plgpu.wait_smem_to_gmem(0)

    def _added(self, values: Any, rows: int) -> Any:
        """This block's rows of the sum over the cluster of what its blocks have."""
        sums, barrier = self.scratch["sums"], self.scratch["together"]
        sums[...] = values
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        mine = pl.ds(pl.multiple_of(self.part * rows, rows), rows)
        parts = [
            plgpu.cluster_ref(sums, {"part": part}).at[mine][...] for part in range(self.split)
        ]
        total = functools.reduce(lambda one, other: one + other, parts)
        # Until all have arrived, others read this block's sums.
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return total


def _products(d_out: Any, out: Any) -> Any:
    """The sums of products of results and their gradients, for each query."""
    return jnp.sum(d_out[...].astype(jnp.float32) * out[...].astype(jnp.float32), axis=1)


def _divide(number: Any, by: int) -> tuple[Any, Any]:
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))


def _transposed(tile: Any) -> Any:
    return plgpu.transpose_ref(tile, (1, 0))
