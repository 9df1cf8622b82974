"""The portable kernel of attention against a cache: queries that share a head are one matrix.

Blocks share the keys of a sequence. Each leaves a normalized result and log-sum-exp of its part,
which are combined afterwards.

Source: T. Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops import softmax
from pallasite_std.ops.decode.arguments import DecodeProblem
from pallasite_std.ops.rings import PARAMS, first_elements, over_steps


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one problem is cut up.

    Attributes:
      rows: of the matrix of queries in one block: 16, 32 or 64.
      tile: keys of one step.
      stages: steps that are in flight.
      splits: parts of the keys.
    """

    rows: int
    tile: int
    stages: int
    splits: int

    def shared_bytes(self, problem: DecodeProblem) -> int:
        """Shared memory of the kernel."""
        size, narrow = np.dtype(problem.dtype).itemsize, np.dtype(problem.cache_dtype).itemsize
        tiles = self.rows * size + 2 * self.stages * self.tile * narrow
        # Weights of 32 bits become an operand of the second product by way of shared memory, and
        # values that are converted or masked may do so.
        weights = self.rows * self.tile * 4 if size == 4 else 0
        values = self.tile * problem.head_dim * size
        return int(tiles * problem.head_dim + max(weights, values) + 1024)


def query_rows(problem: DecodeProblem) -> int:
    """Rows of the matrix of queries that share a head of the cache."""
    return problem.tokens * problem.group


def build(problem: DecodeProblem, tiling: Tiling) -> Callable[..., Any]:
    """The kernel as a function of (q, k, v, k_scales?, v_scales?, lengths?, page_indices?).

    q is (batch, kv_heads, tokens * group, head_dim). Returns the results of the parts, float32
    (splits, batch, kv_heads, rows, head_dim), and their log-sum-exp (splits, batch, kv_heads,
    rows), where rows is filled up to whole blocks.
    """
    rows, tile, stages, head_dim = tiling.rows, tiling.tile, tiling.stages, problem.head_dim
    row_tiles = -(-query_rows(problem) // rows)
    # A copy has rows of one page.
    part = math.gcd(tile, problem.page_size or tile)
    copies = tile // part
    factor = softmax.LOG2_E * (problem.scale if problem.soft_cap is None else 1.0)

    def body(*refs: Any, q_smem: Any, k_smem: Any, v_smem: Any, q_loaded: Any, loaded: Any) -> None:
        q, k, v, *rest, out, lse = refs
        factors = (rest.pop(0), rest.pop(0)) if problem.scales else None
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        split, row_tile = lax.div(lax.axis_index("part"), row_tiles), jnp.int32(0)
        if row_tiles > 1:
            row_tile = lax.rem(lax.axis_index("part"), row_tiles)
        length: Any = jnp.int32(problem.kv_len)
        if problem.lengths:
            length = lax.clamp(0, rest.pop(0)[batch], problem.kv_len)
        window = pl.ds(row_tile * rows, rows)
        # The first row of the tile sees keys up to here, the last one up to there.
        before = lax.div(row_tile * rows, problem.group) - (problem.tokens - 1)
        seen_by_all = length + lax.min(before, 0)
        seen = length
        if row_tiles > 1:
            after = lax.div((row_tile + 1) * rows - 1, problem.group) - (problem.tokens - 1)
            seen = lax.clamp(0, length + lax.min(after, 0), length)
        total = lax.div(seen + (tile - 1), tile)
        share = lax.div(total + (tiling.splits - 1), tiling.splits)
        first = split * share
        count = lax.clamp(0, total - first, share)

        def source(pool: Any, key: Any) -> Any:
            """Where ``part`` rows of the cache are, from a key on."""
            if not problem.page_size:
                return pool.at[batch, pl.ds(key, part), head]
            # Entries of the table beyond the length mean nothing: any page will do.
            entry = lax.min(lax.div(key, problem.page_size), problem.pages_per_sequence - 1)
            page = jnp.where(key < length, rest[-1][batch, entry], 0)
            place = pl.ds(lax.rem(key, problem.page_size), part)
            return pool.at[head, page, place] if problem.heads_first else pool.at[page, place, head]

        def fetch(step: Any, stage: Any) -> None:
            for number in range(copies):
                key = (first + step) * tile + number * part
                there = pl.ds(number * part, part)
                for pool, smem in ((k, k_smem), (v, v_smem)):
                    plgpu.copy_gmem_to_smem(
                        source(pool, key), smem.at[stage, there], loaded.at[stage]
                    )

        plgpu.copy_gmem_to_smem(q.at[batch, head, window], q_smem, q_loaded)
        plgpu.barrier_wait(q_loaded)

        def attend(step: Any, stage: Any, carry: Any) -> Any:
            keys, values = k_smem[stage].T, v_smem[stage]
            if problem.narrow:
                keys, values = keys.astype(problem.dtype), values.astype(problem.dtype)
            zero = jnp.zeros((rows, tile), jnp.float32)
            scores = plgpu.mma(zero, q_smem[...], keys)
            if factors is not None:
                scores = scores * factors[0][head]
            if problem.soft_cap is not None:
                scores = softmax.cap(scores, problem.scale, problem.soft_cap)
            key = (first + step) * tile

            def masked(scores: Any, values: Any) -> tuple[Any, Any]:
                shown = _shown(problem, scores.shape, row_tile * rows, key, length)
                # What lies beyond the length need not be finite.
                return jnp.where(shown, scores, -jnp.inf), first_elements(values, length - key, 0)

            scores, values = lax.cond(
                key + tile <= seen_by_all,
                lambda scores, values: (scores, values),
                masked,
                scores,
                values,
            )

            def multiply(acc: Any, weights: Any) -> Any:
                return plgpu.mma(acc, weights.astype(problem.dtype), values)

            return softmax.accumulate(carry, scores, factor, multiply)

        carry = softmax.start(rows, head_dim)
        carry = over_steps(count, stages, loaded, fetch, attend, carry)
        result, largest, logarithm = softmax.finish(carry)
        if factors is not None:
            result = result * factors[1][head]
        out[split, batch, head, window] = result
        lse[split, batch, head, window] = largest * (factor / softmax.LOG2_E) + logarithm

    shape = (tiling.splits, problem.batch, problem.kv_heads, row_tiles * rows)
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(tiling.splits * row_tiles, problem.kv_heads, problem.batch),
        grid_names=("part", "head", "batch"),
        scratch_types={
            "q_smem": plgpu.SMEM((rows, head_dim), problem.dtype),
            "k_smem": plgpu.SMEM((stages, tile, head_dim), problem.cache_dtype),
            "v_smem": plgpu.SMEM((stages, tile, head_dim), problem.cache_dtype),
            "q_loaded": plgpu.Barrier(),
            "loaded": plgpu.Barrier(num_arrivals=2 * copies, num_barriers=stages),
        },
        kernel_name="warp_decode_attention",
        compiler_params=PARAMS,
    )
    return kernel


def _shown(problem: DecodeProblem, shape: tuple[int, ...], row: Any, key: Any, length: Any) -> Any:
    """Which keys each row sees: those up to its own."""
    keys = key + lax.broadcasted_iota(jnp.int32, shape, 1)
    if problem.tokens == 1:
        return keys < length
    tokens = lax.div(row + lax.broadcasted_iota(jnp.int32, shape, 0), problem.group)
    return keys < length - (problem.tokens - 1) + tokens


def combined(results: jax.Array, logarithms: jax.Array) -> jax.Array:
    """The result of all keys from those of the parts; zeros for rows that see no key.

    Args:
      results: (splits, ..., head_dim).
      logarithms: (splits, ...), of the sums of exponentials.
    """
    if results.shape[0] == 1:
        return results[0]
    largest = jnp.max(logarithms, axis=0)
    weights = jnp.exp(logarithms - jnp.where(jnp.isneginf(largest), 0.0, largest))
    total = jnp.sum(weights, axis=0)
    weights = weights / jnp.where(total == 0, 1.0, total)
    return jnp.sum(results * weights[..., None], axis=0)
