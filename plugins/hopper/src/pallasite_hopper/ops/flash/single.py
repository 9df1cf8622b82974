"""The gradients of attention in one kernel, for so few tiles that launches would take longer.

Blocks are of two kinds, or three, that run side by side: of those that own a tile of keys, each
goes through the queries that see it and has the gradient of the keys, of the values, or of both; of
those that own a tile of queries, each goes through the keys that these see. All compute the scores
again, and the sums of the products of results and their gradients where they need them: what a
block has is complete, and written once. That takes seven or eight products of two tiles where five
would do, but neither sums in memory that begin as zeros and are added to and converted in the end,
nor a kernel before.

T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.flash.config import head_tile
from pallasite_hopper.ops.flash.single_block import Arrays, Block
from pallasite_hopper.ops.flash.single_config import OTHER, OWN, TILE, Kind, SingleConfig
from pallasite_std.api import AttentionProblem


def build(
    problem: AttentionProblem, config: SingleConfig
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """The kernel as a function of q, k, v, d_out, out, lse, operands of the problem.

    lse has the natural logarithms of the sums of exponentials, (batch, q_heads, rows): at least
    ``q_seq`` rounded up to whole tiles. Results are the gradients of q, k and v.
    """
    p, dtype, size = problem, problem.dtype, head_tile(max(problem.head_dim, problem.v_dim))
    split, places = config.split, OTHER * config.stages
    passing = plgpu.SMEM((places, config.columns, size), dtype)
    scratch = {
        "own": plgpu.SMEM((OWN, TILE, size), dtype),
        "other": passing,
        "delta": plgpu.SMEM((config.columns,), jnp.float32),
        "own_full": plgpu.Barrier(num_barriers=OWN),
        "other_full": plgpu.Barrier(num_barriers=places),
    }
    cluster: dict[str, Any] = {}
    if split > 1:
        # Sums take the place of the tiles when these have been gone through.
        scratch["other"] = plgpu.RefUnion(passing, plgpu.SMEM((TILE, size), jnp.float32))
        scratch["together"] = plgpu.ClusterBarrier(collective_axes=("part",))
        cluster = {"cluster": (split,), "cluster_names": ("part",)}

    def body(*refs: Any, **scratch_refs: Any) -> None:
        q, k, v, d_out, out, lse, *operands, d_q, d_k, d_v = refs
        results = {"q": d_q, "k": d_k, "v": d_v}
        arrays = Arrays(q, k, v, d_out, out, lse, tuple(operands), results)
        part: Any = jnp.int32(0)
        if split > 1:
            scratch_refs["other"], scratch_refs["sums"] = scratch_refs["other"]
            part = lax.axis_index("part")
        place, first = lax.axis_index("cluster"), 0
        for kind in config.kinds:
            end = first + _clusters(problem, config, kind)
            number, here = place - first, (place >= first) & (place < end)
            if split > 1 and not kind.by_keys:
                number = number * split + part
                here = here & (number < _tiles(problem, kind))
            block = Block(problem, config, kind, size, arrays, scratch_refs, part)
            pl.when(here)(functools.partial(block.run, number))
            first = end

    q_shape = (p.batch, p.q_seq, p.q_heads, p.head_dim)
    kv_shape = (p.batch, p.kv_seq, p.kv_heads)
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q_shape, dtype),
            jax.ShapeDtypeStruct((*kv_shape, p.head_dim), dtype),
            jax.ShapeDtypeStruct((*kv_shape, p.v_dim), dtype),
        ),
        grid=(sum(_clusters(problem, config, kind) for kind in config.kinds),),
        grid_names=("cluster",),
        **cluster,
        scratch_types=scratch,
        kernel_name="attention_backward_single",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
    )
    return kernel


def _tiles(problem: AttentionProblem, kind: Kind) -> int:
    """Tiles that blocks of a kind own."""
    if kind.by_keys:
        return problem.batch * problem.kv_heads * -(-problem.kv_seq // TILE)
    return problem.batch * problem.q_heads * -(-problem.q_seq // TILE)


def _clusters(problem: AttentionProblem, config: SingleConfig, kind: Kind) -> int:
    """Clusters of blocks of a kind: one for each tile of keys; blocks of queries need none."""
    tiles = _tiles(problem, kind)
    return tiles if kind.by_keys else -(-tiles // config.split)
