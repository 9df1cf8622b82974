"""The portable kernel of attention: a block for a tile of queries, one pass over keys and values.

Weights are the left operand of the second product as they come out of the first: a lane holds the
same elements of an accumulator and of a left operand of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops import softmax
from pallasite_std.ops.flash.config import AttentionConfig
from pallasite_std.ops.flash.problem import Problem, View
from pallasite_std.ops.flash.steps import over_keys
from pallasite_std.ops.rings import PARAMS, over_steps

IN_REGISTERS = 256
"""Bytes of a query that are kept in registers; of longer ones, they are read again each step."""


def build(problem: Problem, config: AttentionConfig, residuals: bool) -> Callable[..., Any]:
    """The kernel as a function of (q, k, v, operands...), the latter as the problem lists them.

    Returns:
      A function that returns a tuple of the result and, with ``residuals``, the two parts of
      log-sum-exp (see ``residuals.py``), with q_seq rounded up to whole tiles.
    """
    head_dim, v_dim, dtype = problem.head_dim, problem.v_dim, problem.dtype
    block_q, block_kv, stages = config.block_q, config.block_kv, config.stages
    tiles = -(-problem.q_seq // block_q)
    always_masked = problem.has("q_segments")

    def body(
        *refs: Any,
        q_smem: Any,
        k_smem: Any,
        v_smem: Any,
        q_loaded: Any,
        loaded: Any,
        out_smem: Any = None,
    ) -> None:
        q, k, v, *rest = refs
        given = len(problem.operands)
        operands, (out, *lse) = tuple(rest[:given]), rest[given:]
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        kv_head = lax.div(head, problem.group)
        # The last queries of a causal problem see most keys: they come first.
        start = (tiles - 1 - lax.axis_index("tile")) * block_q
        view = View.of(problem, operands, batch, head)
        steps = over_keys(view, start, block_q, block_kv)
        rows = pl.ds(start, block_q)

        def fetch(step: Any, stage: Any) -> None:
            keys = pl.ds(steps.place(step)[1], block_kv)
            plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head], k_smem.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[stage], loaded.at[stage])

        plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_smem, q_loaded)
        plgpu.barrier_wait(q_loaded)
        held = q_smem[...] if head_dim * dtype.itemsize <= IN_REGISTERS else None

        def attend(step: Any, stage: Any, carry: Any) -> Any:
            zero = jnp.zeros((block_q, block_kv), jnp.float32)
            queries = q_smem[...] if held is None else held
            key = steps.place(step)[1]
            products = plgpu.mma(zero, queries, k_smem[stage].T)
            scores, _ = view.scores(products, start, key, keys_axis=1)
            if always_masked:
                scores = view.masked(scores, start, key, keys_axis=1)
            else:
                scores = lax.cond(
                    view.all_seen(start, block_q, key, block_kv),
                    lambda scores: scores,
                    lambda scores: view.masked(scores, start, key, keys_axis=1),
                    scores,
                )

            def multiply(acc: Any, weights: Any) -> Any:
                weights = view.dropped(weights, start, key, keys_axis=1)
                return plgpu.mma(acc, weights.astype(dtype), v_smem[stage])

            return softmax.accumulate(carry, scores, problem.factor, multiply)

        carry = softmax.start(block_q, v_dim)
        carry = over_steps(steps.count, stages, loaded, fetch, attend, carry)
        result, *parts = softmax.finish(carry)
        staging = q_smem if out_smem is None else out_smem
        staging[...] = result.astype(dtype)
        plgpu.copy_smem_to_gmem(staging, out.at[batch, rows, head])
        if residuals:
            for number, part in enumerate(parts):
                lse[0][batch, head, number, rows] = part
        plgpu.wait_smem_to_gmem(0)

    shape = (problem.batch, problem.q_seq, problem.q_heads, v_dim)
    outputs = [jax.ShapeDtypeStruct(shape, dtype)]
    if residuals:
        rows = (problem.batch, problem.q_heads, 2, tiles * block_q)
        outputs.append(jax.ShapeDtypeStruct(rows, jnp.float32))
    scratch = {
        "q_smem": plgpu.SMEM((block_q, head_dim), dtype),
        "k_smem": plgpu.SMEM((stages, block_kv, head_dim), dtype),
        "v_smem": plgpu.SMEM((stages, block_kv, v_dim), dtype),
        "q_loaded": plgpu.Barrier(),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }
    if v_dim != head_dim:
        scratch["out_smem"] = plgpu.SMEM((block_q, v_dim), dtype)
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        grid=(tiles, problem.q_heads, problem.batch),
        grid_names=("tile", "head", "batch"),
        scratch_types=scratch,
        kernel_name="warp_attention",
        compiler_params=PARAMS,
    )
    return kernel
