"""When the gradients of attention are computed in one kernel, and how it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallasite_hopper.ops.flash import single
from pallasite_hopper.ops.flash.single_choice import one_kernel
from pallasite_hopper.ops.flash.single_config import TILE, SingleConfig
from pallasite_hopper.ops.flash.terms import SHORT
from pallasite_std.api import AttentionProblem, Extras, in_whole_tiles, padded

_VECTOR = 8
"""Elements of 16 bytes: rows of the copy engine are whole vectors of these."""


def chosen(problem: AttentionProblem, extras: Extras) -> SingleConfig | None:
    """The configuration if one kernel takes less time than several, else None."""
    if extras.block_mask is not None:
        return None
    if extras.q_segments is not None and max(problem.q_seq, problem.kv_seq) > SHORT:
        return None
    return one_kernel(problem)


def gradients(
    problem: AttentionProblem,
    config: SingleConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    extras: Extras,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v.

    Args:
      problem: what was computed, without operands.
      config: how.
      q, k, v, out, d_out: operands, result and its cotangent; (batch, sequence, heads, size).
      lse: (batch, q_heads, q_seq or more), natural logarithms of the sums of exponentials; with a
        bias or slopes (batch, q_heads, 2, q_seq or more): the largest scores, and the logarithms
        relative to these.
      extras: the other arrays, without a mask of blocks.
    """
    sizes = problem.head_dim, problem.v_dim
    arrays = [padded(one, 3, _VECTOR) for one in (q, k, v, d_out, out)]
    rows = -(-problem.q_seq // TILE) * TILE
    if lse.shape[-1] < rows:
        lse = jnp.pad(lse, (*[(0, 0)] * (lse.ndim - 1), (0, rows - lse.shape[-1])))
    found = {name: one for name, one in extras._asdict().items() if one is not None}
    found = in_whole_tiles(found, TILE, TILE)
    shared = {name: found[name].shape for name in ("bias", "slopes") if name in found}
    full = AttentionProblem(
        **{
            **{name: getattr(problem, name) for name in problem.__dataclass_fields__},
            "head_dim": arrays[0].shape[3],
            "v_dim": arrays[2].shape[3],
            "operands": tuple(found),
            "of_batch": frozenset(name for name, shape in shared.items() if shape[0] != 1),
            "of_head": frozenset(
                name for name, shape in shared.items() if shape[1] != 1 or name == "slopes"
            ),
        }
    )
    d_q, d_k, d_v = _kernel(full, config)(*arrays, lse, *found.values())
    return d_q[..., : sizes[0]], d_k[..., : sizes[0]], d_v[..., : sizes[1]]


@functools.lru_cache(maxsize=256)
def _kernel(problem: AttentionProblem, config: SingleConfig) -> Callable[..., Any]:
    return single.build(problem, config)
