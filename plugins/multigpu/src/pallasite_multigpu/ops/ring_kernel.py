"""A step of ring attention in one kernel: Hopper's attention, and in each of its blocks one more
warpgroup, which writes this device's keys and values to the next device meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.flash.forward import Companion, build
from pallasite_hopper.ops.flash.forward_choice import default_config
from pallasite_hopper.ops.flash.tiles import Problem
from pallasite_multigpu.ops.tiles import tiles_of
from pallasite_std.api import padded

LARGEST_HEAD = 128
"""Elements of a head at most, see ``Companion``; beyond, the steps consist of two kernels."""
SENT = 2048
"""Elements that a block sends at a time."""


def fits(q: Any, k: Any) -> bool:
    """Whether the kernel takes these operands."""
    return (
        q.dtype in (jnp.bfloat16, jnp.float16)
        and q.dtype == k.dtype
        and q.shape[3] <= LARGEST_HEAD
        and 0 not in (*q.shape, *k.shape)
    )


def attend_and_send(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_lengths: jax.Array | None,
    kv_lengths: jax.Array | None,
    sent: tuple[jax.Array, jax.Array] | None,
    axis: Hashable,
    count: int,
    blocks: int,
    *,
    causal: bool,
    scale: float,
    soft_cap: float | None,
    pairs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Attention, and the keys and values of the device before this one.

    Args:
      q, k, v, q_lengths, kv_lengths, causal, scale, soft_cap: as of ``attention_forward``; see
        :func:`fits`.
      sent: the keys and values that go to the next device; None for none.
      axis: of the mesh.
      count: devices along it.
      blocks: at most as many as run at the same time.
      pairs: (results, 2), int32: which batch of the queries and which one of the keys and values
        each batch of the result is made of; by default one after another.

    Returns:
      The result, log-sum-exp, and the keys and values that have come, if any were sent.
    """
    operands = [padded(one, 3, 8) for one in (q, k, v)]
    batch, tokens, q_heads, head_dim = operands[0].shape
    problem = Problem(
        batch=batch if pairs is None else pairs.shape[0],
        q_seq=tokens,
        kv_seq=k.shape[1],
        q_heads=q_heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        dtype=jnp.dtype(q.dtype),
        causal=causal,
        scale=scale,
        soft_cap=soft_cap,
        q_lengths=q_lengths is not None,
        kv_lengths=kv_lengths is not None,
        save_residuals=True,
        pairs=pairs is not None,
    )
    given = [one for one in (q_lengths, kv_lengths, pairs) if one is not None]
    flat = [] if sent is None else [one.reshape(1, -1) for one in sent]
    kernel = _kernel(problem, sent[0].size if sent else 0, axis, count, blocks)
    out, lse, *following = kernel(*operands, *given, *flat)
    results = out[..., : q.shape[3]], lse[:, :, :tokens]
    if sent is None:
        return *results, None
    k_next, v_next = (one.reshape(sent[0].shape) for one in following)
    return *results, (k_next, v_next)


@functools.lru_cache(maxsize=64)
def _kernel(
    problem: Problem, size: int, axis: Hashable, count: int, blocks: int
) -> Callable[..., Any]:
    heads = problem.heads if not size else None
    config = default_config(problem.head_dim, problem.causal, problem.q_seq, heads=heads)
    if not size:
        return build(problem, config, blocks)
    config = dataclasses.replace(config, warpgroups=min(config.warpgroups, 2))
    result = jax.ShapeDtypeStruct((1, size), problem.dtype)

    def send(block: Any, launched: int, sources: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        """Writes this block's part to the next device. One block waits for what comes: all others
        send without waiting, so that it does not matter in which order they run."""
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        after = {axis: lax.rem(lax.axis_index(axis) + 1, count)}
        tiles = dataclasses.replace(tiles_of(1, size, SENT, launched), blocks=launched)
        for source, made in zip(sources, results, strict=True):
            there = plgpu.remote_ref(made, after)

            def move(rows: Any, columns: Any, source: Any = source, there: Any = there) -> None:
                there[rows, columns] = source[rows, columns]

            tiles.each(move, block)
        plgpu.commit_smem()  # All lanes have written: it is also a barrier of the warpgroup.
        pl.semaphore_signal(arrived, 1, device_id=after)
        pl.when(block == launched - 1)(lambda: pl.semaphore_wait(arrived, launched))

    companion = Companion(run=send, results=(result, result), name="ring_attention")
    return build(problem, config, blocks, companion)
