"""What goes before and after the matmuls of the backward: sums of rows, and a conversion."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.flash.backward_config import LOG2_E, BackwardConfig, BackwardProblem
from pallasite_hopper.ops.flash.backward_tiles import DqParts
from pallasite_std.api import exponents

ROWS = 64
"""Queries of one block."""

_LINES = 4
"""Of 256 zeros that are written at once: eight for each lane."""


def row_statistics(
    problem: BackwardProblem,
    out: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    q_lengths: jax.Array | None,
    padded: int,
    sums_shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """What each query's scores are normalized with, and what is subtracted from their gradients.

    Args:
      problem: extents.
      out, d_out: (batch, q_seq, q_heads, elements of a head).
      lse: (batch, q_heads, q_seq or more), natural logarithms, or (batch, q_heads, 2, q_seq or
        more), the largest scores and logarithms relative to these. Those of queries that do not
        exist do not count, as the gradient of their results is zero, but must not be NaN.
      q_lengths: (batch,), or None.
      padded: rows of the result, a multiple of 64.
      sums_shape: (batch, q_heads, ...), of what the gradient of the queries is added to.

    Returns:
      (batch, q_heads, 2 or 3, padded), float32: the logarithms to base 2 of the sums, infinite for
      queries that see nothing and that do not exist, ``sum(out * d_out)`` and, if they are given,
      the largest scores; and zeros of float32, of ``sums_shape``.
    """
    dim, tiles = problem.head_dim, padded // ROWS
    # Each block writes its part of the zeros.
    lines = math.prod(sums_shape[2:-1])
    each = -(-lines // tiles)
    each += -each % _LINES
    written = -(-lines // each) * each
    rest, two = padded - lse.shape[-1], lse.ndim == 4
    if rest > 0:
        filled = 0.0 if two else math.inf
        lse = jnp.pad(lse, (*[(0, 0)] * (lse.ndim - 1), (0, rest)), constant_values=filled)

    def body(out_g: Any, d_out_g: Any, lse_g: Any, *refs: Any) -> None:
        lengths_g, (stats_g, zeros_g, out_s, d_out_s, loaded) = (
            (None, refs) if q_lengths is None else (refs[0], refs[1:])
        )
        batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        rows = pl.ds(tile * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(out_g.at[batch, rows, head, *problem.value_window], out_s, loaded)
        plgpu.copy_gmem_to_smem(
            d_out_g.at[batch, rows, head, *problem.value_window], d_out_s, loaded
        )
        if two:
            stats_g[batch, head, 2, rows] = lse_g[batch, head, 0, rows]
            logs = lse_g[batch, head, 1, rows] * LOG2_E
            logs = jnp.where(logs == -jnp.inf, jnp.inf, logs)
        else:
            logs = exponents(lse_g[batch, head, rows])
        if lengths_g is not None:
            number = lax.iota(jnp.int32, ROWS)
            logs = jnp.where(number + tile * ROWS < lengths_g[batch], logs, jnp.inf)
        stats_g[batch, head, 0, rows] = logs

        def clear(number: Any, _: Any) -> None:
            part = pl.ds(tile * each + number * _LINES, _LINES)
            zeros_g[batch, head, part] = jnp.zeros((_LINES, sums_shape[-1]), jnp.float32)

        lax.fori_loop(0, jnp.where(tile * each < written, each // _LINES, 0), clear, None)
        plgpu.barrier_wait(loaded)
        products = out_s[...].astype(jnp.float32) * d_out_s[...].astype(jnp.float32)
        stats_g[batch, head, 1, rows] = jnp.sum(products, axis=1)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((problem.batch, problem.q_heads, 2 + two, padded), jnp.float32),
            jax.ShapeDtypeStruct((*sums_shape[:2], written, sums_shape[-1]), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((ROWS, dim), out.dtype),
            plgpu.SMEM((ROWS, dim), out.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(problem.batch, tiles, problem.q_heads),
        grid_names=("batch", "tile", "head"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="attention_backward_rows",
    )
    operands = [] if q_lengths is None else [q_lengths]
    statistics, zeros = kernel(out, d_out, lse, *operands)
    return statistics, zeros[:, :, :lines].reshape(sums_shape)


def convert_dq(problem: BackwardProblem, config: BackwardConfig, sums: jax.Array) -> jax.Array:
    """The gradient of the queries from its sums.

    Args:
      problem: extents and dtype.
      config: which says how the sums are stored.
      sums: (batch, q_heads, tiles, parts, lines, 256) of float32.

    Returns:
      (batch, q_seq, q_heads, elements of a head), the sums times the scale.
    """
    dim, block_q = problem.head_dim, config.block_q
    parts = DqParts.of(problem, config)

    def body(sums_g: Any, dq_g: Any, dq_s: Any) -> None:
        batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        target = plgpu.transpose_ref(dq_s, (1, 0)) if parts.transposed else dq_s
        for part in range(parts.parts):
            stored = parts.view(sums_g.at[batch, head, tile, part])
            sums = parts.join(stored[...]) * problem.scale
            row, column = (part * ROWS, 0) if parts.by_rows else (0, part * parts.columns)
            window = (pl.ds(row, ROWS), pl.ds(column, parts.columns))
            target.at[window][...] = sums.astype(problem.dtype)
        plgpu.commit_smem()
        queries = pl.ds(tile * block_q, block_q)
        plgpu.copy_smem_to_gmem(dq_s, dq_g.at[batch, queries, head, *problem.head_window])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (problem.batch, problem.q_seq, problem.q_heads, problem.stored_dim), problem.dtype
        ),
        scratch_types=[
            plgpu.SMEM((block_q, dim), problem.dtype),
        ],
        grid=(problem.batch, sums.shape[2], problem.q_heads),
        grid_names=("batch", "tile", "head"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="attention_backward_dq",
    )
    return kernel(sums)
